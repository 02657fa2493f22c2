"""Signals as a request to stop at the next step boundary, the same in all processes."""

import contextlib
import os
import signal
import threading
from types import FrameType

from flaxformer_min.system.processes import exchange, post, read_posts

URGENT = (signal.SIGTERM, signal.SIGINT)  # whoever sends a second one means at once
# A terminal that closes sends SIGHUP, often twice; SLURM warns of the end of a job by SIGUSR1.
STOP_SIGNALS = (*URGENT, signal.SIGHUP, signal.SIGUSR1)

AT_ONCE = "stopped at once; what was saved counts, and the same command goes on"


class StopRequest:
    """A context in which a first of the STOP_SIGNALS asks to stop, once `defer` was called.

    The request waits until the program asks for it, at a step boundary. A SIGTERM or SIGINT after
    that ends the process at once with status 128 + its number; the others change nothing then. A
    first signal before `defer`, when there is no step to save, ends it at once too. A SIGHUP that
    is ignored, because nohup started the process, stays ignored.

    Python runs a signal handler only when the main thread comes back from a compilation or a long
    step, and then once for several equal signals. So a thread counts the signals, from the byte
    that each of them writes to a pipe when it arrives.

    `received` is the number of the first signal, None before it.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self._deferring, self._counted = False, False

    def __enter__(self) -> "StopRequest":
        arrivals, self._pipe = os.pipe()
        os.set_blocking(self._pipe, False)  # Python demands it of a handler's pipe
        self._counter = threading.Thread(target=self._count, args=(arrivals,), daemon=True)
        self._counter.start()
        self._wakeup_before = signal.set_wakeup_fd(self._pipe)
        hangs_up = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
        numbers = [n for n in STOP_SIGNALS if n != signal.SIGHUP or hangs_up]
        self._handlers_before = {n: signal.signal(n, self._note) for n in numbers}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._handlers_before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup_before)
        os.close(self._pipe)  # the thread ends once it has read all that was written
        self._counter.join()

    def defer(self) -> None:
        """Makes a first signal from now on a request, which does not end the process."""
        self._deferring = True

    @property
    def requested(self) -> bool:
        """Whether a signal has come."""
        return self.received is not None

    @property
    def exit_status(self) -> int:
        """0 if no signal came, else the shell's 128 + number, such as 143 for SIGTERM."""
        return 0 if self.received is None else 128 + self.received

    def record(self, number: int) -> None:
        """Records a signal, of this process or another; the first one sets the exit status."""
        self.received = self.received or number

    def _note(self, number: int, _: FrameType | None) -> None:
        """Handles a signal: the main thread sees the request before its next line of Python."""
        self.record(number)

    def _count(self, arrivals: int) -> None:
        """Runs in the thread: reads one byte for each signal, until the pipe is closed."""
        with open(arrivals, "rb", buffering=0) as pipe:
            while byte := pipe.read(1):
                number = byte[0]  # other signals that have a handler write bytes too
                if number in (URGENT if self._counted else STOP_SIGNALS):
                    if self._counted or not self._deferring:
                        with contextlib.suppress(OSError):  # stderr may be closed
                            os.write(2, f"{AT_ONCE}\n".encode())
                        os._exit(128 + number)
                    self._counted = True


class AgreedStop:
    """Whether any process of the run was asked to stop; with one process, whether this one was."""

    def __init__(self, request: StopRequest) -> None:
        self._request = request

    def __call__(self) -> bool:
        """Whether any process was asked to stop: the same answer in all processes.

        All of them have to ask equally often and in the same order.
        """
        received = self._request.received
        numbers = exchange(None if received is None else str(received))
        for number in numbers.values():
            self._request.record(int(number))
        return bool(numbers)

    def in_sight(self) -> bool:
        """Whether this process may break off work that it does without the other processes.

        Other processes may get another answer at this moment; they hear of a request the next time
        they ask. It also tells the other processes of this process's own request.
        """
        if self._request.requested:
            post("stop")
        return self._request.requested or bool(read_posts("stop"))
