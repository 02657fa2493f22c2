"""Many sentences through few rows: who is worked on when, and what is left of whom."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flaxformer_min.decoding import rows
from flaxformer_min.decoding.rows import through_rows


def count_down(sentences: list[int], rows: int, wanted: list[bool] | None = None) -> tuple:
    """A sentence n takes n steps and ends with the sum n + (n-1) + ... + 1, and with its double.

    Also how many steps the rows took, and which sentences were prepared together.
    """
    taken, prepared = [], []

    def prepare(some):
        jax.debug.callback(lambda some: prepared.append(some.tolist()), some, ordered=True)
        return some, 2 * some

    def step(state, cache, ready):
        number, double = ready
        steps, total, _ = state
        left = jnp.where(steps == 0, number, cache)  # what a row held before does not count
        jax.debug.callback(lambda: taken.append(1), ordered=True)
        state = steps + 1, total + left, double
        return state, left - 1, left <= 1

    zero = jnp.zeros(rows, jnp.int32)
    found = jax.jit(functools.partial(through_rows, step, prepare=prepare))(
        (zero, zero, zero),
        jnp.full(rows, 99, jnp.int32),
        jnp.array(sentences, jnp.int32),
        jnp.array([n > 0 for n in sentences] if wanted is None else wanted),
    )
    jax.effects_barrier()
    return jax.device_get(found), len(taken), prepared


@pytest.mark.run
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 6, 12])
def test_every_sentence_gets_its_own_steps_whatever_the_rows(rows):
    sentences = [3, 7, 1, 1, 5, 2, 11, 1, 4, 4, 1, 6]
    (steps, totals, doubles), _, prepared = count_down(sentences, rows)
    assert steps.tolist() == sentences
    assert totals.tolist() == [n * (n + 1) // 2 for n in sentences]
    assert doubles.tolist() == [2 * n for n in sentences]
    assert [n for some in prepared for n in some] == sentences


def test_a_row_that_is_free_is_given_to_the_next_sentence_at_once():
    """5 beside 2 and 3, then 4 beside 1 and 1; two at a time would take 5 + 3 + 4 steps."""
    assert count_down([5, 2, 3, 1, 4, 1], 2)[1] == 5 + 4


def test_the_drawing_in_the_docstring_of_rows_is_what_happens():
    """Sentences A to F, which take 5, 2, 3, 1, 4 and 1 steps."""
    at_work = []

    def step(state, cache, ready):
        letters, lengths = ready
        jax.debug.callback(lambda row: at_work.append(bytes(row).decode()), letters, ordered=True)
        return state + 1, cache, state + 1 >= lengths

    sentences = jnp.array([*b"ABCDEF"], jnp.uint8), jnp.array([5, 2, 3, 1, 4, 1])
    run = functools.partial(through_rows, step, prepare=lambda some: some)
    jax.jit(run)(jnp.zeros(2, jnp.int32), (), sentences, jnp.ones(6, bool))
    jax.effects_barrier()
    lines = [line for line in (rows.__doc__ or "").splitlines() if line.startswith("    row ")]
    drawn = ["".join(re.findall("[A-F.]", line)[:9]) for line in lines]
    assert drawn == ["AAAAADF..", "BBCCCEEEE"]
    computed = ["".join(row) for row in zip(*at_work, strict=True)]
    for line, row in zip(drawn, computed, strict=True):
        busy = line.rstrip(".")  # an idle row computes some sentence in vain
        assert row.startswith(busy)


def test_sentences_are_prepared_when_rows_wait_for_them_and_fillers_never():
    _, _, prepared = count_down([2, 1, 3, 1, 0, 0, 0, 0], 2)
    assert prepared == [[2, 1], [3, 1]]


def test_what_is_not_wanted_stays_as_it_began_and_costs_no_step():
    sentences, wanted = [3, 2, 9, 1, 9, 9], [True, True, False, True, False, False]
    (steps, totals, doubles), taken, prepared = count_down(sentences, 2, wanted)
    assert steps.tolist() == [3, 2, 0, 1, 0, 0]
    assert totals.tolist() == [6, 3, 0, 1, 0, 0]
    assert doubles.tolist() == [6, 4, 0, 2, 0, 0]
    assert prepared == [[3, 2], [9, 1]]
    assert taken == 3


def test_nothing_wanted_is_nothing_done():
    (steps, _, _), taken, prepared = count_down([5, 5], 2, [False, False])
    assert steps.tolist() == [0, 0]
    assert taken == 0
    assert prepared == []


def test_rows_that_do_not_divide_the_sentences_are_refused():
    with pytest.raises(AssertionError):
        count_down([1, 2, 3], 2)
    np.testing.assert_array_equal(count_down([1, 2, 3], 3)[0][0], [1, 2, 3])
