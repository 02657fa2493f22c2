"""Beam search and greedy search for the best translations (paper, section 6.1).

The search knows no model. A step function takes the token each hypothesis emitted last, a cache,
the index of that token (BOS has index 0) and the data of the sentences (memory, masks), and gives
the log-probabilities of the next token and the new cache. Index 0 says that the row has just been
given a new sentence: the cache is then that of another sentence and must be ignored. Cache leaves
are [B, M, ...] and follow their hypotheses, unless `Search.move` says what follows them.

    search = Search(bos_id=2, eos_id=3, pad_id=0, length=50)
    found = beam_search(step_fn, cache, sentences, max_lengths, search)

Letters: Q sentences, of which B are searched at a time, M hypotheses kept alive for each (the
beam), N returned, T tokens, V vocabulary. Lengths count EOS and not BOS. A hypothesis whose
log-probability is -inf does not exist: it fills a place for which there was no candidate.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, PyTree, Shaped

from flaxformer_min.decoding.rows import Prepare, Step, Stepped, through_rows

Tokens = Int[Array, "B M L"]  # the hypotheses so far, BOS first: L = T + 1
Index = Int[Array, " B"]  # how many tokens follow BOS
LogProbs = Float[Array, "B M V"]
Scores = Float[Array, "B M"]
Alpha = float | Float[Array, ""]  # the exponent of the length penalty
# (tokens, cache, index, what `prepare` gives of the sentences) -> (log-probabilities, cache)
StepFn = Callable[[Int[Array, "B M"], PyTree, Index, PyTree], tuple[LogProbs, PyTree]]
# (tokens, index, sentences) -> which token may come next
Allowed = Callable[[Tokens, Index, PyTree], Bool[Array, "#B #M #V"]]
# (log-probabilities, index, sentences) -> the next token of each sentence
Choose = Callable[[Float[Array, "B V"], Index, PyTree], Int[Array, "B 1"]]
# (cache, parents [B, M]) -> the cache after hypothesis m has become a child of parents[b, m]
Move = Callable[[PyTree, Int[Array, "B M"]], PyTree]

LARGEST_CHUNK = 128  # the most values in a chunk; `top_k` first compares the chunks' maxima


def anything(tokens: Tokens, index: Index, sentences: PyTree) -> Bool[Array, "1 1 1"]:
    """Allows every token."""
    return jnp.ones((1, 1, 1), bool)


def likeliest(log_probs: Float[Array, "B V"], index: Index, sentences: PyTree) -> Int[Array, "B 1"]:
    """Chooses the likeliest token."""
    return top_k(log_probs, 1)[1]


def take(tree: PyTree[Shaped[Array, "B M ..."]], places: Int[Array, "B N"]) -> PyTree:
    """Takes the given places of axis 1 of every leaf: [B, M, ...] -> [B, N, ...], by one gather."""

    def take_leaf(leaf: Shaped[Array, "B M ..."]) -> Shaped[Array, "B N ..."]:
        index = places.reshape(*places.shape, *(1,) * (leaf.ndim - 2))
        return jnp.take_along_axis(leaf, index, axis=1, mode="promise_in_bounds")

    return jax.tree.map(take_leaf, tree)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Search:
    """The settings of a search, the same for all sentences. The beam and alpha are the paper's."""

    bos_id: int
    eos_id: int
    pad_id: int
    length: int  # T, the number of tokens for which the cache has room
    beam_size: int = 4  # M; 1 is greedy search by definition
    n_best: int = 1  # N, at most M
    length_penalty_alpha: Alpha = 0.6
    rows: int | None = None  # B, a divisor of Q; None searches all sentences at once
    # Computes, once for B sentences, what the step function needs of them; by default nothing.
    prepare: Prepare = lambda sentences: sentences
    allowed: Allowed = anything  # which token may come next
    choose: Choose = likeliest  # the next token where the beam is 1
    move: Move = take  # how the cache follows the hypotheses


class Hypotheses(NamedTuple):
    """The N best hypotheses of each sentence, best first, finished ones before unfinished ones.

    tokens end in EOS if finished and are then padded; scores are log_probs / length_penalty. A
    place without a hypothesis has score -inf, length 0, only pad tokens, and is not finished.
    """

    tokens: Int[Array, "B N T"]
    scores: Float[Array, "B N"]
    lengths: Int[Array, "B N"]
    log_probs: Float[Array, "B N"]
    finished: Bool[Array, "B N"]


class _Beam(NamedTuple):
    """M hypotheses of each sentence; tokens begin with BOS, which lengths do not count."""

    tokens: Int[Array, "B M T+1"]
    log_probs: Scores
    lengths: Int[Array, "B M"]


class _State(NamedTuple):
    """The state of each sentence's search; its alive hypotheses all have the same length."""

    alive: _Beam
    finished: _Beam


class _Sentences(NamedTuple):
    """The sentences and how many tokens each may have: all Q of them, or the B at work."""

    data: PyTree
    max_lengths: Int[Array, " Q"]


def length_penalty(lengths: Int[Array, "*shape"], alpha: Alpha) -> Float[Array, "*shape"]:
    """Returns ((5 + n) / 6)^alpha for lengths n (Wu et al. 2016).

    The score of a hypothesis is its log-probability divided by this.
    """
    return ((5.0 + lengths) / 6.0) ** alpha


def beam_search(
    step_fn: StepFn, cache: PyTree, sentences: PyTree, max_lengths: Int[Array, " Q"], search: Search
) -> Hypotheses:
    """Finds the n_best translations of each sentence with a beam of beam_size: tokens [Q, N, T].

    Each step ranks the 2M best one-token extensions; those that end in EOS join the finished, and
    the best M of the rest live on (tensor2tensor's rules). A sentence stops when no alive
    hypothesis can enter its n_best any more, or at max_lengths[q] <= T tokens, and its row is given
    to the next sentence (decoding/rows.py). No row depends on another, so the other sentences do
    not matter. A hypothesis that is still alive at the end is scored at its length and ranked after
    the finished ones. A token that is not allowed loses its probability without renormalisation, so
    that scores stay the model's.

    Leaves of `sentences` are [Q, ...]; those of `cache` are [B, M, ...], with room for T tokens.
    """
    assert 1 <= search.n_best <= search.beam_size, search
    if search.beam_size == 1:
        return greedy_search(step_fn, cache, sentences, max_lengths, search)
    alpha = search.length_penalty_alpha

    def step(state: _State, cache: PyTree, ready: _Sentences) -> Stepped:
        log_probs, cache = _next(step_fn, search.allowed, state.alive, cache, ready.data)
        candidates, last, parents = _extend(state.alive, log_probs)
        going = _only(candidates, last != search.eos_id)
        alive, kept = _best(going, going.log_probs, search.beam_size)
        pool = _join(state.finished, _only(candidates, last == search.eos_id))
        finished, _ = _best(pool, _scores(pool, alpha), search.beam_size)
        done = _is_done(alive, finished, ready.max_lengths, search)
        return _State(alive, finished), search.move(cache, take(parents, kept)), done

    return _run(step, cache, _Sentences(sentences, max_lengths), search)


def greedy_search(
    step_fn: StepFn, cache: PyTree, sentences: PyTree, max_lengths: Int[Array, " Q"], search: Search
) -> Hypotheses:
    """Takes the token of `search.choose` at each step, to EOS or max_lengths[q]: tokens [Q, 1, T].

    The arguments are those of `beam_search`; M and N are 1, whatever `search` says. The log_probs
    and scores of the result are the model's own, whatever `search.choose` goes by.
    """
    search = dataclasses.replace(search, beam_size=1, n_best=1)

    def step(state: _State, cache: PyTree, ready: _Sentences) -> Stepped:
        log_probs, cache = _next(step_fn, search.allowed, state.alive, cache, ready.data)
        log_probs, lengths = log_probs[:, 0], state.alive.lengths
        token = search.choose(log_probs, lengths[:, 0], ready.data)
        longer = _Beam(
            _write(state.alive.tokens, token, lengths + 1),
            state.alive.log_probs + jnp.take_along_axis(log_probs, token, axis=1),
            lengths + 1,
        )
        ended = token == search.eos_id
        done = ended[:, 0] | (longer.lengths[:, 0] >= ready.max_lengths)
        return _State(_only(longer, ~ended), _only(longer, ended)), cache, done

    return _run(step, cache, _Sentences(sentences, max_lengths), search)


def _run(step: Step, cache: PyTree, sentences: _Sentences, search: Search) -> Hypotheses:
    """Searches every sentence, except those with a limit of 0, which get no hypothesis."""

    def prepare(some: _Sentences) -> _Sentences:
        return some._replace(data=search.prepare(some.data))

    start = _start(search, search.rows or len(sentences.max_lengths))
    wanted = sentences.max_lengths > 0
    return _rank(through_rows(step, start, cache, sentences, wanted, prepare), search)


def _start(search: Search, rows: int) -> _State:
    """Returns the state at a sentence's start: one empty hypothesis of probability 1.

    The other M - 1 places hold no hypothesis.
    """
    shape = rows, search.beam_size
    tokens = jnp.full((*shape, search.length + 1), search.pad_id, jnp.int32)
    tokens = tokens.at[:, :, 0].set(search.bos_id)
    # The default float is float32, and float64 where jax_enable_x64 is on.
    log_probs = jnp.full(shape, -jnp.inf, jnp.result_type(float)).at[:, 0].set(0.0)
    alive = _Beam(tokens, log_probs, jnp.zeros(shape, jnp.int32))
    return _State(alive, _only(alive, jnp.zeros_like(alive.lengths, bool)))


def _next(
    step_fn: StepFn, allowed: Allowed, alive: _Beam, cache: PyTree, sentences: PyTree
) -> tuple[LogProbs, PyTree]:
    """Returns log-probabilities of the next token, -inf where it is not allowed, and the cache."""
    index = alive.lengths[:, 0]
    last = jnp.take_along_axis(alive.tokens, index[:, None, None], 2, mode="promise_in_bounds")
    log_probs, cache = step_fn(last[:, :, 0], cache, index, sentences)
    log_probs = log_probs.astype(jnp.result_type(float))
    return jnp.where(allowed(alive.tokens, index, sentences), log_probs, -jnp.inf), cache


def _extend(
    alive: _Beam, log_probs: LogProbs
) -> tuple[_Beam, Int[Array, "B 2*M"], Int[Array, "B 2*M"]]:
    """Returns the 2M likeliest extensions by one token, best first, the token, the parent's place.

    At most M extensions end in EOS, one for each parent, so at least M go on.
    """
    batch, beam, vocab = log_probs.shape
    totals = (alive.log_probs[:, :, None] + log_probs).reshape(batch, beam * vocab)
    totals, choices = top_k(totals, 2 * beam)
    parents, last = choices // vocab, choices % vocab
    tokens, lengths = take((alive.tokens, alive.lengths + 1), parents)
    return _Beam(_write(tokens, last, lengths), totals, lengths), last, parents


def _write(tokens: Tokens, last: Int[Array, "B M"], places: Int[Array, "B M"]) -> Tokens:
    """Returns the hypotheses with token last[b, m] written at places[b, m]."""
    here = jnp.arange(tokens.shape[2])[None, None] == places[:, :, None]
    return jnp.where(here, last[:, :, None].astype(tokens.dtype), tokens)


def top_k(values: Float[Array, "B C"], count: int) -> tuple[Float[Array, "B K"], Int[Array, "B K"]]:
    """Does what lax.top_k does along axis 1, several times faster over many values on a CPU.

    K = count. The K largest values lie in the K chunks with the largest maxima, so only these
    chunks are ranked. The chunks stay in their order, so that of equal values the first comes
    first, as in lax.top_k.
    """
    size = values.shape[1]
    width = max(w for w in range(1, LARGEST_CHUNK + 1) if size % w == 0)
    chunks = values.reshape(-1, size // width, width)
    _, best = lax.top_k(chunks.max(axis=2), min(count, size // width))
    best = jnp.sort(best, axis=1)
    found, places = lax.top_k(take(chunks, best).reshape(-1, best.shape[1] * width), count)
    return found, take(best, places // width) * width + places % width


def _is_done(
    alive: _Beam, finished: _Beam, max_lengths: Int[Array, " B"], search: Search
) -> Bool[Array, " B"]:
    """Says whether a sentence's search is over: no alive hypothesis can enter the n_best.

    Either none is left, or the limit is reached, or all are too unlikely. Log-probabilities only
    fall, so the best alive one divided by the largest penalty still to come is a bound. The penalty
    is monotone in the length: its largest value is at the next length (alpha < 0) or at the last.
    """
    lengths, alpha = alive.lengths[:, 0], search.length_penalty_alpha
    penalty = jnp.maximum(length_penalty(lengths + 1, alpha), length_penalty(max_lengths, alpha))
    bound = jnp.max(alive.log_probs, axis=1) / penalty
    worst = _scores(finished, alpha)[:, search.n_best - 1]
    return (worst >= bound) | (lengths >= max_lengths)


def _rank(found: _State, search: Search) -> Hypotheses:
    """Ranks the n_best of each sentence: finished ones, then unfinished ones, then empty places.

    The finished and the alive hypotheses are each sorted already, so a stable sort by these three
    groups is enough.
    """
    both = _join(found.finished, found.alive)
    is_finished = jnp.arange(both.lengths.shape[1]) < found.finished.lengths.shape[1]
    exists = both.log_probs > -jnp.inf
    group = jnp.where(exists, jnp.where(is_finished[None, :], 0, 1), 2)
    order = jnp.argsort(group, axis=1, stable=True)[:, : search.n_best]
    scores = _scores(both, search.length_penalty_alpha)
    best, group, scores = take((both, group, scores), order)
    return Hypotheses(
        tokens=jnp.where(group[:, :, None] < 2, best.tokens[:, :, 1:], search.pad_id),
        scores=scores,
        lengths=jnp.where(group < 2, best.lengths, 0),
        log_probs=best.log_probs,
        finished=group == 0,
    )


def _scores(beam: _Beam, alpha: Alpha) -> Scores:
    return beam.log_probs / length_penalty(beam.lengths, alpha)


def _only(beam: _Beam, keep: Bool[Array, "B M"]) -> _Beam:
    """Keeps the hypotheses marked by `keep`; all others cease to exist."""
    return beam._replace(log_probs=jnp.where(keep, beam.log_probs, -jnp.inf))


def _join(first: _Beam, second: _Beam) -> _Beam:
    return jax.tree.map(lambda a, b: jnp.concatenate([a, b], axis=1), first, second)


def _best(beam: _Beam, keys: Scores, count: int) -> tuple[_Beam, Int[Array, "B {count}"]]:
    """Returns the `count` hypotheses with the largest keys, largest first, and their places."""
    _, places = lax.top_k(keys, count)
    return take(beam, places), places
