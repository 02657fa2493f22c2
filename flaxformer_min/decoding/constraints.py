"""Constraints on the next token of a hypothesis: boolean masks, True = allowed, combined by `&`.

A mask is [B, M, V], with size 1 for an axis on which it does not depend. The hypotheses so far are
`tokens` [B, M, L], BOS first; index[b] is the number of tokens after BOS. A token that is not
allowed loses its probability without renormalisation, so that scores stay the model's.
"""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

Index = Int[Array, " B"]


def all_but(ids: tuple[int, ...], vocab_size: int) -> Bool[Array, "1 1 V"]:
    """Allows every token but the given ids."""
    return jnp.asarray(~np.isin(np.arange(vocab_size), ids)[None, None, :])


def long_enough(
    index: Index, min_length: int | Int[Array, ""], eos_id: int, vocab_size: int
) -> Bool[Array, "B 1 V"]:
    """Allows EOS only as token number min_length, counted from 1, or later; other tokens always."""
    return all_but((eos_id,), vocab_size) | (index + 1 >= min_length)[:, None, None]


def no_repeated_ngram(
    tokens: Int[Array, "B M L"], index: Index, size: int, vocab_size: int
) -> Bool[Array, "B M V"]:
    """Forbids a token that would repeat `size` tokens in a row which the hypothesis already has.

    BOS does not count. Every earlier run of size - 1 tokens is compared with the last such run;
    where they are equal, the token that followed the earlier one is not allowed.
    """
    batch, hypotheses, length = tokens.shape
    if size >= length:
        return jnp.ones((batch, hypotheses, vocab_size), bool)
    places = jnp.maximum(index[:, None] + np.arange(2 - size, 1)[None, :], 0)
    last = jnp.take_along_axis(tokens, places[:, None, :], axis=2)
    firsts = np.arange(1, length - size + 1)  # where an earlier n-gram can begin
    earlier = tokens[:, :, firsts[:, None] + np.arange(size - 1)[None, :]]
    same = jnp.all(earlier == last[:, :, None, :], axis=3)
    ends = firsts + size - 1
    repeats = same & (ends[None, :] <= index[:, None])[:, None, :]
    forbidden = jnp.zeros((batch, hypotheses, vocab_size), bool)
    b, m = np.ogrid[:batch, :hypotheses]
    return ~forbidden.at[b[..., None], m[..., None], tokens[:, :, ends]].max(repeats)


def forced_prefix(
    allowed: Bool[Array, "#B #M V"], prefixes: Int[Array, "B P"], index: Index, pad_id: int
) -> Bool[Array, "B #M V"]:
    """Allows only token number `index` of the prefix; after its end, what `allowed` allows.

    Prefixes [B, P] are padded; a sentence without a prefix has a row of padding.
    """
    at = jnp.minimum(index, prefixes.shape[1] - 1)
    token = jnp.take_along_axis(prefixes, at[:, None], axis=1)
    forced = (token != pad_id) & (index < prefixes.shape[1])[:, None]
    only = jnp.arange(allowed.shape[-1])[None, :] == token
    return jnp.where(forced[:, None, :], only[:, None, :], allowed)
