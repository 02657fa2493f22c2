"""Why the parts are there: small experiments with the paper's parts: python examples/why.py.

Each function takes a moment and prints what it found. Weights are random; D = 512 as in the paper
where it matters.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from flaxformer_min.config import ModelConfig
from flaxformer_min.model.layers import EncoderLayer, FeedForward, layer_norm
from flaxformer_min.model.masks import causal_mask
from flaxformer_min.model.positions import sinusoidal_positions

SMALL = ModelConfig(d_model=64, d_ff=256, num_heads=4, d_k=16, d_v=16)
DRAW = np.random.default_rng(1)


def normal(*shape: int) -> jax.Array:
    return jnp.asarray(DRAW.standard_normal(shape), jnp.float32)


def embedding() -> None:
    table, ids = normal(30, 512) * 512**-0.5, np.array([21, 13, 4])
    one_hot = np.eye(30, dtype=np.float32)[ids]
    print("one-hot rows times the table are a look-up:", np.allclose(one_hot @ table, table[ids]))
    print(f"  any two one-hot words are {np.linalg.norm(one_hot[0] - one_hot[1]):.2f} apart")
    scaled = table[ids] * 512**0.5
    print(f"  a row has length {jnp.linalg.norm(table[ids[0]]):.2f}, a position ", end="")
    print(f"{np.linalg.norm(sinusoidal_positions(9, 512)[5]):.2f}: times sqrt(512) = ", end="")
    print(f"{512**0.5:.1f} the row has {jnp.linalg.norm(scaled[0]):.2f} and is not drowned")


def positions() -> None:
    table = sinusoidal_positions(5_000, 512).astype(np.float64)
    products = np.sum(table[:-7] * table[7:], axis=1)
    print("a position and the one 7 on have the same product wherever they stand:", end=" ")
    print(f"{products.min():.3f} to {products.max():.3f}")
    turns = 2 * np.pi, 2 * np.pi * 10000 ** (510 / 512)
    nearest = np.linalg.norm(np.diff(table, axis=0), axis=1).min()
    print(f"  256 wheels turn once in {turns[0]:.1f} to {turns[1]:,.0f} positions; ", end="")
    print(f"neighbours among 5,000 are at least {nearest:.2f} apart")


def order() -> None:
    """Tom bit a dog -> a dog bit Tom."""
    layer, words, moved = EncoderLayer(SMALL, rngs=nnx.Rngs(1)), normal(1, 4, 64), [2, 3, 1, 0]
    added = sinusoidal_positions(4, 64)[None]
    everything, causal = jnp.ones((1, 1, 4, 4), bool), causal_mask(4)
    for name, place, mask in (
        ("no position", 0 * added, everything),
        ("no position, but a causal mask", 0 * added, causal),
        ("positions", added, everything),
    ):
        one, other = layer(words + place, mask), layer(words[:, moved] + place, mask)
        same = np.allclose(one[:, moved], other, atol=1e-5)
        print(f"{name}: other words' order gives the same vectors in that order: {same}")


def two_jobs() -> None:
    """Attention mixes positions, the FFN works on each by itself."""
    layer, x = EncoderLayer(SMALL, rngs=nnx.Rngs(1)), normal(1, 6, 64)
    everything, changed = jnp.ones((1, 1, 6, 6), bool), x.at[0, 2].add(1.0)

    def attention(x):
        return layer.self_attention(x, layer.self_attention.keys_values(x), everything)

    for name, function in (("attention", attention), ("the FFN", layer.feed_forward)):
        moved = jnp.abs(function(changed) - function(x)).max(axis=-1)[0] > 1e-6
        print(f"word 3 of 6 changes; {name} moves words", *(np.flatnonzero(moved) + 1))
    slope = jax.grad(lambda x: layer(x, everything)[0, 5, 0])(x)[0, 0]
    print(f"one layer joins word 1 to word 6: a gradient of length {jnp.linalg.norm(slope):.3f}")


def widening() -> None:
    """How much of x a linear map can read back from max(0, x W), with F = D and with F = 4 D."""
    x = normal(2_000, 64)
    for width in (64, 256):
        hidden = jax.nn.relu(x @ normal(64, width))
        known = jnp.hstack([hidden, jnp.ones((len(x), 1))])
        rest = x - known @ jnp.linalg.lstsq(known, x)[0]
        print(f"max(0, x W) with D = 64 and F = {width} loses {rest.var() / x.var():.1%} of x")


def residuals() -> None:
    """What is left of the gradient, and of the difference of words, after 30 sublayers."""
    x, sublayers = normal(1, 5, 64), [FeedForward(SMALL, rngs=nnx.Rngs(n)) for n in range(30)]

    def top(x, kept):
        for sublayer in sublayers:
            x = layer_norm(kept * x + sublayer(x), jnp.ones(64), jnp.zeros(64))
        return x

    sent = normal(*x.shape)  # the gradient that the loss gives to the top
    for name, kept in (("with", 1.0), ("without", 0.0)):
        y, pull = jax.vjp(lambda x, kept=kept: top(x, kept), x)
        arrives = jnp.linalg.norm(pull(sent)[0]) / jnp.linalg.norm(sent)
        cosine = y[0, 0] @ y[0, 1] / (jnp.linalg.norm(y[0, 0]) * jnp.linalg.norm(y[0, 1]))
        print(f"30 sublayers {name} residuals: {arrives:.2f} of the gradient arrives, ", end="")
        print(f"two words have the cosine {cosine:.2f}")


def norm() -> None:
    x = layer_norm(5 + 3 * normal(1, 4, 512), jnp.ones(512), jnp.zeros(512))
    print(f"LayerNorm: the means of 4 words are {jnp.abs(x.mean(-1)).max():.0e} at most, ", end="")
    print("their variances", *(f"{variance:.3f}" for variance in x.var(-1)[0].tolist()))


def main() -> None:
    for experiment in (embedding, positions, order, two_jobs, widening, residuals, norm):
        experiment()


if __name__ == "__main__":
    main()
