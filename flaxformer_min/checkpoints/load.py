"""Loads a checkpoint to translate with: one of a workdir's, or one that stands by itself."""

from collections.abc import Callable
from pathlib import Path
from typing import Literal, TypeVar

from flaxformer_min.checkpoints import retention
from flaxformer_min.checkpoints.format import Loaded, read_checkpoint
from flaxformer_min.errors import UserError
from flaxformer_min.system.devices import start as start_devices
from flaxformer_min.system.sealed import DeletedError, is_sealed, unless_deleted, verify

LOOKS = 30  # so often is a checkpoint looked for while a run deletes what is being read

T = TypeVar("T")


def load_for_inference(directory: str | Path, step: int | Literal["best"] | None = None) -> Loaded:
    """Loads config, tokenizer and weights from a workdir, or from one checkpoint directory.

    `step` picks one of a workdir's checkpoints. None is the newest good one; a damaged one is
    passed by with a warning. If a run deletes one while it is being read, the next newest is looked
    for. "best" is the one whose evaluation is best by the `train.best_metric`
    of the newest checkpoint's config. JAX keeps the programs that are compiled from now on, as
    `system.devices.keep_programs` says.

    Raises:
        UserError: there is no checkpoint, or none of this step, or it has another format version,
            or a run deleted it while it was being read; the text says what is there.
        CheckpointError: a file, which is named, is damaged; for step None, no checkpoint is good.
        OSError: a file, which is named, cannot be read, though it is not damaged.
    """
    start_devices()
    directory = Path(directory).absolute()
    if is_sealed(directory):
        loaded = verified_checkpoint(directory)
        if step not in (None, loaded.step):
            raise UserError(f"{directory}: is one checkpoint, of step {loaded.step}, not {step}")
        return loaded
    root = checkpoints_of(directory)
    if step is None:
        return look_again(lambda: _newest_good(root))
    if step == "best":
        return look_again(lambda: verified_checkpoint(retention.best_folder(root)))
    return verified_checkpoint(retention.folder_of(root, step))


def look_again(work: Callable[[], T]) -> T:
    """Returns what `work` does, which is called again if a checkpoint is deleted meanwhile."""
    for _ in range(LOOKS):
        try:
            return work()
        except DeletedError:
            continue
    return work()


def verified_checkpoint(folder: Path) -> Loaded:
    """Verifies every file of one checkpoint, then reads it.

    Raises what `verify` and `read_checkpoint` raise, and DeletedError if it is deleted meanwhile.
    """
    with unless_deleted(folder):
        verify(folder)
        return read_checkpoint(folder)


def _newest_good(root: Path) -> Loaded:
    if (good := retention.newest_good_folder(root)) is None:
        raise UserError(f"{root}: no checkpoint of this run; give the one to use: {root}/NAME")
    with unless_deleted(good[1]):
        return read_checkpoint(good[1])


def checkpoints_of(workdir: Path) -> Path:
    """Returns the directory of a workdir's checkpoints.

    Raises UserError unless it holds at least one whole checkpoint.
    """
    if not workdir.is_dir():
        raise UserError(f"{workdir}: no such directory; give a workdir or a checkpoint")
    if not retention.find_checkpoints(workdir / retention.FOLDER):
        entries = ", ".join(sorted(path.name for path in workdir.iterdir())) or "nothing"
        raise UserError(
            f"{workdir}: no finished checkpoint in it, only: {entries}; "
            "give a workdir that holds checkpoints/STEP, or one checkpoint"
        )
    return workdir / retention.FOLDER
