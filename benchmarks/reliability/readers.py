"""11: loads and averages beside a run that saves every step: nothing is called damaged."""

import itertools
import logging
import shutil
from pathlib import Path

from benchmarks.reliability.runs import Run, Size, programs
from benchmarks.reliability.tally import Tally
from flaxformer_min.checkpoints.average import average
from flaxformer_min.checkpoints.load import load_for_inference

SIZE = Size(1_000_000, 1_000_000, 1, buckets=1, devices=1)


def readers(folder: Path, short: bool, seed: int) -> Tally:
    """The run keeps three checkpoints and goes on until it has been read often enough."""
    tally, warnings = Tally("readers"), list[str]()
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())
    logging.getLogger("flaxformer_min").addHandler(handler)
    run = Run(folder / "read", folder, SIZE)
    start = run.start(JAX_COMPILATION_CACHE_DIR=str(programs(folder)))
    start.wait_until(lambda: len(run.counted()) >= 3)
    first = run.newest
    for number in range(22 if short else 1100):
        averages = number % 11 == 10
        problems = _average(run, folder) if averages else _load(run)
        problems += [warning for warning in warnings if "damaged" in warning]
        warnings.clear()
        tally.trial(f"read {number}", problems, seen="averages" if averages else "loads")
    logging.getLogger("flaxformer_min").removeHandler(handler)
    saved = run.newest - first
    start.kill()
    tally.trial("the run", [] if saved else ["it saved nothing meanwhile"])
    tally.notes.append(f"{saved} saves meanwhile")
    return tally


def _load(run: Run) -> list[str]:
    try:
        load_for_inference(run.workdir)
    except Exception as error:
        return [f"{type(error).__name__}: {error}"]
    return []


_numbers = itertools.count()


def _average(run: Run, folder: Path) -> list[str]:
    output = folder / f"average-{next(_numbers)}"
    try:
        average(run.workdir, output, last=2)
    except Exception as error:
        return [f"{type(error).__name__}: {error}"]
    shutil.rmtree(output)
    return []
