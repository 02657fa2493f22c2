"""5: SIGTERM in every phase: the state is saved, and the same command goes on."""

import os
import random
import re
import signal
import time
from pathlib import Path

from benchmarks.reliability.marked import MARKED
from benchmarks.reliability.runs import Run, Start, reference, same_end, size, warm
from benchmarks.reliability.tally import Tally
from flaxformer_min.system.signals import AT_ONCE

WATCHED = ("-m", "benchmarks.reliability.watched")
PHASES = ("compile", "step", "loss", "decoding", "save", "group")


def stops(folder: Path, short: bool, seed: int) -> Tally:
    """Chains of runs: each is stopped once in every phase and then ends as if never stopped."""
    tally, draw = Tally("stops"), random.Random(seed)
    never_stopped = reference(folder, size(short))
    slowest = 0.0
    for chain in range(1 if short else 5):
        run = warm(Run(folder / f"stopped-{chain}", folder, size(short)), folder)
        phases = ["decoding"] if short else draw.sample(PHASES, len(PHASES))
        for phase in phases:
            problems, seconds = _stop(run, phase, draw)
            slowest = max(slowest, seconds)
            tally.trial(f"chain {chain}, {phase}", problems, seen=f"in {phase}")
        start = run.finish()
        problems = [] if start.process.returncode == 0 else [start.output()]
        problems += same_end(run, never_stopped)
        tally.trial(f"end of chain {chain}", problems, seen="runs ended alike")
    tally.notes.append(f"at most {slowest:.1f} s from signal to exit")
    return tally


def _stop(run: Run, phase: str, draw: random.Random) -> tuple[list[str], float]:
    """Stops one start in a phase; problems, and seconds from the signal to the exit."""
    if phase in ("loss", "decoding"):
        marks = run.workdir.with_name(f"{run.workdir.name}.{run.starts}.marks")
        variables = {
            "STOP_IN": phase,
            "STOP_AFTER": f"{draw.uniform(0, 0.02)}",
            "MARKS": str(marks),
        }
        start = run.start(WATCHED, **variables)
        ended = start.wait()
        sent, *later = marks.read_text().split() if marks.exists() else ["0"]
        problems = [] if phase in later else [f"not sent in {phase}, but after {later}"]
        return problems + _saved(start), ended - float(sent)
    start = run.start(MARKED, cold=phase == "compile")
    _wait(start, phase, draw)
    sent = time.time()
    if phase == "group":
        os.killpg(start.process.pid, signal.SIGTERM)
    else:
        start.process.send_signal(signal.SIGTERM)
    ended = start.wait()
    if phase == "compile" and AT_ONCE in start.output():
        return _as_before(start), ended - sent
    return _saved(start), ended - sent


def _wait(start: Start, phase: str, draw: random.Random) -> None:
    """Waits for a random moment of the phase."""
    if phase == "compile":
        start.wait_for("compiling")
        time.sleep(draw.uniform(0, 1))
        return
    goal = start.begun + draw.randint(1, start.run.size.checkpoint_every)
    start.wait_for_step(goal)
    if phase == "save":
        start.wait_for("saving")


def _as_before(start: Start) -> list[str]:
    """What is wrong after an exit before there was a state: it saves nothing and loses nothing."""
    run, status, problems = start.run, start.process.returncode, start.run.damaged()
    if status != 143:
        problems.append(f"exit status {status}: {start.output()}")
    if run.newest != start.begun:
        problems.append(f"step {start.begun} became {run.newest}")
    if children := start.children_left():
        problems.append(f"processes left: {children}")
    return problems


def _saved(start: Start) -> list[str]:
    """What is wrong after an exit that should have saved the last step."""
    run, status, output = start.run, start.process.returncode, start.output()
    problems = run.damaged()
    if status != 143:
        problems.append(f"exit status {status}: {output}")
    said = re.search(r"stopped at step (\d+)", output)
    if not said or int(said[1]) != run.newest:
        problems.append(f"newest checkpoint is {run.newest}, said: {output.splitlines()[-1:]}")
    if run.last_step() != run.newest:
        problems.append(f"newest checkpoint is {run.newest}, last step {run.last_step()}")
    if run.newest < start.begun:
        problems.append(f"step {start.begun} was lost")
    if left := run.unfinished():
        problems.append(f"left unfinished: {left}")
    if children := start.children_left():
        problems.append(f"processes left: {children}")
    return problems
