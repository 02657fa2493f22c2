"""The decoder one token at a time, with the keys and values of earlier tokens in a cache.

The cache is not in the paper. It changes no result: decoding a prefix token by token gives the
logits of `Transformer.decode` on the whole prefix. A search keeps M hypotheses of each sentence,
and all of them share one cache.

The cache of one layer is a list of blocks. A block holds the keys and values of some consecutive
positions, with M slots for each position. For M = 3 the first block begins like this:

    position       0           1           2
    slot        0  1  2     0  1  2     0  1  2       slot m of position l is row l * M + m
    row         0  1  2     3  4  5     6  7  8

Slot m of position l is written once, by the hypothesis that was number m when token l was decoded.
When the search reorders its hypotheses, no key and no value moves. Only `ancestors` changes, the
mask that says which slots are the past of which hypothesis. In this example the past of hypothesis
0 is slot 0 of position 0 and slot 1 of position 1, and it has just written its own slot:

    ancestors[b, 0]     l = 0: slot 0      l = 1: slot 1      l = 2: slot 0 (its own new one)

Letters: B sentences, M hypotheses of each, L positions, S source length, D d_model, H heads, K d_k,
U d_v, V vocabulary.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Shaped

from flaxformer_min.model.attention import Context, Mask, Query, Values
from flaxformer_min.model.dropout import MaybeKey
from flaxformer_min.model.layers import KeysValues, MultiHeadAttention, SourceMask
from flaxformer_min.model.linear import dense
from flaxformer_min.model.transformer import Transformer

# The first block has 16 positions. Each later block has as many, or a quarter of all positions
# before it if that is more: 16 16 16 16 16 20 25 ... The last block has what is left.
FIRST_BLOCK = 16


class CacheBlock(NamedTuple):
    """The keys and values of one layer at the L positions of one block.

    Slot m of position l, counted from the block's first position, is row l * M + m.
    """

    keys: Float[Array, "B H K LM"]  # transposed: the layout the score product reads fastest
    values: Float[Array, "B H LM U"]

    def written(self, new: KeysValues, index: Int[Array, " B"]) -> "CacheBlock":
        """Returns a copy that holds `new`, [B, H, M, K] and [B, H, M, U], at position index[b].

        The index counts from the block's first position. A sentence whose index[b] lies outside of
        this block keeps its old keys and values.
        """
        keys = new.keys.swapaxes(2, 3).astype(self.keys.dtype)
        values = new.values.astype(self.values.dtype)
        rows = index * new.keys.shape[2]
        return CacheBlock(put(self.keys, keys, rows, 3), put(self.values, values, rows, 2))


class DecodingCache(NamedTuple):
    """The past of all hypotheses of a batch: keys and values, and whose past each of them is.

    ancestors[b, m, l, n] is True if slot n of position l belongs to the past of hypothesis m.
    """

    ancestors: Bool[Array, "B M L M"]
    layers: list[list[CacheBlock]]  # the blocks of each layer

    def moved(self, parents: Int[Array, "B M"]) -> "DecodingCache":
        """Returns the cache after hypothesis m has become a child of hypothesis parents[b, m]."""
        ancestors = jnp.take_along_axis(self.ancestors, parents[:, :, None, None], axis=1)
        return self._replace(ancestors=ancestors)


def block_sizes(length: int, first: int | None = None) -> list[int]:
    """Returns the number of positions of each block of a cache; they sum to `length`.

    The first block has `first` of them, by default FIRST_BLOCK.
    """
    sizes: list[int] = []
    while (total := sum(sizes)) < length:
        sizes.append(min(max(first or FIRST_BLOCK, total // 4), length - total))
    return sizes


def init_cache(
    model: Transformer, batch: int, hypotheses: int, length: int, first_block: int | None = None
) -> DecodingCache:
    """Returns an empty cache of `length` positions for `batch` sentences of `hypotheses` each.

    `first_block` is that of `block_sizes`.
    """
    config, dtype = model.config, model.dtype
    heads = batch, config.num_heads
    sizes = [positions * hypotheses for positions in block_sizes(length, first_block)]
    keys = [jnp.zeros((*heads, config.d_k, size), dtype) for size in sizes]
    values = [jnp.zeros((*heads, size, config.d_v), dtype) for size in sizes]
    past = [CacheBlock(*block) for block in zip(keys, values, strict=True)]
    ancestors = jnp.zeros((batch, hypotheses, length, hypotheses), bool)
    return DecodingCache(ancestors, [past for _ in model.decoder])


class StepWeights(NamedTuple):
    """Some weights in the form in which `decode_step` multiplies by them.

    A step multiplies few rows by many small matrices: one wide product is faster than three, and
    a table that has to be transposed in each step takes half as long again.
    """

    output: Float[Array, "D V"]  # the output table, transposed
    # W_Q, W_K and W_V of each layer's self-attention, side by side for each head, and their biases
    projections: list[tuple[Float[Array, "D E"], Float[Array, " E"] | None]]


def step_weights(model: Transformer) -> StepWeights:
    """Returns the weights in that form. They are made once, before the loop of a search."""
    projections = []
    for layer in model.decoder:
        of = layer.self_attention
        kernel = _side_by_side(of.num_heads, of.query, of.key, of.value)
        biases = [x for x in (of.query_bias, of.key_bias, of.value_bias) if x is not None]
        projections.append((kernel, _side_by_side(of.num_heads, *biases) if biases else None))
    return StepWeights(model.output_table.T, projections)


def _side_by_side(num_heads: int, *parts: nnx.Param) -> Float[Array, "*shape"]:
    """Concatenates the parts' columns for each head: [..., H x K], ... -> [..., H x (K + ...)]."""
    by_head = [part[...].reshape(*part.shape[:-1], num_heads, -1) for part in parts]
    return jnp.concatenate(by_head, axis=-1).reshape(*parts[0].shape[:-1], -1)


def memory_keys_values(model: Transformer, memory: Float[Array, "B S D"]) -> list[KeysValues]:
    """Returns each decoder layer's cross-attention keys and values of memory [B, S, D].

    They are the same at every step of a search, so that they are computed only once.
    """
    return [layer.cross_attention.keys_values(memory) for layer in model.decoder]


def decode_step(
    model: Transformer,
    weights: StepWeights,
    tokens: Int[Array, "B M"],
    index: Int[Array, " B"],
    cache: DecodingCache,
    memories: list[KeysValues],
    source_mask: SourceMask,
) -> tuple[Float[Array, "B M V"], DecodingCache]:
    """Decodes one more token of each hypothesis; returns its logits [B, M, V] and the new cache.

    `tokens` [B, M] are the tokens that the hypotheses emitted last. Those of sentence b have
    position index[b]; BOS has position 0. The logits, which are those of the next token, equal
    column index[b] of `Transformer.decode` on the whole prefixes. A sentence whose index is 0 has
    just begun: what the cache holds in its row belongs to another sentence and is ignored.
    `weights` are those of `step_weights`; `memories` are those of `memory_keys_values`, one for
    each layer.
    """
    batch, hypotheses, length, _ = cache.ancestors.shape
    assert model.config.positions == "sinusoidal" or length <= model.config.max_length
    positions = jnp.asarray(model.positions("target", length))
    x = model.embed(model.embedding, tokens, positions[index][:, None])
    itself = jnp.eye(hypotheses, dtype=bool)[None, :, None]
    itself = jnp.broadcast_to(itself, (batch, hypotheses, 1, hypotheses))
    ancestors = put(cache.ancestors & (index > 0)[:, None, None, None], itself, index, 2)
    layers: list[list[CacheBlock]] = []
    # Cross-attention takes the M hypotheses of a sentence as M queries, so the keys and values of
    # the memory are held once per sentence.
    parts = zip(model.decoder, weights.projections, memories, cache.layers, strict=True)
    for layer, projection, memory, past in parts:
        layers.append([])
        attend_to_past = functools.partial(
            attention_step, layer.self_attention, projection, past, ancestors, index, layers[-1]
        )
        x = layer.sublayers(x, attend_to_past, memory, source_mask)
    return model.project(x, weights.output.T), DecodingCache(ancestors, layers)


def attention_step(
    attention: MultiHeadAttention,
    projection: tuple[Array, Array | None],
    past: Sequence[CacheBlock],
    ancestors: Bool[Array, "B M L M"],
    index: Int[Array, " B"],
    written: list[CacheBlock],
    x: Float[Array, "B M D"],
    key: MaybeKey = None,
) -> Float[Array, "B M D"]:
    """Lets the newest token of each hypothesis attend to its past: x [B, M, D] -> [B, M, D].

    `projection` is that of the layer in `StepWeights`, `past` are the layer's blocks before this
    step, and `ancestors` is the mask. The function appends the blocks with the new token in them to
    `written`. It does not read a block that no sentence has come to yet. There is no dropout, so
    `key` is None.
    """
    batch, hypotheses, _ = x.shape
    d_k, furthest = past[0].keys.shape[2], jnp.max(index)
    parts = dense(x, *projection).reshape(batch, hypotheses, attention.num_heads, -1)
    query, *new = jnp.split(parts.swapaxes(1, 2), (d_k, 2 * d_k), axis=3)
    blocks, first = [], 0
    for block in past:
        end = first + block.keys.shape[3] // hypotheses
        mask = ancestors[:, None, :, first:end].reshape(batch, 1, hypotheses, -1)
        written.append(block.written(KeysValues(*new), index - first))
        blocks.append(MaskedBlock(*written[-1], mask, furthest >= first))
        first = end
    return attention.merge(attend_blocks(query, blocks))


class MaskedBlock(NamedTuple):
    """The keys and values of one block, and which query may attend to which key."""

    keys: Float[Array, "B H K S"]
    values: Values
    mask: Mask  # all False where the block is not needed
    needed: Bool[Array, ""]  # whether any sentence has come to this block


class _Sums(NamedTuple):
    """Attention to the keys of the blocks so far, with weights exp(score - largest).

    The weights are not normalised yet.
    """

    largest: Float[Array, "B H T 1"]  # the largest score
    total: Float[Array, "B H T 1"]  # the sum of the weights
    context: Context  # the sum of weight x value


def attend_blocks(query: Query, blocks: Sequence[MaskedBlock]) -> Context:
    """Does what `scaled_dot_product_attention` does, with the keys and values of all blocks.

    Queries [B, H, T, K] become outputs [B, H, T, U]. The blocks are added one after another: the
    first one always, a later one only if it is needed, and otherwise it costs nothing. A block
    whose mask is all False for a query changes no bit of that query's result.
    """
    first, *rest = blocks
    shape = *query.shape[:3], 1
    wide = jnp.promote_types(query.dtype, jnp.float32)
    nothing = _Sums(
        jnp.full(shape, jnp.finfo(wide).min, wide),
        jnp.zeros(shape, wide),
        jnp.zeros((*query.shape[:3], first.values.shape[3]), wide),
    )
    sums = _add_block(nothing, query, first)
    for block in rest:
        add = functools.partial(_add_block, query=query, block=block)
        sums = jax.lax.cond(block.needed, add, lambda sums: sums, sums)
    context = sums.context / jnp.where(sums.total > 0, sums.total, 1)
    return context.astype(first.values.dtype)


def _add_block(sums: _Sums, query: Query, block: MaskedBlock) -> _Sums:
    """Returns the sums with one more block, in at least float32 whatever the inputs are."""
    product = functools.partial(
        jnp.einsum, precision="highest", preferred_element_type=sums.total.dtype
    )
    scores = product("BHTK,BHKS->BHTS", query, block.keys) / query.shape[-1] ** 0.5
    lowest = jnp.finfo(scores.dtype).min
    here = jnp.where(block.mask, scores, lowest).max(axis=-1, keepdims=True)
    largest = jnp.maximum(sums.largest, here)
    weights = jnp.where(block.mask, jnp.exp(scores - largest), 0)
    kept = jnp.exp(sums.largest - largest)  # 1 where this block has no larger score
    return _Sums(
        largest,
        sums.total * kept + weights.sum(axis=-1, keepdims=True),
        sums.context * kept
        + product("BHTS,BHSU->BHTU", weights.astype(block.values.dtype), block.values),
    )


def put(
    x: Shaped[Array, "B ..."], new: Shaped[Array, "B ..."], places: Int[Array, " B"], axis: int
) -> Shaped[Array, "B ..."]:
    """Returns a copy of x in which x[b] holds new[b] from places[b] on along `axis` of x.

    Where new[b] would not lie within x[b], x[b] is unchanged. A TPU would scatter one row after
    another; it writes all of x again instead, on its way from memory to the next operation.
    """
    return jax.lax.platform_dependent(
        *(x, new, places),
        tpu=functools.partial(_put_by_selecting, axis=axis),
        default=functools.partial(_put_by_scattering, axis=axis),
    )


def _put_by_selecting(
    x: Shaped[Array, "B ..."], new: Shaped[Array, "B ..."], places: Int[Array, " B"], axis: int
) -> Shaped[Array, "B ..."]:
    """Does what `put` does, by one choice for each place of `new` along the axis."""
    size, room = new.shape[axis], x.shape[axis] - new.shape[axis]
    places = jnp.where((places >= 0) & (places <= room), places, -size)
    along = [x.shape[axis] if a == axis else 1 for a in range(x.ndim)]
    offsets = jnp.arange(x.shape[axis]).reshape(along) - jnp.expand_dims(places, range(1, x.ndim))
    for n in range(size):
        x = jnp.where(offsets == n, jax.lax.slice_in_dim(new, n, n + 1, axis=axis), x)
    return x


def _put_by_scattering(
    x: Shaped[Array, "B ..."], new: Shaped[Array, "B ..."], places: Int[Array, " B"], axis: int
) -> Shaped[Array, "B ..."]:
    """Does what `put` does, by a scatter of each sentence."""
    window = jax.lax.ScatterDimensionNumbers(
        update_window_dims=tuple(range(x.ndim - 1)),
        inserted_window_dims=(),
        scatter_dims_to_operand_dims=(axis - 1,),
    )

    def put_row(x, new, place):
        return jax.lax.scatter(x, place[None], new, window, mode="drop")

    return jax.vmap(put_row)(x, new, places)
