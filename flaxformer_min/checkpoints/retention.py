"""Finds, verifies and ranks the checkpoints in one directory, and deletes outdated ones.

What is no state of the run whose directory this is (an average, another run's checkpoint, a name
that is no number) is passed by with a warning, wherever checkpoints are looked for.
"""

import functools
import logging
import os
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Literal

from flaxformer_min.checkpoints.format import CONFIG, META, Meta, parse_meta, read_config
from flaxformer_min.checkpoints.progress import score
from flaxformer_min.config import TrainConfig
from flaxformer_min.config_rules import check_resume
from flaxformer_min.errors import UserError
from flaxformer_min.system import sealed
from flaxformer_min.system.sealed import (
    DELETED,
    PARTIAL,
    CheckpointError,
    DeletedError,
    unless_deleted,
)

FOLDER = "checkpoints"  # inside a workdir
NAME = re.compile(rf"(0|[1-9][0-9]*)((?:{re.escape(PARTIAL)})?(?:{re.escape(DELETED)})?)")

_log = logging.getLogger(__name__)


def find_checkpoints(root: Path) -> dict[int, Path]:
    """Returns the folders of the whole checkpoints in a directory by step, ascending as numbers.

    A folder STEP.partial that is sealed is the checkpoint of its step, even beside an older STEP.
    """
    while True:
        entries = _entries(root)
        found = {
            step: path
            for step, suffix, path in entries
            if _is_folder(path) and (not suffix or (suffix == PARTIAL and sealed.is_sealed(path)))
        }
        if all(os.path.lexists(path) for *_, path in entries):
            return found  # otherwise one has got another name since it was listed


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

    Damaged ones are passed by with a warning. Raises CheckpointError if all are damaged, UserError
    for another format version, and DeletedError if one was deleted meanwhile.
    """
    good = newest_good_folder(root)
    return None if good is None else good[0]


def newest_good_folder(root: Path) -> tuple[int, Path] | None:
    """Returns what `newest_good` does, with the folder."""
    damaged = []
    for step, folder in newest_first(root):
        try:
            with unless_deleted(folder):
                sealed.verify(folder)
                if own_meta(step, folder) is not None:
                    return step, folder
        except CheckpointError as error:
            _log.warning("%s; passed by", error)
            damaged.append(step)
    if damaged:
        raise CheckpointError(f"{root}: no good checkpoint; damaged: {sorted(damaged)}")
    return None


def newest_first(root: Path) -> Iterator[tuple[int, Path]]:
    """Yields step and folder of the whole checkpoints in a directory; names what is none."""
    folders = find_checkpoints(root)
    for path in sorted(root.glob("[!.]*")):
        if not (NAME.fullmatch(path.name) and _is_folder(path)):
            _warn_once(f"{path}: has not the name of a checkpoint; passed by")
    yield from reversed(folders.items())


def best_folder(root: Path) -> Path:
    """Returns the folder with the best evaluation, by `train.best_metric` of the newest's config.

    Raises UserError if no checkpoint has an evaluation.
    """
    metas, best = read_metas(root), []
    folders = {step: root / str(step) for step in metas} | find_checkpoints(root)
    if metas:
        with unless_deleted(newest := folders[max(metas)]):
            best = best_steps(scores_of(metas, read_config(newest).train.best_metric), 1)
    if not best:
        raise UserError(f"{root}: no checkpoint has an evaluation; steps: {list(folders)}")
    return folders[best[0]]


def read_metas(root: Path) -> dict[int, Meta]:
    """Reads the meta.json of every step of the run.

    One that cannot be read is passed by with a warning.
    """
    metas = {}
    for step, folder in find_checkpoints(root).items():
        try:
            with unless_deleted(folder):
                sealed.verify(folder, [META, CONFIG])
                metas[step] = own_meta(step, folder)
        except DeletedError:
            return read_metas(root)
        except (CheckpointError, UserError, OSError) as error:
            _log.warning("%s; passed by", error)
    return {step: meta for step, meta in metas.items() if meta is not None}


def own_meta(step: int, folder: Path) -> Meta | None:
    """Reads meta.json of a checkpoint whose meta.json and config.json have been verified.

    Returns None, with a warning, if it is no state of the run in whose workdir it lies. Runs with
    the same config have the same states; so it is the config that tells one run from another.
    """
    meta, other = parse_meta(folder), None
    if meta.averaged_steps is not None:
        other = "is an average"
    elif meta.step != step:
        other = f"is a copy of step {meta.step}"
    elif _is_another_runs(folder):
        other = "is another run's checkpoint"
    if other is None:
        return meta
    _warn_once(f"{folder}: {other}; passed by, until this run saves step {step} in its place")
    return None


def _is_another_runs(folder: Path) -> bool:
    """Whether a checkpoint's config is one that the run in this workdir could not go on from."""
    try:
        of_checkpoint, of_run = read_config(folder), read_config(folder.parent.parent)
    except (OSError, UserError):  # the workdir has none; or whoever needs it says what is wrong
        return False
    try:
        check_resume(of_checkpoint, of_run)
    except UserError:
        return True
    return False


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

    What is not named like a checkpoint is left alone; `root` is made if it is missing.
    """
    root.mkdir(parents=True, exist_ok=True)
    for step, suffix, path in _entries(root):
        if suffix == PARTIAL and sealed.is_sealed(path):
            sealed.put_in_place(root / str(step))
        elif suffix:
            sealed.remove(path)


def _entries(root: Path) -> list[tuple[int, str, Path]]:
    """Returns step, suffix and path of everything that is named like a checkpoint, sorted.

    They are sorted by step and suffix. The suffix is "" or made of those in system/sealed.py.
    """
    matches = [(NAME.fullmatch(path.name), path) for path in root.glob("*")]
    return sorted((int(match[1]), match[2], path) for match, path in matches if match)


def _is_folder(path: Path) -> bool:
    """Whether this is a directory, or a link to one that may be on a disk that is not there now."""
    return path.is_dir() or (path.is_symlink() and not path.exists())


@functools.cache
def _warn_once(text: str) -> None:
    """Gives a warning, once in this process: a run looks through its checkpoints at every save."""
    _log.warning("%s", text)
