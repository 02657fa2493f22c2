"""The decoder one token at a time, with the keys and values of its past in a cache.

The paper does not speak of it: its result is that of the whole decoder on the whole prefix. Search
keeps M hypotheses of each sentence, and each of them is a query on one cache that they share.

One layer's cache is a list of blocks of positions. M = 3 hypotheses, the first block:

    position       0           1           2
    slot        0  1  2     0  1  2     0  1  2       slot m of position l is row l * M + m
    row         0  1  2     3  4  5     6  7  8

Slot m of position l is written once, by the hypothesis that had place m when its token number l was
read. When hypotheses change places, no key and no value moves. `ancestors` moves instead, which
says of each hypothesis whose slots are its own past. Here hypothesis 0 came from slot 0, then 1:

    ancestors[b, 0]     l = 0: slot 0      l = 1: slot 1      l = 2: slot 0 (its own new one)

Letters: B sentences, M hypotheses of each, L positions, D d_model, H heads, K d_k, U d_v,
V vocabulary.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from flaxformer_min.model.attention import Context, Mask, Query, Values
from flaxformer_min.model.dropout import MaybeKey
from flaxformer_min.model.layers import KeysValues, MultiHeadAttention, SourceMask
from flaxformer_min.model.transformer import Transformer

# The first block has 16 positions; each later one as many, or a quarter of all positions before it
# if that is more: 16 16 16 16 16 20 25 ... The last one has what is left.
FIRST_BLOCK = 16


class CacheBlock(NamedTuple):
    """The keys and values of one layer at some positions: slot m of position l is row l * M + m."""

    keys: Float[Array, "B H K LM"]  # transposed: the layout the score product reads fastest
    values: Float[Array, "B H LM U"]

    def written(self, new: KeysValues, index: Int[Array, " B"]) -> "CacheBlock":
        """A copy in which position index[b] holds `new`, [B, H, M, K] and [B, H, M, U].

        It is unchanged for a sentence whose index[b] lies in another block.
        """
        keys = new.keys.swapaxes(2, 3).astype(self.keys.dtype)
        values = new.values.astype(self.values.dtype)
        rows = index * new.keys.shape[2]
        return CacheBlock(put(self.keys, keys, rows, 3), put(self.values, values, rows, 2))


class DecodingCache(NamedTuple):
    """What the hypotheses of a batch have as their past.

    ancestors[b, m, l, n] is True if slot n wrote the token that hypothesis m has at position l.
    """

    ancestors: Bool[Array, "B M L M"]
    layers: list[list[CacheBlock]]  # for each layer its blocks of positions

    def moved(self, parents: Int[Array, "B M"]) -> "DecodingCache":
        """The cache after hypothesis m has become a child of hypothesis parents[b, m]."""
        ancestors = jnp.take_along_axis(self.ancestors, parents[:, :, None, None], axis=1)
        return self._replace(ancestors=ancestors)


def block_sizes(length: int) -> list[int]:
    """The numbers of positions in the blocks of a cache, `length` together."""
    sizes: list[int] = []
    while (total := sum(sizes)) < length:
        sizes.append(min(max(FIRST_BLOCK, total // 4), length - total))
    return sizes


def init_cache(model: Transformer, batch: int, hypotheses: int, length: int) -> DecodingCache:
    """An empty cache with room for `length` positions of `hypotheses` for each of `batch`."""
    config, dtype = model.config, model.dtype
    heads = batch, config.num_heads
    sizes = [positions * hypotheses for positions in block_sizes(length)]
    keys = [jnp.zeros((*heads, config.d_k, size), dtype) for size in sizes]
    values = [jnp.zeros((*heads, size, config.d_v), dtype) for size in sizes]
    past = [CacheBlock(*block) for block in zip(keys, values, strict=True)]
    ancestors = jnp.zeros((batch, hypotheses, length, hypotheses), bool)
    return DecodingCache(ancestors, [past for _ in model.decoder])


def memory_keys_values(model: Transformer, memory: Float[Array, "B S D"]) -> list[KeysValues]:
    """Each decoder layer's keys and values of memory [B, S, D]; every step attends to the same."""
    return [layer.cross_attention.keys_values(memory) for layer in model.decoder]


def decode_step(
    model: Transformer,
    tokens: Int[Array, "B M"],
    index: Int[Array, " B"],
    cache: DecodingCache,
    memories: list[KeysValues],
    source_mask: SourceMask,
) -> tuple[Float[Array, "B M V"], DecodingCache]:
    """Logits [B, M, V] after one more token of each hypothesis, tokens [B, M], and the new cache.

    The tokens of sentence b have position index[b]; BOS has 0. The logits equal column index[b] of
    `Transformer.decode` on the whole prefixes. A sentence whose index is 0 has just begun: what the
    cache holds there belongs to another sentence and is ignored.
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
    for layer, memory, past in zip(model.decoder, memories, cache.layers, strict=True):
        layers.append([])
        attend_to_past = functools.partial(
            attention_step, layer.self_attention, past, ancestors, index, layers[-1]
        )
        x = layer.sublayers(x, attend_to_past, memory, source_mask)
    return model.project(x), DecodingCache(ancestors, layers)


def attention_step(
    attention: MultiHeadAttention,
    past: Sequence[CacheBlock],
    ancestors: Bool[Array, "B M L M"],
    index: Int[Array, " B"],
    written: list[CacheBlock],
    x: Float[Array, "B M D"],
    key: MaybeKey = None,
) -> Float[Array, "B M D"]:
    """Self-attention of one new token of each hypothesis to its past: [B, M, D] -> [B, M, D].

    `ancestors` is the mask. A block that no sentence has come to yet is not read. `written` gets
    the blocks with the new token in them. There is no dropout, so `key` is None.
    """
    batch, hypotheses, _ = x.shape
    new, furthest = attention.keys_values(x), jnp.max(index)
    blocks, first = [], 0
    for block in past:
        end = first + block.keys.shape[3] // hypotheses
        mask = ancestors[:, None, :, first:end].reshape(batch, 1, hypotheses, -1)
        written.append(block.written(new, index - first))
        blocks.append(MaskedBlock(*written[-1], mask, furthest >= first))
        first = end
    return attention.merge(attend_blocks(attention.heads(x, attention.query[...]), blocks))


class MaskedBlock(NamedTuple):
    """Keys and values of some positions, and which query may attend to which of them."""

    keys: Float[Array, "B H K S"]
    values: Values
    mask: Mask  # all False where the block is not needed
    needed: Bool[Array, ""]


class _Sums(NamedTuple):
    """Attention over the blocks so far, with weights exp(score - largest), not yet normalised."""

    largest: Float[Array, "B H T 1"]  # score
    total: Float[Array, "B H T 1"]  # of the weights
    context: Context  # sum of weight x value


def attend_blocks(query: Query, blocks: Sequence[MaskedBlock]) -> Context:
    """`scaled_dot_product_attention` to the keys of all blocks; those not needed cost nothing.

    One block is added after the other, the first one always. A block whose mask is all False for a
    query changes no bit of that query's result.
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
    """The sums with one block more. They are at least float32 whatever the inputs are."""
    product = functools.partial(
        jnp.einsum, precision="highest", preferred_element_type=sums.total.dtype
    )
    scores = product("BHTK,BHKS->BHTS", query, block.keys) / query.shape[-1] ** 0.5
    lowest = jnp.finfo(scores.dtype).min
    here = jnp.where(block.mask, scores, lowest).max(axis=-1, keepdims=True)
    largest = jnp.maximum(sums.largest, here)
    weights = jnp.where(block.mask, jnp.exp(scores - largest), 0)
    kept = jnp.exp(sums.largest - largest)  # 1 where nothing here is larger
    return _Sums(
        largest,
        sums.total * kept + weights.sum(axis=-1, keepdims=True),
        sums.context * kept
        + product("BHTS,BHSU->BHTU", weights.astype(block.values.dtype), block.values),
    )


def put(
    x: Shaped[Array, "B ..."], new: Shaped[Array, "B ..."], places: Int[Array, " B"], axis: int
) -> Shaped[Array, "B ..."]:
    """A copy of x that holds new[b] from places[b] on along `axis`.

    Where new[b] would not lie within x, x is unchanged.
    """
    window = jax.lax.ScatterDimensionNumbers(
        update_window_dims=tuple(range(x.ndim - 1)),
        inserted_window_dims=(),
        scatter_dims_to_operand_dims=(axis - 1,),
    )

    def put_row(x, new, place):
        return jax.lax.scatter(x, place[None], new, window, mode="drop")

    return jax.vmap(put_row)(x, new, places)
