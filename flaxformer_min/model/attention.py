"""Scaled dot-product attention (paper, section 3.2.1) as pure functions.

Letters: B batch, H heads, T queries, S keys, K width of a query and a key, U width of a value.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

Query = Float[Array, "B H T K"]
Keys = Float[Array, "B H S K"]
Values = Float[Array, "B H S U"]
Mask = Bool[Array, "#B #H #T S"]  # True = may attend
Weights = Float[Array, "B H T S"]
Context = Float[Array, "B H T U"]


def scaled_dot_product_attention(
    query: Query, key: Keys, value: Values, mask: Mask, *, return_weights: bool = False
) -> Context | tuple[Context, Weights]:
    """softmax(Q K^T / sqrt(K) + M) V, with M minus infinity where the mask is False.

    A masked key has weight exactly 0; a query with no allowed key has weights and output 0 (a
    softmax over nothing, which would be NaN). Scores and softmax are at least float32 whatever
    the inputs are; the output has the value's dtype. `return_weights` also gives the weights
    [B, H, T, S].
    """
    output, weights = attend(query, key, value, mask)
    return (output, weights) if return_weights else output


def attend(
    query: Query,
    key: Keys,
    value: Values,
    mask: Mask,
    drop: Callable[[Weights], Weights] | None = None,
) -> tuple[Context, Weights]:
    """`scaled_dot_product_attention` and its weights, before `drop` takes some of them away.

    `drop` is dropout on the weights, in training.
    """
    at_least_float32 = jnp.promote_types(query.dtype, jnp.float32)
    scores = jnp.einsum(
        "BHTK,BHSK->BHTS", query, key, precision="highest", preferred_element_type=at_least_float32
    )
    weights = masked_softmax(scores / query.shape[-1] ** 0.5, mask)
    kept = weights if drop is None else drop(weights)
    output = jnp.einsum("BHTS,BHSU->BHTU", kept.astype(value.dtype), value, precision="highest")
    return output, weights


def masked_softmax(scores: Weights, mask: Mask) -> Weights:
    """Softmax over the allowed keys of each row; exactly 0 elsewhere and in rows that allow none.

    The lowest finite number stands for minus infinity: a row without an allowed key then has a
    finite softmax, and finite gradients, before the second `where` sets it to 0.
    """
    lowest = jnp.finfo(scores.dtype).min
    return jnp.where(mask, jax.nn.softmax(jnp.where(mask, scores, lowest), axis=-1), 0)


def cudnn_attention(query: Query, key: Keys, value: Keys, mask: Mask) -> Query:
    """`scaled_dot_product_attention` by cuDNN's fused kernel, which keeps nothing of size T x S.

    For NVIDIA GPUs and bfloat16 only. A query with no allowed key reads the mean of the values.
    """
    heads_inside = (x.swapaxes(1, 2) for x in (query, key, value))
    context = jax.nn.dot_product_attention(*heads_inside, mask=mask, implementation="cudnn")
    return context.swapaxes(1, 2)
