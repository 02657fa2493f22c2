"""8: memory and compilations over a long run."""

import os
import time
from pathlib import Path

from benchmarks.reliability.runs import Run, Size, Start, programs
from benchmarks.reliability.tally import Tally

LONG, SHORT = Size(10_000, 200, 100), Size(40, 10, 5, buckets=1, devices=1)
GROWTH = 50e6  # bytes
COMPILED = "Finished XLA compilation of"


def endurance(folder: Path, short: bool, seed: int) -> Tally:
    """Follows one run's resident memory, and what JAX says it compiles."""
    tally = Tally("endurance")
    run = Run(folder / "long", folder, SHORT if short else LONG)
    start = run.start(JAX_LOG_COMPILES="1", JAX_COMPILATION_CACHE_DIR=str(programs(folder)))
    # By then every shape was trained on, evaluated and saved.
    start.wait_for_step(2 * run.size.evaluate_every + 1)
    compiled, memory = start.output().count(COMPILED), [_resident(start)]
    while start.process.poll() is None:
        time.sleep(0.05)
        memory.append(_resident(start) or memory[-1])
    ended = [] if start.process.returncode == 0 and run.newest == run.size.steps else ["no end"]
    tally.trial("end", ended or run.damaged())
    growth = max(memory) - memory[0]
    tally.trial("memory", [f"grew by {growth / 1e6:.0f} MB"] if growth >= GROWTH else [])
    late = start.output().count(COMPILED) - compiled
    tally.trial("compilations", [f"{late} were late"] if late or not compiled else [])
    tally.notes += [
        f"{run.size.steps} steps, {memory[0] / 1e6:.0f} MB when warm, {growth / 1e6:.1f} MB more",
        f"{compiled} compilations before, {late} after",
    ]
    return tally


def _resident(start: Start) -> int:
    """Bytes; 0 when the process has ended."""
    try:
        pages = int(Path(f"/proc/{start.process.pid}/statm").read_text().split()[1])
    except (OSError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")
