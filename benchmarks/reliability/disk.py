"""4: the disk fills up: what was saved stays whole, and nothing is said to be saved that is not."""

import contextlib
import os
import random
import re
import resource
import subprocess
import time
from collections.abc import Generator
from pathlib import Path

from benchmarks.reliability.runs import Run, Start, one_line, programs, reference, same_end, size
from benchmarks.reliability.tally import Tally

MEBIBYTES = 16


def disk(folder: Path, short: bool, seed: int) -> Tally:
    """A run that meets a full disk again and again, and goes on each time there is room.

    On a small tmpfs of its own where that can be mounted; elsewhere files cannot grow beyond a
    limit. The compiled programs are on another disk.
    """
    tally, draw = Tally("disk"), random.Random(seed)
    never_stopped = reference(folder, size(short))
    cache = {"JAX_COMPILATION_CACHE_DIR": str(programs(folder))}
    with _small_disk(folder / "small", short) as small:
        run = Run((small or folder) / "starved", folder, size(short))
        _begin(run.start(**cache))
        for point in range(1 if short else 20):
            before, start = run.newest, run.start(**cache)
            _starve(start, small, draw)
            problems = _checked(start, before)
            if small and point % 4 == 0:  # once more while there is no room
                newest = run.newest
                problems += _checked(run.finish(**cache), newest)
            if small:
                (small / "filler").unlink()
            tally.trial(f"point {point}", problems, seen="disk full" if small else "file too large")
        start = run.finish(**cache)
        problems = [] if start.process.returncode == 0 else [start.output()]
        tally.trial("end", [*problems, *same_end(run, never_stopped)], seen="run ended alike")
    return tally


def _begin(start: Start) -> None:
    """Two checkpoints that can be lost."""
    start.wait_until(lambda: len(start.run.counted()) == 2)
    start.kill()


def _starve(start: Start, small: Path | None, draw: random.Random) -> None:
    """From a random moment on there is room for no whole checkpoint; waits for the exit."""
    run = start.run
    goal = start.begun + draw.randint(0, 2 * run.size.checkpoint_every)
    start.wait_for_step(goal)
    sizes = [path.stat().st_size for path in (run.newest_folder).rglob("*")]
    if small:
        left = draw.uniform(0, 0.8) * sum(sizes)
        while start.process.poll() is None:
            _fill(small, int(left))
            time.sleep(0.005)
    else:
        limit = draw.randint(max(sizes) // 8, max(sizes) - 1)
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(start.process.pid, resource.RLIMIT_FSIZE, (limit, limit))
        start.wait()


def _fill(small: Path, left: int) -> None:
    """Grows the filler until no more than `left` bytes are free."""
    found = os.statvfs(small)
    excess = found.f_bavail * found.f_frsize - left
    with contextlib.suppress(OSError), (small / "filler").open("ab") as filler:
        if excess > 0:
            os.posix_fallocate(filler.fileno(), filler.tell(), excess)


def _checked(start: Start, before: int) -> list[str]:
    """What is wrong after an exit for lack of room, where `before` was the newest checkpoint."""
    run, output = start.run, start.output()
    problems = [*run.damaged(), *one_line(output)]
    if start.process.returncode not in (1, 2):
        problems.append(f"exit status {start.process.returncode}")
    if run.newest < before:
        problems.append(f"step {before} was lost, the newest is {run.newest}")
    if run.last_step() > run.newest + 2 * run.size.checkpoint_every:
        problems.append(f"step {run.last_step()} was reached, the newest is {run.newest}")
    if left := run.unfinished():
        problems.append(f"left unfinished: {left}")
    for step in re.findall(r"checkpoints/(\d+)\S*: not saved", output):
        if int(step) in run.counted():
            problems.append(f"step {step} is there, but said not to be saved")
    if (resumed := re.search(r"resuming from step (\d+)", output)) and int(resumed[1]) != before:
        problems.append(f"resumed from step {resumed[1]}, not {before}")
    if re.search("stopped at step|is finished", output):
        problems.append(f"said: {output.splitlines()[-1]}")
    return problems


@contextlib.contextmanager
def _small_disk(mount: Path, short: bool) -> Generator[Path | None]:
    """A tmpfs, or None where we may not mount one."""
    mount.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={MEBIBYTES}m", "tmpfs", str(mount)]
    if short or subprocess.run(command, capture_output=True, check=False).returncode != 0:
        yield None
        return
    try:
        yield mount
    finally:
        subprocess.run(["umount", str(mount)], check=True)
