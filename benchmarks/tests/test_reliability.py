"""A few trials of every experiment in benchmarks/reliability/; `make reliability` runs them all."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.reliability.runs import tree_hash
from benchmarks.reliability.tally import Tally

ROOT = Path(__file__).parents[2]
EXPERIMENTS = 12


@pytest.mark.run
def test_a_few_trials_of_every_experiment_pass():
    own = {name: value for name, value in os.environ.items() if not name.startswith(("JAX", "XLA"))}
    command = [sys.executable, "-m", "benchmarks.reliability", "--short"]
    done = subprocess.run(
        command, cwd=ROOT, env=own, capture_output=True, text=True, check=False, timeout=900
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line.split(" | ") for line in done.stdout.splitlines()[2:]]
    assert len(rows) == EXPERIMENTS
    assert all(int(tried) == int(passed) > 0 for _, tried, passed, _ in rows)


def test_a_trial_passes_if_nothing_was_wrong_with_it(capfd):
    tally = Tally("demo")
    tally.trial("first", [], seen="kind")
    tally.trial("second", iter(["lost", "late"]), seen="kind")
    tally.trial("third")
    assert tally.row[:3] == ["demo", "3", "2"]
    assert tally.row[3].startswith("2 kind; ")
    assert tally.failures == ["second: lost; late"]


def test_the_hash_of_a_state_sees_every_bit_name_shape_and_dtype():
    tree = {"a": np.zeros(6, np.float32), "b": {"c": np.arange(5)}}
    others = [
        {"a": np.array([0, 0, 0, -0.0, 0, 0], np.float32), "b": {"c": np.arange(5)}},
        {"a": np.zeros((2, 3), np.float32), "b": {"c": np.arange(5)}},
        {"a": np.zeros(6, np.int32), "b": {"c": np.arange(5)}},
        {"a": np.zeros(6, np.float32), "b": {"d": np.arange(5)}},
    ]
    hashes = {tree_hash(other) for other in [tree, *others]}
    assert len(hashes) == 5
    assert tree_hash({"b": {"c": np.arange(5)}, "a": np.zeros(6, np.float32)}) in hashes
