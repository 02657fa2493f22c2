"""Finds, verifies and ranks the checkpoints in one directory, and deletes outdated ones."""

import logging
import re
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Literal

from flaxformer_min.checkpoints.format import CONFIG, Meta, read_config, read_meta
from flaxformer_min.checkpoints.progress import score
from flaxformer_min.config import TrainConfig
from flaxformer_min.errors import UserError
from flaxformer_min.system import sealed
from flaxformer_min.system.sealed import DELETED, PARTIAL, CheckpointError

FOLDER = "checkpoints"  # inside a workdir
NAME = re.compile(rf"(0|[1-9][0-9]*)((?:{re.escape(PARTIAL)})?(?:{re.escape(DELETED)})?)")

_log = logging.getLogger(__name__)


def find_checkpoints(root: Path) -> dict[int, Path]:
    """Returns the folders of the whole checkpoints in a directory by step, ascending as numbers.

    A folder STEP.partial that is sealed is the checkpoint of its step, even beside an older STEP.
    """
    return {
        step: path
        for step, suffix, path in _entries(root)
        if not suffix or (suffix == PARTIAL and sealed.is_sealed(path))
    }


def folder_of(root: Path, step: int) -> Path:
    """Returns the folder of a step's checkpoint.

    Raises UserError naming the steps that have a checkpoint, if this one has none.
    """
    folders = find_checkpoints(root)
    if step not in folders:
        raise UserError(f"{root}: no checkpoint of step {step}; steps there: {list(folders)}")
    return folders[step]


def newest_good(root: Path) -> int | None:
    """Returns the newest step whose checkpoint verifies, or None if there is no checkpoint.

    Damaged ones are passed by with a warning. Raises CheckpointError if all are damaged, and
    UserError for another format version.
    """
    folders = find_checkpoints(root)
    for step, folder in reversed(folders.items()):
        try:
            sealed.verify(folder)
            return step
        except CheckpointError as error:
            _log.warning("%s; passed by", error)
    if folders:
        raise CheckpointError(f"{root}: no good checkpoint; damaged: {list(folders)}")
    return None


def best_step(root: Path) -> int:
    """Returns the step with the best evaluation, by `train.best_metric` of the newest's config.

    Raises UserError if no checkpoint has an evaluation, and CheckpointError if the newest
    checkpoint's config is damaged.
    """
    folders = find_checkpoints(root)
    newest = folders[max(folders)]
    sealed.verify(newest, [CONFIG])
    scores = scores_of(read_metas(root), read_config(newest).train.best_metric)
    if not (best := best_steps(scores, 1)):
        raise UserError(f"{root}: no checkpoint has an evaluation; steps: {list(folders)}")
    return best[0]


def read_metas(root: Path) -> dict[int, Meta]:
    """Reads the meta.json of every step; one that cannot be read is passed by with a warning."""
    metas = {}
    for step, folder in find_checkpoints(root).items():
        try:
            metas[step] = read_meta(folder)
        except (CheckpointError, UserError) as error:
            _log.warning("%s; passed by", error)
    return metas


def delete_outdated(root: Path, train: TrainConfig, damaged: Collection[int]) -> None:
    """Deletes the checkpoints that `kept_steps` does not keep.

    The `damaged` steps are left alone and do not count, nor do those whose meta.json is damaged.
    """
    metas = {step: meta for step, meta in read_metas(root).items() if step not in damaged}
    interim = [step for step, meta in metas.items() if meta.interim]
    scores = scores_of(metas, train.best_metric)
    for step in metas.keys() - kept_steps(scores, interim, train.keep_last, train.keep_best):
        sealed.delete(root / str(step))


def scores_of(
    metas: Mapping[int, Meta], metric: Literal["bleu", "loss"]
) -> dict[int, float | None]:
    """Returns each step's score, higher being better; None for a step without an evaluation.

    A step that was measured otherwise than the newest one with an evaluation has none either. Of
    checkpoints of an older version it is not known how they were measured; they count.
    """
    records = {step: meta.evaluation for step, meta in metas.items() if meta.evaluation}
    measure = metas[max(records)].progress.measure if records else None
    return dict.fromkeys(metas) | {
        step: score(record, metric)
        for step, record in records.items()
        if metas[step].progress.measure in (measure, None)
    }


def kept_steps(
    scores: Mapping[int, float | None], interim: Collection[int], last: int, best: int
) -> set[int]:
    """Returns the steps to keep: the `last` newest and `best` best regular ones, the newest of all.

    A regular step is one that is not `interim`.
    """
    regular = {step: score for step, score in scores.items() if step not in interim}
    return {*sorted(regular)[-last:], *best_steps(regular, best), max(scores)}


def best_steps(scores: Mapping[int, float | None], count: int) -> list[int]:
    """Returns at most `count` steps with a score, best first; of equal scores the earlier first."""
    scored = [(-score, step) for step, score in scores.items() if score is not None]
    return [step for _, step in sorted(scored)[:count]]


def tidy(root: Path) -> None:
    """Finishes what a killed run began: sealed checkpoints get their names, other remains go.

    Directories that are not named like a checkpoint are left alone; `root` is made if missing.
    """
    root.mkdir(parents=True, exist_ok=True)
    for step, suffix, path in _entries(root):
        if suffix == PARTIAL and sealed.is_sealed(path):
            sealed.put_in_place(root / str(step))
        elif suffix:
            shutil.rmtree(path)


def _entries(root: Path) -> list[tuple[int, str, Path]]:
    """Returns step, suffix and path of each directory named like a checkpoint, sorted.

    They are sorted by step and suffix. The suffix is "" or made of those in system/sealed.py.
    """
    matches = [(NAME.fullmatch(path.name), path) for path in root.glob("*") if path.is_dir()]
    return sorted((int(match[1]), match[2], path) for match, path in matches if match)
