"""SIGTERM and SIGINT as a request to stop at the next step boundary."""

import os
import signal
from types import FrameType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopRequest:
    """A context in which SIGTERM and SIGINT wait for a step boundary, once `defer` was called.

    Then a first signal only sets `received`. A second one, or one that comes while there is no
    step to save, ends the process at once. A Python handler runs when the interpreter gets control
    back: after a running step or a compilation, not during it.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self._deferring = False

    def __enter__(self) -> "StopRequest":
        self._previous = {number: signal.signal(number, self._note) for number in STOP_SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def defer(self) -> None:
        """From now on a first signal waits."""
        self._deferring = True

    @property
    def requested(self) -> bool:
        """Whether a signal has come."""
        return self.received is not None

    @property
    def exit_status(self) -> int:
        """0 if no signal came, else the shell's 128 + number: 143 for SIGTERM, 130 for SIGINT."""
        return 0 if self.received is None else 128 + self.received

    def _note(self, number: int, _: FrameType | None) -> None:
        if self.requested or not self._deferring:
            os._exit(128 + number)
        self.received = number
