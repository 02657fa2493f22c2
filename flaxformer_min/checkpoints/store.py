"""The checkpoints of a run: saved in the background, kept by rule, verified when read.

What is in one of them is in checkpoint_directory.py, and what makes one count in manifest.py. A
save is written beside the others as STEP.partial; sealing it is the moment from which it is the
checkpoint of its step, also if another one is still called STEP. All the rest is tidying up, which
the next run in the workdir finishes if this one is killed.
"""

import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from flaxformer_min.checkpoints.format import (
    Meta,
    complete,
    named_leaves,
    read_meta,
    read_state,
    start_writing,
    whole_or_nothing,
)
from flaxformer_min.checkpoints.load import FOLDER
from flaxformer_min.checkpoints.progress import Progress
from flaxformer_min.checkpoints.retention import (
    counted_steps,
    folder_of,
    kept_steps,
    metas_of,
    newest_good,
    scores_of,
    tidy,
)
from flaxformer_min.config import Config
from flaxformer_min.data.tokenizer import Tokenizer
from flaxformer_min.errors import UserError
from flaxformer_min.system.processes import broadcast, exchange, is_first, on_first
from flaxformer_min.system.sealed import (
    CheckpointError,
    checkpoint_errors,
    delete,
    put_in_place,
    verify,
)

OVERHEAD = 1_000_000  # bytes, generously: what a checkpoint takes on the disk beside its arrays

_START = Progress()


class Checkpoints:
    """What a training run writes to and resumes from; only one run at a time may hold a workdir.

    After every save the `train.keep_last` newest regular ones remain, the `train.keep_best` best by
    `train.best_metric` (of equal scores the later), and the newest of all. Of several processes all
    write arrays and all read; the first does everything else.
    """

    def __init__(self, workdir: str | Path, config: Config, tokenizer: Tokenizer) -> None:
        """Finishes or removes what an interrupted run left behind."""
        self._root = Path(workdir).absolute() / FOLDER
        self._config, self._tokenizer = config, tokenizer
        self._verified: int | None = None  # by latest_good; not hashed again when it is restored
        self._damaged: set[int] = set()  # known to be: neither kept for nor counted by retention
        self._pool = ThreadPoolExecutor(1, "checkpoint")
        self._pending: Future[None] | None = None
        on_first(self._tidy)

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def steps(self) -> list[int]:
        """The steps that have a checkpoint, ascending; damaged ones too."""
        return counted_steps(self._root)

    def latest_good(self) -> int | None:
        """The newest step whose files are what was written; None if there is no checkpoint.

        Damaged ones are passed by with a warning and left where they are until their step is saved
        again. Raises CheckpointError if there are checkpoints and all are damaged.
        """
        self._verified = good = broadcast(lambda: newest_good(self._root))
        self._damaged = {step for step in self.steps() if good is not None and step > good}
        return good

    def meta(self, step: int) -> Meta:
        """What was saved beside the state. Raises as `restore`."""
        return read_meta(folder_of(self._root, step))

    def restore(self, step: int, like: Any) -> Any:
        """The state saved at `step`, as arrays with the dtypes and shardings of `like`.

        `like` is the state's pytree, its leaves jax.ShapeDtypeStruct with shardings, or arrays; the
        devices may be others than those the state was saved from. Raises CheckpointError naming a
        damaged file; UserError for an unknown step, another format version, another tokenizer, or
        leaves that differ in name, shape or dtype.
        """
        folder = folder_of(self._root, step)
        if step != self._verified:
            verify(folder)
        if read_meta(folder).tokenizer_sha256 != self._tokenizer.sha256:
            raise UserError(f"{folder}: was trained with another tokenizer than this workdir's")
        return read_state(folder, like)

    def require_space(self, state: Any) -> None:
        """Raises UserError if the disk is too small for the checkpoints that are still to come.

        Beside those that are kept there can be one of a stop and the one that is being written.
        `state` is the state's pytree, of arrays or shapes; compression is left out of account.
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

        The state's buffers may be donated at once. `evaluation`, JSON types only, is the record of
        the one at this step. An `interim` checkpoint is one off the regular steps, because the run
        stops: it is gone as soon as there is a newer one. Waits for the save before this one and
        raises its error if it failed. A checkpoint of the same step is replaced.

        Raises CheckpointError: not writable, or the state holds numbers that are not finite.
        """
        self.wait()
        exchange()  # the first may have waited for minutes
        _refuse_non_finite(state, step)
        folder = self._root / str(step)
        meta = Meta(
            step=step,
            tokenizer_sha256=self._tokenizer.sha256,
            evaluation=evaluation,
            progress=progress,
            interim=interim,
        )
        with whole_or_nothing(folder):
            written = start_writing(folder, state)
        self._pending = self._pool.submit(self._finish, folder, written, meta)

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
        """As `wait`, for the last time."""
        try:
            self.wait()
        finally:
            self._pool.shutdown()

    def _finish(self, folder: Path, written: Callable[[], None], meta: Meta) -> None:
        """The background part."""
        with whole_or_nothing(folder):
            written()
            if not is_first():
                return
            complete(folder, self._config, self._tokenizer, meta)
        with checkpoint_errors(folder, "saved, but an older one could not be removed"):
            put_in_place(folder)
            self._damaged.discard(meta.step)
            self._retain()

    def _tidy(self) -> None:
        self._root.mkdir(parents=True, exist_ok=True)
        tidy(self._root)

    def _retain(self) -> None:
        """Deletes what the rule does not keep; what cannot be judged is left."""
        train, metas = self._config.train, metas_of(self._root)
        metas = {step: meta for step, meta in metas.items() if step not in self._damaged}
        interim = [step for step, meta in metas.items() if meta.interim]
        scores = scores_of(metas, train.best_metric)
        for step in metas.keys() - kept_steps(scores, interim, train.keep_last, train.keep_best):
            delete(self._root / str(step))


def _human(size: int | float) -> str:
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
