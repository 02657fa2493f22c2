"""Sampling: translations drawn token by token from the model's distribution."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key, PyTree

from flaxformer_min.decoding.search import Hypotheses, Search, StepFn, greedy_search


def narrow(
    log_probs: Float[Array, "B V"],
    temperature: float | Float[Array, ""] = 1.0,
    top_k: int | Int[Array, ""] | None = None,
    top_p: float | Float[Array, ""] | None = None,
) -> Float[Array, "B V"]:
    """Divides log_probs by the temperature; -inf for all but the top_k and, of these, the top_p.

    top_p keeps the fewest likeliest tokens whose share of the probability left by temperature and
    top_k is at least top_p (Holtzman et al. 2020). The likeliest token always stays, and so does
    any token exactly as likely as the last one kept. The result [B, V] is not normalised.
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


def sample(
    step_fn: StepFn,
    cache: PyTree,
    sentences: PyTree,
    max_lengths: Int[Array, " Q"],
    search: Search,
    keys: Callable[[PyTree], Key[Array, " B"]],
    draw_from: Callable[[Float[Array, "B V"]], Float[Array, "B V"]] = narrow,
) -> Hypotheses:
    """Draws one translation of each sentence, with a key of its own: tokens [Q, 1, T].

    `keys` makes the keys of the B sentences that are being decoded from what `search.prepare`
    returned for them. Each token is drawn from what `draw_from` makes of the log-probabilities of
    the allowed tokens; it need not be normalised. The log_probs and scores of the result are the
    model's own. All other arguments are those of `greedy_search`.
    """

    def choose(log_probs: Float[Array, "B V"], index: Int[Array, " B"], ready: PyTree):
        step_keys = jax.vmap(jax.random.fold_in)(keys(ready), index)
        return jax.vmap(jax.random.categorical)(step_keys, draw_from(log_probs))[:, None]

    search = dataclasses.replace(search, choose=choose)
    return greedy_search(step_fn, cache, sentences, max_lengths, search)
