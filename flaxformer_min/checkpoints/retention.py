"""The checkpoints in a directory: which there are, which is good, and which of them to keep."""

import logging
import re
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Literal

from flaxformer_min.checkpoints.format import CONFIG, Meta, read_config, read_meta
from flaxformer_min.checkpoints.progress import score
from flaxformer_min.errors import UserError
from flaxformer_min.system.sealed import (
    DELETED,
    PARTIAL,
    CheckpointError,
    is_sealed,
    put_in_place,
    verify,
)

NAME = re.compile(rf"(0|[1-9][0-9]*)((?:{re.escape(PARTIAL)})?(?:{re.escape(DELETED)})?)")

_log = logging.getLogger(__name__)


def counted(root: Path) -> dict[int, Path]:
    """Where the checkpoints in a directory are, by step, ascending as numbers."""
    return {
        step: path
        for step, state, path in _entries(root)
        if not state or (state == PARTIAL and is_sealed(path))
    }


def counted_steps(root: Path) -> list[int]:
    """The steps of the checkpoints in a directory, ascending."""
    return list(counted(root))


def folder_of(root: Path, step: int) -> Path:
    """Where the checkpoint of a step is; raises UserError with the steps there are."""
    folders = counted(root)
    if step not in folders:
        raise UserError(f"{root}: no checkpoint of step {step}; steps there: {list(folders)}")
    return folders[step]


def newest_good(root: Path) -> int | None:
    """The newest step whose files are what was written; None if there is no checkpoint.

    Damaged ones are passed by with a warning. Raises CheckpointError if all are.
    """
    folders = counted(root)
    for step, folder in reversed(folders.items()):
        try:
            verify(folder)
            return step
        except CheckpointError as error:
            _log.warning("%s; passed by", error)
    if folders:
        raise CheckpointError(f"{root}: no good checkpoint; damaged: {list(folders)}")
    return None


def metas_of(root: Path) -> dict[int, Meta]:
    """Of every checkpoint; one that cannot be read is passed by with a warning."""
    metas = {}
    for step, folder in counted(root).items():
        try:
            metas[step] = read_meta(folder)
        except (CheckpointError, UserError) as error:
            _log.warning("%s; passed by", error)
    return metas


def scores_of(
    metas: Mapping[int, Meta], metric: Literal["bleu", "loss"]
) -> dict[int, float | None]:
    """How each checkpoint ranks, higher being better; None without an evaluation."""
    records = {step: meta.evaluation for step, meta in metas.items()}
    return {step: score(record, metric) if record else None for step, record in records.items()}


def best_of(root: Path) -> int:
    """The step of the best evaluation, by the metric of the newest checkpoint's config."""
    folders = counted(root)
    newest = folders[max(folders)]
    verify(newest, [CONFIG])
    scores = scores_of(metas_of(root), read_config(newest).train.best_metric)
    if not (best := best_steps(scores, 1)):
        raise UserError(f"{root}: no checkpoint has an evaluation; steps: {list(folders)}")
    return best[0]


def kept_steps(
    scores: Mapping[int, float | None], interim: Collection[int], last: int, best: int
) -> set[int]:
    """The `last` newest and the `best` best of the regular steps, and the newest of all."""
    regular = {step: score for step, score in scores.items() if step not in interim}
    return {*sorted(regular)[-last:], *best_steps(regular, best), max(scores)}


def best_steps(scores: Mapping[int, float | None], count: int) -> list[int]:
    """At most `count` of the steps that have a score, best first; of equal scores the later."""
    scored = [(score, step) for step, score in scores.items() if score is not None]
    return [step for _, step in sorted(scored, reverse=True)[:count]]


def tidy(root: Path) -> None:
    """Finishes what was sealed and removes what was not, or was being deleted."""
    for step, state, path in _entries(root):
        if state == PARTIAL and is_sealed(path):
            put_in_place(root / str(step))
        elif state:
            shutil.rmtree(path)


def _entries(root: Path) -> list[tuple[int, str, Path]]:
    """Step, state of the name (see manifest.py) and path of all that is ours, in that order."""
    matches = [(NAME.fullmatch(path.name), path) for path in root.glob("*") if path.is_dir()]
    return sorted((int(match[1]), match[2], path) for match, path in matches if match)
