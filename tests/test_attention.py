"""Scaled dot-product and multi-head attention: values worked out by hand, the reference, claims.

Sizes are distinct primes: B 2, H 3, T 5, K 7, S 11, U 13.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import numpy_transformer as reference
import pytest
from flax import nnx
from jaxtyping import TypeCheckError
from tiny_model import (
    CONFIG,
    SOURCE,
    TARGET_IN,
    build,
    compiled_forward,
    random_params,
    silenced,
)

from flaxformer_min.model.attention import attend, cudnn_attention, scaled_dot_product_attention
from flaxformer_min.model.cached import MaskedBlock, attend_blocks
from flaxformer_min.model.dropout import dropout
from flaxformer_min.model.layers import MultiHeadAttention
from flaxformer_min.model.masks import padding_mask

B, H, T, K, S, U = 2, 3, 5, 7, 11, 13
ALL = jnp.ones((1, 1, 1, S), bool)

attention = jax.jit(scaled_dot_product_attention, static_argnames="return_weights")


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


@pytest.fixture(scope="module")
def inputs():
    return normal(1, B, H, T, K), normal(2, B, H, S, K), normal(3, B, H, S, U)


@pytest.fixture(scope="module")
def mask():
    """A random mask in which query 2 of the first row has no allowed key."""
    allowed = np.random.default_rng(4).random((B, 1, T, S)) < 0.6
    allowed[0, 0, 2] = False
    return jnp.asarray(allowed)


def weights_of(query, key, mask, value=None):
    value = jnp.zeros((*key.shape[:3], 1)) if value is None else value
    return attention(query, key, value, mask, return_weights=True)[1]


def in_blocks(key, value, mask, sizes, needed):
    """Keys and values cut into blocks of these sizes."""
    blocks, first = [], 0
    for size, need in zip(sizes, needed, strict=True):
        here = slice(first, first + size)
        keys = key[:, :, here].swapaxes(2, 3)
        blocks.append(MaskedBlock(keys, value[:, :, here], mask[..., here], jnp.array(need)))
        first += size
    return blocks


# Values


def test_a_row_worked_out_by_hand():
    # Scores 2 log w and sqrt(d_k) = 2 give the weights .4 .1 .5; d_v = 3 has no part in it.
    query = jnp.array([[[[2.0, 0.0, 0.0, 0.0]]]])
    key = jnp.zeros((1, 1, 3, 4)).at[0, 0, :, 0].set(jnp.log(jnp.array([0.4, 0.1, 0.5])))
    value = jnp.array([[[[1.0, 0.0, 10.0], [0.0, 1.0, 20.0], [0.0, 0.0, 30.0]]]])
    output, weights = attention(
        query, key, value, jnp.ones((1, 1, 1, 3), bool), return_weights=True
    )
    np.testing.assert_allclose(weights[0, 0, 0], [0.4, 0.1, 0.5], rtol=1e-6)
    np.testing.assert_allclose(output[0, 0, 0], [0.4, 0.1, 21.0], rtol=1e-6)


@pytest.mark.run
def test_keys_in_blocks_give_what_all_keys_at_once_give(inputs, mask):
    query, key, value = inputs
    wanted = attention(query, 3 * key, value, mask)  # the largest score may be in any block
    found = attend_blocks(query, in_blocks(3 * key, value, mask, (5, 4, 2), [True] * 3))
    np.testing.assert_allclose(found, wanted, atol=1e-6)
    assert not np.any(found[0, :, 2])  # no allowed key


@pytest.mark.run
def test_a_block_that_is_not_needed_is_not_read_and_reading_it_changes_no_bit(inputs, mask):
    query, key, value = inputs
    mask = mask.at[..., 5:].set(False)
    without = attend_blocks(query, in_blocks(key, value, mask, (5, 6), [True, False]))
    np.testing.assert_array_equal(
        attend_blocks(query, in_blocks(key, value, mask, (5, 6), [True, True])), without
    )
    key, value = key.at[:, :, 5:].set(jnp.nan), value.at[:, :, 5:].set(jnp.nan)
    np.testing.assert_array_equal(
        attend_blocks(query, in_blocks(key, value, mask, (5, 6), [True, False])), without
    )
    assert np.any(without)


def test_output_equals_the_numpy_reference(inputs, mask):
    output, weights = attention(*inputs, mask, return_weights=True)
    assert output.shape == (B, H, T, U)
    assert weights.shape == (B, H, T, S)
    for b, h in np.ndindex(B, H):
        query, key, value = (np.asarray(x[b, h], np.float64) for x in inputs)
        wanted = reference.attention_weights(query, key, np.asarray(mask[b, 0]))
        np.testing.assert_allclose(weights[b, h], wanted, atol=1e-6)
        np.testing.assert_allclose(output[b, h], wanted @ value, atol=1e-6)


def test_weights_are_optional(inputs, mask):
    output = attention(*inputs, mask)
    np.testing.assert_array_equal(output, attention(*inputs, mask, return_weights=True)[0])


def test_weights_are_a_distribution_over_the_allowed_keys(inputs, mask):
    weights = np.asarray(weights_of(*inputs[:2], mask))
    allowed = np.broadcast_to(mask, weights.shape)
    assert (weights[~allowed] == 0).all()
    assert (weights[allowed] > 0).all()
    np.testing.assert_allclose(weights.sum(-1), allowed.any(-1), atol=1e-6)


def test_a_query_without_an_allowed_key_gets_zero_and_finite_gradients(inputs, mask):
    output, weights = attention(*inputs, mask, return_weights=True)
    assert (np.asarray(output[0, :, 2]) == 0).all()
    assert (np.asarray(weights[0, :, 2]) == 0).all()
    assert (np.abs(output[0, :, 1]) > 0).all()
    grads = jax.grad(lambda *x: (attention(*x, mask) ** 2).sum(), (0, 1, 2))(*inputs)
    assert all(np.isfinite(grad).all() for grad in grads)
    assert (np.asarray(grads[0][0, :, 2]) == 0).all()


def test_what_a_masked_key_and_value_hold_changes_no_bit(inputs):
    query, key, value = inputs
    mask = jnp.ones((1, 1, T, S), bool).at[..., 4].set(False)
    changed = key.at[:, :, 4].set(1e30), value.at[:, :, 4].set(-1e30)
    np.testing.assert_array_equal(
        attention(query, *changed, mask), attention(query, key, value, mask)
    )


def test_very_large_scores_do_not_overflow(inputs):
    query, key, _ = inputs
    weights = np.asarray(weights_of(1e15 * query, 1e15 * key, ALL))
    assert np.isfinite(weights).all()
    np.testing.assert_allclose(weights.max(-1), 1.0)


@pytest.mark.parametrize("shape", [(B, 1, 1, S), (1, 1, T, S), (B, 1, T, S), (B, H, T, S)])
def test_masks_broadcast_over_rows_heads_and_queries(inputs, shape):
    mask = jnp.asarray(np.random.default_rng(6).random(shape) < 0.7)
    np.testing.assert_array_equal(
        attention(*inputs, mask), attention(*inputs, jnp.broadcast_to(mask, (B, H, T, S)))
    )


@pytest.mark.parametrize(("axis", "which"), [(3, "key"), (2, "value")])
def test_queries_and_keys_share_a_width_and_keys_and_values_a_length(inputs, axis, which):
    query, key, value = inputs
    cut = {"key": key, "value": value}
    cut[which] = jax.lax.slice_in_dim(cut[which], 1, None, axis=axis)
    with pytest.raises(TypeCheckError, match=which):
        attention(query, cut["key"], cut["value"], ALL)


# Properties


def test_keys_and_values_are_a_set(inputs):
    query, key, value = inputs
    order = np.random.default_rng(0).permutation(S)
    np.testing.assert_allclose(
        attention(query, key[:, :, order], value[:, :, order], ALL),
        attention(query, key, value, ALL),
        atol=1e-6,
    )


def test_heads_do_not_see_each_other(inputs):
    together = attention(*inputs, ALL)
    for h in range(H):
        alone = attention(*(x[:, h : h + 1] for x in inputs), ALL)
        np.testing.assert_allclose(together[:, h : h + 1], alone, atol=1e-6)


def test_raw_scores_have_variance_d_k_and_scaled_ones_variance_1():
    d_k, keys = 211, 401
    query, key = normal(1, 1, 1, 307, d_k), normal(2, 1, 1, keys, d_k)
    np.testing.assert_allclose((query[0, 0] @ key[0, 0].T).var(), d_k, rtol=0.05)
    # A row's log-weights are its scaled scores up to a constant.
    scores = jnp.log(weights_of(query, key, jnp.ones((1, 1, 1, keys), bool)))
    np.testing.assert_allclose(scores.var(axis=-1).mean(), 1.0, rtol=0.05)


def test_unscaled_scores_would_pick_one_key_and_lose_the_gradient():
    d_k, keys = 512, 41
    query, key = normal(1, 1, 1, 37, d_k), normal(2, 1, 1, keys, d_k)
    mask = jnp.ones((1, 1, 1, keys), bool)
    soft, hard = (np.asarray(weights_of(q, key, mask)) for q in (query, query * d_k**0.5))
    assert soft.max(-1).mean() < 0.3
    assert hard.max(-1).mean() > 0.9
    slope = [(w * (1 - w)).sum(-1).mean() for w in (soft, hard)]  # d weight / d own score
    assert slope[1] < 0.15 * slope[0]


def test_tied_query_and_key_projections_make_scores_symmetric():
    x, w_query, w_key = normal(1, 1, 1, S, 26), normal(2, 26, K) / 5, normal(3, 26, K) / 5

    def scores(query, key):
        # log w_ij - log w_ii is s_ij - s_ii, and s_ii is known.
        logs = np.log(np.asarray(weights_of(query, key, ALL)))[0, 0]
        own = np.asarray((query * key).sum(-1))[0, 0] / K**0.5
        return logs - np.diagonal(logs)[:, None] + own[:, None]

    tied = scores(x @ w_query, x @ w_query)
    np.testing.assert_allclose(tied, tied.T, atol=1e-4)
    free = scores(x @ w_query, x @ w_key)
    assert np.abs(free - free.T).max() > 1.0


# Precision and dropout


def test_bfloat16_inputs_get_a_float32_softmax_and_a_bfloat16_output(inputs, mask):
    low = [x.astype(jnp.bfloat16) for x in inputs]
    output, weights = attention(*low, mask, return_weights=True)
    assert output.dtype == jnp.bfloat16
    assert weights.dtype == jnp.float32
    exact = attention(*(x.astype(jnp.float32) for x in low), mask, return_weights=True)
    np.testing.assert_allclose(weights, exact[1], atol=1e-6)
    np.testing.assert_allclose(output.astype(jnp.float32), exact[0], atol=2e-2)


@pytest.mark.run
def test_blocks_in_bfloat16_are_summed_in_float32():
    """The first half of 1,022 values is 1: a sum in bfloat16 would lose units from 256 on."""
    ones = jnp.ones((1, 1, 1022, K), jnp.bfloat16)
    value = (jnp.arange(1022) < 511)[None, None, :, None].astype(jnp.bfloat16)
    allowed = jnp.ones((1, 1, 1, 1022), bool)
    blocks = in_blocks(ones, value, allowed, [73] * 14, [True] * 14)
    found = attend_blocks(ones[:, :, :1], blocks)
    assert found.dtype == jnp.bfloat16
    np.testing.assert_array_equal(found.astype(jnp.float32), [[[[0.5]]]])


@pytest.mark.run
def test_float64_inputs_stay_float64(inputs, mask):
    with jax.enable_x64(True):
        wide = [jnp.asarray(np.asarray(x), jnp.float64) for x in inputs]
        output, weights = attention(*wide, mask, return_weights=True)
        assert output.dtype == weights.dtype == jnp.float64
        blocks = in_blocks(*wide[1:], mask, (5, 6), [True, True])
        np.testing.assert_allclose(attend_blocks(wide[0], blocks), output, atol=1e-14)
        query, key, value = (np.asarray(x[1, 2]) for x in wide)
    wanted = reference.attention_weights(query, key, np.asarray(mask[1, 0])) @ value
    np.testing.assert_allclose(output[1, 2], wanted, atol=1e-14)


@pytest.mark.run
def test_dropout_acts_on_the_weights_that_are_read_and_not_on_those_returned():
    query, key = normal(1, 2, 3, 41, K), normal(2, 2, 3, 43, K)
    identity = jnp.broadcast_to(jnp.eye(43), (2, 3, 43, 43))  # the output is what was read
    mask = jnp.ones((1, 1, 1, 43), bool)
    drop = functools.partial(dropout, rate=0.3, key=jax.random.key(0))
    *_, weights, read = jax.jit(attend, static_argnums=4)(query, key, identity, mask, drop)
    np.testing.assert_array_equal(weights, weights_of(query, key, mask))
    kept = np.asarray(read) != 0
    np.testing.assert_allclose(kept.mean(), 0.7, atol=0.02)
    np.testing.assert_allclose(read[kept], weights[kept] / 0.7, rtol=1e-5)
    assert (kept[0] != kept[1]).any()  # rows of the batch and heads each draw their own
    assert (kept[:, 0] != kept[:, 1]).any()


# Multi-head attention


@pytest.mark.run
def test_multi_head_attention_is_its_heads_concatenated_and_projected():
    params = random_params()["decoder"][1]["cross_attention"]
    layer = build(CONFIG, random_params()).decoder[1].cross_attention
    x, memory, mask = normal(1, 5, 13, 26), normal(2, 5, 11, 26), padding_mask(SOURCE)
    heads = []
    for h in range(CONFIG.num_heads):
        match, read = (slice(h * width, (h + 1) * width) for width in (CONFIG.d_k, CONFIG.d_v))
        projected = (
            x @ params["query"][:, match],
            memory @ params["key"][:, match],
            memory @ params["value"][:, read],
        )
        heads.append(attention(*(p[:, None] for p in projected), mask)[:, 0])
    wanted = jnp.concatenate(heads, axis=-1) @ params["output"]
    output = layer(x, layer.keys_values(memory), mask)
    assert output.shape == (5, 13, 26)
    np.testing.assert_allclose(output, wanted, atol=1e-5)


def test_with_attention_silenced_a_token_moves_only_its_own_row():
    params, changed = random_params(), SOURCE.at[0, 3].set(SOURCE[0, 3] % 30 + 1)

    def moved(params):
        apart = [compiled_forward(CONFIG, params, ids, TARGET_IN)[0] for ids in (changed, SOURCE)]
        return (np.abs(apart[0] - apart[1]).max(-1) > 0).astype(int)

    only_row_3 = np.zeros((5, 11), int)
    only_row_3[0, 3] = 1
    np.testing.assert_array_equal(moved(silenced(params, "output")), only_row_3)
    np.testing.assert_array_equal(moved(params)[0], np.ones(11))  # its neighbours hear of it
    np.testing.assert_array_equal(moved(params)[1:], np.zeros((4, 11)))


def test_with_attention_silenced_the_decoder_forgets_source_and_prefix():
    params = silenced(random_params(), "output")
    logits = compiled_forward(CONFIG, params, SOURCE, TARGET_IN)[1]
    changed = TARGET_IN.at[:, 3].set(TARGET_IN[:, 3] % 30 + 1)
    other = compiled_forward(CONFIG, params, SOURCE[::-1], changed)[1]
    moved = (np.abs(other - logits).max(-1) > 0).astype(int)
    np.testing.assert_array_equal(moved, np.tile(np.arange(13) == 3, (5, 1)))


@pytest.mark.parametrize("queries", [1, 5])  # in the mask: the source's has one for all
def test_the_fused_kernel_gets_the_same_mask_and_scale_and_gives_the_same_axes_back(
    monkeypatch, queries
):
    """Here XLA stands in for cuDNN, which needs a GPU; only the kernel's name is changed."""
    original = jax.nn.dot_product_attention

    def on_any_machine(*arrays, implementation, **options):
        assert implementation == "cudnn"
        lengths = [array.shape[1] for array in arrays]
        assert lengths == [6, 12, 12] and options["mask"].shape == (3, 1, 6, 12)
        return original(*arrays, implementation="xla", **options)

    monkeypatch.setattr(jax.nn, "dot_product_attention", on_any_machine)
    random = np.random.default_rng(3)
    query, key, value = (
        jnp.asarray(random.standard_normal((3, 2, length, 7)), jnp.float32)
        for length in (5, 11, 11)
    )
    mask = jnp.asarray(random.random((3, 1, queries, 11)) < 0.5).at[..., 4].set(True)
    found = cudnn_attention(query, key, value, mask)
    expected = scaled_dot_product_attention(query, key, value, mask)
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_evaluation_runs_without_the_fused_kernel_which_needs_a_gpu():
    x = jax.random.normal(jax.random.key(5), (2, 5, CONFIG.d_model))
    outputs = []
    for kind in ("exact", "cudnn"):
        config = dataclasses.replace(CONFIG, attention=kind)
        attention = MultiHeadAttention(config, rngs=nnx.Rngs(3))
        outputs.append(attention(x, attention.keys_values(x), jnp.ones((1, 1, 1, 5), bool)))
    np.testing.assert_array_equal(*outputs)


@pytest.mark.run
def test_the_weights_that_are_shown_are_those_before_dropout():
    config = dataclasses.replace(CONFIG, attention_dropout=0.5)

    @jax.jit
    def attended(key):
        attention, seen = MultiHeadAttention(config, rngs=nnx.Rngs(3)), {}
        x = jax.random.normal(jax.random.key(5), (2, 5, config.d_model))
        output = attention(x, attention.keys_values(x), jnp.ones((1, 1, 1, 5), bool), key, seen)
        return seen["weights"], output

    shown, whole = attended(None)
    shown_in_training, dropped = attended(jax.random.key(7))
    np.testing.assert_allclose(shown_in_training, shown, rtol=1e-6)
    assert np.abs(dropped - whole).max() > 0.01
