"""train.py that marks the phase it is in: a file with the phase's name lies in MARKS meanwhile.

A phase is the time within one function of the program. If that function is renamed, this program
fails; so an experiment cannot lose a phase without a word.
"""

import functools
import itertools
import os
import sys
from pathlib import Path
from typing import Any

from flaxformer_min.checkpoints.store import Checkpoints
from flaxformer_min.cli import main
from flaxformer_min.training import loop
from flaxformer_min.training.step import StepProgram
from flaxformer_min.training.validation import Validation

MARKED = ("-m", "benchmarks.reliability.marked")
PHASES: dict[str, tuple[Any, str]] = {
    "preparing": (loop, "prepare_data"),
    "restoring": (loop.Trainer, "saved_state"),
    "compiling": (StepProgram, "compile"),
    "stepping": (loop.Trainer, "step"),
    "evaluating": (Validation, "__call__"),
    "saving": (Checkpoints, "_finish"),
}


def mark(folder: Path, phase: str, owner: Any, name: str) -> None:
    """Makes a function of the program mark the phase while it runs; two calls have two marks."""
    function, numbers = getattr(owner, name), itertools.count()

    @functools.wraps(function)
    def marked(*args: Any, **kwargs: Any) -> Any:
        path = folder / f"{phase}.{next(numbers)}"
        path.touch()
        try:
            return function(*args, **kwargs)
        finally:
            path.unlink()

    setattr(owner, name, marked)


if __name__ == "__main__":
    for phase, (owner, name) in PHASES.items():
        mark(Path(os.environ["MARKS"]), phase, owner, name)
    sys.exit(main(["train", *sys.argv[1:]]))
