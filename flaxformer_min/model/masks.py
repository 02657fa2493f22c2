"""Who may attend to whom (paper, sections 3.1 and 3.2.3). Masks are boolean, True = may attend.

Masks combine with `&`: decoder self-attention sees `padding_mask(target_in) & causal_mask(T)`.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


def padding_mask(ids: Int[Array, "B S"], pad_id: int = 0) -> Bool[Array, "B 1 1 S"]:
    """Hides padding keys from every query: [B, S] ids -> [B, 1, 1, S]."""
    return (ids != pad_id)[:, None, None, :]


def causal_mask(length: int) -> Bool[Array, "1 1 T T"]:
    """Hides the future: query t sees keys 0 to t, itself included. [1, 1, T, T]."""
    return jnp.tril(jnp.ones((1, 1, length, length), dtype=bool))
