"""12: saves that Orbax leaves out or writes otherwise: each is noticed before it counts.

As a program it is train.py in which Orbax does what WRONG says in save number AT.
"""

import itertools
import os
import random
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp

from benchmarks.reliability.runs import Run, one_line, programs, reference, same_end, size
from benchmarks.reliability.tally import Tally
from flaxformer_min.checkpoints import saved_state
from flaxformer_min.cli import main

Parts = dict[str, dict[str, Any]]


def _without_a_leaf(parts: Parts) -> Parts:
    return {part: dict(list(leaves.items())[:-1]) for part, leaves in parts.items()}


def _of_another_shape(parts: Parts) -> Parts:
    return parts | {"params": {name: leaf[None] for name, leaf in parts["params"].items()}}


def _of_another_dtype(parts: Parts) -> Parts:
    rounded = {name: leaf.astype(jnp.bfloat16) for name, leaf in parts["params"].items()}
    return parts | {"params": rounded}


WRONG: dict[str, Callable[[Parts], Parts] | None] = {
    "nothing": None,
    "without a leaf": _without_a_leaf,
    "of another shape": _of_another_shape,
    "of another dtype": _of_another_dtype,
}


def unwritten(folder: Path, short: bool, seed: int) -> Tally:
    """A run goes on after each save that went wrong, and ends as if none had."""
    tally, draw = Tally("unwritten"), random.Random(seed)
    never_stopped = reference(folder, size(short))
    run = Run(folder / "unwritten", folder, size(short))
    cache = {"JAX_COMPILATION_CACHE_DIR": str(programs(folder))}
    for number in range(1 if short else 20):
        wrong, at = list(WRONG)[number % len(WRONG)], draw.randrange(2)
        before = run.newest
        start = run.finish(
            program=("-m", "benchmarks.reliability.unwritten"), WRONG=wrong, AT=str(at), **cache
        )
        problems = [*one_line(start.output()), *run.damaged()]
        if start.process.returncode != 1 or "not saved" not in start.output():
            problems.append(f"status {start.process.returncode}: {start.output()[-300:]}")
        if run.newest != before + at * run.size.checkpoint_every:
            problems.append(f"the newest checkpoint is {run.newest}, was {before}, save {at}")
        tally.trial(f"save {at} {wrong}", problems, seen="saves")
    start = run.finish(**cache)
    problems = [] if start.process.returncode == 0 else [start.output()]
    tally.trial("end", [*problems, *same_end(run, never_stopped)], seen="run ended alike")
    return tally


def _go_wrong() -> None:
    """Puts a function that goes wrong once in the place of Orbax's."""
    save, numbers = saved_state.ocp.save_checkpointables_async, itertools.count()

    def wrong(path: str, parts: Parts) -> Any:
        if next(numbers) != int(os.environ["AT"]):
            return save(path, parts)
        change = WRONG[os.environ["WRONG"]]
        return save(path, change(parts)) if change else SimpleNamespace(result=lambda: None)

    saved_state.ocp.save_checkpointables_async = wrong


if __name__ == "__main__":
    _go_wrong()
    sys.exit(main(["train", *sys.argv[1:]]))
