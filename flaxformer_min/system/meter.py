"""How far a long task is, on standard error: a bar on a terminal, plain lines anywhere else."""

import contextlib
import sys
import threading
import time

from tqdm import tqdm

LONGEST_PAUSE = 30.0  # seconds between two plain lines; the first ones come faster


class Bar(tqdm):
    """A bar whose lock is one between threads.

    tqdm's own is also one between processes, for which Python 3.14 starts a process that outlives
    this one by a moment.
    """


Bar.set_lock(threading.RLock())


class Pace:
    """Says when a plain line is due: after 1, 2, 4, 8, 16 and 32 seconds, then every 30."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._next = 1.0

    def elapsed(self) -> float:
        """Returns the seconds since the start."""
        return max(time.perf_counter() - self._start, 1e-9)

    def due(self) -> bool:
        """Whether it is time for a line; then the next one is due later."""
        elapsed = self.elapsed()
        if elapsed < self._next:
            return False
        self._next = elapsed + min(elapsed, LONGEST_PAUSE)
        return True

    def left(self, done: int, total: int) -> str:
        """Returns the time that the rest takes, as "00:26 left", if it goes on as before."""
        seconds = self.elapsed() * (total - done) / max(done, 1)
        return f"{Bar.format_interval(seconds)} left"


class Meter:
    """The progress of a task of `total` units, such as "lines"; a context.

    Where there is no terminal it prints a line at the start, lines with rate and time left as a
    `Pace` says, and one at the end if there was such a line before. `plain` False leaves the lines
    out, and `bar` False the bar.
    """

    def __init__(
        self, task: str, total: int, unit: str, *, plain: bool = True, bar: bool = True
    ) -> None:
        about = {"total": total, "desc": task, "unit": f" {unit}", "leave": False}
        self._bar = Bar(**about, disable=None if bar else True)  # None: unless on a terminal
        self._task, self._total, self._unit = task, total, unit
        self._plain, self._done, self._told = plain and not sys.stderr.isatty(), 0, False
        self._pace = Pace()

    def __enter__(self) -> "Meter":
        if self._plain:
            say(f"{self._task}: {self._total:,} {self._unit}")
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def update(self, count: int) -> None:
        """Takes note of so many more units that are done."""
        self._bar.update(count)
        self._done += count
        over = self._told and self._done == self._total
        if self._plain and (over or self._pace.due()):
            self._told = True
            rate = self._done / self._pace.elapsed()
            say(
                f"{self._task}: {self._done:,} of {self._total:,} {self._unit}, "
                f"{rate:,.{int(rate < 10)}f} a second, {self._pace.left(self._done, self._total)}"
            )


def say(text: str) -> None:
    """Prints a line to standard error, above a progress bar; nothing if the terminal has closed.

    A run goes on then, at least to its next step boundary, where it can be saved.
    """
    with contextlib.suppress(OSError):
        Bar.write(text, file=sys.stderr)
