"""Sampling: translations drawn token by token from the model's distribution."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key, PyTree

from flaxformer_min.decoding.rows import Prepare
from flaxformer_min.decoding.search import (
    Allowed,
    Hypotheses,
    StepFn,
    anything,
    as_they_are,
    greedy_search,
)


def sample(
    step_fn: StepFn,
    cache: PyTree,
    sentences: PyTree,
    *,
    rows: int,
    prepare: Prepare = as_they_are,
    keys: Callable[[PyTree], Key[Array, " B"]],
    temperature: float | Float[Array, ""] = 1.0,
    top_k: int | Int[Array, ""] | None = None,
    top_p: float | Float[Array, ""] | None = None,
    bos_id: int,
    eos_id: int,
    pad_id: int,
    max_lengths: Int[Array, " Q"],
    length: int,
    length_penalty_alpha: float | Float[Array, ""],
    allowed: Allowed = anything,
) -> Hypotheses:
    """A translation of each sentence drawn with its own key; N = M = 1, cache leaves [B, 1, ...].

    `keys` gives those of the sentences at work from what is prepared for them.
    Each token comes from `narrowed` log-probabilities of what is allowed; log_probs and scores are
    those of the model, at temperature 1 and with nothing cut off. Otherwise as greedy_search.
    """

    def draw(
        log_probs: Float[Array, "B V"], index: Int[Array, " B"], ready: PyTree
    ) -> Int[Array, "B 1"]:
        step_keys = jax.vmap(jax.random.fold_in)(keys(ready), index)
        narrow = narrowed(log_probs, temperature, top_k, top_p)
        return jax.vmap(jax.random.categorical)(step_keys, narrow)[:, None]

    return greedy_search(
        step_fn,
        cache,
        sentences,
        rows=rows,
        prepare=prepare,
        bos_id=bos_id,
        eos_id=eos_id,
        pad_id=pad_id,
        max_lengths=max_lengths,
        length=length,
        length_penalty_alpha=length_penalty_alpha,
        allowed=allowed,
        choose=draw,
    )


def narrowed(
    log_probs: Float[Array, "B V"],
    temperature: float | Float[Array, ""],
    top_k: int | Int[Array, ""] | None,
    top_p: float | Float[Array, ""] | None,
) -> Float[Array, "B V"]:
    """log_probs / temperature, and -inf for all but the top_k and, of these, the top_p.

    top_p keeps the fewest likeliest tokens whose share of the probability left by temperature and
    top_k is at least top_p (Holtzman et al. 2020); the likeliest token always stays, and so does
    any exactly as likely as the last one kept. Not normalised.
    """
    scaled = log_probs / temperature
    if top_k is None and top_p is None:
        return scaled
    ranked = -jnp.sort(-scaled, axis=1)
    kept = jnp.ones_like(ranked, bool)
    if top_k is not None:
        kept &= jnp.arange(ranked.shape[1])[None, :] < top_k
    if top_p is not None:
        shares = jax.nn.softmax(jnp.where(kept, ranked, -jnp.inf), axis=1)
        kept &= jnp.cumsum(shares, axis=1) - shares < top_p
    last = jnp.min(jnp.where(kept, ranked, jnp.inf), axis=1, keepdims=True)
    return jnp.where(scaled >= last, scaled, -jnp.inf)
