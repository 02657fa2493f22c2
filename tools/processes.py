"""Runs of several processes on this machine, one CPU device each, with accidents at a given step.

As a program it is one of these processes: it reads what is to happen as JSON from its first
argument and hands the others to the command line.
"""

import contextlib
import itertools
import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tools import tiny_config

ROOT = Path(__file__).parent.parent
ONE_DEVICE = "--xla_backend_optimization_level=0"  # and compiled quickly: most of the time is that


class Accident(NamedTuple):
    """A signal that a process sends to itself when it calls Trainer.step for the `call`-th time."""

    process: int
    call: int
    number: int


class Ended(NamedTuple):
    status: int | None  # None: it had to be killed
    errors: str
    seconds: float  # since the first process ended or was stopped; NaN if it had to be


def launch(
    corpus: Path,
    workdir: Path,
    processes: int,
    *overrides: str,
    accidents: Sequence[Accident] = (),
    silence: float = 60,
    patience: float = 900,
) -> list[Ended]:
    """Trains with the tiny config; what became of each process. Those left over are killed."""
    config = f"{tiny_config.__file__}:{corpus}"
    arguments = ["train", "--config", config, "--workdir", str(workdir), *overrides]
    if processes > 1:
        arguments += ["--distributed.coordinator", f"127.0.0.1:{free_port()}"]
        arguments += ["--distributed.processes", str(processes)]
    started = []
    for process in range(processes):
        plan = json.dumps([silence, [a[1:] for a in accidents if a.process == process]])
        which = ["--distributed.process", str(process)] if processes > 1 else []
        started.append(
            subprocess.Popen(
                [sys.executable, __file__, plan, *arguments, *which],
                cwd=ROOT,
                env=os.environ | {"XLA_FLAGS": ONE_DEVICE, "PYTHONPATH": str(ROOT)},
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    stopped = {a.process for a in accidents if a.number == signal.SIGSTOP}
    return _wait(started, stopped, patience)


def _wait(started: list[subprocess.Popen], stopped: set[int], patience: float) -> list[Ended]:
    began, first, at = time.monotonic(), None, {}
    while len(at) < len(started) - len(stopped) and time.monotonic() < began + patience:
        for place, process in enumerate(started):
            if process.poll() is not None:
                at.setdefault(place, time.monotonic())
            elif place in stopped and first is None and _is_stopped(process.pid):
                first = time.monotonic()
        first = min([*at.values(), *([first] if first else [])], default=None)
        time.sleep(0.05)
    statuses = [process.poll() for process in started]
    for process in started:
        process.kill()
    errors = [process.communicate()[1] for process in started]
    since = [at.get(place, math.nan) - (first or 0) for place in range(len(started))]
    return list(itertools.starmap(Ended, zip(statuses, errors, since, strict=True)))


def _is_stopped(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    return False


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


def metrics(workdir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


def worst_difference(one: Path, other: Path) -> float:
    """The largest relative difference of a loss; BLEU records and steps have to be the same."""
    worst = 0.0
    for left, right in zip(metrics(one), metrics(other), strict=True):
        assert (left["step"], left.get("bleu")) == (right["step"], right.get("bleu"))
        for name in {"loss", "validation_loss"} & left.keys():
            worst = max(worst, abs(left[name] - right[name]) / abs(left[name]))
    return worst


def main() -> int:
    silence, accidents = json.loads(sys.argv[1])
    from flaxformer_min import cli
    from flaxformer_min.system import failures
    from flaxformer_min.training import loop

    failures.SILENCE = silence
    step, calls = loop.Trainer.step, itertools.count(1)

    def watched(self: Any, state: Any, batch: Any) -> Any:
        call = next(calls)
        for at, number in accidents:
            if call == at:
                os.kill(os.getpid(), number)
        return step(self, state, batch)

    loop.Trainer.step = watched
    return cli.main(sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main())
