"""Several processes end as one: an error, a death or a silence in one of them ends all.

Every process has a thread that says each second, through the key-value store, that it lives. That
of process 0 judges: who failed, and who says nothing any more. Its verdict ends every process,
wherever it waits (a program that waits for a dead peer cannot be interrupted otherwise). Should
this fail, jax.distributed ends a process 100 seconds after it last heard from process 0.
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

from flaxformer_min.system.processes import exchange, is_first, post, posted

BEAT = 1  # seconds between two signs of life
SILENCE = 60  # seconds without one after which a process is given up
ROLL_CALL = 15  # the same once some process has failed: it may be because another has died
GRACE = 2  # seconds in which others may report the same failure

Told = Callable[[BaseException], tuple[str | None, int]]


class Verdict(NamedTuple):
    """How the run ends."""

    text: str | None  # the line that says why
    status: int
    by_all: bool  # said by every process, not by process 0 alone
    missing: list[int]  # processes that are gone


def together(work: Callable[[], int], told: Told) -> int:
    """What `work` returns; with many processes, an error in one of them ends all.

    `told` gives the one line for an error, if it needs one, and the exit status; it raises what it
    does not know. An error of process 0 is told by it alone, one of another process by process 0
    with the number of that process, and a process that is gone by all.
    """
    if jax.process_count() == 1:
        return work()
    watch = Watch(told)
    try:
        status = work()
        exchange()
    except BaseException as error:
        watch.fail(error)
    watch.over()
    return status


class Watch:
    """The thread of this process."""

    def __init__(self, told: Told):
        self._told = told
        self._over = threading.Event()
        self._traceback: str | None = None  # of an error that is a bug
        self._heard = time.monotonic()  # when process 0 last answered
        self._changes = {p: ("", self._heard) for p in range(jax.process_count())}
        self._failed_at: float | None = None
        parts = (self._beat, self._mind_the_first)
        self._threads = [threading.Thread(target=part, daemon=True) for part in parts]
        for thread in self._threads:
            thread.start()

    def over(self) -> None:
        """From now on processes may leave."""
        self._over.set()
        for thread in self._threads:  # one that is within the store when Python ends would crash it
            thread.join()

    def fail(self, error: BaseException) -> NoReturn:
        """Reports this process's error and waits for the end of all."""
        try:
            text, status = self._told(error)
        except BaseException:
            text, status = f"{type(error).__name__}: {error}".splitlines()[0], 1
            self._traceback = traceback.format_exc()
        with contextlib.suppress(Exception):
            post(f"failed/{jax.process_index()}", json.dumps([text, status]))
        time.sleep(2 * SILENCE)
        os._exit(1)  # nobody judges any more

    def _beat(self) -> None:
        beats = 0
        while not self._over.wait(BEAT):
            with contextlib.suppress(jax.errors.JaxRuntimeError):  # silence, if process 0 is gone
                post(f"alive/{jax.process_index()}", str(beats := beats + 1))
                self._heard = time.monotonic()
                if is_first():
                    self._judge()
                for verdict in posted("verdict").values():
                    self._leave(Verdict(*json.loads(verdict)))

    def _mind_the_first(self) -> None:
        while not self._over.wait(BEAT):
            if (silent := time.monotonic() - self._heard) > SILENCE:
                self._leave(Verdict(_gone(0, silent), 1, True, [0]))

    def _judge(self) -> None:
        """Process 0: gives a verdict if it is time for one."""
        now, beats, failures = time.monotonic(), posted("alive"), posted("failed")
        for process, (last, _) in self._changes.items():
            if (beat := beats.get(str(process), "")) != last:
                self._changes[process] = beat, now
        if failures and self._failed_at is None:
            self._failed_at = now
        verdict = judged(
            {process: now - at for process, (_, at) in self._changes.items()},
            {int(process): json.loads(text) for process, text in failures.items()},
            None if self._failed_at is None else now - self._failed_at,
        )
        if verdict is not None:
            post("verdict/0", json.dumps(verdict))

    def _leave(self, verdict: Verdict) -> NoReturn:
        """Ends this process; process 0, without which no other can hear anything, as the last."""
        if self._traceback is not None and not verdict.missing:
            print(self._traceback, file=sys.stderr, end="")
        if verdict.text is not None and (verdict.by_all or is_first()):
            print(f"error: {verdict.text}", file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        if 0 not in verdict.missing:
            with contextlib.suppress(Exception):
                post(f"left/{jax.process_index()}")
                stay, until = is_first(), time.monotonic() + SILENCE / 6
                while stay and time.monotonic() < until:
                    stay = len(posted("left")) < jax.process_count() - len(verdict.missing)
                    time.sleep(0.05)
        os._exit(verdict.status)


def judged(
    silent: dict[int, float], failures: dict[int, Any], failed_since: float | None
) -> Verdict | None:
    """How a run ends, or None if it goes on or it is too early to say.

    `silent`: for each process, seconds since its last sign of life. `failures`: (text, status) of
    those that reported an error, the first of them `failed_since` seconds ago. Where somebody is
    missing, the errors of the others are taken for a consequence.
    """
    patience = SILENCE if failed_since is None else min(ROLL_CALL, SILENCE)
    missing = [p for p, seconds in silent.items() if seconds > patience and p not in failures]
    if missing:
        text = "; ".join(_gone(process, silent[process]) for process in missing)
        return Verdict(text, 1, True, missing)
    if failed_since is None or failed_since < GRACE:
        return None
    if any(seconds >= failed_since for p, seconds in silent.items() if p not in failures):
        return None  # no sign of life since then
    process = min(failures)
    text, status = failures[process]
    if text is not None and process != 0:
        text = f"process {process}: {text}"
    return Verdict(text, status, False, [])


def _gone(process: int, seconds: float) -> str:
    return f"process {process} has died or hangs: no sign of life for {seconds:.0f} seconds"
