"""The label-smoothed loss: published numbers, optax, and the chunked form that fuses projection."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import numpy_transformer as reference
import optax
import pytest
from flax import nnx
from jaxprs import equations
from tiny_model import SOURCE, TARGET_IN, VARIANTS, VOCAB_SIZE, random_params

from flaxformer_min.data.batch import Batch
from flaxformer_min.model.build import split_model
from flaxformer_min.model.teacher_forcing import forced_states
from flaxformer_min.training.loss import (
    chunk_size,
    make_loss,
    projected_cross_entropy,
    smoothed_cross_entropy,
)

B, T, D, V, CHUNK = 3, 11, 5, 23, 4
loss = jax.jit(smoothed_cross_entropy, static_argnums=3)


@pytest.fixture(scope="module")
def wide():
    """NumPy float64: states [B, T, D], table [V, D], labels and weights [B, T], padding 0."""
    rng = np.random.default_rng(5)
    labels = rng.integers(1, V, (B, T)) * (np.arange(T) < np.array([[11], [4], [7]]))
    states, table = rng.standard_normal((B, T, D)), rng.standard_normal((V, D))
    return states, table, labels, (labels > 0).astype(np.float64)


@pytest.fixture(scope="module")
def case(wide):
    """The same in float32."""
    states, table, labels, weights = wide
    states, table, weights = (jnp.asarray(x, jnp.float32) for x in (states, table, weights))
    return states, table, jnp.asarray(labels), weights


@pytest.fixture(scope="module")
def logits(wide):
    return jnp.asarray(wide[0] @ wide[1].T, jnp.float32)


@pytest.mark.parametrize(("smoothing", "wanted"), [(0.4, 6.486866), (0.0, 5.626821)])
def test_joeynmts_case_gives_the_value_of_optax_and_torchs_convention(smoothing, wanted):
    logits = jnp.asarray(np.log([[0.1, 0.1, 0.6, 0.1, 0.1]] * 6), jnp.float32)
    labels, weights = jnp.array([2, 1, 2, 0, 1, 0]), jnp.array([1.0, 1.0, 1.0, 0.0, 1.0, 0.0])
    total, tokens = loss(logits, labels, weights, smoothing)
    np.testing.assert_allclose(total, wanted, atol=2e-6)
    assert tokens == 4


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_value_equals_the_numpy_reference(wide, case, logits, smoothing):
    states, table, labels, weights = wide
    rows = zip(states @ table.T, labels, weights, strict=True)
    wanted = sum(reference.smoothed_loss(*row, smoothing) for row in rows)
    total, tokens = loss(logits, *case[2:], smoothing)
    np.testing.assert_allclose(total, wanted, rtol=1e-6)
    assert tokens == 22


def test_value_and_gradients_equal_optax(case, logits):
    labels, weights = case[2:]

    def theirs(logits):
        soft = optax.smooth_labels(jax.nn.one_hot(labels, V), 0.1)
        return (optax.softmax_cross_entropy(logits, soft) * weights).sum()

    value, grad = jax.jit(jax.value_and_grad(lambda x: loss(x, labels, weights, 0.1)[0]))(logits)
    wanted, wanted_grad = jax.jit(jax.value_and_grad(theirs))(logits)
    np.testing.assert_allclose(value, wanted, rtol=1e-6)
    np.testing.assert_allclose(grad, wanted_grad, atol=1e-6)


def test_tokens_of_weight_zero_contribute_nothing(case, logits):
    labels, weights = case[2:]
    real = np.asarray(weights) > 0
    changed = np.where(real[..., None], logits, 1e30), np.where(real, labels, 17)
    gradient = jax.jit(jax.value_and_grad(lambda *x: loss(*x, weights, 0.1)[0]))
    total, grad = gradient(*changed)
    np.testing.assert_array_equal(total, gradient(logits, labels)[0])
    assert (np.asarray(grad)[~real] == 0).all()
    assert (np.asarray(grad)[real] != 0).all()


def test_sums_add_up_over_any_split_of_the_tokens(case, logits):
    # Not means: rows of 11, 4 and 7 tokens count token by token.
    labels, weights = case[2:]
    parts = [loss(logits, labels, weights.at[rows].set(0), 0.1) for rows in (0, np.array([1, 2]))]
    np.testing.assert_allclose(np.sum(parts, axis=0), loss(logits, *case[2:], 0.1), rtol=1e-6)
    assert [tokens for _, tokens in parts] == [11, 11]


def test_weights_count_by_their_size(case, logits):
    labels, weights = case[2:]
    thrice = loss(logits, labels, 3 * weights, 0.1)
    np.testing.assert_allclose(thrice, 3 * np.array(loss(logits, labels, weights, 0.1)), rtol=1e-6)


def test_very_large_logits_stay_finite():
    logits = jnp.array([[1e4, -1e4, 0.0]])
    for label, wanted in ((0, 0.0), (1, 2e4)):
        total, _ = loss(logits, jnp.array([label]), jnp.array([1.0]), 0.0)
        np.testing.assert_allclose(total, wanted, rtol=1e-6)


def test_bfloat16_logits_are_summed_in_float32(case, logits):
    low = logits.astype(jnp.bfloat16)
    total, tokens = loss(low, *case[2:], 0.1)
    assert total.dtype == tokens.dtype == jnp.float32
    np.testing.assert_allclose(total, loss(low.astype(jnp.float32), *case[2:], 0.1)[0], rtol=1e-6)


# The chunked form


def whole(states, table, labels, weights, smoothing, chunk):
    """What the chunked form must equal, with the logits held all at once."""
    logits = jnp.einsum("BTD,VD->BTV", states, table, precision="highest")
    return smoothed_cross_entropy(logits, labels, weights, smoothing)


def value_and_gradients(loss, case, chunk):
    """Of 2.5 x the mean: the chunked form must obey a cotangent other than 1."""

    def mean(states, table):
        total, tokens = loss(states, table, *case[2:], 0.1, chunk)
        return 2.5 * total / tokens, (total, tokens)

    (_, sums), grads = jax.jit(jax.value_and_grad(mean, (0, 1), has_aux=True))(*case[:2])
    return (*sums, *grads)


@pytest.mark.parametrize("chunk", [1, 4, 11, 64])
def test_the_chunked_form_equals_the_whole_in_float32(case, chunk):
    ours = value_and_gradients(projected_cross_entropy, case, chunk)
    for got, wanted in zip(ours, value_and_gradients(whole, case, chunk), strict=True):
        assert got.dtype == jnp.float32
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)


def test_the_chunked_form_equals_the_whole_in_float64(wide):
    with jax.enable_x64(True):
        case = tuple(jnp.asarray(x) for x in wide)
        ours = value_and_gradients(projected_cross_entropy, case, CHUNK)
        wholes = value_and_gradients(whole, case, CHUNK)
    for got, wanted in zip(ours, wholes, strict=True):
        assert got.dtype == jnp.float64
        np.testing.assert_allclose(got, wanted, rtol=1e-12, atol=1e-12)


def test_the_chunked_form_has_the_same_value_without_gradients(case, logits):
    sums = jax.jit(projected_cross_entropy, static_argnums=(4, 5))(*case, 0.1, CHUNK)
    np.testing.assert_allclose(sums, loss(logits, *case[2:], 0.1), rtol=1e-6)


def test_the_chunked_form_never_holds_all_logits(case):
    def total(loss):
        return lambda states, table: loss(states, table, *case[2:], 0.1, CHUNK)[0]

    for function in (total(projected_cross_entropy), jax.grad(total(projected_cross_entropy))):
        assert largest_array(jax.make_jaxpr(function)(*case[:2])) <= B * CHUNK * V
    assert largest_array(jax.make_jaxpr(total(whole))(*case[:2])) == B * T * V


def largest_array(jaxpr):
    """The most entries of any array made in a jaxpr."""
    return max(var.aval.size for equation in equations(jaxpr) for var in equation.outvars)


def test_bfloat16_states_give_a_float32_sum_and_float32_table_gradients(case):
    low = (case[0].astype(jnp.bfloat16), *case[1:])
    total, _, states_grad, table_grad = value_and_gradients(projected_cross_entropy, low, CHUNK)
    wanted = value_and_gradients(whole, case, CHUNK)
    assert total.dtype == table_grad.dtype == jnp.float32
    assert states_grad.dtype == jnp.bfloat16
    np.testing.assert_allclose(total, wanted[0], rtol=1e-2)
    np.testing.assert_allclose(table_grad, wanted[3], atol=2e-2 * np.abs(wanted[3]).max())


@pytest.mark.run
def test_the_logits_bias_of_marians_models_counts_in_the_loss_and_has_the_gradient_of_jax():
    config = VARIANTS["Marian's"]
    graphdef, params = split_model(config, VOCAB_SIZE)[0], random_params(config)
    target = jnp.where(TARGET_IN == 0, 7, TARGET_IN)  # 7 is pad and BOS here, as in Marian
    batch = Batch(jnp.where(SOURCE == 0, 7, SOURCE), target)
    loss = make_loss(graphdef, pad_id=7, bos_id=7, smoothing=0.1)

    def plain(params):
        model = nnx.merge(graphdef, params)
        states = forced_states(model, *batch, pad_id=7, bos_id=7)
        weights = (target != 7).astype(jnp.float32)
        return smoothed_cross_entropy(model.project(states), target, weights, 0.1)[0]

    wanted, wanted_gradients = jax.jit(jax.value_and_grad(plain))(params)
    found, gradients = jax.jit(jax.value_and_grad(lambda params: loss(params, batch, None)[0]))(
        params
    )
    assert np.abs(gradients["logits_bias"]).max() > 1
    np.testing.assert_allclose(found, wanted, rtol=1e-6)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4),
        gradients,
        wanted_gradients,
    )


@pytest.mark.run
def test_another_id_for_padding_is_a_mere_renaming_of_ids():
    """Where 17 is padding, id 0 is a token like any other."""
    config = VARIANTS["narrow heads"]
    graphdef, params = split_model(config, VOCAB_SIZE)[0], random_params(config)
    swap = np.arange(VOCAB_SIZE)
    swap[[0, 17]] = 17, 0
    batch = Batch(
        np.array([[5, 0, 9, 17], [8, 3, 17, 17]]), np.array([[0, 7, 0, 3], [3, 4, 17, 17]])
    )
    renamed = Batch(swap[batch.source], swap[batch.target])
    total, tokens = jax.jit(make_loss(graphdef, pad_id=17, bos_id=2, smoothing=0.1))(
        params, batch, None
    )
    wanted, _ = jax.jit(make_loss(graphdef, pad_id=0, bos_id=2, smoothing=0.1))(
        {**params, "embedding": params["embedding"][swap]}, renamed, None
    )
    np.testing.assert_allclose(total, wanted, rtol=1e-5)
    assert tokens == 6


@pytest.mark.usefixtures("as_users_have_it")
@pytest.mark.parametrize(
    ("platform", "rows", "length", "columns"),
    [
        (None, 16, 100, 32),  # 512 positions at once
        (None, 16, 20, 20),
        (None, 1000, 20, 1),
        ("cpu", 16, 300, 256),  # 512 positions on each of 8 devices
        ("tpu", 64, 1024, 512),  # 4,096 on each of 8: two chunks
        ("tpu", 64, 1025, 342),  # three chunks, about equally wide
        ("gpu", 8, 100, 100),
    ],
)
def test_a_device_holds_the_logits_of_so_many_positions_at_once(platform, rows, length, columns):
    devices = np.array([SimpleNamespace(platform=platform)])
    mesh = SimpleNamespace(devices=devices, shape={"data": 4, "fsdp": 2, "tensor": 3})
    assert chunk_size(rows, length, mesh if platform else None) == columns
