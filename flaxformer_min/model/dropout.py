"""Dropout with an explicit key (paper, section 5.4)."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

MaybeKey = Key[Array, ""] | None  # None in evaluation


def dropout(x: Float[Array, "..."], rate: float, key: MaybeKey) -> Float[Array, "..."]:
    """Zeroes each entry with probability `rate` and divides the rest by 1 - rate.

    Without a key, which means evaluation, x is returned as it is. The mask has x's shape, so that
    each entry is dropped independently of all others.
    """
    if key is None or rate == 0:
        return x
    keep = jax.random.bernoulli(key, 1 - rate, x.shape)
    return jnp.where(keep, x / (1 - rate), 0)


def split(key: MaybeKey, count: int) -> list[MaybeKey]:
    """Splits a key into `count` independent keys; returns `count` times None in evaluation."""
    return [None] * count if key is None else list(jax.random.split(key, count))
