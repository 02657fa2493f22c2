"""One training step: what it averages, what it leaves alone, on one device and on many."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.extend.core import jaxprs_in_params
from jax.sharding import Mesh, NamedSharding
from trees import assert_close_for_its_size, assert_same_bits

from flaxformer_min.config import MeshConfig, ModelConfig, OptimizerConfig
from flaxformer_min.data.batch import Batch
from flaxformer_min.errors import UserError
from flaxformer_min.model.build import count_parameters, split_model
from flaxformer_min.model.layers import FeedForward
from flaxformer_min.model.teacher_forcing import shift_right
from flaxformer_min.model.transformer import Transformer
from flaxformer_min.training.loss import make_loss
from flaxformer_min.training.optimizer import make_optimizer
from flaxformer_min.training.sharding import AXES, ROWS, abstract_rows, make_mesh, shardings
from flaxformer_min.training.state import TrainState, init_state
from flaxformer_min.training.step import StepProgram, gradient_sums, make_train_step
from tools import tiny_config

PAD, BOS, EOS, VOCAB = 0, 2, 3, 48
MODEL = ModelConfig(num_layers=1, d_model=16, d_ff=32, num_heads=2, d_k=8, d_v=8, dropout=0.0)
OPTIMIZER = make_optimizer(OptimizerConfig(peak_learning_rate=1e-2, warmup_steps=3), MODEL.d_model)
GRAPHDEF, _ = split_model(MODEL, VOCAB)
KEY = jax.random.key(5)
KEYWORDS = {"pad_id": PAD, "bos_id": BOS}


@functools.cache
def fresh_state():
    return jax.jit(lambda: init_state(MODEL, VOCAB, OPTIMIZER, 7))()


def ragged_batch(target_lengths=(1, 3, 11, 2, 0, 0, 5, 7), source_length=7, target_length=11):
    """Rows whose targets have the given numbers of tokens, EOS included; 0 is a filler row."""
    random = np.random.default_rng(1)
    batch = Batch(
        np.zeros((len(target_lengths), source_length), np.int32),
        np.zeros((len(target_lengths), target_length), np.int32),
    )
    for row, length in enumerate(target_lengths):
        for side, n in zip(batch, (min(length, source_length), length), strict=True):
            side[row, :n] = random.integers(4, VOCAB, n)
            side[row, max(n - 1, 0) : n] = EOS
    return batch


@functools.cache
def make_step(accumulation=1, smoothing=0.1, graphdef=GRAPHDEF):
    loss = make_loss(graphdef, **KEYWORDS, smoothing=smoothing)
    return jax.jit(make_train_step(loss, OPTIMIZER, accumulation))


@jax.jit
def mean_loss_and_tokens(params, batch):
    loss, tokens = make_loss(GRAPHDEF, **KEYWORDS, smoothing=0.0)(params, batch, None)
    return loss / tokens, tokens


def test_the_decoder_reads_bos_and_then_every_token_but_the_last():
    target = jnp.array([[5, 7, EOS], [11, EOS, PAD]])
    assert shift_right(target, BOS).tolist() == [[BOS, 5, 7], [BOS, 11, EOS]]


def test_the_loss_counts_target_tokens_with_eos_and_no_padding():
    params = fresh_state().params
    loss, tokens = mean_loss_and_tokens(params, ragged_batch())
    assert tokens == 1 + 3 + 11 + 2 + 5 + 7
    # Before training the guess is nearly uniform.
    assert abs(float(loss) - np.log(VOCAB)) < 1


@pytest.mark.run
def test_filler_rows_and_more_padding_do_not_change_loss_or_gradient():
    params, short = fresh_state().params, ragged_batch((3, 5))
    longer = Batch(*(np.pad(side, ((0, 5), (0, 2))) for side in short))
    gradient = jax.jit(jax.value_and_grad(mean_loss_and_tokens, has_aux=True))
    assert_close_for_its_size(gradient(params, short), gradient(params, longer), 1e-5)


# Token-true averages

# Its state is the last gradient, and it changes nothing.
KEEP_GRADIENT = optax.GradientTransformation(
    lambda params: jax.tree.map(jnp.zeros_like, params),
    lambda grads, _, params: (jax.tree.map(jnp.zeros_like, params), grads),
)
# Of two micro-batches the second is all padding, of four every second one.
RAGGED = (1, 0, 3, 0, 30, 0, 2, 0, 2, 0, 30, 0, 1, 0, 3, 0)


def gradient_of(dtype, accumulation: int, devices: int):
    """(loss, gradient) of the ragged batch, computed on so many devices in so many parts."""
    params = jax.tree.map(
        lambda leaf: np.asarray(leaf, dtype), jax.device_get(fresh_state().params)
    )
    mesh = Mesh(np.array(jax.devices()[:devices]).reshape(-1, 1, 1), AXES)
    zero = np.int32(0)
    state = TrainState(zero, params, params, zero, zero)
    state = jax.device_put(state, shardings(mesh, state))
    batch = jax.device_put(ragged_batch(RAGGED, 7, 31), NamedSharding(mesh, ROWS))
    loss = make_loss(GRAPHDEF, **KEYWORDS, smoothing=0.1)
    step = make_train_step(loss, KEEP_GRADIENT, accumulation)
    state, metrics = jax.jit(step)(state, batch, jax.random.key(5))
    assert metrics.tokens == sum(RAGGED)
    return jax.device_get((metrics.loss, state.opt_state))


@functools.cache
def whole_gradient(dtype):
    return gradient_of(dtype, 1, 1)


@pytest.mark.run
@pytest.mark.parametrize(
    ("dtype", "accumulation", "devices"),
    [("float32", 4, 2), ("float64", 2, 4)],
)
def test_every_token_weighs_alike_over_ragged_micro_batches_and_devices(
    dtype, accumulation, devices
):
    tolerance = {"float32": 1e-6, "float64": 1e-12}[dtype]
    with jax.enable_x64(dtype == "float64"):
        expected, found = whole_gradient(dtype), gradient_of(dtype, accumulation, devices)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert one.dtype == dtype
        assert np.linalg.norm(one - other) <= tolerance * np.linalg.norm(other)


def narrowed(jaxpr) -> list[str]:
    """The equations that make 32 bits of 64, at any depth."""
    found = []
    for equation in jaxpr.eqns:
        types = [[v.aval.dtype for v in side] for side in (equation.invars, equation.outvars)]
        if jnp.float64 in types[0] and jnp.float32 in types[1]:
            found.append(str(equation))
        for inner in jaxprs_in_params(equation.params):
            found += narrowed(inner)
    return found


@pytest.mark.run
def test_with_float64_weights_nothing_is_rounded_to_float32():
    step = make_train_step(make_loss(GRAPHDEF, **KEYWORDS, smoothing=0.1), OPTIMIZER, 2)
    with jax.enable_x64(True):
        params = jax.tree.map(
            lambda leaf: leaf.astype(np.float64), jax.device_get(fresh_state().params)
        )
        state = TrainState(np.int32(0), params, OPTIMIZER.init(params), np.int32(0), np.int32(0))
        jaxpr = jax.make_jaxpr(step)(state, ragged_batch(), jax.random.key(5))
    assert narrowed(jaxpr.jaxpr) == []


@pytest.mark.run
def test_a_batch_of_filler_rows_alone_gives_finite_numbers():
    state, metrics = make_step()(fresh_state(), ragged_batch((0,) * 8), KEY)
    assert metrics.tokens == 0 and metrics.loss == 0
    assert all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(state.params))


# Numbers that are not finite


class NotFinite(FeedForward):
    """A sublayer one of whose activations is not a number."""

    def __call__(self, x, key=None, taps=None):
        return super().__call__(x, key, taps).at[0, 1, 2].set(jnp.nan)


@jax.custom_vjp
def infinite_gradient(x):
    """x itself, but its gradient has an infinite number."""
    return x


infinite_gradient.defvjp(lambda x: (x, None), lambda _, grad: (grad.at[5, 3].set(jnp.inf),))


def broken_step(where: str):
    """A training step that has a number that is not finite there."""
    if where == "activations":
        model = Transformer(MODEL, VOCAB, rngs=nnx.Rngs(0))
        model.encoder[0].feed_forward = NotFinite(MODEL, rngs=nnx.Rngs(0))
        return make_step(graphdef=nnx.split(model)[0])

    sums = make_loss(GRAPHDEF, **KEYWORDS, smoothing=0.1)

    def broken_loss(params, batch, key):
        if where == "gradient":
            params = params | {"embedding": infinite_gradient(params["embedding"])}
        loss, tokens = sums(params, batch, key)
        return (loss + jnp.inf if where == "loss" else loss), tokens

    return jax.jit(make_train_step(broken_loss, OPTIMIZER))


@pytest.mark.run
@pytest.mark.parametrize("where", ["loss", "gradient", "activations"])
def test_a_step_that_is_not_finite_leaves_everything_but_the_counters(where):
    good, bad, batch = make_step(), broken_step(where), ragged_batch()
    before, _ = good(fresh_state(), batch, KEY)
    after = before
    for skipped in (1, 2):
        after, metrics = bad(after, batch, KEY)
        assert (int(metrics.skipped), int(metrics.skipped_in_a_row)) == (skipped, skipped)
        assert bool(jnp.isfinite(metrics.loss)) == (where == "gradient")
    assert (int(after.step), int(after.skipped), int(after.opt_state[0].count)) == (3, 2, 1)
    assert_same_bits((after.params, after.opt_state), (before.params, before.opt_state))
    went_on, metrics = good(after, batch, KEY)
    assert (int(metrics.skipped), int(metrics.skipped_in_a_row)) == (2, 0)
    never_broken, _ = good(before, batch, KEY)
    assert_same_bits(
        (went_on.params, went_on.opt_state), (never_broken.params, never_broken.opt_state)
    )


@pytest.mark.run
def test_dropout_depends_on_step_and_key_and_on_nothing_else():
    model = ModelConfig(num_layers=1, d_model=16, d_ff=32, num_heads=2, d_k=8, d_v=8, dropout=0.3)
    step, batch = make_step(graphdef=split_model(model, VOCAB)[0]), ragged_batch()
    state = fresh_state()

    def loss(state, key):
        return float(step(state, batch, key)[1].loss)

    assert loss(state, KEY) == loss(state, KEY)
    assert loss(state, KEY) != loss(state, jax.random.key(6))
    assert loss(state, KEY) != loss(state._replace(step=state.step + 1), KEY)


@pytest.mark.run
def test_training_on_one_batch_learns_it_by_heart():
    step, batch, state = make_step(smoothing=0.0), ragged_batch(), fresh_state()
    for _ in range(150):
        state, metrics = step(state, batch, KEY)
    assert metrics.loss < 0.1


@pytest.mark.run
@pytest.mark.parametrize("sizes", [(8, 1, 1), (2, 2, 2), (1, 4, 2)])
def test_a_mesh_of_devices_takes_the_same_step_as_one_device(sizes):
    config = MeshConfig(data=sizes[0], fsdp=sizes[1], tensor=sizes[2])
    mesh, state, batch = make_mesh(config), fresh_state(), ragged_batch()
    expected, expected_metrics = make_step()(state, batch, KEY)
    spread = jax.device_put(state, shardings(mesh, state))
    rows = jax.device_put(batch, NamedSharding(mesh, ROWS))
    got, metrics = make_step()(spread, rows, KEY)
    assert_close_for_its_size(metrics.loss, expected_metrics.loss, 1e-6)
    assert_close_for_its_size(got.opt_state[0].mu, expected.opt_state[0].mu, 1e-5)
    up = got.params["encoder"][0]["feed_forward"]["up"]
    assert up.addressable_shards[0].data.size == up.size // mesh.size


def test_a_mesh_that_does_not_make_the_devices_is_refused():
    with pytest.raises(UserError, match="3 x 1 x 1 does not make the 8 devices"):
        make_mesh(MeshConfig(data=3))


def test_one_axis_of_a_mesh_may_take_the_rest():
    assert dict(make_mesh(MeshConfig(tensor=2)).shape) == {"data": 4, "fsdp": 1, "tensor": 2}


def test_parameters_are_counted_by_the_paper_s_formula():
    layers = 2 * 4 * 16 * 16 + 4 * 16 * 16  # three attentions of four square kernels
    feed_forward = 2 * (2 * 16 * 32 + 32 + 16)
    norms = 5 * 2 * 16
    assert count_parameters(fresh_state().params) == (
        layers + feed_forward + norms + VOCAB * MODEL.d_model
    )


# A loss whose gradient is known


@pytest.mark.parametrize("accumulation", [1, 2, 4])
def test_the_logged_norm_is_that_of_the_gradient_of_the_mean_loss(accumulation):
    batch = np.arange(24.0).reshape(8, 3).astype(np.float32) - 7

    def loss(params, batch, key):
        return (batch * params["weights"]).sum(), jnp.float32(5 * len(batch))

    zero, params = jnp.int32(0), {"weights": jnp.ones((1, 3))}
    state = TrainState(zero, params, params, zero, zero)
    _, metrics = make_train_step(loss, KEEP_GRADIENT, accumulation)(state, batch, KEY)
    np.testing.assert_allclose(metrics.gradient_norm, np.linalg.norm(batch.sum(0) / 40), rtol=1e-6)
    np.testing.assert_allclose(metrics.loss, batch.sum() / 40, rtol=1e-6)


def test_every_micro_batch_has_a_key_of_its_own():
    def loss(params, batch, key):
        return jax.random.normal(key, (5,)) @ params["weights"], jnp.float32(1)

    _, gradient = gradient_sums(loss, {"weights": jnp.ones(5)}, jnp.ones((6, 2)), KEY, 3)
    each = [jax.random.normal(jax.random.fold_in(KEY, number), (5,)) for number in range(3)]
    np.testing.assert_allclose(gradient["weights"], np.sum(each, axis=0), rtol=1e-5)


def test_row_r_goes_to_micro_batch_r_modulo_their_number():
    """So each micro-batch has an equal share of every device's rows."""
    batch = 2.0 ** np.arange(6, dtype=np.float32)[:, None]

    def loss(params, batch, key):
        return jax.random.normal(key) * batch.sum() * params["weight"], jnp.float32(1)

    _, gradient = gradient_sums(loss, {"weight": jnp.float32(1)}, batch, KEY, 3)
    drawn = [float(jax.random.normal(jax.random.fold_in(KEY, number))) for number in range(3)]
    wanted = sum(drawn[row % 3] * 2.0**row for row in range(6))
    np.testing.assert_allclose(gradient["weight"], wanted, rtol=1e-5)


@pytest.mark.run
def test_a_step_takes_over_the_memory_of_its_state_and_of_nothing_else():
    config = tiny_config.get_config(".")
    mesh = make_mesh(config.mesh)
    program = StepProgram(config, mesh, **KEYWORDS)
    batch, key = Batch(*abstract_rows(mesh, 16, 7, 11)), jax.eval_shape(jax.random.key, 0)
    state, *others = program.jitted.lower(program.shapes, batch, key).args_info[0]
    assert all(leaf.donated for leaf in jax.tree.leaves(state))
    assert not any(leaf.donated for leaf in jax.tree.leaves(others))
