"""A jax.profiler trace of a few steps, for TensorBoard or Perfetto."""

import sys
from pathlib import Path

import jax

AFTER = 10  # steps of a run before its trace starts, so that compilation is not in it


class Profiler:
    """Writes the trace of `steps` steps to WORKDIR/profile; of none if `steps` is 0."""

    def __init__(self, workdir: Path, start: int, steps: int):
        self._folder = workdir / "profile"
        self._first, self._end = start + AFTER, start + AFTER + steps
        self._running = False

    def before(self, step: int) -> None:
        """To be called before each step."""
        if step == self._first < self._end:
            jax.profiler.start_trace(str(self._folder))
            self._running = True
        elif step == self._end:
            self.stop()

    def stop(self) -> None:
        """Ends the trace if one runs."""
        if self._running:
            self._running = False
            jax.profiler.stop_trace()
            print(f"trace written to {self._folder}", file=sys.stderr)
