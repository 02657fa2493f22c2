"""Other programs' training steps, for training.py: each gives `step(source, target) -> loss`.

Both are the 2017 shapes with the peer's own habits. Tokens are int32 [B, S] and [B, T], padded
with 0. Nothing here is used by the package.
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

Step = Callable[[np.ndarray, np.ndarray], float]


class Size(NamedTuple):
    """The model of a comparison; d_k = d_v = d_model / num_heads."""

    num_layers: int
    d_model: int
    d_ff: int
    num_heads: int
    vocab_size: int
    dropout: float = 0.1


def flax_wmt(size: Size) -> Step:
    """What flax's wmt example does in a step, in plain JAX: its model, its loss, its metrics.

    Pre-norm with a norm after each stack, dense layers on [B, T, D], [D, H, K] kernels, dropout on
    attention weights and inside the FFN too, concatenated sinusoids, one table for both languages
    and the softmax, a one-hot smoothed loss over all of [B, T, V], the accuracy, Adam.
    """
    import jax
    import jax.numpy as jnp
    import optax

    d, heads = size.d_model, size.num_heads
    xavier = jax.nn.initializers.xavier_uniform()
    norm = {"scale": jnp.ones(d), "bias": jnp.zeros(d)}

    def attention_weights(key):
        shapes = {"query": (d, heads, d // heads), "key": (d, heads, d // heads)}
        shapes |= {"value": (d, heads, d // heads), "output": (heads, d // heads, d)}
        keys = dict(zip(shapes, jax.random.split(key, len(shapes)), strict=True))
        return {name: xavier(keys[name], shape) for name, shape in shapes.items()}

    def layer_weights(key, attentions):
        keys = jax.random.split(key, attentions + 2)
        return {
            "attention": [attention_weights(key) for key in keys[2:]],
            "norms": [norm] * (attentions + 1),
            "up": (xavier(keys[0], (d, size.d_ff)), jnp.zeros(size.d_ff)),
            "down": (xavier(keys[1], (size.d_ff, d)), jnp.zeros(d)),
        }

    @jax.jit
    def init(key):
        table, encoder, decoder = jax.random.split(key, 3)
        return {
            "table": jax.random.normal(table, (size.vocab_size, d)),
            "encoder": [layer_weights(k, 1) for k in jax.random.split(encoder, size.num_layers)],
            "decoder": [layer_weights(k, 2) for k in jax.random.split(decoder, size.num_layers)],
            "norms": [norm] * 2,
        }

    def normalise(x, p):
        mean = x.mean(-1, keepdims=True)
        variance = jnp.maximum(0.0, (x * x).mean(-1, keepdims=True) - mean * mean)
        return (x - mean) * (jax.lax.rsqrt(variance + 1e-6) * p["scale"]) + p["bias"]

    def drop(x, keys):
        keep = jax.random.bernoulli(next(keys), 1 - size.dropout, x.shape)
        return jnp.where(keep, x / (1 - size.dropout), 0)

    def attend(p, x, read, mask, keys):
        query, key, value = (
            jnp.einsum("btd,dhk->bthk", side, p[name])
            for name, side in (("query", x), ("key", read), ("value", read))
        )
        scores = jnp.einsum("bthk,bshk->bhts", query / math.sqrt(d // heads), key)
        weights = jax.nn.softmax(jnp.where(mask, scores, jnp.finfo(scores.dtype).min))
        context = jnp.einsum("bhts,bshk->bthk", drop(weights, keys), value)
        return jnp.einsum("bthk,hkd->btd", context, p["output"])

    def layer(p, x, reads, masks, keys):
        for attention, norm, read, mask in zip(
            p["attention"], p["norms"], reads, masks, strict=False
        ):
            y = normalise(x, norm)
            x = x + drop(attend(attention, y, y if read is None else read, mask, keys), keys)
        y = normalise(x, p["norms"][-1])
        y = drop(jax.nn.relu(y @ p["up"][0] + p["up"][1]), keys)
        return x + drop(y @ p["down"][0] + p["down"][1], keys)

    def positions(length):
        rates = np.exp(np.arange(d // 2) * -(math.log(10_000) / (d // 2 - 1)))
        angles = np.arange(length)[:, None] * rates
        return np.concatenate([np.sin(angles), np.cos(angles)], axis=1).astype(np.float32)

    def logits(params, source, target, keys):
        def embed(tokens):
            return drop(params["table"][tokens] + positions(tokens.shape[1]), keys)

        causal = np.tri(target.shape[1], dtype=bool)
        real, target_real = (source > 0)[:, None, None], (target > 0)[:, None, None]
        x = embed(source)
        for p in params["encoder"]:
            x = layer(p, x, [None], [real & real.swapaxes(2, 3)], keys)
        memory = normalise(x, params["norms"][0])
        y = embed(jnp.pad(target, ((0, 0), (1, 0)))[:, :-1])
        masks = target_real & target_real.swapaxes(2, 3) & causal, target_real.swapaxes(2, 3) & real
        for p in params["decoder"]:
            y = layer(p, y, [None, memory], masks, keys)
        y = normalise(y, params["norms"][1])
        return y @ params["table"].T / math.sqrt(d)

    def cross_entropy(scores, target, smoothing):
        off = smoothing / (size.vocab_size - 1)
        wanted = jnp.where(target[..., None] == jnp.arange(size.vocab_size), 1 - smoothing, off)
        losses = -jnp.sum(wanted * jax.nn.log_softmax(scores), axis=-1)
        weights = target > 0
        return (losses * weights).sum() / weights.sum()

    def loss(params, source, target, key):
        keys = iter(jax.random.split(key, 10 * size.num_layers + 2))
        scores = logits(params, source, target, keys)
        right = ((scores.argmax(-1) == target) & (target > 0)).sum()
        metrics = cross_entropy(scores, target, 0.0), right  # the example computes them each step
        return cross_entropy(scores, target, 0.1), metrics

    adam = optax.adamw(1e-4, b1=0.9, b2=0.98, eps=1e-9, weight_decay=0.0)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, count, source, target):
        key = jax.random.fold_in(jax.random.key(0), count)
        (_, metrics), grads = jax.value_and_grad(loss, has_aux=True)(params, source, target, key)
        updates, state = adam.update(grads, state, params)
        return optax.apply_updates(params, updates), state, count + 1, metrics

    params = init(jax.random.key(0))
    state, count = jax.jit(adam.init)(params), jnp.zeros((), jnp.int32)

    def run(source, target):
        nonlocal params, state, count
        params, state, count, (value, _) = step(params, state, count, source, target)
        return float(value)

    return run


def torch_transformer(size: Size, *, bfloat16: bool = False, threads: int = 2) -> Step:
    """torch.nn.Transformer (post-norm), one tied table, torch's fused smoothed loss and Adam."""
    import torch
    from torch import nn
    from torch.nn import functional

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    table = nn.Embedding(size.vocab_size, size.d_model, padding_idx=0)
    nn.init.normal_(table.weight, std=size.d_model**-0.5)
    model = nn.Transformer(
        size.d_model,
        size.num_heads,
        size.num_layers,
        size.num_layers,
        size.d_ff,
        size.dropout,
        batch_first=True,
    ).train()
    parameters = [*model.parameters(), *table.parameters()]
    adam = torch.optim.Adam(parameters, lr=1e-4, betas=(0.9, 0.98), eps=1e-9, fused=True)
    rates = torch.exp(torch.arange(0, size.d_model, 2) * (-math.log(10_000.0) / size.d_model))
    angles = torch.arange(4096)[:, None] * rates
    positions = torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)

    def embed(tokens):
        x = table(tokens) * math.sqrt(size.d_model) + positions[: tokens.shape[1]]
        return functional.dropout(x, size.dropout)

    def run(source, target):
        source, target = torch.from_numpy(source).long(), torch.from_numpy(target).long()
        read = functional.pad(target, (1, 0), value=1)[:, :-1]
        future = torch.ones(read.shape[1], read.shape[1], dtype=torch.bool).triu(1)
        adam.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=bfloat16):
            states = model(
                embed(source),
                embed(read),
                tgt_mask=future,
                src_key_padding_mask=source == 0,
                tgt_key_padding_mask=read == 0,
                memory_key_padding_mask=source == 0,
            )
            scores = functional.linear(states, table.weight)
        loss = functional.cross_entropy(
            scores.flatten(0, 1).float(), target.flatten(), ignore_index=0, label_smoothing=0.1
        )
        loss.backward()
        adam.step()
        return loss.item()

    return run
