"""Layer norm before each sublayer instead of behind it: python examples/pre_norm.py.

The paper's model is post-norm, LayerNorm(x + Dropout(Sublayer(x))). Most later models are pre-norm,
x + Dropout(Sublayer(LayerNorm(x))), with one more norm behind each stack. Everything that differs
stands here; the package is used as it is. The decoder that keeps a cache (model/cached.py) does not
call `decode_states`, so whoever searches with this model adds the last norm there as well.
"""

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from flaxformer_min.config import ModelConfig
from flaxformer_min.data.batch import Batch
from flaxformer_min.model.dropout import dropout
from flaxformer_min.model.layers import Residual, layer_norm
from flaxformer_min.model.transformer import Transformer
from flaxformer_min.training.loss import make_loss
from flaxformer_min.training.state import initial_state
from flaxformer_min.training.step import make_train_step

RESIDUALS = ("self_attention_residual", "cross_attention_residual", "feed_forward_residual")
MODEL = ModelConfig(num_layers=2, d_model=64, d_ff=128, num_heads=4, d_k=16, d_v=16)


class PreNorm(Residual):
    """x + Dropout(Sublayer(LayerNorm(x))): the one line that differs."""

    def __call__(self, x, sublayer, key, taps=None):
        normed = layer_norm(x, self.scale[...], self.bias[...])
        return x + dropout(sublayer(normed), self.rate, key)


class PreNormTransformer(Transformer):
    """The paper's Transformer with its residuals replaced, and a norm behind each stack."""

    def __init__(self, config: ModelConfig, vocab_size: int, *, rngs: nnx.Rngs):
        super().__init__(config, vocab_size, rngs=rngs)
        for layer in (*self.encoder, *self.decoder):
            for name in RESIDUALS:
                if hasattr(layer, name):
                    setattr(layer, name, PreNorm(config))
        self.encoder_norm, self.decoder_norm = Residual(config), Residual(config)

    def encode(self, *arguments, **options):
        """Source ids [B, S] -> memory [B, S, D], normed once more."""
        norm = self.encoder_norm
        return layer_norm(super().encode(*arguments, **options), norm.scale[...], norm.bias[...])

    def decode_states(self, *arguments, **options):
        """Decoder states [B, T, D], normed once more."""
        states, norm = super().decode_states(*arguments, **options), self.decoder_norm
        return layer_norm(states, norm.scale[...], norm.bias[...])


def reversal(step: int, rows: int = 64, length: int = 7, vocab_size: int = 20) -> Batch:
    """Random tokens and the same tokens backwards. Ids: 0 is padding, 2 BOS, 3 EOS."""
    tokens = jax.random.randint(jax.random.key(step), (rows, length), 4, vocab_size)
    eos = jnp.full((rows, 1), 3)
    return Batch(jnp.hstack([tokens, eos]), jnp.hstack([tokens[:, ::-1], eos]))


def train(steps: int) -> list[float]:
    """The losses of so many training steps, in nats per target token."""
    optimizer = optax.adam(1e-3)
    graphdef, params = nnx.split(PreNormTransformer(MODEL, 20, rngs=nnx.Rngs(1)))
    loss = make_loss(graphdef, pad_id=0, bos_id=2, smoothing=0.1)
    train_step = jax.jit(make_train_step(loss, optimizer))
    state, losses = initial_state(nnx.to_pure_dict(params), optimizer), []
    for step in range(steps):
        state, metrics = train_step(state, reversal(step), jax.random.key(0))
        losses.append(float(metrics.loss))
    return losses


if __name__ == "__main__":
    losses = train(300)
    print(f"loss {losses[0]:.3f} at step 1, {losses[-1]:.3f} at step {len(losses)}")
