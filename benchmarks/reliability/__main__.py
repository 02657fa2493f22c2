"""Prints a table of all experiments; the exit status is 1 if a trial failed."""

import argparse
import sys
import tempfile
import traceback
from contextlib import redirect_stderr
from pathlib import Path

import jax

from benchmarks.reliability.damage import damage
from benchmarks.reliability.disk import disk
from benchmarks.reliability.endurance import endurance
from benchmarks.reliability.gradients import gradients
from benchmarks.reliability.hostile import hostile
from benchmarks.reliability.kills import kills
from benchmarks.reliability.nonfinite import nonfinite
from benchmarks.reliability.places import places
from benchmarks.reliability.readers import readers
from benchmarks.reliability.resume import resume
from benchmarks.reliability.stops import stops
from benchmarks.reliability.tally import Tally, table
from benchmarks.reliability.unwritten import unwritten

EXPERIMENTS = {
    experiment.__name__: experiment
    for experiment in (
        kills,
        resume,
        damage,
        disk,
        stops,
        nonfinite,
        gradients,
        endurance,
        hostile,
        places,
        readers,
        unwritten,
    )
}


def attempt(name: str, folder: Path, short: bool, seed: int) -> Tally:
    """The experiment's tally; one that breaks is a failed trial, and the others go on."""
    try:
        return EXPERIMENTS[name](folder, short, seed)
    except Exception as error:
        traceback.print_exc()
        tally = Tally(name)
        tally.trial("the experiment itself", [f"{type(error).__name__}: {error}"])
        return tally


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.reliability", description=__doc__)
    parser.add_argument("--short", action="store_true", help="a few trials of each, a minute")
    parser.add_argument("--only", nargs="+", choices=EXPERIMENTS, default=list(EXPERIMENTS))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", type=Path, help="a folder to leave all files in")
    options = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 1 if options.short else 4)
    tallies = []
    with tempfile.TemporaryDirectory(prefix="reliability-") as temporary:
        folder = options.keep or Path(temporary)
        with (folder / "output.txt").open("w") as output, redirect_stderr(output):
            for name in options.only:
                tally = attempt(name, folder, options.short, options.seed)
                print(table([tally.row]).splitlines()[-1], file=sys.__stderr__, flush=True)
                tallies.append(tally)
    print(table([tally.row for tally in tallies]))
    for tally in tallies:
        for failure in tally.failures:
            print(f"FAILED {tally.name}: {failure}")
    return int(any(tally.failures for tally in tallies))


if __name__ == "__main__":
    sys.exit(main())
