"""The label-smoothed loss: published numbers, optax, and the chunked form that fuses projection."""

import jax
import jax.numpy as jnp
import numpy as np
import numpy_transformer as reference
import optax
import pytest

from flaxformer_min.loss import projected_cross_entropy, smoothed_cross_entropy

B, T, D, V = 3, 11, 5, 23


@pytest.fixture(scope="module")
def case():
    """States [B, T, D], table [V, D], labels and weights [B, T], with padding of weight 0."""
    rng = np.random.default_rng(5)
    labels = rng.integers(1, V, (B, T)) * (np.arange(T) < np.array([[11], [4], [7]]))
    states, table = rng.standard_normal((B, T, D)), rng.standard_normal((V, D))
    return states, table, labels, (labels > 0).astype(np.float64)


def as_float32(case):
    states, table, labels, weights = case
    return (*(jnp.asarray(x, jnp.float32) for x in (states, table)), jnp.asarray(labels),
            jnp.asarray(weights, jnp.float32))  # fmt: skip


@pytest.mark.parametrize(("smoothing", "wanted"), [(0.4, 6.486866), (0.0, 5.6268)])
def test_joeynmts_case_gives_the_value_of_optax_and_torchs_convention(smoothing, wanted):
    logits = jnp.tile(jnp.log(jnp.array([0.1, 0.1, 0.6, 0.1, 0.1])), (6, 1))
    labels = jnp.array([2, 1, 2, 0, 1, 0])
    total, tokens = smoothed_cross_entropy(logits, labels, (labels != 0) * 1.0, smoothing)
    np.testing.assert_allclose(total, wanted, atol=5e-5 if smoothing == 0 else 2e-6)
    assert tokens == 4


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_value_equals_the_numpy_reference(case, smoothing):
    states, table, labels, weights = case
    logits = states @ table.T
    rows = zip(logits, labels, weights, strict=True)
    wanted = sum(reference.smoothed_loss(*row, smoothing) for row in rows)
    states, table, labels, weights = as_float32(case)
    total, tokens = smoothed_cross_entropy(states @ table.T, labels, weights, smoothing)
    np.testing.assert_allclose(total, wanted, rtol=1e-6)
    assert tokens == 22


def test_value_and_gradients_equal_optax(case):
    states, table, labels, weights = as_float32(case)
    logits = states @ table.T

    def ours(logits):
        return smoothed_cross_entropy(logits, labels, weights, 0.1)[0]

    def theirs(logits):
        soft = optax.smooth_labels(jax.nn.one_hot(labels, V), 0.1)
        return (optax.softmax_cross_entropy(logits, soft) * weights).sum()

    (value, grad), (wanted, wanted_grad) = (jax.value_and_grad(f)(logits) for f in (ours, theirs))
    np.testing.assert_allclose(value, wanted, rtol=1e-6)
    np.testing.assert_allclose(grad, wanted_grad, atol=1e-6)


def test_tokens_of_weight_zero_contribute_nothing(case):
    states, table, labels, weights = as_float32(case)
    logits, real = states @ table.T, weights > 0

    def total(logits, labels):
        return smoothed_cross_entropy(logits, labels, weights, 0.1)[0]

    alone = smoothed_cross_entropy(logits[real], labels[real], weights[real], 0.1)[0]
    changed = jnp.where(real[..., None], logits, 1e30), jnp.where(real, labels, 17)
    np.testing.assert_allclose(total(logits, labels), alone, rtol=1e-6)
    np.testing.assert_allclose(total(*changed), alone, rtol=1e-6)
    grad = np.asarray(jax.grad(total)(*changed))
    assert (grad[~real] == 0).all()
    assert (grad[real] != 0).all()


def test_sums_add_up_over_any_split_of_the_tokens(case):
    # Not means: two halves with 11 + 4 and 7 tokens count token by token.
    states, table, labels, weights = as_float32(case)
    logits = states @ table.T
    whole = smoothed_cross_entropy(logits, labels, weights, 0.1)
    parts = [
        smoothed_cross_entropy(logits[rows], labels[rows], weights[rows], 0.1)
        for rows in (slice(0, 2), slice(2, 3))
    ]
    np.testing.assert_allclose(np.sum(parts, axis=0), whole, rtol=1e-6)
    assert [tokens for _, tokens in parts] == [15, 7]


def test_weights_count_by_their_size(case):
    states, table, labels, weights = as_float32(case)
    logits = states @ table.T
    once = smoothed_cross_entropy(logits, labels, weights, 0.1)
    thrice = smoothed_cross_entropy(logits, labels, 3 * weights, 0.1)
    np.testing.assert_allclose(thrice, 3 * np.array(once), rtol=1e-6)


def test_very_large_logits_stay_finite():
    logits = jnp.array([[1e4, -1e4, 0.0]])
    for label, wanted in ((0, 0.0), (1, 2e4)):
        total, _ = smoothed_cross_entropy(logits, jnp.array([label]), jnp.ones(1), 0.0)
        np.testing.assert_allclose(total, wanted, rtol=1e-6)


def test_bfloat16_logits_are_summed_in_float32(case):
    states, table, labels, weights = as_float32(case)
    logits = (states @ table.T).astype(jnp.bfloat16)
    total, tokens = smoothed_cross_entropy(logits, labels, weights, 0.1)
    wanted, _ = smoothed_cross_entropy(logits.astype(jnp.float32), labels, weights, 0.1)
    assert total.dtype == tokens.dtype == jnp.float32
    assert total == wanted


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
    case = as_float32(case)
    ours = value_and_gradients(projected_cross_entropy, case, chunk)
    for got, wanted in zip(ours, value_and_gradients(whole, case, chunk), strict=True):
        assert got.dtype == jnp.float32
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)


def test_the_chunked_form_equals_the_whole_in_float64(case):
    with jax.enable_x64(True):
        case = tuple(jnp.asarray(x) for x in case)
        ours = value_and_gradients(projected_cross_entropy, case, 4)
        wholes = value_and_gradients(whole, case, 4)
    for got, wanted in zip(ours, wholes, strict=True):
        assert got.dtype == jnp.float64
        np.testing.assert_allclose(got, wanted, rtol=1e-12, atol=1e-12)


def test_the_chunked_form_has_the_same_value_without_gradients(case):
    case = as_float32(case)
    sums = projected_cross_entropy(*case, 0.1, 4)
    np.testing.assert_allclose(sums, whole(*case, 0.1, 4), rtol=1e-6)


def test_the_chunked_form_never_holds_all_logits(case):
    case, chunk = as_float32(case), 4

    def total(states, table):
        return projected_cross_entropy(states, table, *case[2:], 0.1, chunk)[0]

    for function in (total, jax.grad(total, (0, 1))):
        assert largest_array(jax.make_jaxpr(function)(*case[:2]).jaxpr) <= B * chunk * V
    with_all = jax.make_jaxpr(lambda *x: whole(*x, *case[2:], 0.1, chunk)[0])(*case[:2])
    assert largest_array(with_all.jaxpr) == B * T * V


def equations(jaxpr):
    """Every equation of a jaxpr, those of inner ones (loops, calls) included."""
    for equation in jaxpr.eqns:
        yield equation
        for part in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "eqns")):
            if hasattr(part, "eqns"):
                yield from equations(part)


def largest_array(jaxpr):
    """The most entries of any array made in a jaxpr."""
    return max(var.aval.size for equation in equations(jaxpr) for var in equation.outvars)


def test_bfloat16_states_give_a_float32_sum_and_float32_table_gradients(case):
    states, table, *rest = as_float32(case)
    low = (states.astype(jnp.bfloat16), table, *rest)
    total, _, states_grad, table_grad = value_and_gradients(projected_cross_entropy, low, 4)
    wanted = value_and_gradients(whole, (states, table, *rest), 4)
    assert total.dtype == table_grad.dtype == jnp.float32
    assert states_grad.dtype == jnp.bfloat16
    np.testing.assert_allclose(total, wanted[0], rtol=1e-2)
    np.testing.assert_allclose(table_grad, wanted[3], atol=2e-2 * np.abs(wanted[3]).max())
