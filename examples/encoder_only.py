"""An encoder-only model (BERT) of the paper's parts: python examples/encoder_only.py.

The stack of decoder_only.py with another mask and another loss: every token sees every other one,
and the model learns to restore tokens that were hidden from it. A source stands beside its target,
so that a hidden word can be read in the other language; without the other side it is a guess.
"""

import decoder_only as common
import jax
import jax.numpy as jnp
import numpy as np
from decoder_only import Stack
from flax import nnx

from flaxformer_min.data.batch import padded
from flaxformer_min.data.tokenizer import BOS_ID, EOS_ID, PAD_ID, UNK_ID, Tokenizer
from flaxformer_min.model.masks import padding_mask
from flaxformer_min.training.loss import smoothed_cross_entropy

SHARE = 0.15  # of the tokens are hidden; <unk>, which this corpus hardly has, stands for them


def hidden(rows: jax.Array, key: jax.Array) -> jax.Array:
    """Draws which tokens [B, T] are hidden; <s>, </s> and padding never are."""
    ordinary = (rows != PAD_ID) & (rows != BOS_ID) & (rows != EOS_ID)
    return ordinary & jax.random.bernoulli(key, SHARE, rows.shape)


def restored(model: Stack, rows: jax.Array, mask: jax.Array) -> jax.Array:
    """Logits [B, T, V] of every token, from the rows in which those of `mask` are hidden."""
    return model(jnp.where(mask, UNK_ID, rows), padding_mask(rows, PAD_ID))


def masked_loss(model: Stack, rows: jax.Array, key: jax.Array):
    """The sum of the losses of the hidden tokens, in nats, and their number."""
    mask = hidden(rows, key)
    return smoothed_cross_entropy(restored(model, rows, mask), rows, mask, 0.0)


def accuracy(model: Stack, rows: np.ndarray) -> float:
    """The share of hidden tokens whose likeliest restoration is right."""
    mask = hidden(rows, jax.random.key(2))
    likeliest = restored(model, rows, mask).argmax(-1)
    return float((mask & (likeliest == rows)).sum() / mask.sum())


def sources_alone(tokenizer: Tokenizer, sources: list[str]) -> np.ndarray:
    return padded([[BOS_ID, *tokenizer.encode(line)] for line in sources], common.LENGTH, PAD_ID)


def main(steps: int = 1_000, tested: int = 500) -> None:
    pairs, held_out = common.corpus("train", common.PAIRS), common.corpus("test", tested)
    tokenizer = common.tokenizer_of(pairs[:2_000])
    model = Stack(common.MODEL, tokenizer.vocab_size, rngs=nnx.Rngs(1))
    rows = common.packed(tokenizer, pairs)
    model, losses = common.train(model, masked_loss, rows, steps)
    print(f"loss {losses[0]:.3f} at step 1, {losses[-1]:.3f} at step {steps}")
    beside = accuracy(model, common.packed(tokenizer, held_out))
    alone = accuracy(model, sources_alone(tokenizer, [source for source, _ in held_out]))
    print(f"of the hidden tokens of {tested} held-out pairs {beside:.1%} are restored, ", end="")
    print(f"and {alone:.1%} where a source stands alone")


if __name__ == "__main__":
    main()
