"""Progress: plain lines where there is no terminal, soon at first and seldom later."""

import subprocess
import sys
import time

import pytest

from flaxformer_min.system.meter import Meter, Pace


@pytest.fixture
def clock(monkeypatch) -> list[float]:
    """The time in seconds, as its only item."""
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    return now


def test_lines_come_from_the_first_second_on_and_then_every_half_minute(clock):
    pace, due = Pace(), []
    for tenth in range(1500):
        clock[0] = 100 + tenth / 10
        if pace.due():
            due.append(tenth / 10)
    assert due == [1, 2, 4, 8, 16, 32, 62, 92, 122]


def test_a_line_has_count_rate_and_time_left_and_the_last_one_comes_at_the_end(clock, capsys):
    with Meter("translating", 3000, "lines") as meter:
        for seconds, count in ((0.5, 10), (1.5, 1490), (1.6, 500), (60, 990), (61, 10)):
            clock[0] = 100 + seconds
            meter.update(count)
    assert capsys.readouterr().err.splitlines() == [
        "translating: 3,000 lines",
        "translating: 1,500 of 3,000 lines, 1,000 a second, 00:01 left",
        "translating: 2,990 of 3,000 lines, 50 a second, 00:00 left",
        "translating: 3,000 of 3,000 lines, 49 a second, 00:00 left",
    ]


def test_a_slow_rate_has_a_decimal_and_a_short_task_one_line(clock, capsys):
    with Meter("translating", 7, "lines") as meter:
        clock[0] += 2
        meter.update(3)
    with Meter("translating", 7, "lines") as meter:
        meter.update(7)
    with Meter("translating", 7, "lines", plain=False) as meter:
        clock[0] += 2
        meter.update(3)
    first, second, third = capsys.readouterr().err.splitlines()
    assert first == third == "translating: 7 lines"
    assert second == "translating: 3 of 7 lines, 1.5 a second, 00:02 left"


@pytest.mark.run
def test_a_bar_starts_no_process_of_its_own() -> None:
    """Where processes start anew (spawn, or Python 3.14), a lock between processes needs one."""
    code = """
import multiprocessing, os
multiprocessing.set_start_method("spawn")
from flaxformer_min.system.meter import Meter, say
say("lines are read")
with Meter("reading", 2, "lines") as meter:
    meter.update(2)
try:
    os.waitpid(-1, os.WNOHANG)
except ChildProcessError:  # there is no child
    print("alone")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("alone\n", 0), done.stderr
