"""What the compiled functions make of padded ids, piece by piece."""

import jax
import jax.numpy as jnp
import numpy as np

from flaxformer_min.decoding.options import Options
from flaxformer_min.decoding.programs import (
    Ready,
    _keys,
    _limits,
    _rank_draws,
    _repeat,
    encode_sources,
)
from flaxformer_min.decoding.search import Hypotheses
from flaxformer_min.decoding.sentences import PaddedSentences, Sentence, pad_sentences

DRAWS = jnp.array([[3, 0], [5, 0]], jnp.uint32)


def padded(source, prefixes=None):
    sides = (None if ids is None else jnp.array(ids) for ids in (source, prefixes))
    return PaddedSentences(*sides, DRAWS)


def test_the_sources_mask_hides_the_padding_of_the_tokenizer_and_not_id_0():
    ready = encode_sources([], 17, padded([[0, 4, 17], [5, 17, 17]]))
    assert ready.mask.tolist() == [[[[True, True, False]]], [[[True, False, False]]]]


def test_a_hypothesis_may_be_as_long_as_its_source_or_its_prefix_with_eos_and_the_offset():
    def limits(offset, longest, prefixes):
        source = [[0, 4, 9, 17, 17], [17] * 5]
        options = Options(max_length_offset=offset)
        return _limits(padded(source, prefixes), options, longest, 17).tolist()

    assert limits(0, 23, None) == [3, 0]  # what is all padding is not searched
    assert limits(5, 23, None) == [8, 0]
    assert limits(5, 7, None) == [7, 0]
    long, short = [[0, 4, 9, 8, 17], [17] * 5], [[4, 17, 17, 17, 17], [17] * 5]
    assert limits(0, 23, long) == [5, 0]  # room for EOS after the prefix
    assert limits(2, 23, long) == [7, 0]
    assert limits(2, 23, short) == [5, 0]


def test_every_draw_of_a_sentence_has_a_number_of_its_own():
    repeated = _repeat(padded([[4, 9], [5, 17]], [[7], [17]]), 3)
    assert repeated.draws.tolist() == [[3, 0], [3, 1], [3, 2], [5, 0], [5, 1], [5, 2]]
    assert repeated.source.tolist() == [[4, 9]] * 3 + [[5, 17]] * 3
    assert repeated.prefixes.tolist() == [[7]] * 3 + [[17]] * 3


def test_the_draws_of_a_sentence_come_finished_ones_first_and_then_by_score():
    scores = np.array([-5.0, -1.0, -3.0, -2.0, -9.0, -4.0], np.float32)
    finished = np.array([True, False, True, True, True, False])
    tokens = np.arange(6)[:, None, None]
    found = Hypotheses(
        tokens=jnp.asarray(tokens),
        scores=jnp.asarray(scores[:, None]),
        lengths=jnp.asarray(tokens[..., 0]),
        log_probs=jnp.asarray(scores[:, None]),
        finished=jnp.asarray(finished[:, None]),
    )
    ranked = _rank_draws(found, 3)
    assert ranked.tokens[..., 0].tolist() == [[2, 0, 1], [3, 4, 5]]
    assert ranked.scores.tolist() == [[-3.0, -5.0, -1.0], [-2.0, -9.0, -4.0]]
    assert ranked.finished.tolist() == [[True, True, False], [True, True, False]]


def test_seed_line_and_number_each_decide_the_key_of_a_draw():
    def keys(seed, draws):
        sentences = PaddedSentences(jnp.ones((len(draws), 2), int), None, jnp.array(draws, "u4"))
        ready = Ready(sentences, jnp.ones((len(draws), 1, 1, 2), bool), [])
        return [tuple(key) for key in jax.random.key_data(_keys(seed, ready)).tolist()]

    draws = [[3, 0], [3, 1], [5, 0], [5, 1], [2**32 - 1, 0]]
    assert len({*keys(7, draws), *keys(8, draws)}) == 10
    assert keys(7, draws[::-1]) == keys(7, draws)[::-1]


def test_lines_of_other_ids_have_other_checksums_and_equal_ones_the_same():
    sources = [[4, 9, 3], [9, 4, 3], [260, 9, 3], [4, 9, 3]]
    sentences = [Sentence(place, ids, []) for place, ids in enumerate(sources)]
    narrow, wide = (pad_sentences(sentences, w, 0, with_prefixes=False).draws for w in (3, 7))
    assert len(set(np.asarray(narrow)[:, 0].tolist())) == 3
    assert narrow[0].tolist() == narrow[3].tolist() and narrow[:, 1].tolist() == [0] * 4
    np.testing.assert_array_equal(narrow, wide)
