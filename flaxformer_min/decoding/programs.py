"""What the devices compute: batches of ids in; hypotheses, log-probabilities or weights out.

Several models may work together, an ensemble: the probability of the next token is the arithmetic
mean of theirs. `graphdefs` and `params` hold one entry for each. No row depends on another one.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int, Key, UInt

from flaxformer_min.data.tokenizer import Tokenizer
from flaxformer_min.decoding.batches import rows_of
from flaxformer_min.decoding.constraints import all_but, beginning, long_enough, no_repeated_ngram
from flaxformer_min.decoding.options import Settled
from flaxformer_min.decoding.sampling import sample
from flaxformer_min.decoding.search import Allowed, Hypotheses, StepFn, beam_search
from flaxformer_min.model.attention_weights import AttentionWeights, attention_weights
from flaxformer_min.model.build import Params
from flaxformer_min.model.cached import decode_step, init_cache, memory_keys_values
from flaxformer_min.model.layers import KeysValues
from flaxformer_min.model.masks import padding_mask
from flaxformer_min.model.teacher_forcing import forced_states
from flaxformer_min.model.transformer import Transformer

GraphDefs = tuple[nnx.GraphDef, ...]


class Rows(NamedTuple):
    """Sentences to translate, padded; a row that is all padding has no hypothesis."""

    source: Int[Array, "B S"]
    prefixes: Int[Array, "B P"] | None  # forced beginnings
    # What random draws follow from, beside the seed: the sentence, and which draw of it this is.
    draws: UInt[Array, "B 2"]


class Ready(NamedTuple):
    """Rows that are encoded, and what each layer of each decoder reads of them."""

    rows: Rows
    mask: Bool[Array, "B 1 1 S"]
    memories: list[list[KeysValues]]


def on_devices(function: Callable[..., Any], mesh: Mesh) -> Callable[..., Any]:
    """The compiled function(params, rows, ...), rows of all arrays split over the mesh.

    Each device does its share of the rows as if it were alone: nothing is exchanged, shapes and
    bits are those of one device, and none waits for another before its own rows are done.
    """

    def share(params: Any, rows: Any, *numbers: Any) -> Any:
        specs = (P(), P("rows"), *(P() for _ in numbers))
        shared = jax.shard_map(
            function, mesh=mesh, in_specs=specs, out_specs=P("rows"), check_vma=False
        )
        return shared(params, rows, *numbers)

    return jax.jit(share)


def search_batch(
    graphdefs: GraphDefs,
    tokenizer: Tokenizer,
    longest: int,
    params: tuple[Params, ...],
    rows: Rows,
    options: Settled,
) -> Hypotheses:
    """The N = n_best hypotheses of each row that settled options ask for, best first.

    They have at most source (or prefix) length + offset tokens, and at most `longest`.
    """
    if options.sample:
        rows = _repeated(rows, options.n_best)
    width = rows.source.shape[1]
    length, at_once = min(width + options.max_length_offset, longest), rows_of(width)
    models = [nnx.merge(*member) for member in zip(graphdefs, params, strict=True)]
    search = functools.partial(
        sample if options.sample else beam_search,
        mean_step(models),
        [init_cache(model, at_once, options.beam_size, length) for model in models],
        rows,
        rows=at_once,
        prepare=functools.partial(encoded, models, tokenizer.pad_id),
        bos_id=tokenizer.bos_id,
        eos_id=tokenizer.eos_id,
        pad_id=tokenizer.pad_id,
        max_lengths=_limits(rows, options, longest, tokenizer.pad_id),
        length=length,
        length_penalty_alpha=options.length_penalty_alpha,
        allowed=constraint(tokenizer, options),
    )
    if not options.sample:
        return search(
            beam_size=options.beam_size,
            n_best=options.n_best,
            move=lambda caches, parents: [cache.moved(parents) for cache in caches],
        )
    narrowing = {name: getattr(options, name) for name in ("temperature", "top_k", "top_p")}
    found = search(keys=functools.partial(_keys, options.seed), **narrowing)
    found = jax.tree.map(lambda leaf: leaf.reshape(-1, options.n_best, *leaf.shape[2:]), found)
    order = jnp.lexsort((-found.scores, ~found.finished), axis=1)
    return jax.vmap(lambda drawn, best: jax.tree.map(lambda leaf: leaf[best], drawn))(found, order)


def encoded(models: Sequence[Transformer], pad_id: int, rows: Rows) -> Ready:
    """The rows with their source encoded by each model."""
    mask = padding_mask(rows.source, pad_id)
    memories = [memory_keys_values(model, model.encode(rows.source, mask)) for model in models]
    return Ready(rows, mask, memories)


def mean_step(models: Sequence[Transformer]) -> StepFn:
    """The step function of an ensemble on `Ready` rows; its cache is a list of theirs."""

    def step_fn(tokens, caches, index, ready):
        steps = [
            decode_step(model, tokens, index, cache, memory, ready.mask)
            for model, cache, memory in zip(models, caches, ready.memories, strict=True)
        ]
        log_probs = mean_probability([_log_softmax(logits) for logits, _ in steps])
        return log_probs, [cache for _, cache in steps]

    return step_fn


def _log_softmax(logits: Float[Array, "B M V"]) -> Float[Array, "B M V"]:
    """As JAX's, which would write logits minus their maximum to memory in between."""
    return logits - jax.nn.logsumexp(logits, axis=-1, keepdims=True)


def mean_probability(log_probs: Sequence[Float[Array, "*shape"]]) -> Float[Array, "*shape"]:
    """The logarithm of the arithmetic mean of probabilities, given and returned as logarithms."""
    if len(log_probs) == 1:
        return log_probs[0]
    return jax.nn.logsumexp(jnp.stack(log_probs), axis=0) - math.log(len(log_probs))


def constraint(tokenizer: Tokenizer, options: Settled) -> Allowed:
    """What the options allow a hypothesis to go on with; a row's prefix comes before all of it."""
    vocab_size, pad_id = tokenizer.vocab_size, tokenizer.pad_id
    own = () if options.forbid_unknown else (tokenizer.unk_id,)
    never = tuple(i for i in tokenizer.never_generated if i not in own)

    def allowed(
        tokens: Int[Array, "B M L"], index: Int[Array, " B"], ready: Ready
    ) -> Bool[Array, "B #M V"]:
        mask = all_but(never, vocab_size)
        mask &= long_enough(index, options.min_length, tokenizer.eos_id, vocab_size)
        if size := options.no_repeat_ngram_size:
            mask &= no_repeated_ngram(tokens, index, size, vocab_size)
        prefixes = ready.rows.prefixes
        return mask if prefixes is None else beginning(mask, prefixes, index, pad_id)

    return allowed


def score_batch(
    graphdefs: GraphDefs,
    tokenizer: Tokenizer,
    params: tuple[Params, ...],
    rows: tuple[Int[Array, "B S"], Int[Array, "B T"]],
) -> Float[Array, "B T"]:
    """Forced decoding: the log-probability of each target token given its source and past.

    It is 0 at padding.
    """
    source, target = rows
    log_probs = []
    for member in zip(graphdefs, params, strict=True):
        model = nnx.merge(*member)
        states = forced_states(
            model, source, target, pad_id=tokenizer.pad_id, bos_id=tokenizer.bos_id
        )
        logits = model.project(states)
        log_probs.append(-optax.softmax_cross_entropy_with_integer_labels(logits, target))
    return jnp.where(target != tokenizer.pad_id, mean_probability(log_probs), 0)


def weigh_batch(
    graphdef: nnx.GraphDef,
    tokenizer: Tokenizer,
    params: Params,
    rows: tuple[Int[Array, "B S"], Int[Array, "B T"]],
) -> AttentionWeights:
    """The attention weights by which a model reads source and target rows."""
    model = nnx.merge(graphdef, params)
    return attention_weights(model, *rows, pad_id=tokenizer.pad_id, bos_id=tokenizer.bos_id)


def _limits(rows: Rows, options: Settled, longest: int, pad_id: int) -> Int[Array, " B"]:
    """The length limit of each row; filler rows have 0 and never begin."""
    sizes = jnp.sum(rows.source != pad_id, axis=1)
    room = sizes
    if rows.prefixes is not None:  # a long one, and EOS
        room = jnp.maximum(sizes, jnp.sum(rows.prefixes != pad_id, axis=1) + 1)
    return jnp.where(sizes > 0, jnp.minimum(room + options.max_length_offset, longest), 0)


def _repeated(rows: Rows, count: int) -> Rows:
    """Each row `count` times, numbered: every draw is a sentence of its own."""
    rows = jax.tree.map(lambda leaf: jnp.repeat(leaf, count, axis=0), rows)
    numbers = jnp.arange(len(rows.draws), dtype=rows.draws.dtype) % count
    return rows._replace(draws=rows.draws.at[:, 1].set(numbers))


def _keys(seed: int | Int[Array, ""], ready: Ready) -> Key[Array, " B"]:
    """A key for each draw of each sentence: from the seed, the sentence, and which draw it is."""

    def key(draw: UInt[Array, "2"]) -> Key[Array, ""]:
        return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), draw[0]), draw[1])

    return jax.vmap(key)(ready.rows.draws)
