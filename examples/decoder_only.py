"""A language model of the paper's parts: python examples/decoder_only.py.

An encoder layer whose mask hides the future is the layer of a decoder-only model. A loss of
(params, batch, key) that gives (sum, tokens) is all that the training step wants to know.
"""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from flaxformer_min.config import ModelConfig
from flaxformer_min.model.dropout import split
from flaxformer_min.model.layers import EncoderLayer
from flaxformer_min.model.linear import project
from flaxformer_min.model.masks import causal_mask, padding_mask
from flaxformer_min.model.positions import sinusoidal_positions
from flaxformer_min.training.loss import smoothed_cross_entropy
from flaxformer_min.training.state import initial_state
from flaxformer_min.training.step import make_train_step

MODEL = ModelConfig(num_layers=2, d_model=64, d_ff=128, num_heads=4, d_k=16, d_v=16, dropout=0.0)
TEXT = "the quick brown fox jumps over the lazy dog and the dog does not mind. " * 40
ROWS, LENGTH = 16, 48


class LanguageModel(nnx.Module):
    """Bytes [B, T] -> logits of the next byte [B, T, V]. Byte 0 is padding and the beginning."""

    def __init__(self, config: ModelConfig, vocab_size: int, *, rngs: nnx.Rngs):
        self.config = config
        table = jax.random.normal(rngs.params(), (vocab_size, config.d_model))
        self.embedding = nnx.Param(table * config.d_model**-0.5)
        layers = range(config.num_layers)
        self.layers = nnx.List([EncoderLayer(config, rngs=rngs) for _ in layers])

    def __call__(self, tokens: jax.Array, key: jax.Array | None = None) -> jax.Array:
        width, length = self.config.d_model, tokens.shape[1]
        x = self.embedding[...][tokens] * width**0.5 + sinusoidal_positions(length, width)[None]
        mask = padding_mask(tokens, pad_id=-1) & causal_mask(length)
        for layer, layer_key in zip(self.layers, split(key, len(self.layers)), strict=True):
            x = layer(x, mask, layer_key)
        return project(x, self.embedding[...])


def batches(text: str) -> Iterator[dict[str, jax.Array]]:
    """Endless batches {"text": [ROWS, LENGTH]} of random pieces of the text, as bytes."""
    data = jnp.frombuffer(text.encode(), jnp.uint8).astype(jnp.int32)
    for step in range(1 << 30):
        starts = jax.random.randint(jax.random.key(step), (ROWS, 1), 0, len(data) - LENGTH)
        yield {"text": data[starts + jnp.arange(LENGTH)[None]]}


def train(steps: int) -> list[float]:
    """The losses of so many training steps, in nats per byte."""
    optimizer = optax.adam(1e-3)
    graphdef, params = nnx.split(LanguageModel(MODEL, 256, rngs=nnx.Rngs(1)))

    def loss(params, batch, key):
        text = batch["text"]
        before = jnp.pad(text, ((0, 0), (1, 0)))[:, :-1]
        logits = nnx.merge(graphdef, params)(before, key)
        return smoothed_cross_entropy(logits, text, jnp.ones(text.shape), 0.0)

    train_step = jax.jit(make_train_step(loss, optimizer))
    state, losses = initial_state(nnx.to_pure_dict(params), optimizer), []
    for _, batch in zip(range(steps), batches(TEXT), strict=False):
        state, metrics = train_step(state, batch, jax.random.key(0))
        losses.append(float(metrics.loss))
    return losses


if __name__ == "__main__":
    losses = train(300)
    print(f"loss {losses[0]:.3f} at step 1, {losses[-1]:.3f} at step {len(losses)}")
