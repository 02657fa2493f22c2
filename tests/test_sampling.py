"""Sampling: what may be drawn by truth table, how often by counting, and what a draw depends on."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flaxformer_min.decoding.sampling import narrow, sample
from flaxformer_min.decoding.search import Search

ROW = [0.05, 0.4, 0.1, 0.3, 0.15]


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "kept"),
    [
        (1.0, None, None, {0, 1, 2, 3, 4}),
        (1.0, 1, None, {1}),
        (1.0, 3, None, {1, 3, 4}),
        (1.0, 99, None, {0, 1, 2, 3, 4}),
        (1.0, None, 0.39, {1}),
        (1.0, None, 0.41, {1, 3}),
        (1.0, None, 0.71, {1, 3, 4}),
        (1.0, None, 1.0, {0, 1, 2, 3, 4}),
        (1.0, 2, 0.56, {1}),  # 0.4 of the 0.7 that top_k leaves are 0.571
        (1.0, 2, 0.58, {1, 3}),
        (0.5, None, 0.54, {1}),  # squared: 0.16 of 0.285 are 0.561
        (0.5, None, 0.57, {1, 3}),
        (2.0, None, 0.55, {1, 3}),
    ],
)
def test_what_may_be_drawn(temperature, top_k, top_p, kept):
    log_probs = jnp.log(jnp.array([ROW]))
    found = np.asarray(narrow(log_probs, temperature, top_k, top_p))[0]
    assert set(np.flatnonzero(found > -np.inf).tolist()) == kept
    expected = np.asarray(log_probs)[0] / temperature
    np.testing.assert_allclose(found[list(kept)], expected[list(kept)], rtol=1e-6)


def test_rows_are_narrowed_each_by_itself_and_what_is_forbidden_stays_so():
    log_probs = jnp.log(jnp.array([ROW, ROW[::-1], [0.0, 0.0, 0.9, 0.0, 0.1]]))
    found = np.asarray(narrow(log_probs, 1.0, 3, 0.99)) > -np.inf
    assert found.astype(int).tolist() == [[0, 1, 0, 1, 1], [1, 1, 0, 1, 0], [0, 0, 1, 0, 1]]


def draw_translations(keys, probabilities=ROW, length=3, rows=None, **options):
    """Every step has the same probabilities; token 0 is EOS."""
    row = jnp.log(jnp.array(probabilities))

    def step_fn(tokens, cache, index, keys):
        return jnp.broadcast_to(row, (*tokens.shape, len(probabilities))), cache

    limits = jnp.full(len(keys), length)

    search = Search(bos_id=7, eos_id=0, pad_id=8, length=length, rows=rows)
    draw_from = functools.partial(narrow, **options)
    return jax.device_get(sample(step_fn, {}, keys, limits, search, lambda keys: keys, draw_from))


@pytest.mark.run
def test_tokens_come_as_often_as_they_are_likely_and_scores_are_the_model_s():
    keys = jax.random.split(jax.random.key(3), 4001)
    for options, expected in (
        ({}, np.array(ROW)),
        ({"temperature": 0.5}, np.array(ROW) ** 2 / np.sum(np.array(ROW) ** 2)),
        ({"top_k": 2}, np.array([0, 4, 0, 3, 0]) / 7),
    ):
        found = draw_translations(keys, **options)
        first = np.bincount(found.tokens[:, 0, 0], minlength=5) / len(keys)
        np.testing.assert_allclose(first, expected, atol=0.03)  # four standard deviations
        tokens = [found.tokens[n, 0, : found.lengths[n, 0]] for n in range(len(keys))]
        log_probs = [np.log(np.array(ROW)[ids]).sum() for ids in tokens]
        np.testing.assert_allclose(found.log_probs[:, 0], log_probs, rtol=1e-5)
        assert (found.finished[:, 0] == [ids[-1] == 0 for ids in tokens]).all()


@pytest.mark.run
def test_draws_are_made_in_float64_where_jax_is():
    with jax.enable_x64(True):
        found = draw_translations(jax.random.split(jax.random.key(7), 3))
    assert found.scores.dtype == np.float64
    assert found.tokens.dtype == np.int32


@pytest.mark.run
def test_a_draw_depends_on_its_own_key_alone_and_changes_from_step_to_step():
    keys = jax.random.split(jax.random.key(5), 11)
    together = draw_translations(keys, length=9)
    backwards = draw_translations(keys[::-1], length=9)
    np.testing.assert_array_equal(together.tokens, backwards.tokens[::-1])
    np.testing.assert_array_equal(
        together.tokens[4:5], draw_translations(keys[4:5], length=9).tokens
    )
    np.testing.assert_array_equal(together.tokens, draw_translations(keys, length=9, rows=1).tokens)
    assert len({tuple(row) for row in together.tokens[:, 0].tolist()}) > 5
    assert max(len(set(row)) for row in together.tokens[:, 0].tolist()) > 2
