"""Searches many sentences in few rows of a batch, which is known as continuous batching.

A row whose sentence is done is given to the next sentence at once; it does not wait for the other
rows. Two rows and the sentences A to F, which take 5, 2, 3, 1, 4 and 1 steps:

    step        1  2  3  4  5  6  7  8  9
    row 0       A  A  A  A  A  D  F  .  .      . is a row that is idle
    row 1       B  B  C  C  C  E  E  E  E
    prepared    AB    CD       EF

Shapes are static, so every step computes every row. When a row is free and no prepared sentence is
left, the next R sentences are prepared together (for example, their sources are encoded). The
result of a sentence does not depend on the other sentences.

Letters: R rows, Q sentences.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int, PyTree, Shaped

Rows = PyTree[Shaped[Array, "R ..."]]
All = PyTree[Shaped[Array, "Q ..."]]
Wanted = Bool[Array, " Q"]
Stepped = tuple[PyTree, PyTree, Bool[Array, " R"]]
# (state, cache, sentences), leaves [R, ...] -> state and cache after a step, which rows are done
Step = Callable[[PyTree, PyTree, PyTree], Stepped]
# R sentences as they were given -> the same sentences with all that is computed once for each
Prepare = Callable[[PyTree], PyTree]


class _Work(NamedTuple):
    """The state of the R rows, and the results so far."""

    upcoming: Int[Array, ""]  # the number of the sentence that gets a row next
    places: Int[Array, " R"]  # places[r] is the sentence of row r, Q if the row is idle
    done: Bool[Array, " R"]  # whether row r can take another sentence
    state: Rows
    sentences: Rows
    cache: Rows
    results: All


class _Prepared(NamedTuple):
    """R prepared sentences, from number `first` on; those from number `end` on are not searched."""

    sentences: Rows
    first: Int[Array, ""]
    end: Int[Array, ""]


def through_rows(
    step: Step, fresh: Rows, cache: Rows, sentences: All, wanted: Wanted, prepare: Prepare
) -> All:
    """Steps each wanted sentence until it is done; returns its last state, leaves [Q, ...].

    The result of a sentence that is not wanted is `fresh`. A row begins a sentence with its `fresh`
    state, which is the same for all rows, and with the cache of the sentence before, which `step`
    must ignore. Sentences after the last wanted one are never prepared. Idle rows keep stepping,
    from `fresh` on. They became idle after every working row had begun its sentence, so they are
    never further on than a working row and make no step longer. Q must be a multiple of R.
    """
    rows, count = len(jax.tree.leaves(fresh)[0]), len(wanted)
    assert count % rows == 0, (count, rows)
    end = jnp.max(jnp.where(wanted, jnp.arange(count) + 1, 0), initial=0)

    def advance(work: _Work) -> _Work:
        state, cache, done = step(work.state, work.cache, work.sentences)
        return work._replace(state=state, cache=cache, done=done | (work.places == count))

    def prepare_and_step(work: _Work) -> _Work:
        """Prepares the next R sentences and steps until a row is free and none of them is left."""
        ready = prepare(_slice(sentences, work.upcoming, rows))
        prepared = _Prepared(ready, work.upcoming, jnp.minimum(work.upcoming + rows, end))

        def goes_on(work: _Work) -> Bool[Array, ""]:
            busy = work.places < count
            return jnp.any(busy) & (jnp.all(busy) | (prepared.end == end))

        def refill(work: _Work) -> _Work:
            return _refill(work, prepared, fresh, wanted)

        return lax.while_loop(goes_on, lambda work: refill(advance(work)), refill(work))

    idle = jnp.full(rows, count)
    shapes = jax.eval_shape(prepare, _slice(sentences, 0, rows))
    blank = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    results = jax.tree.map(lambda leaf: jnp.repeat(leaf[:1], count, axis=0), fresh)
    work = _Work(jnp.int32(0), idle, jnp.ones(rows, bool), fresh, blank, cache, results)
    return lax.while_loop(lambda work: work.upcoming < end, prepare_and_step, work).results


def _refill(work: _Work, prepared: _Prepared, fresh: Rows, wanted: Wanted) -> _Work:
    """Keeps the result of every row that is done and gives the row to the next prepared sentence.

    A row for which there is no sentence becomes idle. The rows are refilled one after another, so
    that only what changes is copied.
    """
    count = len(wanted)

    def due(work: _Work) -> Bool[Array, " R"]:
        """Says which rows hold a result, or are idle although a prepared sentence is left."""
        return work.done & ((work.places < count) | (work.upcoming < prepared.end))

    def refill_one(work: _Work) -> _Work:
        row, more = jnp.argmax(due(work)), work.upcoming < prepared.end
        result, place = _slice(work.state, row, 1), work.places[row]
        chosen = jnp.where(more, work.upcoming - prepared.first, 0)
        return work._replace(
            upcoming=work.upcoming + more,
            places=work.places.at[row].set(jnp.where(more, work.upcoming, count)),
            done=work.done.at[row].set(~(more & wanted[work.upcoming])),
            state=_set_row(work.state, row, _slice(fresh, 0, 1)),
            sentences=_set_row(work.sentences, row, _slice(prepared.sentences, chosen, 1)),
            # An idle row's place is Q, one past the end, so that its state is dropped.
            results=jax.tree.map(
                lambda leaf, new: leaf.at[place].set(new[0], mode="drop"), work.results, result
            ),
        )

    return lax.while_loop(lambda work: jnp.any(due(work)), refill_one, work)


def _slice(tree: PyTree, first: int | Int[Array, ""], count: int) -> PyTree:
    """Returns `count` rows of every leaf, from row `first` on."""
    return jax.tree.map(lambda leaf: lax.dynamic_slice_in_dim(leaf, first, count), tree)


def _set_row(tree: PyTree, row: Int[Array, ""], new: PyTree) -> PyTree:
    """Returns the tree with one row of every leaf [R, ...] replaced by `new`, [1, ...]."""
    return jax.tree.map(
        lambda leaf, part: lax.dynamic_update_slice_in_dim(leaf, part, row, 0), tree, new
    )
