"""Scaled dot-product attention (paper, section 3.2.1) as pure functions.

Letters: B batch, H heads, T queries, S keys, K width of a query and a key, U width of a value. L
is the layers, where the weights of a whole model are meant.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

Query = Float[Array, "B H T K"]
Keys = Float[Array, "B H S K"]
Values = Float[Array, "B H S U"]
Mask = Bool[Array, "#B #H #T S"]  # True = may attend
Weights = Float[Array, "B H T S"]
Context = Float[Array, "B H T U"]

# The kinds of arrays that `check` knows.
FLOATS, IDS, BOOLEANS = jnp.floating, jnp.integer, jnp.bool_
_MEANT = {FLOATS: "floating", IDS: "integer token ids", BOOLEANS: "boolean, True = may attend"}


class Attended(NamedTuple):
    """Attention step by step: S = Q K^T, S / sqrt(d_k), the weights and the output."""

    scores: Weights
    scaled_scores: Weights  # not masked: a masked key has a score, and weight 0
    weights: Weights  # before dropout
    context: Context  # the output, softmax(...) V


class AttentionWeights(NamedTuple):
    """The weights of a model's three sites, [B, L, H, queries, keys], in every layer and head.

    The weights of one query sum to 1. A key that a mask hides has weight exactly 0. Query t of the
    decoder is the decoder's input when it predicts target token t: BOS for the first token, the
    target token before it for a later one. The keys of the decoder's self-attention are these same
    inputs.
    """

    encoder: Float[Array, "B L H S S"]
    decoder: Float[Array, "B L H T T"]
    cross: Float[Array, "B L H T S"]


def scaled_dot_product_attention(
    query: Query, key: Keys, value: Values, mask: Mask, *, return_weights: bool = False
) -> Context | tuple[Context, Weights]:
    """Computes softmax(Q K^T / sqrt(d_k) + M) V, where M is minus infinity where the mask is False.

    It returns the output [B, H, T, U], and with `return_weights` also the weights [B, H, T, S]. A
    masked key has weight exactly 0. A query with no allowed key has weights and output 0, where a
    softmax over nothing would be NaN. Scores and softmax are computed in at least float32, whatever
    the dtype of the inputs is; the output has the dtype of `value`.

    A mask that is not boolean, or inputs that are not floating, are a TypeError; shapes that do not
    fit are a ValueError.

    >>> query = jnp.ones((1, 1, 1, 2))
    >>> key, value = jnp.eye(3, 2)[None, None], jnp.eye(3)[None, None]
    >>> mask = jnp.array([True, True, False])[None, None, None]  # the third key is hidden
    >>> print(scaled_dot_product_attention(query, key, value, mask))
    [[[[0.5 0.5 0. ]]]]
    """
    *_, weights, output = attend(query, key, value, mask)
    return (output, weights) if return_weights else output


def attend(
    query: Query,
    key: Keys,
    value: Values,
    mask: Mask,
    drop: Callable[[Weights], Weights] | None = None,
) -> Attended:
    """Does what `scaled_dot_product_attention` does and returns what it computed on the way.

    In training, `drop` is the dropout on the weights: the output is computed from `drop(weights)`,
    whereas the weights that are returned are those before dropout.

    >>> query, key, value = jnp.ones((1, 1, 1, 4)), jnp.ones((1, 1, 3, 4)), jnp.ones((1, 1, 3, 5))
    >>> step = attend(query, key, value, jnp.array([[[[True, True, False]]]]))
    >>> print(step.scores, step.scaled_scores, step.weights)  # S, S / sqrt(d_k), softmax(...)
    [[[[4. 4. 4.]]]] [[[[2. 2. 2.]]]] [[[[0.5 0.5 0. ]]]]
    """
    _check(query, key, value, mask)
    at_least_float32 = jnp.promote_types(query.dtype, jnp.float32)
    scores = jnp.einsum(
        "BHTK,BHSK->BHTS", query, key, precision="highest", preferred_element_type=at_least_float32
    )
    scaled = scores / query.shape[-1] ** 0.5
    weights = masked_softmax(scaled, mask)
    kept = weights if drop is None else drop(weights)
    output = jnp.einsum("BHTS,BHSU->BHTU", kept.astype(value.dtype), value, precision="highest")
    return Attended(scores, scaled, weights, output)


def masked_softmax(scores: Weights, mask: Mask) -> Weights:
    """Takes the softmax of scores [B, H, T, S] over the keys that each query may attend to.

    A masked key gets exactly 0, and so does every key of a query that may attend to none. The
    lowest finite number stands for minus infinity: a query without an allowed key then has a finite
    softmax, and finite gradients, before the outer `where` sets it to 0.
    """
    check(scores=(scores, FLOATS, "B H T S"), mask=(mask, BOOLEANS, "#B #H #T S"))
    lowest = jnp.finfo(scores.dtype).min
    return jnp.where(mask, jax.nn.softmax(jnp.where(mask, scores, lowest), axis=-1), 0)


def cudnn_attention(query: Query, key: Keys, value: Keys, mask: Mask) -> Query:
    """Does what `scaled_dot_product_attention` does in cuDNN's kernel, which stores no T x S array.

    It needs an NVIDIA GPU, bfloat16 and values as wide as keys (U = K). A query with no allowed key
    gets the mean of the values instead of 0.
    """
    _check(query, key, value, mask)
    # In training the kernel takes even lengths only, and masks that name every query and key.
    size = mask.shape[0], mask.shape[1], query.shape[2], key.shape[2]
    mask = _even(_even(jnp.broadcast_to(mask, size), 2), 3)
    heads_inside = (_even(x, 2).swapaxes(1, 2) for x in (query, key, value))
    context = jax.nn.dot_product_attention(*heads_inside, mask=mask, implementation="cudnn")
    return context[:, : query.shape[2]].swapaxes(1, 2)


def _even(array: Array, axis: int) -> Array:
    """Appends a zero, or False, along an axis of odd size."""
    return jnp.pad(array, [(0, size % 2 * (i == axis)) for i, size in enumerate(array.shape)])


def _check(query: Query, key: Keys, value: Values, mask: Mask) -> None:
    """Refuses inputs of attention that are not floating, not boolean or do not fit together."""
    check(
        query=(query, FLOATS, "B H T K"),
        key=(key, FLOATS, "B H S K"),
        value=(value, FLOATS, "B H S U"),
        mask=(mask, BOOLEANS, "#B #H #T S"),
    )


def check(**arrays: tuple[Any, type, str]) -> None:
    """Refuses arrays of another dtype or shape than is meant, while a function is traced.

    An argument is the name of an array; its value is the array, its kind and its axes in the
    paper's letters. A letter has the same size wherever it stands; with "#" an axis of 1 will do:

        check(query=(query, FLOATS, "B H T K"), mask=(mask, BOOLEANS, "#B #H #T S"))

    Raises TypeError for the dtype and ValueError for the shape; both name the array.
    """
    sizes = {"1": 1}
    for name, (array, kind, letters) in arrays.items():
        dtype = getattr(array, "dtype", None)
        if dtype is None or not jnp.issubdtype(dtype, kind):
            raise TypeError(f"{name} is {dtype or type(array).__name__}: it must be {_MEANT[kind]}")
        known, axes = dict(sizes), letters.split()
        fits = array.ndim == len(axes)
        for axis, size in zip(axes, array.shape, strict=False):
            if axis[0] != "#" or size != 1:
                fits &= sizes.setdefault(axis.strip("#"), size) == size
        if not fits:
            given = "".join(f", {axis} = {known[axis]}" for axis in known if axis.isalpha())
            wanted = f"[{', '.join(axes)}]{given}" + ' ("#": or 1)' * ("#" in letters)
            raise ValueError(f"{name} has shape {list(array.shape)}: it must be {wanted}")
