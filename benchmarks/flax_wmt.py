"""What flax's wmt example does in a training step: its model, its loss and metrics, Adam.

Made of flax.linen's own layers, as the example is: pre-norm with a norm after each stack, dense
layers on [B, T, D], kernels [D, H, K], dropout on attention weights and inside the FFN too,
concatenated sinusoids, one table for both languages and the softmax, a one-hot smoothed loss over
all of [B, T, V], loss and accuracy as metrics.
"""

import functools
import math
from collections.abc import Collection

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

from benchmarks.sizes import Size, Step

XAVIER, NEAR_ZERO = nn.initializers.xavier_uniform(), nn.initializers.normal(1e-6)


def make_step(size: Size, alike: Collection[str] = ()) -> Step:
    """The step, with its weights and optimizer state inside.

    `alike` names in what it does as ours does: "dropout" at the paper's sites alone, "metrics"
    without an accuracy and a loss that is not smoothed.
    """
    model, adam = (
        Transformer(size, "dropout" not in alike),
        optax.adamw(1e-4, b1=0.9, b2=0.98, eps=1e-9, weight_decay=0.0),
    )

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, count, source, target):
        key = jax.random.fold_in(jax.random.key(0), count)

        def loss(params):
            scores = model.apply(params, source, target, rngs={"dropout": key})
            return cross_entropy(scores, target, 0.1), scores

        (value, scores), grads = jax.value_and_grad(loss, has_aux=True)(params)
        updates, state = adam.update(grads, state, params)
        right = ((scores.argmax(-1) == target) & (target > 0)).sum()
        metrics = cross_entropy(scores, target, 0.0), right
        metrics = (value, 0) if "metrics" in alike else metrics
        return optax.apply_updates(params, updates), state, count + 1, metrics

    tokens = jnp.ones((2, 8), jnp.int32)
    keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    params = jax.jit(model.init)(keys, tokens, tokens)
    state, count = jax.jit(adam.init)(params), jnp.zeros((), jnp.int32)

    def run(source, target):
        nonlocal params, state, count
        params, state, count, (value, _) = step(params, state, count, source, target)
        return float(value)

    return run


def cross_entropy(scores, target, smoothing: float):
    """The mean over real target tokens."""
    vocab_size = scores.shape[-1]
    off = smoothing / (vocab_size - 1)
    wanted = jnp.where(target[..., None] == jnp.arange(vocab_size), 1 - smoothing, off)
    losses = -jnp.sum(wanted * nn.log_softmax(scores), axis=-1)
    real = target > 0
    return (losses * real).sum() / real.sum()


class Transformer(nn.Module):
    """Logits of the target, which it shifts itself."""

    size: Size
    drop_inside: bool  # attention weights and the FFN's activations too

    @nn.compact
    def __call__(self, source, target):
        size = self.size
        table = nn.Embed(size.vocab_size, size.d_model, embedding_init=nn.initializers.normal(1.0))

        def embed(tokens):
            return drop(size, table(tokens) + positions(tokens.shape[1], size.d_model))

        source_real, target_real = source > 0, target > 0
        x = embed(source)
        for _ in range(size.num_layers):
            x = Layer(size, self.drop_inside)(x, nn.make_attention_mask(source_real, source_real))
        memory = nn.LayerNorm()(x)
        y = embed(jnp.pad(target, ((0, 0), (1, 0)))[:, :-1])
        future = nn.combine_masks(
            nn.make_attention_mask(target_real, target_real), nn.make_causal_mask(target)
        )
        across = nn.make_attention_mask(target_real, source_real)
        for _ in range(size.num_layers):
            y = Layer(size, self.drop_inside)(y, future, memory, across)
        return table.attend(nn.LayerNorm()(y)) / math.sqrt(size.d_model)


class Layer(nn.Module):
    """Attention to itself, to the memory if there is one, and the FFN."""

    size: Size
    drop_inside: bool

    @nn.compact
    def __call__(self, x, mask, memory=None, memory_mask=None):
        x = x + drop(self.size, self.attention()(nn.LayerNorm()(x), mask=mask))
        if memory is not None:
            read = self.attention()(nn.LayerNorm()(x), memory, mask=memory_mask)
            x = x + drop(self.size, read)
        return x + self.feed_forward(nn.LayerNorm()(x))

    def attention(self) -> nn.Module:
        return nn.MultiHeadDotProductAttention(
            num_heads=self.size.num_heads,
            kernel_init=XAVIER,
            use_bias=False,
            broadcast_dropout=False,
            dropout_rate=self.size.dropout if self.drop_inside else 0.0,
            deterministic=False,
        )

    def feed_forward(self, x):
        dense = functools.partial(nn.Dense, kernel_init=XAVIER, bias_init=NEAR_ZERO)
        y = nn.relu(dense(self.size.d_ff)(x))
        y = drop(self.size, y) if self.drop_inside else y
        return drop(self.size, dense(self.size.d_model)(y))


def drop(size: Size, x):
    return nn.Dropout(size.dropout, deterministic=False)(x)


def positions(length: int, d_model: int) -> np.ndarray:
    rates = np.exp(np.arange(d_model // 2) * -(math.log(10_000) / (d_model // 2 - 1)))
    angles = np.arange(length)[:, None] * rates
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=1).astype(np.float32)
