"""Loads a checkpoint to translate with: one of a workdir's, or one that stands by itself."""

from pathlib import Path
from typing import Literal

from flaxformer_min.checkpoints import retention
from flaxformer_min.checkpoints.format import Loaded, read_checkpoint
from flaxformer_min.errors import UserError
from flaxformer_min.system.sealed import is_sealed, verify


def load_for_inference(directory: str | Path, step: int | Literal["best"] | None = None) -> Loaded:
    """Loads config, tokenizer and weights from a workdir, or from one checkpoint directory.

    `step` picks one of a workdir's checkpoints. None is the newest good one; a damaged one is
    passed by with a warning. "best" is the one whose evaluation is best by the `train.best_metric`
    of the newest checkpoint's config.

    Raises:
        UserError: there is no checkpoint, or none of this step, or it has another format version;
            the text says what is there.
        CheckpointError: a file, which is named, is damaged; for step None, no checkpoint is good.
    """
    directory = Path(directory).absolute()
    if is_sealed(directory):
        loaded = verified_checkpoint(directory)
        if step not in (None, loaded.step):
            raise UserError(f"{directory}: is one checkpoint, of step {loaded.step}, not {step}")
        return loaded
    root = checkpoints_of(directory)
    if step is None:
        good = retention.newest_good(root)
        assert good is not None  # checkpoints_of has seen some
        return read_checkpoint(retention.folder_of(root, good))
    chosen = retention.best_step(root) if step == "best" else step
    return verified_checkpoint(retention.folder_of(root, chosen))


def verified_checkpoint(folder: Path) -> Loaded:
    """Verifies every file of one checkpoint, then reads it.

    Raises what `verify` and `read_checkpoint` raise.
    """
    verify(folder)
    return read_checkpoint(folder)


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
