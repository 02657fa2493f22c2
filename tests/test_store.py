"""A checkpoint is whole or invisible, what is claimed is on disk, and any device reads it."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_checkpoints import (
    CONFIG,
    OTHER_TOKENIZER,
    TOKENIZER,
    abstract,
    flip_a_bit,
    make_state,
    names,
    opened,
    saved,
)
from trees import assert_same_bits

from flaxformer_min.checkpoints import format as checkpoint_format
from flaxformer_min.checkpoints import saved_state
from flaxformer_min.checkpoints.average import average
from flaxformer_min.checkpoints.load import load_for_inference
from flaxformer_min.checkpoints.progress import Progress
from flaxformer_min.checkpoints.retention import find_checkpoints, newest_good
from flaxformer_min.config_rules import config_to_json
from flaxformer_min.errors import UserError
from flaxformer_min.system import sealed
from flaxformer_min.system.sealed import CheckpointError


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workdir with the checkpoints 5 and 11; to be copied, not changed."""
    workdir = tmp_path_factory.mktemp("two_steps")
    saved(workdir, 5, 11)
    return workdir


@pytest.fixture
def workdir(two_steps: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    shutil.copytree(two_steps, tmp_path / "run")
    return tmp_path / "run"


# ---- Saving and restoring


@pytest.mark.run
@pytest.mark.parametrize("devices", [1, 2, 8])
def test_a_state_saved_on_four_devices_comes_back_bit_by_bit_on_others(tmp_path, devices):
    state = make_state(13)
    like = abstract(state, devices)
    state = jax.device_put(state, jax.tree.map(lambda leaf: leaf.sharding, abstract(state, 4)))
    with opened(tmp_path) as checkpoints:
        checkpoints.save(state, 13)
        checkpoints.wait()
        assert checkpoints.steps() == [13]
        restored = checkpoints.restore(13, like)
    assert_same_bits(restored, state)
    assert jax.tree.all(
        jax.tree.map(lambda leaf, want: leaf.sharding == want.sharding, restored, like)
    )


def test_weights_load_as_numpy_float32_with_config_and_tokenizer(two_steps):
    loaded = load_for_inference(two_steps)
    assert loaded.step == 11
    assert loaded.config == CONFIG
    assert loaded.tokenizer.model_bytes == TOKENIZER.model_bytes
    assert {type(leaf) for leaf in jax.tree.leaves(loaded.params)} == {np.ndarray}
    assert_same_bits(loaded.params, make_state(11).params)


def test_a_copied_checkpoint_loads_without_its_workdir(workdir, tmp_path):
    shutil.move(workdir / "checkpoints" / "5", tmp_path / "elsewhere")
    shutil.rmtree(workdir)
    loaded = load_for_inference(str(tmp_path / "elsewhere"))
    assert loaded.step == 5
    assert_same_bits(loaded.params, make_state(5).params)


def test_buffers_donated_right_after_save_do_not_change_what_is_saved(tmp_path):
    spoil = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf * 0 + 1, tree), donate_argnums=0)
    with opened(tmp_path) as checkpoints:
        for step in range(1, 4):
            state = make_state(step)._replace(params={"wide": jnp.full((300, 1000), step * 1.0)})
            checkpoints.save(state, step)
            state = jax.block_until_ready(spoil(spoil(state)))
    for step in range(1, 4):
        assert (load_for_inference(tmp_path, step).params["wide"] == step).all()


def test_a_name_that_could_not_be_read_back_is_not_saved(tmp_path):
    """In the path of a weight digits are the number of a layer."""
    params = {"encoder": {"2": jnp.ones(3)}}
    with opened(tmp_path) as checkpoints, pytest.raises(AssertionError, match="ambiguous"):
        checkpoints.save(make_state(1)._replace(params=params), 1)
    assert not names(tmp_path)


def test_numbers_that_are_not_finite_are_not_saved(tmp_path):
    state = make_state(1)
    moments = jax.tree.map(lambda leaf: leaf * jnp.float32(jnp.nan), state.opt_state[0].nu)
    bad = state._replace(opt_state=(state.opt_state[0]._replace(nu=moments), *state.opt_state[1:]))
    with opened(tmp_path) as checkpoints:
        with pytest.raises(CheckpointError, match="opt_state/0/nu/bias has numbers that are not"):
            checkpoints.save(bad, 1)
        assert checkpoints.steps() == []


def test_restoring_refuses_another_tokenizer_and_another_models_state(workdir):
    like = abstract(make_state(5), 1)
    other = opened(workdir, tokenizer=OTHER_TOKENIZER)
    with other, pytest.raises(UserError, match="another tokenizer"):
        other.restore(5, like)
    query = jax.ShapeDtypeStruct((8, 2, 4), jnp.float32)
    wider = like._replace(params={**like.params, "encoder": {2: {"query": query}}})
    with (
        opened(workdir) as checkpoints,
        pytest.raises(UserError, match=r"encoder/10/query is float32\[8, 2, 3\] there and"),
    ):
        checkpoints.restore(5, wider)


# ---- Paths that Orbax reads as patterns, and what it leaves out


@pytest.mark.run
@pytest.mark.parametrize(
    "name", ["x[1]", "back\\slash", "end\\", "gs:", "*?%41 #'\"\n\u65e5~", " "]
)
def test_a_path_of_any_name_holds_checkpoints_that_are_read_and_renamed(tmp_path, name):
    saved(tmp_path / name / "run", 5, 11)
    with opened(tmp_path / name / "run") as checkpoints:
        assert checkpoints.latest_good() == 11
        assert_same_bits(checkpoints.restore(11, make_state(0)), make_state(11))
    average(tmp_path / name / "run", tmp_path / name / "mean", last=2)
    (tmp_path / name).rename(tmp_path / "renamed")
    for folder, step in (("run", 11), ("run/checkpoints/5", 5), ("mean", 11)):
        assert load_for_inference(tmp_path / "renamed" / folder).step == step


def test_a_directory_gets_another_path_only_where_its_own_has_a_meaning(tmp_path):
    for name in ("plain-1_2.x, y", "\u65e5", "[", "a\\", "gs:"):
        (tmp_path / name).mkdir()
        with checkpoint_format.plain_path(tmp_path / name) as path:
            assert os.path.samefile(path, tmp_path / name)
            assert (path == str(tmp_path / name)) == (name[0] in "p\u65e5")
        assert not path.startswith("/proc") or not os.path.exists(path)
    assert not checkpoint_format.PLAIN.fullmatch("/gs/bucket")


def test_all_processes_of_a_run_give_a_directory_the_same_path(tmp_path, monkeypatch):
    """Orbax refuses to save where the paths differ. The other process has 211 and 307 in use."""
    (tmp_path / "[").mkdir()
    taken = os.open(tmp_path, os.O_RDONLY)
    os.dup2(taken, 211)
    others = iter(["211", "307", "307"])
    monkeypatch.setattr(checkpoint_format, "exchange", lambda text: {0: text, 1: next(others)})
    with checkpoint_format.plain_path(tmp_path / "[", everywhere=True) as path:
        assert path == "/proc/self/fd/307"
        assert os.path.samefile(path, tmp_path / "[")
    for number in (taken, 211):
        os.close(number)
    assert list(others) == []


def test_what_orbax_did_not_write_is_noticed_before_the_checkpoint_counts(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint_format, "PLAIN", re.compile(".*"))  # Orbax sees the pattern
    run = tmp_path / "x[1]"
    with opened(run) as checkpoints:
        checkpoints.save(make_state(5), 5)
        with pytest.raises(CheckpointError, match="was not written whole: params/bias is missing"):
            checkpoints.wait()
    assert names(run) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda stored: stored["rest"].pop("step"), "step is missing there and int32[] here"),
        (
            lambda stored: stored["params"].update({"params/bias": np.zeros(4, np.float32)}),
            "params/bias is float32[4] there and float32[3] here",
        ),
        (
            lambda stored: stored["params"].update({"params/bias": np.zeros(3, np.float16)}),
            "params/bias is float16[3] there and float32[3] here",
        ),
    ],
)
def test_a_leaf_that_is_missing_or_otherwise_on_the_disk_is_named(
    tmp_path, monkeypatch, change, message
):
    def changed(folder, stored_shapes=saved_state.stored_shapes):
        stored = stored_shapes(folder)
        change(stored)
        return stored

    monkeypatch.setattr(saved_state, "stored_shapes", changed)
    with opened(tmp_path) as checkpoints:
        checkpoints.save(make_state(5), 5)
        with pytest.raises(CheckpointError, match=re.escape(f"was not written whole: {message}")):
            checkpoints.wait()
    assert names(tmp_path) == []


# ---- What is read


def test_what_was_verified_to_find_the_newest_is_not_hashed_again(workdir, monkeypatch):
    hashed: list[str] = []

    def counting(path: Path, fingerprint=sealed._fingerprint) -> dict:
        hashed.append(path.name)
        return fingerprint(path)

    monkeypatch.setattr(sealed, "_fingerprint", counting)
    files = [path for path in (workdir / "checkpoints" / "11").rglob("*") if path.is_file()]
    with opened(workdir) as checkpoints:
        assert checkpoints.latest_good() == 11
        checkpoints.restore(11, make_state(11))
        assert len(hashed) == len(files) - 1 + 1  # all but the manifest, and meta.json once more
        checkpoints.restore(5, make_state(5))
        assert len(hashed) == 2 * len(files)
    hashed.clear()
    load_for_inference(workdir)
    load_for_inference(workdir, 5)
    assert len(hashed) == 2 * (len(files) - 1)


def test_a_damaged_checkpoint_is_not_restored(workdir):
    damaged = next((workdir / "checkpoints" / "11" / "arrays" / "rest" / "d").iterdir())
    flip_a_bit(damaged)
    with opened(workdir) as checkpoints, pytest.raises(CheckpointError, match=f"^{damaged}: dam"):
        checkpoints.restore(11, make_state(11))


# ---- Whole or invisible


class Killed(BaseException):
    """What no cleaning up catches, as it would not see a kill."""


@pytest.fixture
def killed_at(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """A list with the number of steps of the file system after which the process "dies".

    The removal of a directory dies half-way.
    """
    left = [-1]

    def before(function):
        def step(*arguments, **options):
            left[0] -= 1
            if left[0] == -1:
                if function is shutil.rmtree:
                    files = [path for path in arguments[0].rglob("*") if path.is_file()]
                    for path in files[::2]:
                        path.unlink()
                raise Killed
            return function(*arguments, **options)

        return step

    for owner, name in (
        (sealed, "_flush"),
        (sealed, "_fingerprint"),
        (shutil, "rmtree"),
        (Path, "rename"),
        (Path, "replace"),
        (Path, "write_text"),
        (Path, "write_bytes"),
        (Path, "mkdir"),
    ):
        monkeypatch.setattr(owner, name, before(getattr(owner, name)))
    yield left
    monkeypatch.undo()


@pytest.mark.run
def test_a_save_that_is_killed_before_any_step_of_it_leaves_the_old_or_the_new_one(
    two_steps, tmp_path, killed_at
):
    """Step 11 is saved again with other content, and retention deletes step 5 after that."""
    new, ends = Progress(1.0, 11, 0), []
    while "finished" not in ends:
        workdir = tmp_path / str(len(ends))
        shutil.copytree(two_steps, workdir)
        with opened(workdir, keep_last=1) as checkpoints:
            killed_at[0] = len(ends)
            try:
                checkpoints.save(make_state(12), 11, progress=new)
                checkpoints.wait()
                ends.append("finished")
            except Killed:
                pass
            killed_at[0] = -1
            assert newest_good(workdir / "checkpoints") == 11
            found = checkpoints.meta(11).progress
        with opened(workdir, keep_last=1) as checkpoints:
            assert checkpoints.latest_good() == 11
            assert checkpoints.meta(11).progress == found
            assert names(workdir) in (["11", "5"], ["11"])
            if len(ends) % 8 == 0 or ends[-1] == "finished":
                state = checkpoints.restore(11, make_state(0))
                assert_same_bits(state, make_state(12 if found == new else 11))
        ends.append("new" if found == new else "old")
    assert names(workdir) == ["11"]
    order = [end for end in ends if end != "finished"]
    assert order == sorted(order, reverse=True)  # old, ..., old, new, ..., new
    assert order.count("old") > 10 and order.count("new") > 5


SAVE_UNTIL_KILLED = """
import os, signal, sys, threading
import jax, jax.numpy as jnp
from flaxformer_min.checkpoints.store import Checkpoints
from flaxformer_min.config_rules import config_from_json
from flaxformer_min.data.tokenizer import Tokenizer
workdir, config, tokenizer, delay = sys.argv[1:]
config, tokenizer = config_from_json(config), Tokenizer(bytes.fromhex(tokenizer))
checkpoints = Checkpoints(workdir, config, tokenizer)
step = checkpoints.latest_good() or 0
make = lambda step: {"params": {"w": jnp.full((500, 300), step * 1.0)}, "step": jnp.int32(step)}
if step:
    assert checkpoints.restore(step, make(0))["step"] == step
checkpoints.save(make(step + 1), step + 1)  # the first is slow: everything is compiled and loaded
checkpoints.wait()
threading.Timer(float(delay), os.kill, (os.getpid(), signal.SIGKILL)).start()
while True:
    step += 1
    checkpoints.save(make(step), step)
    checkpoints.save(make(step + 1), step + 1)
"""


@pytest.mark.run
def test_kill_minus_nine_during_saves_leaves_no_counted_checkpoint_unreadable(tmp_path):
    config = config_to_json(CONFIG).replace('"keep_last": 9', '"keep_last": 2')
    script = [sys.executable, "-c", SAVE_UNTIL_KILLED, str(tmp_path), config]
    newest = 0
    for delay in ("0.04", "0.11", "0.23"):
        done = subprocess.run(
            [*script, TOKENIZER.model_bytes.hex(), delay],
            env={**os.environ, "XLA_FLAGS": ""},
            timeout=300,
        )
        assert done.returncode == -9
        steps = list(find_checkpoints(tmp_path / "checkpoints"))
        assert steps[-1] > newest, "progress that was saved is never lost"
        newest = steps[-1]
        for step in steps:
            assert (load_for_inference(tmp_path, step).params["w"] == step).all()


# ---- A full disk


SAVE_TOO_MUCH = """
import json, resource, signal, sys, time
import jax, jax.numpy as jnp
from flaxformer_min.checkpoints.store import Checkpoints
from flaxformer_min.config_rules import config_from_json
from flaxformer_min.system.sealed import CheckpointError
from flaxformer_min.checkpoints.retention import find_checkpoints, newest_good
from flaxformer_min.checkpoints.progress import Progress
from flaxformer_min.data.tokenizer import Tokenizer
workdir, config, tokenizer, limits = sys.argv[1:]
config, tokenizer = config_from_json(config), Tokenizer(bytes.fromhex(tokenizer))
assert signal.getsignal(signal.SIGXFSZ) == signal.SIG_IGN
hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
weights = jax.random.normal(jax.random.key(0), (400, 500))
with Checkpoints(workdir, config, tokenizer) as checkpoints:
    for step, limit in enumerate(json.loads(limits), 1):
        state = {"params": {"w": weights + step}, "step": jnp.int32(step)}
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard if limit is None else limit, hard))
        try:
            checkpoints.save(state, step)
            while checkpoints._pending:
                checkpoints.raise_if_failed()
                time.sleep(0.001)
            told = "saved"
        except CheckpointError as error:
            told = str(error)
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        print(json.dumps([step, told, checkpoints.steps()]), flush=True)
"""


@pytest.mark.run
def test_what_is_reported_as_saved_is_on_the_disk_and_failures_are_loud(tmp_path):
    """A limit on the size of files is what a full disk looks like to a writer."""
    limits = [None, 0, 1, 70, 300, 600, 1_100, 3_000, 9_000, 40_000, 200_000, 400_000, None]
    config, model = config_to_json(CONFIG), TOKENIZER.model_bytes.hex()
    done = subprocess.run(
        [sys.executable, "-c", SAVE_TOO_MUCH, str(tmp_path), config, model, json.dumps(limits)],
        env={**os.environ, "XLA_FLAGS": "", "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "none")},
        stdout=subprocess.PIPE,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0
    reports = [json.loads(line) for line in done.stdout.splitlines()]
    durable = [step for step, told, _ in reports if told == "saved"]
    assert (len(reports), durable) == (len(limits), [1, len(limits)])
    for step, told, steps in reports:
        assert steps == [saved for saved in durable if saved <= step]
        if step not in durable:
            folder = tmp_path / "checkpoints" / str(step)
            assert told.startswith(f"{folder}: not saved: ") and "File too large" in told
    assert names(tmp_path) == sorted(map(str, durable))
    weights = jax.random.normal(jax.random.key(0), (400, 500))
    for step in durable:
        loaded = load_for_inference(tmp_path, step)
        np.testing.assert_array_equal(loaded.params["w"], weights + step)


def test_a_failed_save_is_raised_once_by_whatever_is_called_next(workdir, monkeypatch):
    def full(folder: Path) -> None:
        raise OSError(28, "No space left on device")

    calls = {
        "save": lambda checkpoints: checkpoints.save(make_state(13), 13),
        "wait": lambda checkpoints: checkpoints.wait(),
        "close": lambda checkpoints: checkpoints.close(),
    }
    for call in calls.values():
        with opened(workdir) as checkpoints:
            with monkeypatch.context() as patch:
                patch.setattr(sealed, "seal", full)
                checkpoints.save(make_state(12), 12)
                checkpoints._pool.shutdown()  # by now it has failed, and nobody has been told
            with pytest.raises(CheckpointError, match=r"/12: not saved: OSError: .*No space left"):
                call(checkpoints)
            checkpoints.raise_if_failed()
            checkpoints.wait()
        assert names(workdir) == ["11", "5"]


def test_a_folder_that_cannot_be_written_to_is_named(workdir):
    root = workdir / "checkpoints"
    with opened(workdir) as checkpoints:
        root.rename(workdir / "elsewhere")
        root.write_text("a file")
        with pytest.raises(CheckpointError, match=f"^{root / '12'}: not saved: NotADirectoryError"):
            checkpoints.save(make_state(12), 12)


def test_a_save_that_replaces_one_is_not_lost_where_the_old_one_cannot_go(workdir, monkeypatch):
    def denied(*_):
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", denied)
        checkpoints = opened(workdir)
        checkpoints.save(make_state(12), 11)
        with pytest.raises(CheckpointError, match=r"/11: saved, but an older one could not be rem"):
            checkpoints.close()
    assert names(workdir) == ["11", "11.partial", "5"]
    assert_same_bits(load_for_inference(workdir, 11).params, make_state(12).params)
    with opened(workdir):
        assert names(workdir) == ["11", "5"]
    assert_same_bits(load_for_inference(workdir, 11).params, make_state(12).params)


# ---- Mistakes of the user


def test_a_path_without_a_checkpoint_is_named_with_what_is_there(tmp_path):
    with pytest.raises(UserError, match="nowhere: no such directory; give a workdir or a check"):
        load_for_inference(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="empty: no finished checkpoint in it, only: nothing"):
        load_for_inference(tmp_path / "empty")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="file: no such directory"):
        load_for_inference(tmp_path / "file")
    with pytest.raises(UserError, match="no finished checkpoint in it, only: empty, file;"):
        average(tmp_path, tmp_path / "mean", last=1)


def test_a_step_that_is_not_there_is_refused_with_those_that_are(two_steps):
    with pytest.raises(UserError, match=r"no checkpoint of step 6; steps there: \[5, 11\]"):
        load_for_inference(two_steps, 6)
    with pytest.raises(UserError, match=r"no checkpoint has an evaluation; steps: \[5, 11\]"):
        load_for_inference(two_steps, "best")
    with pytest.raises(UserError, match="is one checkpoint, of step 11, not 5"):
        load_for_inference(two_steps / "checkpoints" / "11", 5)
