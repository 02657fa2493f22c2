"""Search against published tables, exhaustive search and a separate NumPy beam search."""

import functools
import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from trees import assert_same_bits

from flaxformer_min.decoding.constraints import all_but
from flaxformer_min.decoding.search import (
    Hypotheses,
    Search,
    beam_search,
    greedy_search,
    length_penalty,
    top_k,
)

NONE = -np.inf


def penalty(length: int, alpha: float) -> float:
    return ((5 + length) / 6) ** alpha


def ids(found: Hypotheses, sentence: int, rank: int) -> list[int]:
    length = np.asarray(found.lengths)[sentence, rank]
    return np.asarray(found.tokens)[sentence, rank, :length].tolist()


# --- Tables of tensor2tensor: the row of probabilities belongs to (step, rank of the beam). -------

G = [[[0.7, 0.3]], [[0.4, 0.6]], [[0.5, 0.5]]]
A = [
    [[0.1, 0.1, 0.8], [0.1, 0.1, 0.8]],
    [[0.4, 0.5, 0.1], [0.2, 0.4, 0.4]],
    [[0.05, 0.9, 0.05], [0.4, 0.4, 0.2]],
]
A2 = [A[0], [[0.3, 0.6, 0.1], [0.2, 0.4, 0.4]], A[2]]
C = [[[0.2, 0.1, 0.7]], [[0.4, 0.1, 0.5]]]


def search_tables(tables: list, beam: int, alpha: float, n_best: int) -> Hypotheses:
    probabilities = jnp.array(tables)  # [B, step, M, V]

    def step_fn(tokens, cache, index, sentences):
        del tokens
        return jnp.log(sentences[jnp.arange(len(index)), index]), cache

    settings = Search(
        bos_id=0,
        eos_id=1,
        pad_id=0,
        length=len(tables[0]),
        beam_size=beam,
        length_penalty_alpha=alpha,
        n_best=n_best,
    )
    search = functools.partial(
        beam_search,
        step_fn,
        sentences=probabilities,
        max_lengths=jnp.full(len(tables), len(tables[0]), jnp.int32),
        search=settings,
    )
    return jax.device_get(jax.jit(search)({}))


@pytest.mark.run
@pytest.mark.parametrize(
    ("tables", "beam", "alpha", "expected"),
    [
        ([G], 1, 0.0, [[([0, 1], -0.867501)]]),
        ([A], 2, 0.0, [[([2, 1], -0.916291)]]),
        ([A], 2, 0.0, [[([2, 1], -0.916291), ([2, 0, 1], -1.244795)]]),
        ([C], 1, 0.0, [[([2, 2], -1.049822)]]),
        ([A], 2, 3.5, [[([2, 0, 1], -0.454791), ([2, 1], -0.534219)]]),
        (
            [A, A2],
            2,
            3.5,
            [
                [([2, 0, 1], -0.454791), ([2, 1], -0.534219)],
                [([2, 1], -0.427921), ([2, 0, 1], -0.559897)],
            ],
        ),
        ([A2], 2, 3.5, [[([2, 1], -0.427921), ([2, 0, 1], -0.559897)]]),
    ],
    ids=["G", "A-stops-early", "A-runs-on", "C-none-finishes", "A-long", "B-both-rows", "B-row-2"],
)
def test_tables_of_tensor2tensor_are_reproduced(tables, beam, alpha, expected):
    found = search_tables(tables, beam, alpha, n_best=len(expected[0]))
    for sentence, hypotheses in enumerate(expected):
        for rank, (tokens, score) in enumerate(hypotheses):
            assert ids(found, sentence, rank) == tokens
            np.testing.assert_allclose(found.scores[sentence, rank], score, atol=1e-6)
            assert found.finished[sentence, rank] == (tokens[-1] == 1)


@pytest.mark.run
def test_a_search_for_one_stops_before_a_search_for_two():
    """Table A: after two steps the best is settled, the second best is not."""
    steps = []
    probabilities = jnp.array(A)

    def step_fn(tokens, cache, index, sentences):
        jax.debug.callback(lambda index: steps.append(int(index)), index[0])
        return jnp.log(probabilities[index]), cache

    counts = []
    for n_best in (1, 2):
        steps.clear()
        search = functools.partial(
            beam_search,
            step_fn,
            sentences=(),
            max_lengths=jnp.array([3]),
            search=Search(
                bos_id=0,
                eos_id=1,
                pad_id=0,
                length=3,
                beam_size=2,
                length_penalty_alpha=0.0,
                n_best=n_best,
            ),
        )
        jax.block_until_ready(jax.jit(search)({}))
        jax.effects_barrier()
        counts.append(len(steps))
    assert counts == [2, 3]


# --- A model by prefix: the cache holds each hypothesis's prefix, so it must follow its parent. ---


@functools.partial(
    jax.jit, static_argnames=("length", "beam", "n_best", "eos", "forbidden", "search", "rows")
)
def search_prefixes(
    log_probs: jax.Array,  # [B, prefixes, V], prefixes numbered by prefix_number
    length: int,
    beam: int,
    alpha: float | jax.Array,
    n_best: int,
    *,
    max_lengths: jax.Array | None = None,
    eos: int = 0,
    forbidden: tuple[int, ...] = (),
    search: Callable[..., Hypotheses] = beam_search,
    rows: int | None = None,  # of all sentences by default
) -> Hypotheses:
    batch, _, vocab = log_probs.shape
    rows = rows or batch

    def step_fn(tokens, prefix, index, log_probs):
        longer = prefix * (vocab + 1) + tokens + 1
        prefix = jnp.where(index[:, None] == 0, 0, longer)
        return jnp.take_along_axis(log_probs, prefix[:, :, None], axis=1), prefix

    if max_lengths is None:
        max_lengths = jnp.full(batch, length, jnp.int32)
    settings = Search(
        bos_id=vocab,
        eos_id=eos,
        pad_id=vocab + 1,
        length=length,
        beam_size=beam,
        n_best=n_best,
        length_penalty_alpha=alpha,
        rows=rows,
        allowed=lambda tokens, index, sentences: all_but(forbidden, vocab),
    )
    return search(step_fn, jnp.zeros((rows, beam), jnp.int32), log_probs, max_lengths, settings)


def prefix_number(prefix: tuple[int, ...], vocab: int) -> int:
    number = 0
    for token in prefix:
        number = number * (vocab + 1) + token + 1
    return number


def random_models(seed: int, models: int, length: int, vocab: int, scale: float) -> np.ndarray:
    rng = np.random.default_rng(seed)
    logits = scale * rng.normal(size=(models, (vocab + 1) ** (length - 1), vocab))
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def exhaustive(model: np.ndarray, length: int, alpha: float) -> list[tuple]:
    """(finished, score, tokens) of everything that EOS (0) or the length ends, best first."""
    vocab = model.shape[-1]
    found = []
    for n in range(1, length + 1):
        for tokens in itertools.product(range(vocab), repeat=n):
            finished = tokens[-1] == 0
            if 0 in tokens[:-1] or (not finished and n < length):
                continue
            total = sum(model[prefix_number(tokens[:i], vocab), tokens[i]] for i in range(n))
            found.append((finished, total / penalty(n, alpha), list(tokens)))
    return sorted(found, key=lambda item: (not item[0], -item[1]))


def reference_beam(model: np.ndarray, length: int, beam: int, alpha: float, n_best: int) -> list:
    """tensor2tensor's search on lists, without any early stop: (score, tokens), best first."""
    vocab = model.shape[-1]
    alive, finished = [(0.0, ())], []
    for n in range(1, length + 1):
        candidates = [
            (total + model[prefix_number(tokens, vocab), token], (*tokens, token))
            for total, tokens in alive
            for token in range(vocab)
        ]
        candidates = sorted(candidates, key=lambda item: -item[0])[: 2 * beam]
        finished += [(t / penalty(n, alpha), h) for t, h in candidates if h[-1] == 0]
        finished = sorted(finished, key=lambda item: -item[0])[:beam]
        alive = [item for item in candidates if item[1][-1] != 0][:beam]
    unfinished = [(total / penalty(length, alpha), tokens) for total, tokens in alive]
    return (finished + unfinished)[:n_best]


def test_fairseq_sentences_are_reproduced_without_penalty():
    """Their EOS finishes only among the best M candidates, ours among the best 2M.

    So in the second sentence w1 EOS, fourth of four at step 2, is found here and not there: it is
    likelier (0.7 x 0.25) than their best, which follows it.
    """
    eos, w1, w2 = 0, 2, 3
    sentences = [
        {
            (): [0, 0, 0.9, 0.1],
            (w1,): [1, 0, 0, 0],
            (w2,): [0, 0, 0.9, 0.1],
            (w2, w1): [0, 0, 0.1, 0.9],
            (w2, w2): [0.6, 0, 0.2, 0.2],
            (w2, w1, w2): [1, 0, 0, 0],
            (w2, w1, w1): [1, 0, 0, 0],
        },
        {
            (): [0, 0, 0.7, 0.3],
            (w1,): [0.25, 0, 0.35, 0.4],
            (w2,): [0, 0, 0.1, 0.9],
            (w1, w2): [0.6, 0, 0.4, 0],
            (w2, w2): [0.01, 0, 0, 0.99],
            (w2, w2, w2): [0.1, 0, 0.5, 0.4],
            (w1, w2, w1): [1, 0, 0, 0],
        },
    ]
    table = np.tile(np.array([1.0, 0, 0, 0]), (2, 5**4, 1))
    for sentence, rows in enumerate(sentences):
        for prefix, row in rows.items():
            table[sentence, prefix_number(prefix, 4)] = row
    found = search_prefixes(jnp.log(jnp.array(table)), 5, 2, 0.0, 2)
    expected = [
        [([w1, eos], -0.105361), ([w2, w1, w2, eos], -2.513306)],
        [([w1, eos], np.log(0.7 * 0.25)), ([w1, w2, eos], -1.783791)],
    ]
    for sentence, rank in itertools.product(range(2), range(2)):
        tokens, score = expected[sentence][rank]
        assert ids(found, sentence, rank) == tokens
        np.testing.assert_allclose(found.scores[sentence, rank], score, atol=1e-6)


@pytest.mark.run
def test_a_wide_beam_finds_what_exhaustive_search_finds_in_its_order():
    """200 random models, every prefix kept; finished and, after them, unfinished hypotheses."""
    length, vocab, n_best = 4, 4, 60  # 40 sequences can finish; 20 of the 81 unfinished follow
    models = random_models(1, 200, length, vocab, scale=1.5)
    log_probs = jnp.array(models, jnp.float32)
    for alpha in (-0.5, 0.0, 0.6, 1.0):
        found = jax.device_get(search_prefixes(log_probs, length, 81, alpha, n_best))
        for i, model in enumerate(models):
            best = exhaustive(model, length, alpha)
            scores = {tuple(tokens): (finished, score) for finished, score, tokens in best}
            expected = [score for _, score, _ in best[:n_best]]
            np.testing.assert_allclose(found.scores[i], expected, atol=1e-5)
            kept = [tuple(ids(found, i, rank)) for rank in range(n_best)]
            assert len(set(kept)) == n_best
            for rank, tokens in enumerate(kept):
                finished, score = scores[tokens]
                assert found.finished[i, rank] == finished
                np.testing.assert_allclose(found.scores[i, rank], score, atol=1e-5)


@pytest.mark.run
@pytest.mark.parametrize("beam", [2, 3, 5])
def test_stopping_early_changes_no_result(beam):
    """A search without any stop rule, on lists, gives the same n best for every n and penalty."""
    length, vocab = 6, 4
    models = random_models(beam, 40, length, vocab, scale=2.0)
    models[:, :, 0] -= np.where(np.arange(40) % 2, 0.0, 2.0)[:, None]  # half of them end late
    log_probs = jnp.array(models, jnp.float32)
    for n_best in (1, beam):
        for alpha in (-2.0, -0.5, 0.0, 0.6, 3.5):
            found = jax.device_get(search_prefixes(log_probs, length, beam, alpha, n_best))
            for i, model in enumerate(models):
                expected = reference_beam(model, length, beam, alpha, n_best)
                np.testing.assert_allclose(found.scores[i], [s for s, _ in expected], atol=1e-5)
                assert [ids(found, i, n) for n in range(n_best)] == [list(t) for _, t in expected]


# --- In few lines ---------------------------------------------------------------------------------


@pytest.mark.run
def test_a_search_needs_ids_and_a_length_and_has_the_beam_and_the_penalty_of_the_paper():
    """Always: EOS (1) with probability 0.4, token 2 with 0.6, so EOS at once is the best."""

    def step_fn(tokens, cache, index, sentences):
        row = jnp.log(jnp.array([0.0, 0.4, 0.6]))
        return jnp.broadcast_to(row, (*tokens.shape, 3)), cache

    search = Search(bos_id=0, eos_id=1, pad_id=0, length=3)
    found = beam_search(step_fn, (), (), jnp.array([3, 2]), search)
    assert (search.beam_size, search.length_penalty_alpha) == (4, 0.6)
    assert found.tokens.tolist() == [[[1, 0, 0]], [[1, 0, 0]]]
    np.testing.assert_allclose(found.scores, np.log(0.4), rtol=1e-6)
    greedy = greedy_search(step_fn, (), (), jnp.array([3, 2]), search)
    assert greedy.tokens.tolist() == [[[2, 2, 2]], [[2, 2, 0]]]
    np.testing.assert_allclose(greedy.scores[0, 0], 3 * np.log(0.6) / (8 / 6) ** 0.6, rtol=1e-6)


def test_more_hypotheses_than_the_beam_are_refused():
    search = Search(bos_id=0, eos_id=1, pad_id=0, length=3, n_best=5)
    with pytest.raises(AssertionError):
        beam_search(lambda *_: None, (), (), jnp.array([3]), search)


# --- Properties -----------------------------------------------------------------------------------


def test_beam_one_is_greedy_and_follows_the_likeliest_token():
    length, vocab = 5, 3
    models = random_models(5, 23, length, vocab, scale=1.0)
    log_probs = jnp.array(models, jnp.float32)
    greedy = search_prefixes(log_probs, length, 1, 0.6, 1, search=greedy_search)
    beam = search_prefixes(log_probs, length, 1, 0.6, 1)
    assert_same_bits(greedy, beam)
    ends = []
    for i, model in enumerate(models):
        chain, total = [], 0.0
        while len(chain) < length and (not chain or chain[-1] != 0):
            row = model[prefix_number(tuple(chain), vocab)]
            total += row.max()
            chain.append(int(row.argmax()))
        ends.append(len(chain))
        assert ids(greedy, i, 0) == chain
        assert greedy.finished[i, 0] == (chain[-1] == 0)
        np.testing.assert_allclose(greedy.log_probs[i, 0], total, atol=1e-5)
        np.testing.assert_allclose(greedy.scores[i, 0], total / penalty(len(chain), 0.6), atol=1e-5)
        assert np.all(np.asarray(greedy.tokens)[i, 0, len(chain) :] == vocab + 1)
    assert len(set(ends)) > 2


@pytest.mark.run
@pytest.mark.parametrize("beam", [1, 3])
def test_a_sentence_gives_the_same_bits_alone_among_neighbours_and_after_others_in_its_row(beam):
    length, vocab, batch = 6, 4, 14
    log_probs = jnp.array(random_models(11, batch, length, vocab, scale=2.0), jnp.float32)
    limits = jnp.array([6, 2, 6, 5, 1, 6, 4, 3, 6, 6, 0, 5, 6, 2])

    def search(which, rows):
        return jax.device_get(
            search_prefixes(
                log_probs[which],
                length,
                beam,
                0.6,
                beam,
                max_lengths=limits[which],
                rows=rows,
            )
        )

    together = search(slice(None), batch)
    assert len(set(together.lengths[:, 0].tolist())) > 3  # rows are free at different steps
    for rows in (1, 2, 7):
        assert_same_bits(search(slice(None), rows), together)
    for i in range(batch):
        alone = search(slice(i, i + 1), 1)
        assert_same_bits(
            jax.tree.map(lambda leaf, i=i: leaf[i], together),
            jax.tree.map(lambda leaf: leaf[0], alone),
        )


@pytest.mark.run
@pytest.mark.parametrize("beam", [1, 2])
def test_every_sentence_keeps_its_own_limit_and_unfinished_ones_are_scored_at_it(beam):
    """Both tokens are equally likely and EOS is not: only the limit ends a sentence."""
    length, limits = 5, np.array([0, 1, 3, 5])
    log_probs = jnp.log(jnp.broadcast_to(jnp.array([0.0, 0.6, 0.4]), (4, 4**4, 3)))
    found = search_prefixes(log_probs, length, beam, 1.0, 1, max_lengths=jnp.array(limits))
    assert found.lengths[:, 0].tolist() == limits.tolist()
    assert not found.finished.any()
    np.testing.assert_allclose(
        found.scores[:, 0], limits * np.log(0.6) / ((5 + limits) / 6), rtol=1e-6
    )
    assert np.all(np.asarray(found.tokens)[:, 0] == np.where(np.arange(5) < limits[:, None], 1, 4))


def test_an_unfinished_hypothesis_ranks_after_a_less_likely_finished_one():
    """EOS has probability 0.1 at the first step only; then 0.9 goes on for ever."""
    table = np.tile(np.array([0.0, 1.0]), (1, 3**2, 1))
    table[0, 0] = [0.1, 0.9]
    found = search_prefixes(jnp.log(jnp.array(table)), 3, 2, 0.0, 2)
    assert [ids(found, 0, 0), ids(found, 0, 1)] == [[0], [1, 1, 1]]
    assert found.finished[0].tolist() == [True, False]
    np.testing.assert_allclose(found.scores[0], np.log([0.1, 0.9]), rtol=1e-6)


@pytest.mark.run
@pytest.mark.parametrize("beam", [1, 3])
def test_forbidden_ids_never_come_and_scores_are_not_renormalised(beam):
    length, vocab = 4, 5
    models = random_models(17, 13, length, vocab, scale=0.5)
    models[:, :, [1, 3]] += 2.0  # the likeliest of all
    forbidden = search_prefixes(
        jnp.array(models, jnp.float32), length, beam, 0.0, beam, forbidden=(1, 3)
    )
    without = models.copy()
    without[:, :, [1, 3]] = NONE
    expected = search_prefixes(jnp.array(without, jnp.float32), length, beam, 0.0, beam)
    assert_same_bits(forbidden, expected)
    assert not np.isin(forbidden.tokens, [1, 3]).any()
    for i in range(13):
        tokens = tuple(ids(forbidden, i, 0))
        steps = [models[i, prefix_number(tokens[:n], vocab), t] for n, t in enumerate(tokens)]
        np.testing.assert_allclose(forbidden.log_probs[i, 0], sum(steps), atol=1e-5)


def test_places_without_a_hypothesis_are_empty():
    """One certain path: EOS at once. A beam of 3 has no other hypothesis."""
    log_probs = jnp.log(jnp.broadcast_to(jnp.array([1.0, 0.0]), (1, 3**3, 2)))
    found = search_prefixes(log_probs, 4, 3, 0.6, 3)
    assert found.finished[0].tolist() == [True, False, False]
    assert found.scores[0].tolist() == [0.0, NONE, NONE]
    assert found.log_probs[0].tolist() == [0.0, NONE, NONE]
    assert found.lengths[0].tolist() == [1, 0, 0]
    assert found.tokens[0].tolist() == [[0, 3, 3, 3], [3, 3, 3, 3], [3, 3, 3, 3]]


@pytest.mark.run
@pytest.mark.parametrize("beam", [1, 2])
@pytest.mark.parametrize(("row", "forbidden"), [([NONE, NONE], ()), ([-0.7, -0.7], (0, 1))])
def test_where_nothing_is_possible_there_is_no_hypothesis(row, forbidden, beam):
    log_probs = jnp.broadcast_to(jnp.array(row), (1, 3**2, 2))
    found = search_prefixes(log_probs, 3, beam, 0.6, 1, forbidden=forbidden)
    assert not found.finished[0, 0]
    assert found.scores[0, 0] == NONE
    assert found.lengths[0, 0] == 0
    assert found.tokens[0, 0].tolist() == [3, 3, 3]


def test_scores_are_float64_where_jax_is():
    models = random_models(19, 5, 4, 3, scale=1.0)
    with jax.enable_x64(True):
        for beam in (1, 4):
            found = search_prefixes(jnp.array(models), 4, beam, 0.6, 1)
            assert found.scores.dtype == np.float64
            for i in range(5):
                tokens = tuple(ids(found, i, 0))
                total = sum(
                    models[i, prefix_number(tokens[:n], 3), t] for n, t in enumerate(tokens)
                )
                np.testing.assert_allclose(found.log_probs[i, 0], total, rtol=1e-14)


def test_length_penalty_is_that_of_sockeye_at_small_lengths():
    found = length_penalty(jnp.array([1, 2, 3]), 0.2)
    np.testing.assert_allclose(found, np.array([6, 7, 8]) ** 0.2 / 6**0.2, rtol=1e-6)


def test_equal_candidates_come_in_the_order_of_beams_and_ids():
    """Every token has the same probability: ties go to the earlier beam, then the smaller id."""
    log_probs = jnp.log(jnp.full((1, 5**2, 4), 0.25))
    found = search_prefixes(log_probs, 3, 3, 0.0, 3, eos=3)
    assert [ids(found, 0, rank) for rank in range(3)] == [[3], [0, 3], [0, 0, 3]]


@pytest.mark.run
@pytest.mark.parametrize("size", [1, 7, 127, 131, 251 * 5, 97 * 64])
def test_top_k_is_that_of_jax_ties_included(size):
    rng = np.random.default_rng(size)
    for values in (rng.normal(size=(3, size)), rng.integers(0, 3, (3, size)), np.zeros((3, size))):
        values = jnp.where(rng.random((3, size)) < 0.1, -np.inf, values.astype(np.float32))
        for count in {1, min(6, size)}:
            found, expected = top_k(values, count), jax.lax.top_k(values, count)
            assert_same_bits(tuple(found), tuple(expected))


def test_of_equal_values_the_first_comes_first_also_from_a_chunk_with_a_smaller_maximum():
    values = jnp.full((1, 256), -1.0).at[0, jnp.array([3, 130, 140])].set(jnp.array([5.0, 9, 5]))
    assert top_k(values, 3)[1].tolist() == [[130, 3, 140]]
