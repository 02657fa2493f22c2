"""Meshes: what is split, what is refused, and that no mesh changes what is learnt."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from trees import assert_close

from flaxformer_min.checkpoints.leaves import named_leaves
from flaxformer_min.checkpoints.saved_state import read_state, start_writing
from flaxformer_min.config import Config, DataConfig, MeshConfig, ModelConfig, OptimizerConfig
from flaxformer_min.data.batch import Batch
from flaxformer_min.errors import UserError
from flaxformer_min.model.build import split_model
from flaxformer_min.planning import hlo
from flaxformer_min.training.loss import make_loss, projected_cross_entropy
from flaxformer_min.training.sharding import (
    ROW_AXES,
    ROWS,
    _check_cudnn,
    abstract,
    check_mesh,
    make_mesh,
    rows_here,
    shardings,
)
from flaxformer_min.training.state import init_state
from flaxformer_min.training.step import make_train_step

MODEL = ModelConfig(
    num_layers=1, d_model=16, d_ff=32, num_heads=8, d_k=2, d_v=2, dropout=0.1, max_length=16
)
VOCAB, ROWS_OF_A_BATCH, LENGTH = 104, 16, 7
ADAM = optax.adam(3e-3, b1=0.9, b2=0.98)
MESHES = [(8, 1, 1), (4, 2, 1), (2, 2, 2), (1, 8, 1), (1, 1, 8)]
CONFIG = Config(
    model=MODEL,
    data=DataConfig(
        train=("a", "b"),
        validation=("a", "b"),
        source_language="en",
        target_language="de",
        vocab_size=VOCAB,
        row_multiple=16,
    ),
)


def mesh_of(data: int, fsdp: int = 1, tensor: int = 1):
    sizes = MeshConfig(data=data, fsdp=fsdp, tensor=tensor)
    return make_mesh(sizes, jax.devices()[: data * fsdp * tensor])


def fresh_state(model=MODEL):
    return init_state(model, VOCAB, ADAM, seed=3)


def compiled_step(mesh, model=MODEL, accumulation=1):
    graphdef, _ = split_model(model, VOCAB)
    loss = make_loss(graphdef, pad_id=0, bos_id=2, smoothing=0.1, mesh=mesh)
    step = make_train_step(loss, ADAM, accumulation)
    state = abstract(mesh, jax.eval_shape(lambda: fresh_state(model)))
    rows = NamedSharding(mesh, ROWS)
    side = jax.ShapeDtypeStruct((ROWS_OF_A_BATCH, LENGTH), jnp.int32, sharding=rows)
    key = jax.eval_shape(lambda: jax.random.key(0))
    return jax.jit(step, donate_argnums=0).lower(state, Batch(side, side), key).compile()


def batches(count: int):
    """Ragged rows of few words, the target being the source backwards."""
    rng = np.random.default_rng(11)
    for _ in range(count):
        words = rng.integers(4, 20, (ROWS_OF_A_BATCH, LENGTH)).astype(np.int32)
        words[np.arange(LENGTH) >= rng.integers(2, LENGTH + 1, (ROWS_OF_A_BATCH, 1))] = 0
        yield Batch(words, words[:, ::-1].copy())


def split_state(mesh, model=MODEL):
    """A fresh state, born split."""
    shapes = jax.eval_shape(lambda: fresh_state(model))
    return jax.jit(lambda: fresh_state(model), out_shardings=shardings(mesh, shapes))()


def losses_on(mesh, step, steps: int, model=MODEL) -> list[float]:
    state = split_state(mesh, model)
    key, losses = jax.device_put(jax.random.key(5), NamedSharding(mesh, P())), []
    for batch in batches(steps):
        batch = jax.device_put(batch, NamedSharding(mesh, ROWS))
        state, metrics = step(state, batch, key)
        losses.append(float(metrics.loss))
    return losses


@pytest.fixture(scope="module")
def programs():
    """The compiled train step of every mesh."""
    return {sizes: compiled_step(mesh_of(*sizes)) for sizes in MESHES}


@pytest.fixture(scope="module")
def alone():
    """The losses of one device."""
    mesh = mesh_of(1)
    return losses_on(mesh, compiled_step(mesh), 50)


# The same training


@pytest.mark.run
@pytest.mark.parametrize("sizes", MESHES)
def test_a_mesh_gives_the_losses_of_one_device_with_dropout_on(programs, alone, sizes):
    losses = losses_on(mesh_of(*sizes), programs[sizes], len(alone))
    np.testing.assert_allclose(losses, alone, rtol=1e-5)
    assert alone[-1] < 0.9 * alone[0]


@pytest.mark.run
def test_accumulation_on_a_mesh_gives_the_losses_of_one_device():
    mesh, one = mesh_of(4, 2), mesh_of(1)
    losses = losses_on(mesh, compiled_step(mesh, accumulation=2), 3)
    np.testing.assert_allclose(losses, losses_on(one, compiled_step(one, accumulation=2), 3), 1e-5)


@pytest.mark.run
@pytest.mark.parametrize("knobs", [{"scan_layers": True}, {"remat": True}])
def test_layers_in_a_loop_and_computed_again_give_the_same_losses(knobs):
    mesh, model = mesh_of(1), dataclasses.replace(MODEL, num_layers=3)
    plain = losses_on(mesh, compiled_step(mesh, model), 3, model)
    changed = dataclasses.replace(model, **knobs)  # weights and their tree are the same
    losses = losses_on(mesh, compiled_step(mesh, changed), 3, model)
    np.testing.assert_allclose(losses, plain, rtol=1e-5)


# What is split, and what moves


def test_parameters_and_moments_are_split_over_all_axes():
    state = split_state(mesh_of(2, 2, 2))
    layer = state.params["decoder"][0]
    query = layer["cross_attention"]["query"]
    assert query.addressable_shards[0].data.shape == (4, 8)
    assert layer["feed_forward"]["up"].addressable_shards[0].data.shape == (4, 16)
    assert layer["feed_forward"]["down"].addressable_shards[0].data.shape == (4, 16)
    assert state.params["embedding"].addressable_shards[0].data.shape == (52, 4)
    for tree in (state.params, state.opt_state[0].mu, state.opt_state[0].nu):
        held = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(tree))
        whole = sum(leaf.nbytes for leaf in jax.tree.leaves(tree))
        small = sum(leaf.nbytes for leaf in jax.tree.leaves(tree) if leaf.ndim == 1)
        assert (whole - small) / 8 < held < (whole - small) / 8 + small


@pytest.mark.run
@pytest.mark.parametrize("sizes", MESHES)
def test_devices_exchange_no_logits_and_no_batch(programs, sizes):
    params = jax.eval_shape(fresh_state).params
    found = hlo.read(programs[sizes].as_text()).collectives
    activations = 4 * ROWS_OF_A_BATCH * LENGTH * MODEL.d_model
    logits = 4 * ROWS_OF_A_BATCH * LENGTH * VOCAB
    biggest = max(4 * leaf.size for leaf in jax.tree.leaves(params))
    # The rows of the embeddings, looked up in columns of the table, are exchanged.
    rows = [one for one in found if one.kind == "all-to-all"]
    assert all(one.trips == 1 and one.bytes <= activations for one in rows)
    found = [one for one in found if one.kind != "all-to-all"]
    if sizes[2] == 1:  # weights are gathered and gradients summed, once, and nothing else moves
        assert {one.kind for one in found} <= {"all-gather", "all-reduce", "reduce-scatter"}
        assert all(one.trips == 1 for one in found)
        assert all(one.bytes <= biggest for one in found if one.kind == "all-gather")
    else:  # sums over heads, hidden units and words, a row's own
        shares = sizes[0] * sizes[1]
        moving = [one for one in found if one.kind not in ("all-reduce", "all-gather")]
        assert all(one.bytes < activations // shares for one in moving)
        in_loops = [one for one in found if one.trips > 1]
        assert all(one.bytes <= activations // shares for one in in_loops)
        # Where rows are split too, an all-reduce may hold all gradients at once.
        whole = [one for one in found if one.kind != "all-reduce" or shares == 1]
        assert all(one.bytes < logits // shares for one in whole)


@pytest.mark.run
@pytest.mark.parametrize("sizes", [(8, 1, 1), (2, 4, 1), (2, 2, 2)])
def test_the_loss_and_its_gradients_are_those_of_one_device(sizes):
    rng = np.random.default_rng(7)
    states, table = rng.standard_normal((16, 11, 6)), rng.standard_normal((22, 6))
    labels = rng.integers(0, 22, (16, 11))
    case = [jnp.asarray(x, jnp.float32) for x in (states, table)]
    weights = jnp.asarray(labels > 3, jnp.float32)

    def gradients(mesh):
        def total(states, table):
            return projected_cross_entropy(
                states, table, jnp.asarray(labels), weights, 0.1, 4, mesh
            )

        return jax.jit(jax.value_and_grad(total, (0, 1), has_aux=True))(*case)

    assert_close(gradients(mesh_of(*sizes)), gradients(None), rtol=1e-5, atol=1e-5)


# Saved here, restored there


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The same state, saved on 1, 2, 4 and 8 devices."""
    folder, state = tmp_path_factory.mktemp("states"), jax.jit(fresh_state)()
    for devices in (1, 2, 4, 8):
        mesh = mesh_of(max(1, devices // 4), min(2, devices), 2 if devices > 2 else 1)
        split = jax.device_put(state, shardings(mesh, state))
        (folder / str(devices)).mkdir()
        start_writing(folder / str(devices), split)()
    return folder, state


@pytest.mark.run
@pytest.mark.parametrize("here", [1, 2, 4, 8])
@pytest.mark.parametrize("there", [1, 2, 4, 8])
def test_a_state_comes_back_bit_by_bit_on_another_number_of_devices(saved, here, there):
    folder, state = saved
    for mesh in (mesh_of(there), mesh_of(1, there)):
        restored = read_state(folder / str(here), abstract(mesh, state))
        for one, other in zip(jax.tree.leaves(restored), jax.tree.leaves(state), strict=True):
            assert len(one.sharding.device_set) == there
            assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


# What does not divide


@pytest.mark.parametrize(
    ("sizes", "changes", "message"),
    [
        (
            (1, 1, 8),
            {"num_heads": 4},
            "mesh.tensor is 8, which does not divide model.num_heads (4)",
        ),
        ((1, 1, 8), {"d_ff": 36}, "model.d_ff (36); of 8 devices 1, 2, 4 would"),
        ((1, 8, 1), {"d_model": 12}, "mesh.fsdp is 8, which does not divide model.d_model (12)"),
        ((1, 1, 8), {"vocab_size": 301}, "data.vocab_size (301); of 8 devices 1 would"),
        ((8, 1, 1), {"row_multiple": 12}, "data.row_multiple is 12: it must be a multiple of"),
        ((8, 1, 1), {"accumulation": 4}, "optimizer.accumulation = 32; 32 would fit"),
        ((8, 1, 1), {"attention": "cudnn"}, "needs NVIDIA GPUs (here is cpu)"),
    ],
)
def test_what_does_not_divide_is_refused_with_what_would_fit(sizes, changes, message):
    sections = {"model": ModelConfig, "data": DataConfig, "optimizer": OptimizerConfig}
    config = CONFIG
    for section, kind in sections.items():
        names = {field.name for field in dataclasses.fields(kind)} & changes.keys()
        part = getattr(config, section)
        part = dataclasses.replace(part, **{name: changes[name] for name in names})
        config = dataclasses.replace(config, **{section: part})
    with pytest.raises(UserError) as caught:
        check_mesh(config, mesh_of(*sizes))
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("sizes", MESHES)
def test_what_divides_is_taken(sizes):
    check_mesh(CONFIG, mesh_of(*sizes))


@pytest.mark.parametrize(
    ("sizes", "made"),
    [
        ((-1, 2, 2), (2, 2, 2)),
        ((2, -1, 1), (2, 4, 1)),
        ((8, 1, 1), (8, 1, 1)),
        ((-1, 8, 1), (1, 8, 1)),
    ],
)
def test_minus_one_takes_what_the_other_axes_leave(sizes, made):
    config = MeshConfig(data=sizes[0], fsdp=sizes[1], tensor=sizes[2])
    assert tuple(make_mesh(config).shape.values()) == made


def test_a_mesh_that_is_not_all_devices_is_refused():
    with pytest.raises(UserError, match="3 x 1 x 1 does not make the 8 devices"):
        make_mesh(MeshConfig(data=3))


@pytest.mark.run
def test_what_the_data_axis_does_not_divide_is_whole_and_learns_the_same():
    model = dataclasses.replace(MODEL, d_model=12, d_ff=20, num_heads=6)
    mesh, one = mesh_of(8), mesh_of(1)
    shapes = jax.eval_shape(lambda: fresh_state(model))
    assert all(leaf.is_fully_replicated for leaf in jax.tree.leaves(shardings(mesh, shapes)))
    losses = losses_on(mesh, compiled_step(mesh, model), 3, model)
    np.testing.assert_allclose(losses, losses_on(one, compiled_step(one, model), 3, model), 1e-5)


def test_every_weight_is_split_by_its_name():
    model = dataclasses.replace(MODEL, biases=True, share_embeddings="none", positions="learned")
    leaves = named_leaves(shardings(mesh_of(2, 2, 2), split_model(model, VOCAB)[1]))
    split = {
        **dict.fromkeys(("query", "key", "value", "up"), P(ROW_AXES, "tensor")),
        **dict.fromkeys(("output", "down"), P(("tensor", *ROW_AXES))),
        **dict.fromkeys(("query_bias", "key_bias", "value_bias", "up_bias"), P("tensor")),
        **dict.fromkeys(
            ("embedding", "source_embedding", "output_embedding"), P("tensor", ROW_AXES)
        ),
        "logits_bias": P("tensor"),
    }
    whole = {"output_bias", "down_bias", "scale", "bias", "source_positions", "target_positions"}
    names = {name: name.split("/")[-1] for name in leaves}
    assert set(names.values()) == split.keys() | whole
    assert {n: leaf.spec for n, leaf in leaves.items()} == {
        n: split.get(names[n], P()) for n in leaves
    }


CUDNN = dataclasses.replace(MODEL, attention="cudnn", compute_dtype="bfloat16", d_k=64, d_v=64)


@pytest.mark.parametrize(
    ("changes", "platform", "fits"),
    [
        ({}, "gpu", True),
        ({}, "tpu", False),
        ({"d_k": 128, "d_v": 128}, "gpu", True),
        ({"d_k": 136, "d_v": 136}, "gpu", False),
        ({"d_k": 60, "d_v": 60}, "gpu", False),
        ({"d_k": 32}, "gpu", False),
        ({"compute_dtype": "float32"}, "gpu", False),
        ({"attention_dropout": 0.1}, "gpu", False),
    ],
)
def test_the_fused_kernel_is_refused_where_cudnn_has_none(changes, platform, fits):
    model = dataclasses.replace(CUDNN, **changes)
    if fits:
        _check_cudnn(model, platform)
    else:
        with pytest.raises(UserError, match=f"here is {platform}"):
            _check_cudnn(model, platform)


@pytest.mark.parametrize("sizes", [(8, 1, 1), (2, 2, 2), (1, 1, 8)])
def test_one_process_holds_every_row_once(sizes):
    assert rows_here(mesh_of(*sizes), 16).tolist() == list(range(16))
