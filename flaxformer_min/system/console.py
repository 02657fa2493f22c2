"""The standard streams of this process, when one is closed, its reader has gone, or all is said."""

import os
import sys
from typing import Any


def open_closed_streams() -> None:
    """Puts the null device in the place of every standard stream that is closed.

    Otherwise the next file that is opened would get its number, and what is written to that.
    """
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(number)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))


def say_no_more() -> None:
    """Sends what libraries still say at exit to the null device: the error is the last line.

    A save or restore that failed leaves coroutines of Orbax that nobody awaits, for example.
    """
    sys.stderr.flush()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def drop_what_cannot_be_written() -> None:
    """Sends what a stream still holds to the null device, if its reader or its disk has gone.

    Python would complain at exit and change the status.
    """
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def unraisable(event: Any) -> None:
    """Calls Python's own hook, except for threads that come back to a closed event loop.

    After a failed save or restore, threads of tensorstore do that dozens of times; the failure
    itself is reported where it happens.
    """
    if str(event.exc_value) != "Event loop is closed":
        sys.__unraisablehook__(event)
