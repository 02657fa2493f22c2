"""Many sentences through few rows: a row whose sentence is done is given to the next one.

Rows may be at different steps, so each keeps count for itself. All arrays have the same shape at
every step, and what becomes of a sentence follows from it alone.

Letters: R rows, Q sentences.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int, PyTree, Shaped

Stepped = tuple[PyTree, PyTree, Bool[Array, " R"]]
# (state, cache, sentences), leaves [R, ...] -> state and cache one step later, which rows are done
Step = Callable[[PyTree, PyTree, PyTree], Stepped]
# Sentences as they come -> with what is computed for each of them once; leaves [R, ...] both
Prepare = Callable[[PyTree], PyTree]


class _Work(NamedTuple):
    """Where R rows stand. `places` says which sentence a row is at; Q is none."""

    upcoming: Int[Array, ""]  # the sentence that is next
    places: Int[Array, " R"]
    done: Bool[Array, " R"]
    state: PyTree[Shaped[Array, "R ..."]]
    sentences: PyTree[Shaped[Array, "R ..."]]
    cache: PyTree[Shaped[Array, "R ..."]]
    results: PyTree[Shaped[Array, "Q ..."]]


def through_rows(
    step: Step,
    fresh: PyTree[Shaped[Array, "R ..."]],
    cache: PyTree[Shaped[Array, "R ..."]],
    sentences: PyTree[Shaped[Array, "Q ..."]],
    wanted: Bool[Array, " Q"],
    prepare: Prepare,
) -> PyTree[Shaped[Array, "Q ..."]]:
    """The state in which each sentence is done; that of one not wanted stays as it began.

    A row begins with its `fresh` state and with the cache of the sentence before it, which it must
    not read. Sentences are prepared R at a time, when rows wait for them, and those behind the last
    wanted one never. A row without a sentence goes on for nothing, never further than one at work.
    Q is a multiple of R; `fresh` rows are all the same.
    """
    rows, count = len(jax.tree.leaves(fresh)[0]), len(wanted)
    assert count % rows == 0, (count, rows)
    number = jnp.max(jnp.where(wanted, jnp.arange(count) + 1, 0), initial=0)

    def stepped(work: _Work) -> _Work:
        state, cache, done = step(work.state, work.cache, work.sentences)
        return work._replace(state=state, cache=cache, done=done | (work.places == count))

    def turn(work: _Work) -> _Work:
        """Hands out R more sentences and steps until a row is free again; at last until all are."""
        ready = prepare(_rows(sentences, work.upcoming, rows))
        first, end = work.upcoming, jnp.minimum(work.upcoming + rows, number)

        def working(work: _Work) -> Bool[Array, ""]:
            busy = work.places < count
            return jnp.any(busy) & (jnp.all(busy) | (end == number))

        def refilled(work: _Work) -> _Work:
            return _refill(work, ready, first, end, fresh, wanted)

        return lax.while_loop(working, lambda work: refilled(stepped(work)), refilled(work))

    none = jnp.full(rows, count)
    like = jax.eval_shape(prepare, _rows(sentences, 0, rows))
    blank = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), like)
    results = jax.tree.map(lambda leaf: jnp.repeat(leaf[:1], count, axis=0), fresh)
    work = _Work(jnp.int32(0), none, jnp.ones(rows, bool), fresh, blank, cache, results)
    return lax.while_loop(lambda work: work.upcoming < number, turn, work).results


def _refill(
    work: _Work,
    ready: PyTree[Shaped[Array, "R ..."]],
    first: Int[Array, ""],
    end: Int[Array, ""],
    fresh: PyTree[Shaped[Array, "R ..."]],
    wanted: Bool[Array, " Q"],
) -> _Work:
    """Stores what is done and gives its row to the next sentence before `end`, if there is one.

    Row by row: only what changes is copied.
    """
    count = len(wanted)

    def due(work: _Work) -> Bool[Array, " R"]:
        return work.done & ((work.places < count) | (work.upcoming < end))

    def refill(work: _Work) -> _Work:
        row, more = jnp.argmax(due(work)), work.upcoming < end
        ended, place = _rows(work.state, row, 1), work.places[row]
        taken = _rows(ready, jnp.where(more, work.upcoming - first, 0), 1)
        return work._replace(
            upcoming=work.upcoming + more,
            places=work.places.at[row].set(jnp.where(more, work.upcoming, count)),
            done=work.done.at[row].set(~(more & wanted[work.upcoming])),
            state=_put(work.state, row, _rows(fresh, 0, 1)),
            sentences=_put(work.sentences, row, taken),
            # A free row's place is none, and is dropped.
            results=jax.tree.map(
                lambda leaf, new: leaf.at[place].set(new[0], mode="drop"), work.results, ended
            ),
        )

    return lax.while_loop(lambda work: jnp.any(due(work)), refill, work)


def _rows(tree: PyTree, first: int | Int[Array, ""], count: int) -> PyTree:
    """`count` rows of every leaf from `first` on."""
    return jax.tree.map(lambda leaf: lax.dynamic_slice_in_dim(leaf, first, count), tree)


def _put(tree: PyTree, place: Int[Array, ""], row: PyTree) -> PyTree:
    """The tree with one row of every leaf replaced."""
    return jax.tree.map(
        lambda leaf, new: lax.dynamic_update_slice_in_dim(leaf, new, place, 0), tree, row
    )
