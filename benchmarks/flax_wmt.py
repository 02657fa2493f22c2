"""What flax's wmt example does in a training step, in plain JAX: its model, loss and metrics.

Pre-norm with a norm after each stack, dense layers on [B, T, D], kernels [D, H, K], dropout on
attention weights and inside the FFN too, concatenated sinusoids, one table for both languages and
the softmax, a one-hot smoothed loss over all of [B, T, V], loss and accuracy as metrics, Adam.
"""

import functools
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.sizes import Size, Step

Weights = Any  # nested dicts and lists of arrays
XAVIER = jax.nn.initializers.xavier_uniform()


def make_step(size: Size) -> Step:
    """The step, with its weights and optimizer state inside."""
    adam = optax.adamw(1e-4, b1=0.9, b2=0.98, eps=1e-9, weight_decay=0.0)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, count, source, target):
        key = jax.random.fold_in(jax.random.key(0), count)
        gradient = jax.value_and_grad(functools.partial(loss, size), has_aux=True)
        (_, metrics), grads = gradient(params, source, target, key)
        updates, state = adam.update(grads, state, params)
        return optax.apply_updates(params, updates), state, count + 1, metrics

    params = jax.jit(functools.partial(init, size))(jax.random.key(0))
    state, count = jax.jit(adam.init)(params), jnp.zeros((), jnp.int32)

    def run(source, target):
        nonlocal params, state, count
        params, state, count, (value, _) = step(params, state, count, source, target)
        return float(value)

    return run


def init(size: Size, key: jax.Array) -> Weights:
    table, encoder, decoder = jax.random.split(key, 3)
    return {
        "table": jax.random.normal(table, (size.vocab_size, size.d_model)),
        "encoder": [_layer(size, k, 1) for k in jax.random.split(encoder, size.num_layers)],
        "decoder": [_layer(size, k, 2) for k in jax.random.split(decoder, size.num_layers)],
        "norms": [_norm(size)] * 2,
    }


def _layer(size: Size, key: jax.Array, attentions: int) -> Weights:
    up, down, *rest = jax.random.split(key, attentions + 2)
    return {
        "attentions": [_attention(size, key) for key in rest],
        "norms": [_norm(size)] * (attentions + 1),
        "up": (XAVIER(up, (size.d_model, size.d_ff)), jnp.zeros(size.d_ff)),
        "down": (XAVIER(down, (size.d_ff, size.d_model)), jnp.zeros(size.d_model)),
    }


def _attention(size: Size, key: jax.Array) -> Weights:
    width = size.d_model // size.num_heads
    shapes = dict.fromkeys(("query", "key", "value"), (size.d_model, size.num_heads, width))
    shapes["output"] = (size.num_heads, width, size.d_model)
    keys = jax.random.split(key, len(shapes))
    return {name: XAVIER(k, shapes[name]) for name, k in zip(shapes, keys, strict=True)}


def _norm(size: Size) -> Weights:
    return {"scale": jnp.ones(size.d_model), "bias": jnp.zeros(size.d_model)}


def loss(size: Size, params: Weights, source, target, key: jax.Array):
    """The mean smoothed loss, and the metrics that the example computes at each step."""
    keys = iter(jax.random.split(key, 10 * size.num_layers + 2))
    scores = logits(size, params, source, target, keys)
    right = ((scores.argmax(-1) == target) & (target > 0)).sum()
    metrics = _cross_entropy(scores, target, 0.0), right
    return _cross_entropy(scores, target, 0.1), metrics


def _cross_entropy(scores, target, smoothing: float):
    vocab_size = scores.shape[-1]
    off = smoothing / (vocab_size - 1)
    wanted = jnp.where(target[..., None] == jnp.arange(vocab_size), 1 - smoothing, off)
    losses = -jnp.sum(wanted * jax.nn.log_softmax(scores), axis=-1)
    real = target > 0
    return (losses * real).sum() / real.sum()


def logits(size: Size, params: Weights, source, target, keys: Iterator[jax.Array]):
    def embed(tokens):
        x = params["table"][tokens] + _positions(tokens.shape[1], size.d_model)
        return _drop(size, x, keys)

    causal = np.tri(target.shape[1], dtype=bool)
    source_real, target_real = (source > 0)[:, None, None], (target > 0)[:, None, None]
    mask = source_real & source_real.swapaxes(2, 3)
    x = embed(source)
    for p in params["encoder"]:
        x = _apply(size, p, x, [(None, mask)], keys)
    memory = _normalise(x, params["norms"][0])
    y = embed(jnp.pad(target, ((0, 0), (1, 0)))[:, :-1])
    future = target_real & target_real.swapaxes(2, 3) & causal
    across = target_real.swapaxes(2, 3) & source_real
    for p in params["decoder"]:
        y = _apply(size, p, y, [(None, future), (memory, across)], keys)
    return _normalise(y, params["norms"][1]) @ params["table"].T / math.sqrt(size.d_model)


def _apply(size: Size, p: Weights, x, reads, keys: Iterator[jax.Array]):
    """A layer: attention to itself, or to what it is given to read, then the FFN."""
    for attention, norm, (read, mask) in zip(p["attentions"], p["norms"], reads, strict=False):
        y = _normalise(x, norm)
        attended = _attend(size, attention, y, y if read is None else read, mask, keys)
        x = x + _drop(size, attended, keys)
    y = _normalise(x, p["norms"][-1])
    y = _drop(size, jax.nn.relu(y @ p["up"][0] + p["up"][1]), keys)
    return x + _drop(size, y @ p["down"][0] + p["down"][1], keys)


def _attend(size: Size, p: Weights, x, read, mask, keys: Iterator[jax.Array]):
    query, key, value = (
        jnp.einsum("btd,dhk->bthk", side, p[name])
        for name, side in (("query", x), ("key", read), ("value", read))
    )
    scores = jnp.einsum("bthk,bshk->bhts", query / math.sqrt(query.shape[-1]), key)
    weights = jax.nn.softmax(jnp.where(mask, scores, jnp.finfo(scores.dtype).min))
    context = jnp.einsum("bhts,bshk->bthk", _drop(size, weights, keys), value)
    return jnp.einsum("bthk,hkd->btd", context, p["output"])


def _normalise(x, p: Weights):
    mean = x.mean(-1, keepdims=True)
    variance = jnp.maximum(0.0, (x * x).mean(-1, keepdims=True) - mean * mean)
    return (x - mean) * (jax.lax.rsqrt(variance + 1e-6) * p["scale"]) + p["bias"]


def _drop(size: Size, x, keys: Iterator[jax.Array]):
    keep = jax.random.bernoulli(next(keys), 1 - size.dropout, x.shape)
    return jnp.where(keep, x / (1 - size.dropout), 0)


def _positions(length: int, d_model: int) -> np.ndarray:
    rates = np.exp(np.arange(d_model // 2) * -(math.log(10_000) / (d_model // 2 - 1)))
    angles = np.arange(length)[:, None] * rates
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=1).astype(np.float32)
