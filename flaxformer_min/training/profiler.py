"""A jax.profiler trace of a few steps, for TensorBoard or Perfetto."""

import sys
from pathlib import Path
from typing import Any

import jax

AFTER = 10  # steps of a run before its trace starts, if it has so many: compilation is not in it


class Profiler:
    """Writes the trace of `count` of the steps `start` to `end` to WORKDIR/profile.

    A `count` of 0 writes none; a count larger than the run traces all of it.
    """

    def __init__(self, workdir: Path, start: int, end: int, count: int):
        self._folder = workdir / "profile"
        self._first = max(start, min(start + AFTER, end - count))
        self._end = self._first + count
        self._running = False

    def before(self, step: int, state: Any) -> None:
        """To be called before each step, with the state that the step before it gave."""
        if step == self._end:
            jax.block_until_ready(state)  # the last traced step may still be running
            self.stop()
        elif step == self._first:
            jax.profiler.start_trace(str(self._folder))
            self._running = True

    def stop(self) -> None:
        """Ends the trace if one runs."""
        if self._running:
            self._running = False
            jax.profiler.stop_trace()
            print(f"trace written to {self._folder}", file=sys.stderr)
