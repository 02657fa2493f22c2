"""Attention masks (paper, sections 3.1 and 3.2.3): boolean, True = the query may attend.

Masks combine with `&`: the mask of the decoder's self-attention is `padding_mask(target_in) &
causal_mask(T)`.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from flaxformer_min.model.attention import IDS, check


def padding_mask(ids: Int[Array, "B S"], pad_id: int = 0) -> Bool[Array, "B 1 1 S"]:
    """Hides the keys that are padding from every query: ids [B, S] -> mask [B, 1, 1, S].

    >>> print(padding_mask(jnp.array([[5, 7, 0]])))
    [[[[ True  True False]]]]
    """
    check(ids=(ids, IDS, "B S"))
    return (ids != pad_id)[:, None, None, :]


def causal_mask(length: int) -> Bool[Array, "1 1 T T"]:
    """Hides the future: query t may attend to keys 0 to t. With T = length it is [1, 1, T, T].

    >>> print(causal_mask(3).astype(int))
    [[[[1 0 0]
       [1 1 0]
       [1 1 1]]]]
    """
    if length < 1:
        raise ValueError(f"length is {length}: it must be at least 1")
    return jnp.tril(jnp.ones((1, 1, length, length), dtype=bool))
