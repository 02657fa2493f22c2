"""Heads in pairs, as TPUs multiply them, beside heads one by one."""

import functools

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from trees import assert_close

from flaxformer_min.model.attention import scores_of_keys, sums_of_values
from flaxformer_min.model.head_pairs import _paired_scores, _paired_sums, training_products

B, H, T, S, K = 3, 6, 5, 7, 64
FLOAT32 = jnp.dtype(jnp.float32)
training_scores, training_sums = training_products(scores_of_keys, sums_of_values)


def draw(*shape, dtype=jnp.float32):
    rng = np.random.default_rng(sum(shape))
    return jnp.asarray(rng.standard_normal(shape), dtype)


def with_gradients(function, x, y, dtype):
    """The product, and its gradient by both factors for a drawn cotangent."""
    product, pull_back = jax.vjp(lambda x, y: function(x, y, dtype), x, y)
    return product, pull_back(draw(*product.shape).astype(product.dtype))


QUERY, KEY, WEIGHTS = draw(B, H, T, K), draw(B, H, S, K), draw(B, H, T, S)


def test_scores_and_their_gradients_are_those_of_heads_one_by_one():
    plain, paired = (
        with_gradients(function, QUERY, KEY, FLOAT32)
        for function in (scores_of_keys, functools.partial(_paired_scores, scores_of_keys))
    )
    assert_close(paired, plain, rtol=1e-5, atol=1e-5)


def test_contexts_and_their_gradients_are_those_of_heads_one_by_one():
    plain, paired = (
        with_gradients(function, WEIGHTS, KEY, FLOAT32)
        for function in (sums_of_values, functools.partial(_paired_sums, sums_of_values))
    )
    assert_close(paired, plain, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("heads", "width"), [(5, 64), (6, 32), (2, 128)])
def test_heads_that_fill_no_register_in_pairs_stay_single(heads, width):
    query, key, weights = draw(B, heads, T, width), draw(B, heads, S, width), draw(B, heads, T, S)
    scores = _paired_scores(scores_of_keys, query, key, FLOAT32)
    np.testing.assert_array_equal(scores, scores_of_keys(query, key, FLOAT32))
    context = _paired_sums(sums_of_values, weights, key, FLOAT32)
    np.testing.assert_array_equal(context, sums_of_values(weights, key, FLOAT32))


@pytest.mark.parametrize(("platform", "in_pairs"), [("tpu", True), ("cpu", False), ("cuda", False)])
def test_only_tpus_multiply_heads_in_pairs(platform, in_pairs):
    def loss(query, key, value):
        return training_sums(training_scores(query, key, FLOAT32), value, FLOAT32).sum()

    gradient = jax.jit(jax.grad(loss, (0, 1, 2)))
    text = jax.export.export(gradient, platforms=[platform])(QUERY, KEY, KEY).mlir_module()
    products = [line for line in text.splitlines() if "stablehlo.dot_general" in line]
    assert products and all(("x128x" in line) == in_pairs for line in products)


def test_in_bfloat16_scores_are_float32_and_no_product_of_the_gradient_is():
    query, key = QUERY.astype(jnp.bfloat16), KEY.astype(jnp.bfloat16)
    assert training_scores(query, key, FLOAT32).dtype == jnp.float32
    gradient = jax.grad(lambda query, key: training_scores(query, key, FLOAT32).sum(), (0, 1))
    text = jax.jit(gradient).lower(query, key).as_text()
    products = [line for line in text.splitlines() if "stablehlo.dot_general" in line]
    assert products and all("f32" not in line for line in products)
