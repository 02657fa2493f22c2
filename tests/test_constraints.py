"""Truth tables of what a hypothesis may go on with."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from flaxformer_min.decoding.constraints import (
    all_but,
    forced_prefix,
    long_enough,
    no_repeated_ngram,
)

PAD, BOS, EOS = 0, 1, 2


def test_all_but_some_are_allowed():
    assert np.asarray(all_but((0, 3), 5)).astype(int).tolist() == [[[0, 1, 1, 0, 1]]]
    assert np.asarray(all_but((), 2)).all()


def test_eos_is_allowed_as_the_last_of_enough_tokens():
    """index tokens are there already, so EOS would be number index + 1."""
    allowed = np.asarray(long_enough(jnp.arange(5), 3, EOS, 4))
    assert allowed[:, 0, EOS].tolist() == [False, False, True, True, True]
    assert np.delete(allowed, EOS, axis=-1).all()


def repeats(hypothesis: list[int], size: int, vocab: int = 9) -> set[int]:
    """What would make an n-gram that is there already, by looking."""
    grams = {tuple(hypothesis[i : i + size]) for i in range(len(hypothesis) - size + 1)}
    return {
        v for v in range(vocab) if (*hypothesis, v)[-size:] in grams and len(hypothesis) >= size
    }


@pytest.mark.run
@pytest.mark.parametrize("size", [1, 2, 3, 4, 20])
def test_no_ngram_comes_twice(size):
    hypotheses = [
        [[3, 4, 3, 4, 3], [5, 5, 5, 5, 5], [3, 4, 5, 3, 4]],
        [[6, 3, 6, 3, 3], [8, 7, 6, 8, 7], [3, 4, 5, 6, 7]],
    ]
    for emitted in itertools.product(range(6), range(6)):
        tokens = np.full((2, 3, 8), PAD)
        tokens[:, :, 0] = BOS
        for b, m in np.ndindex(2, 3):
            tokens[b, m, 1 : emitted[b] + 1] = hypotheses[b][m][: emitted[b]]
        allowed = np.asarray(no_repeated_ngram(jnp.array(tokens), jnp.array(emitted), size, 9))
        for b, m in np.ndindex(2, 3):
            forbidden = set(np.flatnonzero(~allowed[b, m]).tolist())
            assert forbidden == repeats(hypotheses[b][m][: emitted[b]], size)


def test_some_ngrams_of_the_table_are_forbidden():
    assert repeats([3, 4, 5, 3, 4], 3) == {5}
    assert repeats([5, 5, 5], 2) == {5}
    assert repeats([3, 4], 1) == {3, 4}


def test_a_prefix_is_all_that_is_allowed_until_its_end():
    prefixes = jnp.array([[4, 3, PAD], [PAD, PAD, PAD], [1, 1, 1]])
    otherwise = jnp.array([[[False, True, True, False, False]]])
    expected = [[{4}, {1, 2}, {1}], [{3}, {1, 2}, {1}], [{1, 2}, {1, 2}, {1}], [{1, 2}] * 3]
    for index in itertools.product(range(4), repeat=3):
        allowed = np.asarray(forced_prefix(otherwise, prefixes, jnp.array(index), PAD))
        sets = [expected[i][row] for row, i in enumerate(index)]
        assert [set(np.flatnonzero(row).tolist()) for row in allowed[:, 0]] == sets
