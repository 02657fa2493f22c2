"""How the processes of a run meet before JAX connects them, and how one learns that process 0 died.

    processes 1, 2 ...                      process 0
    connect to HOST:PORT, again and again   listens at PORT
    say who they are        ------------->  counts who has come, and says how many are missing
    wait                    <-------------  "go" when all are there; closes PORT
    wait until PORT is open again           starts the service of jax.distributed at PORT

JAX alone would wait five minutes in silence and then abort with frames of C++. It also aborts when
the connection to process 0 breaks, before any Python runs. So it is given the address of a `relay`
in its own process, which passes all bytes on and sees the connection break first.
"""

import contextlib
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

PATIENCE = 240.0  # seconds within which all processes of a run have to be started
REPEAT = 30.0  # seconds between two lines about who is missing
HELLO, GO = b"flaxformer_min process ", b"go\n"


class Waiting:
    """A time limit, and a line on standard error at its beginning and every REPEAT seconds."""

    def __init__(self) -> None:
        self._end, self._next = time.monotonic() + PATIENCE, 0.0

    def __call__(self, text: str) -> None:
        """Says the text if it is time to. Raises TimeoutError with it when the time is over."""
        now = time.monotonic()
        if now > self._end:
            raise TimeoutError(f"gave up after {PATIENCE:.0f} seconds: {text}")
        if now >= self._next:
            self._next = now + REPEAT
            print(text, file=sys.stderr)


def gather(where: str, processes: int) -> None:
    """Called by process 0: returns when all the others have come, and lets them go on.

    `where` is HOST:PORT. Raises ValueError if the port is taken, and TimeoutError.
    """
    port, here, waiting = address_of(where)[1], dict[int, socket.socket](), Waiting()
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    try:
        listener = socket.create_server(("", port), family=family, dualstack_ipv6=both)
    except OSError as error:
        raise ValueError(f"process 0 cannot listen at {where}: {error.strerror}") from error
    with contextlib.ExitStack() as stack:
        with listener:
            listener.settimeout(0.5)
            while len(here) < processes - 1:
                missing = ", ".join(str(n) for n in range(1, processes) if n not in here)
                waiting(
                    f"waiting for the other processes at {where}: {len(here) + 1} of {processes} "
                    f"have come, missing: {missing}"
                )
                with contextlib.suppress(OSError, ValueError):  # nobody came, or somebody else
                    guest = stack.enter_context(listener.accept()[0])
                    guest.settimeout(5)
                    number = int(_line(guest).removeprefix(HELLO))
                    if 0 < number < processes:
                        here[number] = guest  # in place of one that came before and has gone
        for guest in here.values():  # now that the port is closed: they wait for JAX to open it
            with contextlib.suppress(OSError):
                guest.sendall(GO)


def come(where: str, process: int) -> None:
    """Called by every other process: returns when all have come and process 0 serves JAX.

    Raises TimeoutError.
    """
    waiting, text = Waiting(), f"process {process}: waiting for process 0 at {where}"
    for reason in _reasons_to_wait(where, process):
        waiting(text + reason)
    while True:
        with contextlib.suppress(OSError):
            socket.create_connection(address_of(where), timeout=5).close()
            return
        waiting(f"{text} to begin")
        time.sleep(0.2)


def _reasons_to_wait(where: str, process: int) -> Iterator[str]:
    """Yields, about each second, why this process has to wait, until process 0 lets it go on."""
    while True:
        try:
            with socket.create_connection(address_of(where), timeout=5) as host:
                host.sendall(HELLO + f"{process}\n".encode())
                host.settimeout(1)
                answer = None
                while answer is None:
                    try:
                        answer = _line(host)
                    except TimeoutError:
                        yield ", which waits for others"
                if answer == GO:
                    return
                yield ": it broke the connection"
        except OSError as error:
            yield f": {error.strerror or error}"
        time.sleep(0.5)


def _line(peer: socket.socket) -> bytes:
    """Reads a short line from a peer, or what it sends before it closes the connection."""
    text = b""
    while not text.endswith(b"\n") and len(text) < 64 and (byte := peer.recv(1)):
        text += byte
    return text


def address_of(where: str) -> tuple[str, int]:
    """Returns HOST and PORT of HOST:PORT; raises ValueError if it is no such text."""
    host, _, port = where.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise ValueError(f"--distributed.coordinator is {where}: it must be HOST:PORT")
    return host.strip("[]"), int(port)


def relay(where: str, lost: Callable[[], None]) -> str:
    """Passes bytes on between a new address, which it returns, and HOST:PORT.

    It calls `lost` when HOST:PORT breaks a connection, before JAX can notice.
    """
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            start(connect, listener.accept()[0])

    def connect(here: socket.socket) -> None:
        ended = threading.Event()  # by JAX in this process
        with here:
            try:
                there = socket.create_connection(address_of(where))
            except OSError:
                return lost()
            with there:
                up = start(pump, here, there, ended.set)
                pump(there, here, lambda: ended.is_set() or lost())
                up.join()

    def pump(source: socket.socket, sink: socket.socket, end: Callable[[], object]) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                sink.sendall(data)
        end()
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_WR)

    def start(work: Callable[..., None], *arguments: Any) -> threading.Thread:
        thread = threading.Thread(target=work, args=arguments, daemon=True)
        thread.start()
        return thread

    start(serve)
    return f"127.0.0.1:{listener.getsockname()[1]}"
