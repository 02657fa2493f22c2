"""The checkpoints of a run: saved in the background, deleted by rule, verified when read.

The files of this folder, lowest first; each imports only files above it in this list:

    leaves.py       the names of a state's leaves
    progress.py     the score of an evaluation and the best one so far
    format.py       the files of one checkpoint, and how they are read for translating
    saved_state.py  writes the whole state of a run, and reads it back
    retention.py    finds, ranks and tidies the checkpoints in a directory
    load.py         loads one checkpoint for translating
    store.py        saves, deletes and restores the checkpoints of the run that trains
    average.py      makes one checkpoint of several

A save writes STEP.partial. Once that is sealed (system/sealed.py) it is the checkpoint of its step,
even if an older one is still called STEP. Renaming it and deleting older ones follow; if the run is
killed before that, the next run in the workdir does it.
"""

import contextlib
import shutil
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from flaxformer_min.checkpoints import retention
from flaxformer_min.checkpoints.format import Meta, read_meta
from flaxformer_min.checkpoints.leaves import named_leaves
from flaxformer_min.checkpoints.progress import Progress
from flaxformer_min.checkpoints.saved_state import read_state, start_writing, write_description
from flaxformer_min.config import Config
from flaxformer_min.data.tokenizer import Tokenizer
from flaxformer_min.errors import UserError
from flaxformer_min.system import sealed
from flaxformer_min.system.processes import broadcast, exchange, is_first, on_first
from flaxformer_min.system.sealed import CheckpointError

OVERHEAD = 1_000_000  # bytes that a checkpoint takes beside its arrays, generously estimated

_START = Progress()


class Checkpoints:
    """The checkpoints of a training run; only one run at a time may hold a workdir.

    After every save there remain the `train.keep_last` newest regular ones, the `train.keep_best`
    best by `train.best_metric` (of equal scores the earlier one), and the newest of all. In a run
    of several processes every process writes and reads arrays; process 0 does everything else.
    """

    def __init__(self, workdir: str | Path, config: Config, tokenizer: Tokenizer) -> None:
        """Finishes or deletes what a killed run began."""
        self._root = Path(workdir).absolute() / retention.FOLDER
        self._config, self._tokenizer = config, tokenizer
        self._verified: int | None = None  # the step that latest_good has verified already
        self._damaged: set[int] = set()  # steps known to be damaged; retention skips them
        self._pool = ThreadPoolExecutor(1, "checkpoint")
        self._pending: Future[None] | None = None  # the save in the background
        on_first(lambda: retention.tidy(self._root))

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def steps(self) -> list[int]:
        """Returns the steps that have a checkpoint, ascending; damaged ones are among them."""
        return list(retention.find_checkpoints(self._root))

    def latest_good(self) -> int | None:
        """Returns the newest step whose checkpoint verifies, or None if there is no checkpoint.

        Damaged checkpoints are passed by with a warning and left where they are until their step is
        saved again. Raises CheckpointError if there are checkpoints and all are damaged, and
        UserError for another format version.
        """
        self._verified = good = broadcast(lambda: retention.newest_good(self._root))
        self._damaged = {step for step in self.steps() if good is not None and step > good}
        return good

    def meta(self, step: int) -> Meta:
        """Reads the meta.json of a step. Raises UserError and CheckpointError as `restore` does."""
        return read_meta(retention.folder_of(self._root, step))

    def restore(self, step: int, like: Any) -> Any:
        """Reads the state saved at `step`, as arrays with the dtypes and shardings of `like`.

        `like` is the state's pytree; its leaves are arrays, or jax.ShapeDtypeStruct with shardings.
        The devices may differ from those that the state was saved from. Raises CheckpointError
        naming a damaged file, and UserError for an unknown step, another format version, another
        tokenizer, or leaves that differ in name, shape or dtype.
        """
        folder = retention.folder_of(self._root, step)
        if step != self._verified:
            sealed.verify(folder)
        if read_meta(folder).tokenizer_sha256 != self._tokenizer.sha256:
            raise UserError(f"{folder}: was trained with another tokenizer than this workdir's")
        return read_state(folder, like)

    def require_space(self, state: Any) -> None:
        """Raises UserError if the disk is too small for the checkpoints that are still to come.

        There are at most keep_last + keep_best regular ones, an interim one, and one being written.
        `state` is the state's pytree, of arrays or shapes. Compression is left out of account.
        """
        train = self._config.train
        arrays = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
        one = arrays + len(self._tokenizer.model_bytes) + OVERHEAD
        saves = -(-train.steps // train.checkpoint_every)
        count = min(train.keep_last + train.keep_best + 1, saves) + 1
        count = max(count - len(self.steps()), 1)
        if (free := shutil.disk_usage(self._root).free) < count * one:
            raise UserError(
                f"{self._root}: {_human(free)} are free and {_human(count * one)} needed, for "
                f"{count} checkpoints: free some space, or lower train.keep_last "
                f"({train.keep_last}) or train.keep_best ({train.keep_best})"
            )

    def save(
        self,
        state: Any,
        step: int,
        *,
        evaluation: Mapping[str, Any] | None = None,
        progress: Progress = _START,
        interim: bool = False,
    ) -> None:
        """Copies the state to the host and returns; writing goes on in the background.

        The state's buffers may be donated at once. `evaluation`, of JSON types, is the record of
        the evaluation at this step, if there was one. An `interim` checkpoint is one between the
        regular steps, saved because the run stops; it is deleted as soon as there is a newer one.
        A checkpoint of the same step is replaced.

        Raises CheckpointError if the directory cannot be written, if the state holds numbers that
        are not finite, or if the save before this one, for which it waits, failed.
        """
        self.wait()
        exchange()  # all wait for process 0, which may finish the last save minutes later
        _refuse_non_finite(state, step)
        folder = self._root / str(step)
        meta = Meta(
            step=step,
            tokenizer_sha256=self._tokenizer.sha256,
            evaluation=evaluation,
            progress=progress,
            interim=interim,
        )
        with _discarded_on_error(folder):
            on_first(lambda: sealed.begin(folder))
            await_arrays = start_writing(sealed.unfinished(folder), state)
        self._pending = self._pool.submit(self._finish, folder, await_arrays, meta)

    def raise_if_failed(self) -> None:
        """Raises CheckpointError if the save in the background has failed; never waits for it."""
        if self._pending is not None and self._pending.done():
            self.wait()

    def wait(self) -> None:
        """Returns when the last save is on the disk; raises CheckpointError if it failed."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def close(self) -> None:
        """Waits as `wait` does and ends the background thread; nothing can be saved after it."""
        try:
            self.wait()
        finally:
            self._pool.shutdown()

    def _finish(self, folder: Path, await_arrays: Callable[[], None], meta: Meta) -> None:
        """Finishes a save in the background: awaits the arrays, seals, deletes what is outdated."""
        with _discarded_on_error(folder):
            await_arrays()
            if not is_first():
                return
            write_description(sealed.unfinished(folder), self._config, self._tokenizer, meta)
            sealed.seal(sealed.unfinished(folder))
        with sealed.checkpoint_errors(folder, "saved, but an older one could not be removed"):
            sealed.put_in_place(folder)
            self._damaged.discard(meta.step)
            retention.delete_outdated(self._root, self._config.train, self._damaged)


@contextlib.contextmanager
def _discarded_on_error(folder: Path) -> Generator[None, None, None]:
    """A context of a save whose errors become a CheckpointError, after STEP.partial is removed."""
    try:
        with sealed.checkpoint_errors(folder, "not saved"):
            yield
    except CheckpointError:
        if is_first():
            sealed.discard(folder)
        raise


def _human(size: int | float) -> str:
    """Returns a number of bytes as text, such as "12.01 GB"."""
    units = ["bytes", "kB", "MB", "GB", "TB"]
    while size >= 1000 and len(units) > 1:
        size, units = size / 1000, units[1:]
    return f"{size:.4g} {units[0]}"


_all_finite = jax.jit(lambda leaf: jnp.isfinite(leaf).all())  # one small program per shape


def _refuse_non_finite(state: Any, step: int) -> None:
    for name, leaf in named_leaves(state).items():
        # One at a time: a CPU that plays many devices can lock up over many small collectives.
        if not _all_finite(leaf):
            raise CheckpointError(f"step {step}: not saved: {name} has numbers that are not finite")
