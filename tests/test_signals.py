"""Signals: the first waits for a step boundary, a second SIGTERM or SIGINT for nothing."""

import os
import pty
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from flaxformer_min.checkpoints.retention import find_checkpoints
from flaxformer_min.system.signals import AT_ONCE, STOP_SIGNALS, AgreedStop, StopRequest
from tools import tiny_config
from tools.processes import metrics

ROOT = Path(__file__).parent.parent

# Deriving a key is one long call into C that lets other threads run, as an XLA compilation is.
PROGRAM = """
import hashlib, sys
from flaxformer_min.system.signals import StopRequest
with StopRequest() as stop:
    if {deferring}:
        stop.defer()
    print("ready", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"", b"", {rounds})
    print("came back", stop.requested, flush=True)
    sys.stdin.readline()  # the last signal may come later than that
"""
LONG, SHORT = 2 * 10**9, 4 * 10**6  # rounds: many minutes, a second or more


@pytest.fixture(autouse=True, scope="module")
def hangups_are_heard():
    """Undoes what nohup does to the tests and their child processes: it has SIGHUP ignored."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def started(deferring: bool, rounds: int) -> subprocess.Popen[str]:
    program = PROGRAM.format(deferring=deferring, rounds=rounds)
    command = [sys.executable, "-c", program]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


@pytest.mark.run
@pytest.mark.parametrize(
    ("deferring", "signals", "status"),
    [
        (False, [signal.SIGTERM], 143),
        (False, [signal.SIGINT], 130),
        (True, [signal.SIGTERM, signal.SIGTERM], 143),
        (True, [signal.SIGTERM, signal.SIGINT], 130),
        (False, [signal.SIGHUP], 129),
        (False, [signal.SIGUSR1], 138),
        (True, [signal.SIGUSR1, signal.SIGTERM], 143),
    ],
)
def test_a_second_signal_ends_the_process_while_it_is_in_a_long_call(deferring, signals, status):
    with started(deferring, LONG) as process:
        for number in signals:
            process.send_signal(number)
            time.sleep(0.2)  # two equal ones on their way together are one to the system
        output, errors = process.communicate(timeout=60)
    assert (process.returncode, output, errors) == (status, "", f"{AT_ONCE}\n")


@pytest.mark.run
@pytest.mark.parametrize(
    "signals",
    [
        [signal.SIGTERM],
        [signal.SIGHUP, signal.SIGHUP],  # a terminal that closes
        [signal.SIGTERM, signal.SIGHUP],  # the end of a session
        [signal.SIGUSR1],
    ],
)
def test_a_request_in_a_long_call_is_known_when_it_comes_back(signals):
    with started(True, SHORT) as process:
        for number in signals:
            process.send_signal(number)
            time.sleep(0.2)
        output, errors = process.communicate("\n", timeout=60)
    assert (process.returncode, output, errors) == (0, "came back True\n", "")


@pytest.mark.parametrize(
    ("number", "status"),
    [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129), (signal.SIGUSR1, 138)],
)
def test_a_request_is_seen_at_once_and_gives_the_exit_status(number, status):
    with StopRequest() as stop:
        stop.defer()
        assert (stop.requested, stop.exit_status) == (False, 0)
        os.kill(os.getpid(), number)
        assert (stop.requested, stop.exit_status) == (True, status)


def test_the_first_signal_sets_the_exit_status_also_if_another_process_received_it():
    with StopRequest() as request:
        stop = AgreedStop(request)
        assert not stop() and not stop.in_sight()
        request.record(signal.SIGINT)
        request.record(signal.SIGTERM)
        assert stop() and stop.in_sight() and request.exit_status == 130


def test_signals_of_other_kinds_are_no_requests():
    before = signal.signal(signal.SIGUSR2, lambda *_: None)
    try:
        with StopRequest() as stop:  # not deferring: a request would end this process
            os.kill(os.getpid(), signal.SIGUSR2)
            assert not stop.requested
    finally:
        signal.signal(signal.SIGUSR2, before)


def test_a_hangup_that_nohup_made_ignored_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopRequest() as stop:  # not deferring: a request would end this process
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stop.requested
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_everything_is_as_it_was_afterwards():
    def everything():
        handlers = [signal.getsignal(number) for number in STOP_SIGNALS]
        wakeup = signal.set_wakeup_fd(-1)
        signal.set_wakeup_fd(wakeup)
        return handlers, wakeup, threading.active_count(), sorted(os.listdir("/proc/self/fd"))

    before = everything()
    with StopRequest():
        assert everything()[:3] != before[:3]
    assert everything() == before


ON_A_TERMINAL = """
import fcntl, os, sys, termios
os.setsid()
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.executable, [sys.executable, "-m", "flaxformer_min", "train", *sys.argv[1:]])
"""


@pytest.mark.run
def test_a_terminal_that_closes_leaves_a_saved_run(corpus, tmp_path):
    config = f"{tiny_config.__file__}:{corpus}"
    flags = ["--train.steps", "100000", "--train.evaluate_every", "100"]
    command = [sys.executable, "-c", ON_A_TERMINAL, "--config", config]
    master, slave = pty.openpty()
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), slave)
    process = subprocess.Popen([*command, "--workdir", str(tmp_path), *flags], cwd=ROOT, **streams)
    os.close(slave)
    shown = b""
    while b"step 100: validation" not in shown:
        shown += os.read(master, 1000)
    os.close(master)
    try:
        assert process.wait(timeout=120) == 128 + signal.SIGHUP
    finally:
        process.kill()
    assert max(find_checkpoints(tmp_path / "checkpoints")) == metrics(tmp_path)[-1]["step"]
