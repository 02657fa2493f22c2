"""A checkpoint is whole or invisible, its bytes are what was written, and any device reads it."""

import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from flaxformer_min import manifest
from flaxformer_min.average import average
from flaxformer_min.checkpoint import Checkpoints, best_steps, kept_steps, load_for_inference
from flaxformer_min.checkpoint_directory import read_meta
from flaxformer_min.config import Config, DataConfig, ModelConfig, config_to_json
from flaxformer_min.errors import UserError
from flaxformer_min.manifest import CheckpointError, verify
from flaxformer_min.tokenizer import train_tokenizer

CONFIG = Config(
    model=ModelConfig(num_layers=1, d_model=10, d_ff=3, num_heads=2, d_k=5, d_v=7),
    data=DataConfig(
        train=("a", "b"),
        validation=("c", "d"),
        source_language="en",
        target_language="de",
        vocab_size=20,
        byte_fallback=False,
    ),
)
TOKENIZER, OTHER_TOKENIZER = (
    train_tokenizer(lines, CONFIG.data)
    for lines in (["a b c d e f g", "ab cd ef ga ba"] * 3, ["h i j k l m n", "hi jk lm nh ih"] * 3)
)
OPTIMIZER = optax.adam(1e-3)


class State(NamedTuple):
    step: jax.Array
    params: dict[str, Any]
    opt_state: Any
    skipped: jax.Array


def make_state(seed: int) -> State:
    """Odd shapes, numbered layers beyond nine, and floats that only exact copying preserves."""
    keys = jax.random.split(jax.random.key(seed), 3)
    params = {
        "embedding": jax.random.normal(keys[0], (16, 5)),
        "encoder": {
            2: {"query": jax.random.normal(keys[1], (8, 2, 3))},
            10: {"query": jax.random.normal(keys[2], (8, 2, 3))},
        },
        "bias": jnp.array([-0.0, 1e-40, 1e38]),
    }
    moments = OPTIMIZER.update(jax.tree.map(jnp.sin, params), OPTIMIZER.init(params))[1]
    return State(jnp.int32(seed), params, moments, jnp.int32(7))


def abstract(state: State, devices: int) -> State:
    """The state's shapes, every first axis of 8 and 16 split over so many devices."""
    mesh = Mesh(np.array(jax.devices()[:devices]), ("fsdp",))

    def leaf(array: jax.Array) -> jax.ShapeDtypeStruct:
        spec = P("fsdp") if array.shape[:1] in ((8,), (16,)) else P()
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=NamedSharding(mesh, spec))

    return jax.tree.map(leaf, state)


def assert_same_bits(left: Any, right: Any) -> None:
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for one, other in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        assert one.dtype == other.dtype
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


def opened(workdir: Path, **options: Any) -> Checkpoints:
    return Checkpoints(workdir, CONFIG, options.pop("tokenizer", TOKENIZER), keep_last=9, **options)


def saved(workdir: Path, *steps: int, **options: Any) -> Path:
    """Saves `make_state(step)` at each step; returns the folder of the checkpoints."""
    with opened(workdir, **options) as checkpoints:
        for step in steps:
            checkpoints.save(make_state(step), step)
    return workdir / "checkpoints"


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


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(bytes(content))


# ---- Saving and restoring


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
    assert loaded.tokenizer.model_bytes == TOKENIZER
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


def test_metrics_are_stored_and_the_best_step_is_found_by_bleu(tmp_path):
    with opened(tmp_path) as checkpoints:
        for step, score in ((3, 20.5), (7, 31.25), (9, 30.0)):
            checkpoints.save(make_state(step), step, {"bleu": {"score": score}, "loss": 2.5})
        checkpoints.save(make_state(10), 10)
    assert load_for_inference(tmp_path, "best").step == 7
    assert read_meta(tmp_path / "checkpoints" / "7").metrics == {
        "bleu": {"score": 31.25},
        "loss": 2.5,
    }


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


# ---- Whole or invisible


def test_a_folder_without_manifest_is_invisible_and_the_next_run_removes_it(workdir):
    root = workdir / "checkpoints"
    shutil.copytree(root / "11", root / "17")
    (root / "17" / "manifest.json").unlink()
    (root / "23" / "arrays.orbax-checkpoint-tmp").mkdir(parents=True)
    (root / "notes").mkdir()
    assert load_for_inference(workdir).step == 11
    with pytest.raises(UserError, match=r"no checkpoint of step 17; steps there: \[5, 11\]"):
        load_for_inference(workdir, 17)
    assert (root / "17").exists(), "a reader removes nothing"
    with Checkpoints(workdir, CONFIG, TOKENIZER, keep_last=2) as checkpoints:
        assert checkpoints.latest_good() == checkpoints.steps()[-1] == 11
        assert sorted(path.name for path in root.iterdir()) == ["11", "5", "notes"]
        (root / "29").mkdir()  # as if another save had stopped here: it must not push out 11
        checkpoints.save(make_state(12), 12)
        checkpoints.wait()
        assert checkpoints.steps() == [11, 12]
        assert (root / "29").exists()


def test_a_deletion_that_is_interrupted_leaves_nothing_that_counts(workdir, monkeypatch):
    def interrupted(folder: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(manifest, "shutil", SimpleNamespace(rmtree=interrupted))
    with pytest.raises(KeyboardInterrupt):
        manifest.delete(workdir / "checkpoints" / "11")
    assert (workdir / "checkpoints" / "11" / "arrays").exists()
    assert load_for_inference(workdir).step == 5


SAVE_UNTIL_KILLED = """
import os, signal, sys, threading
import jax, jax.numpy as jnp
from flaxformer_min.checkpoint import Checkpoints
from flaxformer_min.config import config_from_json
workdir, config, tokenizer, delay = sys.argv[1:]
config, tokenizer = config_from_json(config), bytes.fromhex(tokenizer)
checkpoints = Checkpoints(workdir, config, tokenizer, keep_last=2)
step = checkpoints.latest_good() or 0
make = lambda step: {"params": {"w": jnp.full((500, 300), step * 1.0)}, "step": jnp.int32(step)}
if step:
    assert checkpoints.restore(step, make(0))["step"] == step
checkpoints.save(make(step + 1), step + 1)  # the first is slow: everything is compiled and loaded
checkpoints.wait()
threading.Timer(float(delay), os.kill, (os.getpid(), signal.SIGKILL)).start()
while True:
    step += 1
    checkpoints.save(make(step + 1), step + 1)
"""


def test_kill_minus_nine_during_saves_leaves_no_counted_checkpoint_unreadable(tmp_path):
    script = [sys.executable, "-c", SAVE_UNTIL_KILLED, str(tmp_path)]
    newest = 0
    for delay in ("0.04", "0.11", "0.23"):
        environment = {**os.environ, "XLA_FLAGS": ""}
        done = subprocess.run(
            [*script, config_to_json(CONFIG), TOKENIZER.hex(), delay], env=environment, timeout=300
        )
        assert done.returncode == -9
        steps = sorted(int(path.parent.name) for path in tmp_path.glob("*/*/manifest.json"))
        assert len(steps) >= 2 or newest == 0
        assert steps[-1] > newest, "progress that was saved is never lost"
        newest = steps[-1]
        for step in steps:
            assert (load_for_inference(tmp_path, step).params["w"] == step).all()


@pytest.fixture
def small_files_only() -> Iterator[None]:
    """No file can grow beyond 200 kB, which is what a full disk looks like to a writer."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_failed_save_raises_at_the_next_call_and_harms_nothing(workdir, small_files_only):
    big = {"params": {"w": jax.random.normal(jax.random.key(0), (400, 500))}, "step": jnp.int32(12)}
    with opened(workdir) as checkpoints:
        checkpoints.save(big, 12)
        with pytest.raises(CheckpointError, match=r"checkpoints/12: not saved: .*File too large"):
            checkpoints.save(make_state(13), 13)
        assert sorted(path.name for path in (workdir / "checkpoints").iterdir()) == ["11", "5"]
        checkpoints.save(make_state(13), 13)
        checkpoints.wait()
        assert checkpoints.latest_good() == 13


# ---- Damage


def every_file(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def test_a_flipped_bit_a_cut_and_a_lost_file_are_each_named(workdir):
    folder = workdir / "checkpoints" / "11"
    files = [path for path in every_file(folder) if path.stat().st_size]
    assert len(files) > 10
    for path in files:
        content = path.read_bytes()
        flip_a_bit(path)
        with pytest.raises(CheckpointError, match=f"^{path}: damaged"):
            verify(folder)
        path.write_bytes(content[:-1])
        with pytest.raises(CheckpointError, match=f"^{path}: damaged"):
            verify(folder)
        path.unlink()
        with pytest.raises(CheckpointError, match=f"^{path}: damaged: No such file"):
            verify(folder)
        path.write_bytes(content)
        verify(folder)


def test_a_manifest_that_names_another_hash_is_itself_the_damaged_file(workdir):
    path = workdir / "checkpoints" / "11" / "manifest.json"
    content = json.loads(path.read_text())
    content["files"]["config.json"]["sha256"] = "0" * 64
    path.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=f"^{path}: damaged: not a manifest"):
        verify(path.parent)


def test_the_newest_good_checkpoint_is_used_instead_of_a_damaged_one(workdir, caplog):
    damaged = every_file(workdir / "checkpoints" / "11" / "arrays" / "params" / "d")[0]
    flip_a_bit(damaged)
    assert load_for_inference(workdir).step == 5
    assert [str(damaged) in record.message for record in caplog.records] == [True]
    with pytest.raises(CheckpointError, match=str(damaged)):
        load_for_inference(workdir, 11)
    with Checkpoints(workdir, CONFIG, TOKENIZER, keep_last=1) as checkpoints:
        assert checkpoints.latest_good() == 5
        with pytest.raises(CheckpointError, match=str(damaged)):
            checkpoints.restore(11, abstract(make_state(11), 1))
        checkpoints.save(make_state(8), 8)  # keep_last=1 must not keep damaged 11 in its stead
        checkpoints.wait()
        assert checkpoints.latest_good() == 8
        checkpoints.save(make_state(11), 11)
        checkpoints.wait()
        assert checkpoints.steps() == [11]
        assert checkpoints.latest_good() == 11


def test_when_every_checkpoint_is_damaged_nothing_is_used_and_nothing_removed(workdir):
    for step in ("5", "11"):
        flip_a_bit(workdir / "checkpoints" / step / "tokenizer.model")
    with opened(workdir) as checkpoints:
        with pytest.raises(CheckpointError, match=r"no good checkpoint; damaged: \[5, 11\]"):
            checkpoints.latest_good()
        assert checkpoints.steps() == [5, 11]
    with pytest.raises(CheckpointError, match="no good checkpoint"):
        load_for_inference(workdir)


# ---- What is kept


@pytest.mark.parametrize(
    ("scores", "last", "best", "kept"),
    [
        ({900: 1.0, 1000: 9.0, 10000: 3.0}, 1, 1, {1000, 10000}),  # by number, not as text
        ({1: 30.0, 2: 20.0, 3: 10.0, 4: 5.0}, 2, 1, {1, 3, 4}),  # scores only get worse
        ({1: 30.0, 2: 20.0, 3: 10.0, 4: 5.0}, 1, 2, {1, 2, 4}),
        ({1: 30.0, 2: None, 3: None}, 1, 1, {1, 3}),  # not every step is evaluated
        ({1: None, 2: None, 3: None}, 2, 3, {2, 3}),
        ({1: 5.0, 2: 5.0, 3: 1.0}, 1, 1, {2, 3}),  # equal scores: the later
        ({1: 5.0, 2: 4.0}, 1, 0, {2}),
    ],
)
def test_the_newest_and_the_best_are_kept(scores, last, best, kept):
    assert kept_steps(scores, last, best) == kept


def test_retention_keeps_the_best_and_the_last_when_scores_only_get_worse(tmp_path):
    with Checkpoints(tmp_path, CONFIG, TOKENIZER, keep_last=2, keep_best=1) as checkpoints:
        for step, score in ((2, 30.0), (3, None), (5, 20.0), (7, 10.0), (11, None)):
            metrics = None if score is None else {"bleu": {"score": score}}
            checkpoints.save(make_state(step), step, metrics)
            checkpoints.wait()
            assert step in checkpoints.steps()
        assert checkpoints.steps() == [2, 7, 11]
    assert best_steps({2: 30.0, 7: 10.0, 11: None}, 5) == [2, 7]


# ---- Averages


def test_an_average_is_the_float32_mean_of_the_last_by_step_number(tmp_path):
    steps = [10000, 800, 1000, 900]  # neither the order of time nor that of text
    saved(tmp_path / "run", *steps)
    assert average(tmp_path / "run", tmp_path / "mean", last=3) == [900, 1000, 10000]
    loaded = load_for_inference(tmp_path / "mean")
    trees = [make_state(step).params for step in (900, 1000, 10000)]
    mean = jax.tree.map(lambda *leaves: np.stack(leaves).mean(0, dtype=np.float32), *trees)
    assert_same_bits(loaded.params, mean)
    assert (loaded.step, loaded.config) == (10000, CONFIG)
    assert loaded.tokenizer.model_bytes == TOKENIZER
    assert read_meta(tmp_path / "mean").averaged_steps == [900, 1000, 10000]


def test_an_average_refuses_what_does_not_belong_together(workdir, tmp_path):
    with pytest.raises(UserError, match=r"cannot average the last 3; there are 2: \[5, 11\]"):
        average(workdir, tmp_path / "mean", last=3)
    with pytest.raises(UserError, match="is there already"):
        average(workdir, workdir, last=2)
    saved(workdir, 17, tokenizer=OTHER_TOKENIZER)
    with pytest.raises(UserError, match="steps 11 and 17 have different tokenizers"):
        average(workdir, tmp_path / "mean", last=2)
    with opened(workdir) as checkpoints:
        state = make_state(17)
        checkpoints.save(state._replace(params={**state.params, "bias": jnp.ones(4)}), 17)
    with pytest.raises(UserError, match=r"different shapes: bias is float32\[3\]"):
        average(workdir, tmp_path / "mean", last=2)
    assert not (tmp_path / "mean").exists()


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
    with pytest.raises(UserError, match=r"no checkpoint has a validation BLEU; steps: \[5, 11\]"):
        load_for_inference(two_steps, "best")
    with pytest.raises(UserError, match="is one checkpoint, of step 11, not 5"):
        load_for_inference(two_steps / "checkpoints" / "11", 5)


def test_another_format_version_is_named_and_refused(workdir):
    path = workdir / "checkpoints" / "11" / "manifest.json"
    path.write_text(json.dumps({"format": 2, "anything": "else"}))
    refusal = "11: checkpoint format 2; this program reads 1"
    with pytest.raises(UserError, match=refusal):
        load_for_inference(workdir)
    with opened(workdir) as checkpoints, pytest.raises(UserError, match=refusal):
        checkpoints.latest_good()
