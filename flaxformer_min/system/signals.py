"""SIGTERM and SIGINT as a request to stop at the next step boundary, the same in all processes."""

import os
import signal
import threading
from types import FrameType

from flaxformer_min.system.processes import exchange, post, posted

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopRequest:
    """A context in which SIGTERM and SIGINT wait for a step boundary, once `defer` was called.

    Then a first signal only makes `requested` true. A second one, or one that comes while there is
    no step to save, ends the process at once with 128 + its number. Python runs a handler only when
    the main thread comes back from a compilation or a long step, and then once for several equal
    signals; so a thread counts them, from the byte that each writes to a pipe on arrival.
    """

    def __init__(self) -> None:
        self._received: int | None = None
        self._deferring, self._counted = False, False

    def __enter__(self) -> "StopRequest":
        arrivals, self._written = os.pipe()
        os.set_blocking(self._written, False)  # Python demands it of a handler's pipe
        self._counter = threading.Thread(target=self._count, args=(arrivals,), daemon=True)
        self._counter.start()
        self._wakeup_before = signal.set_wakeup_fd(self._written)
        self._handlers_before = {n: signal.signal(n, self._note) for n in STOP_SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._handlers_before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup_before)
        os.close(self._written)  # the thread has read all when it sees this end
        self._counter.join()

    def defer(self) -> None:
        """From now on a first signal waits."""
        self._deferring = True

    @property
    def requested(self) -> bool:
        """Whether a signal has come."""
        return self._received is not None

    @property
    def exit_status(self) -> int:
        """0 if no signal came, else the shell's 128 + number: 143 for SIGTERM, 130 for SIGINT."""
        return 0 if self._received is None else 128 + self._received

    def adopt(self, number: int) -> None:
        """As if the signal had come here; the first one decides."""
        self._received = self._received or number

    @property
    def received(self) -> int | None:
        """The first signal that came."""
        return self._received

    def _note(self, number: int, _: FrameType | None) -> None:
        """The handler: whoever is in Python code sees the request before the next line."""
        self.adopt(number)

    def _count(self, arrivals: int) -> None:
        """The thread: one byte a signal, until the other end of the pipe is closed."""
        with open(arrivals, "rb", buffering=0) as pipe:
            while byte := pipe.read(1):
                if byte[0] in STOP_SIGNALS:  # others with a handler write theirs too
                    if self._counted or not self._deferring:
                        os._exit(128 + byte[0])
                    self._counted = True


class AgreedStop:
    """Whether any process of the run was asked to stop; with one process, whether it was."""

    def __init__(self, stop: StopRequest) -> None:
        self._stop = stop

    def __call__(self) -> bool:
        """The same answer in all processes; all have to ask, as often and in the same order."""
        told = exchange(str(self._stop.received) if self._stop.requested else None)
        for number in told.values():
            self._stop.adopt(int(number))
        return bool(told)

    def in_sight(self) -> bool:
        """Whether to break off what this process does alone; the others may hear it later."""
        if self._stop.requested:
            post("stop/requested")
        return self._stop.requested or bool(posted("stop"))
