"""Checkpoint averaging: the mean of the weights of several steps of one run (section 6.1)."""

import os
from pathlib import Path
from typing import Any

import jax
import numpy as np

from flaxformer_min.checkpoints.format import CONFIG, META, Loaded, Meta
from flaxformer_min.checkpoints.leaves import difference, named_leaves
from flaxformer_min.checkpoints.load import checkpoints_of, look_again, verified_checkpoint
from flaxformer_min.checkpoints.retention import FOLDER, newest_first, own_meta
from flaxformer_min.checkpoints.saved_state import start_writing, write_description
from flaxformer_min.errors import UserError
from flaxformer_min.system.sealed import (
    checkpoint_errors,
    publish,
    refuse_name,
    unless_deleted,
    verify,
)


def average(workdir: str | Path, output: str | Path, last: int) -> list[int]:
    """Writes to `output` a checkpoint with the mean of the weights of a run's last checkpoints.

    These are the `last` newest regular checkpoints by step number; an interim one, which is there
    because a run was stopped, is passed by. The weights are summed in float32 in the order of the
    steps. The result has the config, tokenizer and step number of the newest checkpoint and no
    optimizer state. Returns the steps that were averaged.

    Raises:
        UserError: there are fewer checkpoints than asked for, `output` is there already or among a
            run's checkpoints, or the checkpoints differ in tokenizer or shapes.
        CheckpointError: a file, which is named, is damaged, or `output` could not be written.
    """
    root, output = checkpoints_of(Path(workdir).absolute()), Path(output).absolute()
    _refuse_output(root, output)
    steps, newest, mean = look_again(lambda: _mean(root, last))
    sha256 = newest.tokenizer.sha256
    meta = Meta(step=newest.step, tokenizer_sha256=sha256, averaged_steps=steps)
    with checkpoint_errors(output, "not saved"), publish(output) as new:
        start_writing(new, {"params": mean})()
        write_description(new, newest.config, newest.tokenizer, meta)
    return steps


def _refuse_output(root: Path, output: Path) -> None:
    """Raises UserError if an average cannot, or should not, be written there."""
    refuse_name(output)
    if os.path.lexists(output):
        raise UserError(f"{output}: is there already; give a new directory")
    for parent in output.resolve().parents:
        is_a_runs = parent.name == FOLDER and (parent.parent / CONFIG).exists()
        if parent == root.resolve() or is_a_runs:
            raise UserError(f"{output}: in {parent} are a run's own checkpoints; write elsewhere")


def _mean(root: Path, last: int) -> tuple[list[int], Loaded, dict[str, Any]]:
    """Returns the steps, the newest of the checkpoints, and the mean of the weights of all.

    The oldest is read first, because a run that is at work deletes it first.
    """
    chosen = _newest(root, last)
    first = loaded = verified_checkpoint(chosen[min(chosen)])
    total = jax.tree.map(np.zeros_like, first.params)
    for step, folder in chosen.items():
        loaded = first if step == first.step else verified_checkpoint(folder)
        _refuse_another(root, first, loaded)
        total = jax.tree.map(np.add, total, loaded.params)
    return list(chosen), loaded, jax.tree.map(lambda leaf: leaf / np.float32(len(chosen)), total)


def _newest(root: Path, last: int) -> dict[int, Path]:
    """Returns the folders of the `last` newest regular steps, steps ascending; reads no others."""
    regular: dict[int, Path] = {}
    for step, folder in newest_first(root):
        with unless_deleted(folder):
            verify(folder, [META, CONFIG])
            meta = own_meta(step, folder)
        if meta is not None and not meta.interim:
            regular[step] = folder
        if len(regular) == last:
            return dict(sorted(regular.items()))
    raise UserError(
        f"{root}: cannot average the last {last}; there are {len(regular)}: {sorted(regular)}; "
        "ask for fewer, or train with a larger train.keep_last"
    )


def _refuse_another(root: Path, one: Loaded, other: Loaded) -> None:
    """Raises UserError if two checkpoints differ in tokenizer or in the shapes of weights."""
    where = f"{root}: steps {one.step} and {other.step}"
    if one.tokenizer.sha256 != other.tokenizer.sha256:
        raise UserError(f"{where} have different tokenizers")
    if found := difference(named_leaves(one.params), named_leaves(other.params)):
        raise UserError(f"{where} have different shapes: {found}")
