"""A jax.profiler trace of a few steps, for TensorBoard or Perfetto."""

import sys
from pathlib import Path
from typing import Any

import jax

from flaxformer_min.system.processes import is_first

AFTER = 10  # steps before the trace starts, so that it holds no compilation


class Profiler:
    """Traces `count` steps of a run that goes from step `start` to `end`, into WORKDIR/profile.

    The trace starts AFTER steps into the run, or earlier if otherwise too few steps were left for
    it. Only process 0 writes a trace. With a `count` of 0 there is none.
    """

    def __init__(self, workdir: Path, start: int, end: int, count: int):
        count = count if is_first() else 0
        self._folder = workdir / "profile"
        self._first = max(start, min(start + AFTER, end - count))
        self._end = self._first + count
        self._running = False

    def before(self, step: int, state: Any) -> None:
        """Starts or ends the trace; to be called before each step, with the newest state."""
        if step == self._end:
            jax.block_until_ready(state)  # the last step of the trace may still be running
            self.close()
        elif step == self._first:
            jax.profiler.start_trace(str(self._folder))
            self._running = True

    def close(self) -> None:
        """Ends the trace if one is being taken."""
        if self._running:
            self._running = False
            jax.profiler.stop_trace()
            print(f"trace written to {self._folder}", file=sys.stderr)
