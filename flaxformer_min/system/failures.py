"""The processes of a run end as one: if one of them fails, dies or is silent, all of them end.

In every process a thread writes each second to the key-value store (system/processes.py) that the
process lives. In process 0 this thread also judges whether a process has failed, or has been silent
for too long. Its verdict ends every process, wherever that is waiting: a program that waits for a
dead process in a collective cannot be interrupted otherwise. A second thread ends its process when
process 0 is silent, and the relay in system/rendezvous.py ends it when the connection to process 0
breaks. Should all this fail, jax.distributed ends a process `processes.HEARTBEAT` seconds after it
last heard from process 0.
"""

import contextlib
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import jax

from flaxformer_min.errors import first_line
from flaxformer_min.system.processes import exchange, is_first, leave, post, read_posts

BEAT = 1  # seconds between two signs of life
SILENCE = 60  # seconds without a sign of life after which a process is given up
# This is the limit once some process has failed, perhaps because another one has died.
SILENCE_AFTER_FAILURE = 15
GRACE = 2  # seconds in which other processes may report the same failure

MessageAndStatus = Callable[[BaseException], tuple[str | None, int]]


class Verdict(NamedTuple):
    """How the run ends."""

    message: str | None  # the line to print, None for no line
    status: int  # the exit status of every process
    missing: list[int]  # processes that are gone; if there are any, all others print the message


def together(work: Callable[[], int], message_and_status: MessageAndStatus) -> int:
    """Calls `work` and returns its result; in a run of several processes, an error in one ends all.

    `message_and_status` gives the line to print about an error (None for no line) and the exit
    status; it raises errors that it does not know. Process 0 prints the line, with the number of
    the process if the error is another's. If a process is gone, all others print that.
    """
    if jax.process_count() == 1:
        return work()
    watch = Watch(message_and_status)
    try:
        status = work()
        exchange()
    except BaseException as error:
        watch.fail(error)
    watch.stop()
    return status


class Watch:
    """The two threads of this process, running from its construction to `stop`."""

    def __init__(self, message_and_status: MessageAndStatus):
        now = time.monotonic()
        self._message_and_status = message_and_status
        self._stopped = threading.Event()
        self._traceback = ""  # that of this process's error, if the error is a bug
        self._first_answered = now  # when process 0 last answered
        # Known to process 0: the last beat of each process and when it first saw that beat, and
        # when it first saw a failure.
        self._beats = {process: ("", now) for process in range(jax.process_count())}
        self._failed_at: float | None = None
        self._threads = [
            threading.Thread(target=self._repeat, args=(action,), daemon=True)
            for action in (self._beat, self._check_first)
        ]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Ends the threads; from now on the other processes may leave."""
        leave()
        self._stopped.set()
        for thread in self._threads:  # one that uses the store while Python ends would crash it
            thread.join()

    def fail(self, error: BaseException) -> NoReturn:
        """Reports this process's error and waits until a thread ends the process by the verdict."""
        try:
            report = self._message_and_status(error)
        except BaseException:
            report = f"{type(error).__name__}: {first_line(error)}", 1
            self._traceback = traceback.format_exc()
        with contextlib.suppress(Exception):
            post("failed", json.dumps(report))
        time.sleep(2 * SILENCE)
        os._exit(1)  # there was no verdict

    def _repeat(self, action: Callable[[], None]) -> None:
        while not self._stopped.wait(BEAT):
            action()

    def _beat(self) -> None:
        """Gives a sign of life, judges if this is process 0, and leaves if there is a verdict."""
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # process 0 is gone
            post("alive", str(time.monotonic()))
            self._first_answered = time.monotonic()
            if is_first():
                self._judge()
            for verdict in read_posts("verdict").values():
                self._leave(Verdict(*json.loads(verdict)))

    def _check_first(self) -> None:
        """Leaves if process 0 is silent; `_beat` may hang in the store then."""
        if (seconds := time.monotonic() - self._first_answered) > SILENCE:
            self._leave(Verdict(_gone(0, seconds), 1, [0]))

    def _judge(self) -> None:
        """Posts the verdict if it is time for one."""
        now = time.monotonic()
        for process, beat in read_posts("alive").items():
            if beat != self._beats[process][0]:
                self._beats[process] = beat, now
        if reports := read_posts("failed"):
            self._failed_at = self._failed_at or now
        verdict = verdict_of(
            {process: now - seen for process, (_, seen) in self._beats.items()},
            {process: json.loads(report) for process, report in reports.items()},
            None if self._failed_at is None else now - self._failed_at,
        )
        if verdict is not None:
            post("verdict", json.dumps(verdict))

    def _leave(self, verdict: Verdict) -> NoReturn:
        """Ends this process. Process 0 ends last, because without it no other can hear anything."""
        leave()
        if not verdict.missing:
            print(self._traceback, file=sys.stderr, end="")
        if verdict.message is not None and (verdict.missing or is_first()):
            print(f"error: {verdict.message}", file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        if 0 not in verdict.missing:
            with contextlib.suppress(Exception):
                post("left")
                until = time.monotonic() + SILENCE / 6
                present = jax.process_count() - len(verdict.missing)
                while is_first() and len(read_posts("left")) < present and time.monotonic() < until:
                    time.sleep(0.05)
        os._exit(verdict.status)


def verdict_of(
    silence: dict[int, float], failures: dict[int, Any], failed_since: float | None
) -> Verdict | None:
    """Decides how a run ends; returns None if it goes on or it is too early to say.

    If a process is gone, failures of other processes are taken for a consequence of that.

    Args:
        silence: for each process, seconds since its last sign of life.
        failures: (message, status) of each process that reported an error.
        failed_since: seconds since the first of these reports; None if there is none.
    """
    patience = SILENCE if failed_since is None else min(SILENCE_AFTER_FAILURE, SILENCE)
    silence = {process: s for process, s in silence.items() if process not in failures}
    if missing := [process for process, seconds in silence.items() if seconds > patience]:
        message = "; ".join(_gone(process, silence[process]) for process in missing)
        return Verdict(message, 1, missing)
    if failed_since is None or failed_since < GRACE:
        return None
    if any(seconds >= failed_since for seconds in silence.values()):
        return None  # that process has given no sign of life since the failure: it may be the cause
    process = min(failures)
    message, status = failures[process]
    if message is not None and process != 0:
        message = f"process {process}: {message}"
    return Verdict(message, status, [])


def _gone(process: int, seconds: float) -> str:
    return f"process {process} has died or hangs: no sign of life for {seconds:.0f} seconds"
