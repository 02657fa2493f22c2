"""The functions that are compiled: token ids go in, hypotheses or log-probabilities come out.

Several models can work together as an ensemble: the probability of the next token is then the
arithmetic mean of the models' probabilities. `graphdefs` and `params` hold one entry for each
model. No row of a batch depends on another row.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int, Key, UInt

from flaxformer_min.data.tokenizer import Tokenizer
from flaxformer_min.decoding import constraints
from flaxformer_min.decoding.batches import CPU, Capacity, rows_at_once
from flaxformer_min.decoding.options import Options
from flaxformer_min.decoding.sampling import narrow, sample
from flaxformer_min.decoding.search import (
    Allowed,
    Hypotheses,
    Index,
    Search,
    StepFn,
    Tokens,
    beam_search,
    take,
)
from flaxformer_min.decoding.sentences import PaddedSentences
from flaxformer_min.model.build import Params
from flaxformer_min.model.cached import decode_step, init_cache, memory_keys_values, step_weights
from flaxformer_min.model.layers import KeysValues
from flaxformer_min.model.masks import padding_mask
from flaxformer_min.model.teacher_forcing import forced_states
from flaxformer_min.model.transformer import Source, Target, Transformer

GraphDefs = tuple[nnx.GraphDef, ...]
Pairs = tuple[Source, Target]  # token ids [B, S] and [B, T]

# For a compiled function the static fields are constants; the other fields are numbers it is given.
jax.tree_util.register_dataclass(Options)


class Ready(NamedTuple):
    """Sentences whose source is encoded, as the decoders need them at every step."""

    sentences: PaddedSentences
    mask: Bool[Array, "B 1 1 S"]
    memories: list[list[KeysValues]]  # for each model, for each of its layers


def rows_mesh(devices: Sequence[Any]) -> Mesh:
    """Returns the mesh over which `on_devices` splits the rows of a batch."""
    return jax.make_mesh((len(devices),), ("rows",), axis_types=(AxisType.Auto,), devices=devices)


def on_devices(function: Callable[..., Any], mesh: Mesh) -> Any:
    """Compiles function(params, rows, ...), with the rows of all arrays split over the mesh.

    `rows` is a tree of arrays [B, ...]; all other arguments are whole on every device. Each device
    does its share of the rows as if it were alone: nothing is exchanged, shapes and bits are those
    of one device, and no device waits for another before its own rows are done.
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
    sentences: PaddedSentences,
    options: Options,
    capacity: Capacity = CPU,
) -> Hypotheses:
    """Returns the N = n_best hypotheses of each sentence, tokens [B, N, T], best first.

    `options` must be complete (`Options.with_defaults`). A hypothesis has at most `longest` tokens,
    and at most max_length_offset tokens more than its source, or than its prefix and EOS if these
    are longer. `capacity` is that of the device.
    """
    models = [nnx.merge(*member) for member in zip(graphdefs, params, strict=True)]
    width = sentences.source.shape[1]
    search = _search_settings(models, tokenizer, longest, width, options, capacity)
    assert search.rows is not None
    shape = search.rows, search.beam_size, search.length
    caches = [init_cache(model, *shape, capacity.first_block) for model in models]
    if options.sample:
        sentences = _repeat(sentences, options.n_best)
    limits = _limits(sentences, options, longest, tokenizer.pad_id)
    if not options.sample:
        return beam_search(mean_step(models), caches, sentences, limits, search)
    draw_from = functools.partial(
        narrow, temperature=options.temperature, top_k=options.top_k, top_p=options.top_p
    )
    keys = functools.partial(_keys, options.seed)
    found = sample(mean_step(models), caches, sentences, limits, search, keys, draw_from)
    return _rank_draws(found, options.n_best)


def _search_settings(
    models: Sequence[Transformer],
    tokenizer: Tokenizer,
    longest: int,
    width: int,
    options: Options,
    capacity: Capacity,
) -> Search:
    """Returns the settings of a search over sentences padded to `width`."""
    alpha, offset = options.length_penalty_alpha, options.max_length_offset
    assert options.beam_size is not None and alpha is not None and offset is not None
    return Search(
        bos_id=tokenizer.bos_id,
        eos_id=tokenizer.eos_id,
        pad_id=tokenizer.pad_id,
        length=min(width + offset, longest),
        beam_size=options.beam_size,
        n_best=min(options.n_best, options.beam_size),  # a search that samples finds one
        length_penalty_alpha=alpha,
        rows=rows_at_once(width, options.beam_size, capacity),
        prepare=functools.partial(encode_sources, models, tokenizer.pad_id),
        allowed=constraint(tokenizer, options),
        move=lambda caches, parents: [cache.moved(parents) for cache in caches],
    )


def encode_sources(models: Sequence[Transformer], pad_id: int, sentences: PaddedSentences) -> Ready:
    """Encodes the source of each sentence by each model."""
    source, mask = sentences.source, padding_mask(sentences.source, pad_id)
    memories = [memory_keys_values(model, model.encode(source, mask)) for model in models]
    return Ready(sentences, mask, memories)


def mean_step(models: Sequence[Transformer]) -> StepFn:
    """Returns the step function of an ensemble, for `Ready` sentences.

    Its cache is a list with one DecodingCache for each model.
    """
    members = [functools.partial(decode_step, model, step_weights(model)) for model in models]

    def step_fn(tokens, caches, index, ready):
        steps = [
            member(tokens, index, cache, memory, ready.mask)
            for member, cache, memory in zip(members, caches, ready.memories, strict=True)
        ]
        log_probs = mean_probability([_log_softmax(logits) for logits, _ in steps])
        return log_probs, [cache for _, cache in steps]

    return step_fn


def _log_softmax(logits: Float[Array, "B M V"]) -> Float[Array, "B M V"]:
    """Computes the log-softmax over V.

    JAX's own function would write logits minus their maximum to memory on the way.
    """
    return logits - jax.nn.logsumexp(logits, axis=-1, keepdims=True)


def mean_probability(log_probs: Sequence[Float[Array, "*shape"]]) -> Float[Array, "*shape"]:
    """Returns the mean of probabilities; they are given and returned as logarithms."""
    if len(log_probs) == 1:
        return log_probs[0]
    return jax.nn.logsumexp(jnp.stack(log_probs), axis=0) - math.log(len(log_probs))


def constraint(tokenizer: Tokenizer, options: Options) -> Allowed:
    """Returns the function that says which token the options allow next.

    Within the prefix of a sentence only the prefix counts.
    """
    vocab_size = tokenizer.vocab_size
    wanted = () if options.forbid_unknown else (tokenizer.unk_id,)
    never = tuple(i for i in tokenizer.never_generated if i not in wanted)

    def allowed(tokens: Tokens, index: Index, ready: Ready) -> Bool[Array, "B #M V"]:
        mask = constraints.all_but(never, vocab_size)
        mask &= constraints.long_enough(index, options.min_length, tokenizer.eos_id, vocab_size)
        if size := options.no_repeat_ngram_size:
            mask &= constraints.no_repeated_ngram(tokens, index, size, vocab_size)
        prefixes = ready.sentences.prefixes
        if prefixes is None:
            return mask
        return constraints.forced_prefix(mask, prefixes, index, tokenizer.pad_id)

    return allowed


def _limits(
    sentences: PaddedSentences, options: Options, longest: int, pad_id: int
) -> Int[Array, " B"]:
    """Returns the largest number of tokens that each sentence's hypotheses may have: [B].

    It is 0 for an entry that is all padding, which is not searched.
    """
    sizes = jnp.sum(sentences.source != pad_id, axis=1)
    room = sizes
    if sentences.prefixes is not None:  # a prefix may be longer than the source
        room = jnp.maximum(sizes, jnp.sum(sentences.prefixes != pad_id, axis=1) + 1)
    assert options.max_length_offset is not None
    return jnp.where(sizes > 0, jnp.minimum(room + options.max_length_offset, longest), 0)


def _repeat(sentences: PaddedSentences, count: int) -> PaddedSentences:
    """Repeats each sentence `count` times and numbers the copies: each draw has its own copy."""
    repeated = jax.tree.map(lambda leaf: jnp.repeat(leaf, count, axis=0), sentences)
    numbers = jnp.arange(len(repeated.draws), dtype=repeated.draws.dtype) % count
    return repeated._replace(draws=repeated.draws.at[:, 1].set(numbers))


def _keys(seed: int | Int[Array, ""], ready: Ready) -> Key[Array, " B"]:
    """Makes a random key for each sentence from the seed, its source ids and the draw's number."""

    def key(draw: UInt[Array, "2"]) -> Key[Array, ""]:
        return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), draw[0]), draw[1])

    return jax.vmap(key)(ready.sentences.draws)


def _rank_draws(found: Hypotheses, count: int) -> Hypotheses:
    """Reshapes draws [B * count, 1, ...] to [B, count, ...], best first for each sentence."""
    found = jax.tree.map(lambda leaf: leaf.reshape(-1, count, *leaf.shape[2:]), found)
    return take(found, jnp.lexsort((-found.scores, ~found.finished), axis=1))


def score_batch(
    graphdefs: GraphDefs, tokenizer: Tokenizer, params: tuple[Params, ...], pairs: Pairs
) -> Float[Array, "B T"]:
    """Returns the log-probability of each target token, [B, T], in nats; it is 0 at padding.

    This is forced decoding: each token's probability is the one given the source and the target
    tokens before it.
    """
    source, target = pairs
    log_probs = []
    for member in zip(graphdefs, params, strict=True):
        model = nnx.merge(*member)
        states = forced_states(
            model, source, target, pad_id=tokenizer.pad_id, bos_id=tokenizer.bos_id
        )
        logits = model.project(states)
        log_probs.append(-optax.softmax_cross_entropy_with_integer_labels(logits, target))
    return jnp.where(target != tokenizer.pad_id, mean_probability(log_probs), 0)
