"""The checkpoints of a run: saved in the background, kept by rule, verified when read.

What is in one of them is in checkpoint_directory.py. A checkpoint is whole or invisible: its
manifest is written last, after Orbax's commit, and removed first. A directory without a manifest
counts for nothing: it is not restored and not kept, and the next run in the workdir removes it.
"""

import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp

from flaxformer_min.checkpoint_directory import (
    Loaded,
    Meta,
    complete,
    named_leaves,
    read_checkpoint,
    read_meta,
    read_state,
    start_writing,
    whole_or_nothing,
)
from flaxformer_min.config import Config
from flaxformer_min.errors import UserError
from flaxformer_min.manifest import CheckpointError, delete, is_sealed, verify
from flaxformer_min.tokenizer import Tokenizer

FOLDER = "checkpoints"  # inside a workdir

_log = logging.getLogger(__name__)


class Checkpoints:
    """What a training run writes to and resumes from; only one run at a time may hold a workdir.

    After every save the `keep_last` newest remain and the `keep_best` with the highest validation
    BLEU, `metrics["bleu"]["score"]`; of equal scores the later step is the better.
    """

    def __init__(
        self,
        workdir: str | Path,
        config: Config,
        tokenizer: bytes,
        *,
        keep_last: int,
        keep_best: int = 0,
    ) -> None:
        """Removes what interrupted saves left behind."""
        self._root = Path(workdir).absolute() / FOLDER
        self._config, self._tokenizer = config, Tokenizer(tokenizer)
        self._keep_last, self._keep_best = keep_last, keep_best
        self._damaged: set[int] = set()  # known to be: neither kept for nor counted by retention
        self._pool = ThreadPoolExecutor(1, "checkpoint")
        self._pending: Future[None] | None = None
        self._root.mkdir(parents=True, exist_ok=True)
        for folder in _step_folders(self._root).values():
            if not is_sealed(folder):
                delete(folder)

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def steps(self) -> list[int]:
        """The steps that have a checkpoint, ascending."""
        return counted_steps(self._root)

    def latest_good(self) -> int | None:
        """The newest step whose files are what was written; None if there is no checkpoint.

        Damaged ones are passed by with a warning and left where they are until their step is saved
        again. Raises CheckpointError if there are checkpoints and all are damaged.
        """
        good = newest_good(self._root)
        self._damaged = {step for step in self.steps() if good is not None and step > good}
        return good

    def restore(self, step: int, like: Any) -> Any:
        """The state saved at `step`, as arrays with the dtypes and shardings of `like`.

        `like` is the state's pytree, its leaves jax.ShapeDtypeStruct with shardings, or arrays; the
        devices may be others than those the state was saved from. Raises CheckpointError naming a
        damaged file; UserError for an unknown step, another format version, another tokenizer, or
        leaves that differ in name, shape or dtype.
        """
        folder = _folder_of(self._root, step)
        verify(folder)
        if read_meta(folder).tokenizer_sha256 != self._tokenizer.sha256:
            raise UserError(f"{folder}: was trained with another tokenizer than this workdir's")
        return read_state(folder, like)

    def save(self, state: Any, step: int, metrics: Mapping[str, Any] | None = None) -> None:
        """Copies the state to the host and returns; writing goes on in the background.

        The state's buffers may be donated at once. `metrics`, JSON types only, are those of the
        evaluation at this step. Waits for the save before this one and raises its error if it
        failed. A checkpoint of the same step is replaced.

        Raises CheckpointError: not writable, or the state holds numbers that are not finite.
        """
        self.wait()
        _refuse_non_finite(state, step)
        folder = self._root / str(step)
        meta = Meta(step=step, tokenizer_sha256=self._tokenizer.sha256, metrics=metrics)
        with whole_or_nothing(folder):
            delete(folder)
            written = start_writing(folder, state)
        self._pending = self._pool.submit(self._finish, folder, written, meta)

    def wait(self) -> None:
        """Returns when the last save is on the disk; raises CheckpointError if it failed."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def close(self) -> None:
        """As `wait`, for the last time."""
        try:
            self.wait()
        finally:
            self._pool.shutdown()

    def _finish(self, folder: Path, written: Callable[[], None], meta: Meta) -> None:
        """The background part. Of several processes all write arrays, the first does the rest."""
        with whole_or_nothing(folder):
            written()
            complete(folder, self._config, self._tokenizer, meta)
        self._damaged.discard(meta.step)
        scores = {
            step: _score(self._root / str(step))
            for step in self.steps()
            if step not in self._damaged
        }
        for step in scores.keys() - kept_steps(scores, self._keep_last, self._keep_best):
            delete(self._root / str(step))


def load_for_inference(directory: str | Path, step: int | Literal["best"] | None = None) -> Loaded:
    """Config, tokenizer and weights of a workdir's checkpoint, or of one checkpoint directory.

    `step` picks among a workdir's: None is the newest good one (a damaged one is passed by with a
    warning), "best" the one with the highest validation BLEU.

    Raises:
        UserError: nothing there, no such step, another format version; says what is there.
        CheckpointError: damaged files, named; for step None, only if no checkpoint is good.
    """
    directory = Path(directory).absolute()
    if is_sealed(directory):
        loaded = read_checkpoint(directory)
        if step not in (None, loaded.step):
            raise UserError(f"{directory}: is one checkpoint, of step {loaded.step}, not {step}")
        return loaded
    root = checkpoints_of(directory)
    if step is None:
        return read_checkpoint(root / str(newest_good(root)))
    if step != "best":
        return read_checkpoint(_folder_of(root, step))
    scores = {step: _score(root / str(step)) for step in counted_steps(root)}
    best = best_steps(scores, 1)
    if not best:
        raise UserError(f"{directory}: no checkpoint has a validation BLEU; steps: {list(scores)}")
    return read_checkpoint(root / str(best[0]))


def checkpoints_of(workdir: Path) -> Path:
    """The directory of a workdir's checkpoints; raises UserError unless at least one counts."""
    if not workdir.is_dir():
        raise UserError(f"{workdir}: no such directory; give a workdir or a checkpoint")
    if not counted_steps(workdir / FOLDER):
        entries = ", ".join(sorted(path.name for path in workdir.iterdir())) or "nothing"
        raise UserError(
            f"{workdir}: no finished checkpoint in it, only: {entries}; "
            "give a workdir that holds checkpoints/STEP, or one checkpoint"
        )
    return workdir / FOLDER


def counted_steps(root: Path) -> list[int]:
    """The steps of the checkpoints in a directory, ascending as numbers."""
    return sorted(step for step, folder in _step_folders(root).items() if is_sealed(folder))


def newest_good(root: Path) -> int | None:
    """As `Checkpoints.latest_good`."""
    steps = counted_steps(root)
    for step in reversed(steps):
        try:
            verify(root / str(step))
            return step
        except CheckpointError as error:
            _log.warning("%s; passed by", error)
    if steps:
        raise CheckpointError(f"{root}: no good checkpoint; damaged: {steps}")
    return None


def kept_steps(scores: Mapping[int, float | None], last: int, best: int) -> set[int]:
    """The `last` newest of the steps and the `best` with the highest scores."""
    assert last > 0
    return {*sorted(scores)[-last:], *best_steps(scores, best)}


def best_steps(scores: Mapping[int, float | None], count: int) -> list[int]:
    """At most `count` of the steps that have a score, best first; of equal scores the later."""
    scored = [(score, step) for step, score in scores.items() if score is not None]
    return [step for _, step in sorted(scored, reverse=True)[:count]]


def _step_folders(root: Path) -> dict[int, Path]:
    """Directories whose names are step numbers; nothing else in there is ours."""
    folders = [path for path in root.glob("*") if path.is_dir() and path.name.isdecimal()]
    return {int(path.name): path for path in folders if path.name == str(int(path.name))}


def _folder_of(root: Path, step: int) -> Path:
    steps = counted_steps(root)
    if step not in steps:
        raise UserError(f"{root}: no checkpoint of step {step}; steps there: {steps}")
    return root / str(step)


def _score(folder: Path) -> float | None:
    """The checkpoint's validation BLEU; None without an evaluation, or if it cannot be known."""
    try:
        return ((read_meta(folder).metrics or {}).get("bleu") or {}).get("score")
    except (CheckpointError, UserError):
        return None


_all_finite = jax.jit(lambda leaf: jnp.isfinite(leaf).all())  # one small program per shape


def _refuse_non_finite(state: Any, step: int) -> None:
    finite = jax.device_get(jax.tree.map(_all_finite, named_leaves(state)))
    for name, good in finite.items():
        if not good:
            raise CheckpointError(f"step {step}: not saved: {name} has numbers that are not finite")
