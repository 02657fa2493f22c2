"""1: kill -9 at any moment, and the same command again."""

import random
import re
import shutil
import time
from collections import Counter
from pathlib import Path

import numpy as np

from benchmarks.reliability.marked import MARKED
from benchmarks.reliability.runs import Run, Start, config_of, reference, same_end, size, warm
from benchmarks.reliability.tally import Tally
from flaxformer_min.training.prepared_data import prepare_data

# How many kills have to hit each phase of marked.py; "any" is a random moment.
LONG = {"preparing": 5, "restoring": 5, "compiling": 5, "evaluating": 5, "saving": 15, "any": 15}
SHORT = {"preparing": 1, "restoring": 1, "compiling": 1, "evaluating": 1, "saving": 1}
MOST = 150  # trials; if they do not hit a phase, the experiment has failed
# Seconds within which a kill follows the beginning of a phase, at first. A kill that comes too late
# halves them, and one that hits doubles them again: how long a phase is depends on the machine and
# on what else runs there.
WIDTH = {
    **{"preparing": 0.2, "restoring": 0.05, "compiling": 1.0},
    **{"evaluating": 0.1, "saving": 0.05, "any": 0.05},
}


def kills(folder: Path, short: bool, seed: int) -> Tally:
    """Kills until every phase was hit as often as it should be, then lets the run end.

    A run that ends before that is compared, and another one begun.
    """
    tally, draw = Tally("kills"), random.Random(seed)
    wanted, late = Counter(SHORT if short else LONG), Counter[str]()
    never_stopped = reference(folder, size(short))
    runs: list[Run] = []
    while +wanted and tally.tried < MOST:
        run = warm(Run(folder / f"killed-{len(runs)}", folder, size(short)), folder)
        runs.append(run)
        while _start_and_kill(run, wanted, late, tally, draw):
            pass
        problems = [*same_end(run, never_stopped), *_once_an_epoch(folder, run)]
        tally.trial(f"end of run {len(runs)}", problems, seen="runs ended alike")
    tally.trial("phases", [f"still to be hit: {+wanted}"] if +wanted else [])
    if not short:
        problems = _cut_programs(folder, runs[-1], draw)
        tally.trial("programs", problems, seen="cut compilation cache")
    return tally


def _start_and_kill(
    run: Run, wanted: Counter[str], late: Counter[str], tally: Tally, draw: random.Random
) -> bool:
    """Whether the run goes on; counts the kill by the phase that it really hit.

    `late` counts for each phase how many kills in a row came too late.
    """
    before = run.newest
    target = _target(wanted, not before, draw) if tally.tried < MOST else None
    start = run.start(MARKED, cold=target == "compiling")
    killed = target is not None and _wait(start, target, late, draw)
    if killed:
        start.kill()
    else:
        start.wait()
    phases = start.phases()
    hit = target if target in phases else min(phases, default="between phases")
    problems = run.damaged()
    resumed = re.search(r"resuming from step (\d+)", start.output())
    if run.newest < before:
        problems.append(f"step {before} was lost, the newest is {run.newest}")
    if resumed and int(resumed[1]) != before:
        problems.append(f"resumed from step {resumed[1]}, not {before}")
    if not killed:
        if start.process.returncode != 0:
            problems.append(f"exit status {start.process.returncode}: {start.output()}")
        tally.trial("a start that ended", problems, seen="starts not killed")
        return bool(problems) and run.starts < 100
    late[target] = late[target] + 1 if hit != target else max(0, late[target] - 1)
    tally.trial(f"kill {tally.tried + 1} in {hit}", problems, seen=f"kills {hit}")
    wanted[hit if wanted[hit] > 0 else "any"] -= 1
    return True


def _target(wanted: Counter[str], fresh: bool, draw: random.Random) -> str | None:
    """The phase to hit next; None if all were.

    Only a fresh run prepares anything, and only one that has a checkpoint restores it.
    """
    left = +wanted
    if fresh and left["preparing"]:
        return "preparing"
    if fresh and set(left) == {"restoring"}:
        return "saving"
    del left["restoring" if fresh else "preparing"]
    return draw.choice(sorted(left.elements())) if left else None


def _wait(start: Start, target: str, late: Counter[str], draw: random.Random) -> bool:
    """Waits for a random moment of the phase; False if the process ended first."""
    run = start.run
    if target == "any" and draw.random() < 0.25:
        time.sleep(draw.uniform(0, 5))
        return start.process.poll() is None
    if target in ("any", "saving"):
        far = run.size.steps if target == "any" else start.begun + 2 * run.size.checkpoint_every
        goal = draw.randint(start.begun, far)
        if not start.wait_for_step(goal):
            return False
    if target != "any" and not start.wait_for(target):
        return False
    time.sleep(draw.uniform(0, WIDTH[target] / 2 ** late[target]))
    return start.process.poll() is None


def _once_an_epoch(folder: Path, run: Run) -> list[str]:
    """Every step's batch was the plan's, and the plan has every pair once in every epoch.

    The log says how many target tokens a step saw. That the batches were the plan's and not merely
    as large follows from losses equal to those of the run never stopped.
    """
    data = prepare_data(config_of(folder, run.size), run.workdir)
    log = [line for line in run.log() if "loss" in line]
    problems = []
    if [line["step"] for line in log] != list(range(1, run.size.steps + 1)):
        problems.append("a step is missing or twice in the log")
    planned = [data.plan.batch_ids(step)[1] for step in range(run.size.steps)]
    for line, ids in zip(log, planned, strict=False):
        if line["tokens"] != data.train.lengths[ids, 1].sum():
            problems.append(f"step {line['step']} saw {line['tokens']} tokens")
    length = data.plan.batches_per_epoch
    for begin in range(0, run.size.steps - length + 1, length):
        seen = np.sort(np.concatenate(planned[begin : begin + length]))
        if not np.array_equal(seen, np.arange(len(data.train))):
            problems.append(f"epoch {begin // length} has not every pair once")
    return problems


def _cut_programs(folder: Path, run: Run, draw: random.Random) -> list[str]:
    """A kill may leave half a compiled program in the cache: it must do no harm."""
    cut = Run(folder / "cut", folder, run.size)
    shutil.copytree(run.workdir, cut.workdir)
    shutil.copytree(run.compiled, cut.compiled)
    shutil.rmtree(cut.newest_folder)
    for path in cut.compiled.iterdir():
        path.write_bytes(path.read_bytes()[: draw.randrange(path.stat().st_size)])
    start = cut.finish()
    problems = same_end(cut, run)
    return problems if start.process.returncode == 0 else [start.output(), *problems]
