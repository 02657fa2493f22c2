"""An average is the float32 mean of a run's newest regular checkpoints, and whole or not there."""

import os
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_checkpoints import (
    CONFIG,
    OTHER_TOKENIZER,
    TOKENIZER,
    flip_a_bit,
    make_state,
    opened,
    saved,
)
from trees import assert_same_bits

from flaxformer_min.checkpoints import average as room
from flaxformer_min.checkpoints.average import average
from flaxformer_min.checkpoints.format import read_meta
from flaxformer_min.checkpoints.load import load_for_inference
from flaxformer_min.errors import UserError
from flaxformer_min.system.sealed import CheckpointError


@pytest.mark.run
def test_an_average_is_the_float32_mean_of_the_last_by_step_number(tmp_path):
    steps = [10000, 800, 1000, 900]  # neither the order of time nor that of text
    saved(tmp_path / "run", *steps)
    assert average(tmp_path / "run", tmp_path / "mean", last=3) == [900, 1000, 10000]
    loaded = load_for_inference(tmp_path / "mean")
    trees = [make_state(step).params for step in (900, 1000, 10000)]
    mean = jax.tree.map(lambda *leaves: np.stack(leaves).mean(0, dtype=np.float32), *trees)
    assert_same_bits(loaded.params, mean)
    assert (loaded.step, loaded.config) == (10000, CONFIG)
    assert loaded.tokenizer.model_bytes == TOKENIZER.model_bytes
    meta = read_meta(tmp_path / "mean")
    assert (meta.averaged_steps, meta.interim) == ([900, 1000, 10000], False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mean", "run"]


def test_a_checkpoint_that_is_there_because_a_run_was_stopped_is_passed_by(tmp_path):
    saved(tmp_path / "run", 5, 7)
    with opened(tmp_path / "run") as checkpoints:
        checkpoints.save(make_state(8), 8, interim=True)
    assert average(tmp_path / "run", tmp_path / "mean", last=2) == [5, 7]
    with pytest.raises(UserError, match=r"cannot average the last 3; there are 2: \[5, 7\]"):
        average(tmp_path / "run", tmp_path / "more", last=3)


@pytest.mark.run
def test_an_average_refuses_what_does_not_belong_together(tmp_path):
    run, mean = tmp_path / "run", tmp_path / "mean"
    saved(run, 5, 11)
    with pytest.raises(UserError, match=r"cannot average the last 3; there are 2: \[5, 11\]"):
        average(run, mean, last=3)
    with pytest.raises(UserError, match="is there already"):
        average(run, run, last=2)
    saved(run, 17, tokenizer=OTHER_TOKENIZER)
    with pytest.raises(UserError, match="steps 11 and 17 have different tokenizers"):
        average(run, mean, last=2)
    with opened(run) as checkpoints:
        state = make_state(17)
        checkpoints.save(state._replace(params={**state.params, "bias": jnp.ones(4)}), 17)
    with pytest.raises(UserError, match=r"different shapes: bias is float32\[3\]"):
        average(run, mean, last=2)
    assert not mean.exists()


def test_a_damaged_one_among_them_is_named_and_nothing_written(tmp_path):
    root = saved(tmp_path / "run", 5, 11)
    damaged = root / "5" / "tokenizer.model"
    flip_a_bit(damaged)
    with pytest.raises(CheckpointError, match=f"^{damaged}: damaged"):
        average(tmp_path / "run", tmp_path / "mean", last=2)
    assert not (tmp_path / "mean").exists()


def test_an_average_that_is_killed_half_way_is_not_there_and_can_be_made_again(
    tmp_path, monkeypatch
):
    def killed(*_):
        raise KeyboardInterrupt

    saved(tmp_path / "run", 5, 11)
    with monkeypatch.context() as patch:
        patch.setattr(room, "write_description", killed)
        with pytest.raises(KeyboardInterrupt):
            average(tmp_path / "run", tmp_path / "mean", last=2)
    assert not (tmp_path / "mean").exists()
    assert average(tmp_path / "run", tmp_path / "mean", last=2) == [5, 11]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mean", "run"]


def test_an_average_among_a_runs_own_checkpoints_is_refused(tmp_path, monkeypatch):
    root = saved(tmp_path / "run", 5, 11)
    (tmp_path / "link").symlink_to(root)
    (tmp_path / "linked run").symlink_to(tmp_path / "run")
    monkeypatch.chdir(tmp_path / "run")
    for output in (
        root / "17",
        f"{root}/17/",
        root / "deeper" / "17",
        tmp_path / "link" / "17",
        tmp_path / "linked run" / "checkpoints" / "17",
        root / ".." / "checkpoints" / "17",
        "checkpoints/17",
    ):
        with pytest.raises(UserError, match=r"17: in .* are a run's own checkpoints"):
            average(tmp_path / "run", output, last=2)
    (tmp_path / "other" / "checkpoints").mkdir(parents=True)
    (tmp_path / "other" / "config.json").write_text("")
    with pytest.raises(UserError, match="are a run's own checkpoints"):
        average(tmp_path / "run", tmp_path / "other" / "checkpoints" / "17", last=2)
    assert sorted(path.name for path in root.iterdir()) == ["11", "5"]


@pytest.mark.parametrize("name", [b"\xff", b"x" * 245 + b"/" + b"x" * 3_700])
def test_an_average_under_a_name_that_cannot_be_kept_is_refused(tmp_path, name):
    saved(tmp_path / "run", 5)
    with pytest.raises(UserError, match=r"is not UTF-8|bytes, at most"):
        average(tmp_path / "run", tmp_path / os.fsdecode(name), last=1)


@pytest.mark.run
def test_an_average_reads_no_older_checkpoint_than_it_takes(tmp_path):
    root = saved(tmp_path / "run", 5, 11, 17)
    flip_a_bit(root / "5" / "meta.json")
    assert average(tmp_path / "run", tmp_path / "mean", last=2) == [11, 17]
    with pytest.raises(CheckpointError, match=r"5/meta.json: damaged"):
        average(tmp_path / "run", tmp_path / "more", last=3)


@pytest.mark.run
def test_an_average_beside_a_run_that_saves_takes_the_newest_that_stay(tmp_path, monkeypatch):
    root = saved(tmp_path / "run", 5, 11, 17)
    read = []

    def reading(folder, verified_checkpoint=room.verified_checkpoint):
        read.append(int(folder.name))
        if read == [11]:  # the run keeps two, and saves before the first has been read
            shutil.rmtree(root / "11")
            saved(tmp_path / "run", 23)
        if read == [11, 17, 23]:  # and once more after it has been read
            shutil.rmtree(root / "17")
        return verified_checkpoint(folder)

    monkeypatch.setattr(room, "verified_checkpoint", reading)
    assert average(tmp_path / "run", tmp_path / "mean", last=2) == [17, 23]
    assert read == [11, 17, 23]
    mean = (make_state(17).params["embedding"] + make_state(23).params["embedding"]) / 2
    np.testing.assert_array_equal(load_for_inference(tmp_path / "mean").params["embedding"], mean)
