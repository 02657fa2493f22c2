"""Scaled dot-product attention (paper, section 3.2.1) as pure functions."""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Key

from flaxformer_min.dropout import dropout


def scaled_dot_product_attention(
    query: Float[Array, "B H T K"],
    key: Float[Array, "B H S K"],
    value: Float[Array, "B H S U"],
    mask: Bool[Array, "#B #H #T S"],
    *,
    dropout_rate: float = 0.0,
    dropout_key: Key[Array, ""] | None = None,
    return_weights: bool = False,
) -> Float[Array, "B H T U"] | tuple[Float[Array, "B H T U"], Float[Array, "B H T S"]]:
    """softmax(Q K^T / sqrt(K) + M) V, with M minus infinity where the mask is False.

    A masked key has weight exactly 0; a query with no allowed key has weights and output 0 (a
    softmax over nothing, which would be NaN). Scores and softmax are at least float32 whatever
    the inputs are; the output has the value's dtype. `return_weights` also gives the weights
    [B, H, T, S], before dropout.
    """
    output, weights = attend(
        query, key, value, mask, dropout_rate=dropout_rate, dropout_key=dropout_key
    )
    return (output, weights) if return_weights else output


def attend(
    query: Float[Array, "B H T K"],
    key: Float[Array, "B H S K"],
    value: Float[Array, "B H S U"],
    mask: Bool[Array, "#B #H #T S"],
    *,
    dropout_rate: float = 0.0,
    dropout_key: Key[Array, ""] | None = None,
) -> tuple[Float[Array, "B H T U"], Float[Array, "B H T S"]]:
    """`scaled_dot_product_attention` with its weights, always."""
    at_least_float32 = jnp.promote_types(query.dtype, jnp.float32)
    scores = jnp.einsum(
        "BHTK,BHSK->BHTS", query, key, precision="highest", preferred_element_type=at_least_float32
    )
    weights = masked_softmax(scores / query.shape[-1] ** 0.5, mask)
    read = dropout(weights, dropout_rate, dropout_key).astype(value.dtype)
    return jnp.einsum("BHTS,BHSU->BHTU", read, value, precision="highest"), weights


class Block(NamedTuple):
    """Keys and values of some positions, which are read if any query needs them."""

    keys: Float[Array, "B H K S"]  # a column for each, as products like to read them
    values: Float[Array, "B H S U"]
    mask: Bool[Array, "#B #H #T S"]  # all False where not needed
    needed: Bool[Array, ""]


class _Reading(NamedTuple):
    """Softmax and product under way: weights so far are exp(score - largest), not normalised."""

    largest: Float[Array, "B H T 1"]
    total: Float[Array, "B H T 1"]
    context: Float[Array, "B H T U"]


def attend_blocks(
    query: Float[Array, "B H T K"], blocks: Sequence[Block]
) -> Float[Array, "B H T U"]:
    """`scaled_dot_product_attention` to the keys of all blocks; those not needed cost nothing.

    One block is read after the other, the first one always. To a query that a block's mask keeps
    from all of it, reading it changes no bit.
    """
    first, *rest = blocks
    shape = *query.shape[:3], 1
    wide = jnp.promote_types(query.dtype, jnp.float32)
    nothing = _Reading(
        jnp.full(shape, jnp.finfo(wide).min, wide),
        jnp.zeros(shape, wide),
        jnp.zeros((*query.shape[:3], first.values.shape[3]), wide),
    )
    reading = _read(nothing, query, first)
    for block in rest:
        read = functools.partial(_read, query=query, block=block)
        reading = jax.lax.cond(block.needed, read, lambda reading: reading, reading)
    context = reading.context / jnp.where(reading.total > 0, reading.total, 1)
    return context.astype(first.values.dtype)


def _read(reading: _Reading, query: Float[Array, "B H T K"], block: Block) -> _Reading:
    """One block further. Scores and sums are at least float32 whatever the inputs are."""
    product = functools.partial(
        jnp.einsum, precision="highest", preferred_element_type=reading.total.dtype
    )
    scores = product("BHTK,BHKS->BHTS", query, block.keys) / query.shape[-1] ** 0.5
    lowest = jnp.finfo(scores.dtype).min
    here = jnp.where(block.mask, scores, lowest).max(axis=-1, keepdims=True)
    largest = jnp.maximum(reading.largest, here)
    weights = jnp.where(block.mask, jnp.exp(scores - largest), 0)
    kept = jnp.exp(reading.largest - largest)  # 1 where nothing here is larger
    return _Reading(
        largest,
        reading.total * kept + weights.sum(axis=-1, keepdims=True),
        reading.context * kept
        + product("BHTS,BHSU->BHTU", weights.astype(block.values.dtype), block.values),
    )


def cudnn_attention(
    query: Float[Array, "B H T K"],
    key: Float[Array, "B H S K"],
    value: Float[Array, "B H S K"],
    mask: Bool[Array, "#B #H #T S"],
) -> Float[Array, "B H T K"]:
    """`scaled_dot_product_attention` by cuDNN's fused kernel, which keeps nothing of size T x S.

    For NVIDIA GPUs and bfloat16 only. A query with no allowed key reads the mean of the values.
    """
    heads_inside = (x.swapaxes(1, 2) for x in (query, key, value))
    context = jax.nn.dot_product_attention(*heads_inside, mask=mask, implementation="cudnn")
    return context.swapaxes(1, 2)


def masked_softmax(
    scores: Float[Array, "B H T S"], mask: Bool[Array, "#B #H #T S"]
) -> Float[Array, "B H T S"]:
    """Softmax over the allowed keys of each row; exactly 0 elsewhere and in rows that allow none.

    The lowest finite number stands for minus infinity: a row without an allowed key then has a
    finite softmax, and finite gradients, before the second `where` sets it to 0.
    """
    lowest = jnp.finfo(scores.dtype).min
    return jnp.where(mask, jax.nn.softmax(jnp.where(mask, scores, lowest), axis=-1), 0)
