"""Checkpoint averaging: the mean of the weights of several steps of one run (section 6.1)."""

from pathlib import Path

import jax
import numpy as np

from flaxformer_min.checkpoint import checkpoints_of, counted_steps
from flaxformer_min.checkpoint_directory import (
    Loaded,
    Meta,
    complete,
    difference,
    named_leaves,
    read_checkpoint,
    start_writing,
    whole_or_nothing,
)
from flaxformer_min.errors import UserError


def average(
    workdir: str | Path,
    output: str | Path,
    last: int,
) -> list[int]:
    """Writes to `output` one checkpoint whose weights are the mean of those of a run's checkpoints.

    Takes the `last` newest by step number and sums in float32 in the order of the steps. The result
    has the config, tokenizer and step number of the newest of them and no optimizer state. Returns
    the steps.

    Raises:
        UserError: fewer checkpoints than asked, an `output` that is there already, or
            checkpoints that differ in tokenizer or shapes.
        CheckpointError: a damaged file, named, or `output` could not be written.
    """
    root, output = checkpoints_of(Path(workdir).absolute()), Path(output).absolute()
    chosen = _newest(root, last)
    if output.exists():
        raise UserError(f"{output}: is there already; give a new directory")
    newest = read_checkpoint(root / str(chosen[-1]))
    total = jax.tree.map(np.zeros_like, newest.params)
    for step in chosen:
        loaded = newest if step == chosen[-1] else read_checkpoint(root / str(step))
        _refuse_another(root, loaded, newest)
        total = jax.tree.map(np.add, total, loaded.params)
    mean = jax.tree.map(lambda leaf: leaf / np.float32(len(chosen)), total)
    meta = Meta(step=newest.step, tokenizer_sha256=newest.tokenizer.sha256, averaged_steps=chosen)
    with whole_or_nothing(output):
        start_writing(output, {"params": mean})()
        complete(output, newest.config, newest.tokenizer, meta)
    return chosen


def _newest(root: Path, last: int) -> list[int]:
    """The `last` newest steps, ascending."""
    counted = counted_steps(root)
    if not 1 <= last <= len(counted):
        raise UserError(
            f"{root}: cannot average the last {last}; there are {len(counted)}: {counted}; "
            "ask for fewer, or train with a larger train.keep_last"
        )
    return counted[-last:]


def _refuse_another(root: Path, loaded: Loaded, newest: Loaded) -> None:
    where = f"{root}: steps {loaded.step} and {newest.step}"
    if loaded.tokenizer.sha256 != newest.tokenizer.sha256:
        raise UserError(f"{where} have different tokenizers")
    if found := difference(named_leaves(loaded.params), named_leaves(newest.params)):
        raise UserError(f"{where} have different shapes: {found}")
