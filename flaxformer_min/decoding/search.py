"""Search: from next-token log-probabilities to the best translations (paper, section 6.1).

The search knows no model. A step function takes the token each hypothesis emitted last, a cache,
the index of that token (BOS has index 0) and what belongs to the sentence (memory, masks), and
gives the log-probabilities of the next token and the new cache. At index 0 a sentence begins, and
what the cache holds is another one's. Cache leaves are [B, M, ...] and follow their hypotheses, or
else `move` says what follows them.

Letters: Q sentences, of which B are searched at a time, M hypotheses kept alive for each (the
beam), N returned, T tokens, V vocabulary. Lengths count EOS and not BOS. A hypothesis whose
log-probability is -inf does not exist: it fills a place for which there was no candidate.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, PyTree, Shaped

from flaxformer_min.decoding.rows import Prepare, Step, Stepped, through_rows

# (tokens, cache, index, what `prepare` gives of the sentences) -> (log-probabilities, cache)
StepFn = Callable[
    [Int[Array, "B M"], PyTree, Int[Array, " B"], PyTree], tuple[Float[Array, "B M V"], PyTree]
]
# (tokens [B, M, T+1], BOS first; how many others there are; sentences) -> which may come next
Allowed = Callable[[Int[Array, "B M L"], Int[Array, " B"], PyTree], Bool[Array, "#B #M #V"]]
# (log-probabilities, how many tokens were emitted, sentences) -> the next token of each sentence
Choose = Callable[[Float[Array, "B V"], Int[Array, " B"], PyTree], Int[Array, "B 1"]]
# (cache, parents [B, M]) -> the cache after hypothesis m has become a child of parents[b, m]
Move = Callable[[PyTree, Int[Array, "B M"]], PyTree]

LARGEST_BLOCK = 128  # of `top_k`


class Hypotheses(NamedTuple):
    """The N best of each sentence, best first, finished ones before unfinished ones.

    tokens end in EOS if finished and are then padded; scores are log_probs / length_penalty.
    A place without a hypothesis has score -inf, length 0, only pad tokens, and is not finished.
    """

    tokens: Int[Array, "B N T"]
    scores: Float[Array, "B N"]
    lengths: Int[Array, "B N"]
    log_probs: Float[Array, "B N"]
    finished: Bool[Array, "B N"]


class _Beam(NamedTuple):
    """M hypotheses of each sentence; tokens begin with BOS, which lengths do not count."""

    tokens: Int[Array, "B M T+1"]
    log_probs: Float[Array, "B M"]
    lengths: Int[Array, "B M"]


class _Limited(NamedTuple):
    """Sentences with their limits; leaves [Q, ...], or [B, ...] of those that are at work."""

    sentences: PyTree
    max_lengths: Int[Array, " Q"]


class _State(NamedTuple):
    """Of each sentence; all its hypotheses that are alive have the same length."""

    alive: _Beam
    finished: _Beam


def length_penalty(
    lengths: Int[Array, "*shape"], alpha: float | Float[Array, ""]
) -> Float[Array, "*shape"]:
    """((5 + n) / 6)^alpha (Wu et al. 2016), by which a log-probability is divided."""
    return ((5.0 + lengths) / 6.0) ** alpha


def anything(
    tokens: Int[Array, "B M L"], index: Int[Array, " B"], sentences: PyTree
) -> Bool[Array, "1 1 1"]:
    """Every token is allowed."""
    return jnp.ones((1, 1, 1), bool)


def as_they_are(sentences: PyTree) -> PyTree:
    """Nothing is computed for the sentences beforehand."""
    return sentences


def likeliest(
    log_probs: Float[Array, "B V"], index: Int[Array, " B"], sentences: PyTree
) -> Int[Array, "B 1"]:
    """The likeliest token."""
    return top_k(log_probs, 1)[1]


def take(tree: PyTree[Shaped[Array, "B M ..."]], places: Int[Array, "B N"]) -> PyTree:
    """From every leaf [B, M, ...] the given places of axis 1: [B, N, ...], in one gather each."""

    def take_leaf(leaf: Shaped[Array, "B M ..."]) -> Shaped[Array, "B N ..."]:
        index = places.reshape(*places.shape, *(1,) * (leaf.ndim - 2))
        return jnp.take_along_axis(leaf, index, axis=1, mode="promise_in_bounds")

    return jax.tree.map(take_leaf, tree)


def beam_search(
    step_fn: StepFn,
    cache: PyTree,
    sentences: PyTree,
    *,
    rows: int,
    prepare: Prepare = as_they_are,
    bos_id: int,
    eos_id: int,
    pad_id: int,
    max_lengths: Int[Array, " Q"],
    length: int,
    beam_size: int,
    length_penalty_alpha: float | Float[Array, ""],
    allowed: Allowed = anything,
    n_best: int = 1,
    move: Move = take,
) -> Hypotheses:
    """The n_best translations of each sentence that a beam of beam_size finds.

    Each step ranks the 2M best one-token extensions; those that end in EOS join the finished, the
    best M others live on (tensor2tensor's rules). A sentence stops when nothing alive can enter its
    n_best any more, or at max_lengths[q] <= length tokens, and another one takes its row; rows do
    not mix, so neighbours do not matter. What is alive then is scored at its length and comes last.
    What is not allowed loses its probability without renormalisation: scores stay the model's.

    `rows` = B of the sentences are prepared at a time and searched at a time (refill.py).
    Shapes: cache leaves [B, M, ...], with room for `length` tokens; the result is [Q, N, T] with
    N = n_best <= beam_size and T = length. beam_size 1 is greedy search by definition.
    """
    assert 1 <= n_best <= beam_size, (n_best, beam_size)
    if beam_size == 1:
        return greedy_search(
            step_fn,
            cache,
            sentences,
            rows=rows,
            prepare=prepare,
            bos_id=bos_id,
            eos_id=eos_id,
            pad_id=pad_id,
            max_lengths=max_lengths,
            length=length,
            length_penalty_alpha=length_penalty_alpha,
            allowed=allowed,
        )

    def step(state: _State, cache: PyTree, ready: _Limited) -> Stepped:
        log_probs, cache = _next(step_fn, allowed, state.alive, cache, ready.sentences)
        candidates, last, parents = _extend(state.alive, log_probs)
        going = _only(candidates, last != eos_id)
        alive, kept = _best(going, going.log_probs, beam_size)
        pool = _join(state.finished, _only(candidates, last == eos_id))
        finished, _ = _best(pool, _scores(pool, length_penalty_alpha), beam_size)
        done = _settled(alive, finished, ready.max_lengths, length_penalty_alpha, n_best)
        return _State(alive, finished), move(cache, take(parents, kept)), done

    start = _start(rows, beam_size, length, bos_id, pad_id)
    found = _run(step, start, cache, _Limited(sentences, max_lengths), prepare)
    return _ranked(found, length_penalty_alpha, pad_id, n_best)


def greedy_search(
    step_fn: StepFn,
    cache: PyTree,
    sentences: PyTree,
    *,
    rows: int,
    prepare: Prepare = as_they_are,
    bos_id: int,
    eos_id: int,
    pad_id: int,
    max_lengths: Int[Array, " Q"],
    length: int,
    length_penalty_alpha: float | Float[Array, ""],
    allowed: Allowed = anything,
    choose: Choose = likeliest,
) -> Hypotheses:
    """The token that `choose` takes at every step until EOS or max_lengths[q] tokens; N = M = 1.

    Cache leaves are [B, 1, ...]. Arguments and result are those of beam_search.
    """

    def step(state: _State, cache: PyTree, ready: _Limited) -> Stepped:
        log_probs, cache = _next(step_fn, allowed, state.alive, cache, ready.sentences)
        log_probs, lengths = log_probs[:, 0], state.alive.lengths
        token = choose(log_probs, lengths[:, 0], ready.sentences)
        longer = _Beam(
            _written(state.alive.tokens, token, lengths + 1),
            state.alive.log_probs + jnp.take_along_axis(log_probs, token, axis=1),
            lengths + 1,
        )
        ended = token == eos_id
        done = ended[:, 0] | (longer.lengths[:, 0] >= ready.max_lengths)
        return _State(_only(longer, ~ended), _only(longer, ended)), cache, done

    start = _start(rows, 1, length, bos_id, pad_id)
    found = _run(step, start, cache, _Limited(sentences, max_lengths), prepare)
    return _ranked(found, length_penalty_alpha, pad_id, n_best=1)


def _start(rows: int, beam: int, length: int, bos_id: int, pad_id: int) -> _State:
    """One empty hypothesis per sentence, probability 1; the other places hold none."""
    tokens = jnp.full((rows, beam, length + 1), pad_id, jnp.int32).at[:, :, 0].set(bos_id)
    # The default float is float32, and float64 where jax_enable_x64 is on.
    log_probs = jnp.full((rows, beam), -jnp.inf, jnp.result_type(float)).at[:, 0].set(0.0)
    alive = _Beam(tokens, log_probs, jnp.zeros((rows, beam), jnp.int32))
    return _State(alive, _only(alive, jnp.zeros_like(alive.lengths, bool)))


def _run(step: Step, start: _State, cache: PyTree, sentences: _Limited, prepare: Prepare) -> _State:
    """Every sentence's state, [Q, ...], when it is done; one of limit 0 never begins."""

    def prepared(some: _Limited) -> _Limited:
        return some._replace(sentences=prepare(some.sentences))

    wanted = sentences.max_lengths > 0
    return through_rows(step, start, cache, sentences, wanted, prepared)


def _next(
    step_fn: StepFn, allowed: Allowed, alive: _Beam, cache: PyTree, sentences: PyTree
) -> tuple[Float[Array, "B M V"], PyTree]:
    """The log-probabilities of the next token, -inf where it is not allowed, and the new cache."""
    index = alive.lengths[:, 0]
    last = jnp.take_along_axis(alive.tokens, index[:, None, None], 2, mode="promise_in_bounds")
    log_probs, cache = step_fn(last[:, :, 0], cache, index, sentences)
    log_probs = log_probs.astype(jnp.result_type(float))
    return jnp.where(allowed(alive.tokens, index, sentences), log_probs, -jnp.inf), cache


def _extend(
    alive: _Beam, log_probs: Float[Array, "B M V"]
) -> tuple[_Beam, Int[Array, "B 2*M"], Int[Array, "B 2*M"]]:
    """The 2M likeliest extensions by one token, best first, that token, and the parent's place.

    At most M of them can end in EOS, one for each parent, so at least M go on.
    """
    batch, beam, vocab = log_probs.shape
    totals = (alive.log_probs[:, :, None] + log_probs).reshape(batch, beam * vocab)
    totals, choices = top_k(totals, 2 * beam)
    parents, last = choices // vocab, choices % vocab
    tokens, lengths = take((alive.tokens, alive.lengths + 1), parents)
    return _Beam(_written(tokens, last, lengths), totals, lengths), last, parents


def _written(
    tokens: Int[Array, "B M L"], last: Int[Array, "B M"], places: Int[Array, "B M"]
) -> Int[Array, "B M L"]:
    """The hypotheses with another token, each at its place."""
    here = jnp.arange(tokens.shape[2])[None, None] == places[:, :, None]
    return jnp.where(here, last[:, :, None].astype(tokens.dtype), tokens)


def top_k(values: Float[Array, "B C"], count: int) -> tuple[Float[Array, "B K"], Int[Array, "B K"]]:
    """lax.top_k along axis 1, several times faster over many values on a CPU: K = count.

    The largest values lie in the blocks with the largest maxima, at most one block for each. Blocks
    stay in their order, so of equal values the first comes first, as there.
    """
    size = values.shape[1]
    width = max(w for w in range(1, LARGEST_BLOCK + 1) if size % w == 0)
    blocks = values.reshape(-1, size // width, width)
    _, best = lax.top_k(blocks.max(axis=2), min(count, size // width))
    best = jnp.sort(best, axis=1)
    found, places = lax.top_k(take(blocks, best).reshape(-1, best.shape[1] * width), count)
    return found, take(best, places // width) * width + places % width


def _settled(
    alive: _Beam,
    finished: _Beam,
    max_lengths: Int[Array, " B"],
    alpha: float | Float[Array, ""],
    n_best: int,
) -> Bool[Array, " B"]:
    """Whether nothing alive can enter the n_best: none is left, too long, or too unlikely.

    Log-probabilities only fall, so the best alive one divided by the largest penalty still to come
    is a bound. The penalty is monotone in the length: its largest value is at the next length
    (alpha < 0) or at the last.
    """
    lengths = alive.lengths[:, 0]
    penalty = jnp.maximum(length_penalty(lengths + 1, alpha), length_penalty(max_lengths, alpha))
    bound = jnp.max(alive.log_probs, axis=1) / penalty
    return (_scores(finished, alpha)[:, n_best - 1] >= bound) | (lengths >= max_lengths)


def _ranked(found: _State, alpha: float | Float[Array, ""], pad_id: int, n_best: int) -> Hypotheses:
    """The n_best in the order finished, unfinished, none; each of the two is sorted already."""
    both = _join(found.finished, found.alive)
    is_finished = jnp.arange(both.lengths.shape[1]) < found.finished.lengths.shape[1]
    exists = both.log_probs > -jnp.inf
    group = jnp.where(exists, jnp.where(is_finished[None, :], 0, 1), 2)
    order = jnp.argsort(group, axis=1, stable=True)[:, :n_best]
    best, group, scores = take((both, group, _scores(both, alpha)), order)
    return Hypotheses(
        tokens=jnp.where(group[:, :, None] < 2, best.tokens[:, :, 1:], pad_id),
        scores=scores,
        lengths=jnp.where(group < 2, best.lengths, 0),
        log_probs=best.log_probs,
        finished=group == 0,
    )


def _scores(beam: _Beam, alpha: float | Float[Array, ""]) -> Float[Array, "B M"]:
    return beam.log_probs / length_penalty(beam.lengths, alpha)


def _only(beam: _Beam, keep: Bool[Array, "B M"]) -> _Beam:
    """The hypotheses marked by keep; the others cease to exist."""
    return beam._replace(log_probs=jnp.where(keep, beam.log_probs, -jnp.inf))


def _join(first: _Beam, second: _Beam) -> _Beam:
    return jax.tree.map(lambda a, b: jnp.concatenate([a, b], axis=1), first, second)


def _best(
    beam: _Beam, keys: Float[Array, "B M"], count: int
) -> tuple[_Beam, Int[Array, "B {count}"]]:
    """The count hypotheses with the largest keys, largest first, and their places."""
    _, places = lax.top_k(keys, count)
    return take(beam, places), places
