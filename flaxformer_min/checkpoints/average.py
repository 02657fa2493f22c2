"""Checkpoint averaging: the mean of the weights of several steps of one run (section 6.1)."""

from pathlib import Path

import jax
import numpy as np

from flaxformer_min.checkpoints.format import Loaded, Meta, read_meta
from flaxformer_min.checkpoints.leaves import difference, named_leaves
from flaxformer_min.checkpoints.load import checkpoints_of, verified_checkpoint
from flaxformer_min.checkpoints.retention import find_checkpoints
from flaxformer_min.checkpoints.saved_state import start_writing, write_description
from flaxformer_min.errors import UserError
from flaxformer_min.system.sealed import checkpoint_errors, publish


def average(workdir: str | Path, output: str | Path, last: int) -> list[int]:
    """Writes to `output` a checkpoint with the mean of the weights of a run's last checkpoints.

    These are the `last` newest regular checkpoints by step number; an interim one, which is there
    because a run was stopped, is passed by. The weights are summed in float32 in the order of the
    steps. The result has the config, tokenizer and step number of the newest checkpoint and no
    optimizer state. Returns the steps that were averaged.

    Raises:
        UserError: there are fewer checkpoints than asked for, `output` is there already, or the
            checkpoints differ in tokenizer or shapes.
        CheckpointError: a file, which is named, is damaged, or `output` could not be written.
    """
    root, output = checkpoints_of(Path(workdir).absolute()), Path(output).absolute()
    chosen = _newest(root, last)
    if output.exists():
        raise UserError(f"{output}: is there already; give a new directory")
    newest = verified_checkpoint(chosen[max(chosen)])
    total = jax.tree.map(np.zeros_like, newest.params)
    for step, folder in chosen.items():
        loaded = newest if step == newest.step else verified_checkpoint(folder)
        _refuse_another(root, loaded, newest)
        total = jax.tree.map(np.add, total, loaded.params)
    mean = jax.tree.map(lambda leaf: leaf / np.float32(len(chosen)), total)
    steps, sha256 = list(chosen), newest.tokenizer.sha256
    meta = Meta(step=newest.step, tokenizer_sha256=sha256, averaged_steps=steps)
    with checkpoint_errors(output, "not saved"), publish(output) as new:
        start_writing(new, {"params": mean})()
        write_description(new, newest.config, newest.tokenizer, meta)
    return steps


def _newest(root: Path, last: int) -> dict[int, Path]:
    """Returns the folders of the `last` newest regular steps, steps ascending."""
    folders = find_checkpoints(root)
    regular = [step for step, folder in folders.items() if not read_meta(folder).interim]
    if not 1 <= last <= len(regular):
        raise UserError(
            f"{root}: cannot average the last {last}; there are {len(regular)}: {regular}; "
            "ask for fewer, or train with a larger train.keep_last"
        )
    return {step: folders[step] for step in regular[-last:]}


def _refuse_another(root: Path, loaded: Loaded, newest: Loaded) -> None:
    """Raises UserError if two checkpoints differ in tokenizer or in the shapes of weights."""
    where = f"{root}: steps {loaded.step} and {newest.step}"
    if loaded.tokenizer.sha256 != newest.tokenizer.sha256:
        raise UserError(f"{where} have different tokenizers")
    if found := difference(named_leaves(loaded.params), named_leaves(newest.params)):
        raise UserError(f"{where} have different shapes: {found}")
