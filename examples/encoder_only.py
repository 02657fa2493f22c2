"""An encoder-only model (BERT) of the paper's parts: python examples/encoder_only.py.

The stack of decoder_only.py with another mask and another loss: every token sees every other one,
and the model learns to restore tokens that were hidden from it. A source stands beside its target,
so that a hidden word can be read in the other language; without the other side it is a guess.
Printed (55 s of CPU time):

    loss 7.281 at step 1, 1.343 at step 800
    of the hidden tokens of 500 held-out pairs 61.2% are restored, 17.3% where a source is alone
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

SHARE = 0.3  # of the tokens are hidden; <unk>, which this corpus hardly has, stands for them
LENGTH, ROWS = 40, 64


def hidden(rows: jax.Array, key: jax.Array) -> jax.Array:
    """Draws which tokens [B, T] are hidden; <s>, </s> and padding never are."""
    ordinary = (rows != PAD_ID) & (rows != BOS_ID) & (rows != EOS_ID)
    return ordinary & jax.random.bernoulli(key, SHARE, rows.shape)


def restored(model: Stack, rows: jax.Array, mask: jax.Array) -> jax.Array:
    """Logits [B, T, V] of every token, from the rows in which those of `mask` are hidden."""
    return model(jnp.where(mask, UNK_ID, rows), padding_mask(jnp.asarray(rows), PAD_ID))


def masked_loss(model: Stack, rows: jax.Array, key: jax.Array):
    """The sum of the losses of the hidden tokens, in nats, and their number."""
    mask = hidden(rows, key)
    logits = restored(model, rows, mask)
    return smoothed_cross_entropy(logits, jnp.asarray(rows), mask.astype(jnp.float32), 0.0)


def accuracy(model: Stack, rows: np.ndarray) -> float:
    """The share of hidden tokens whose likeliest restoration is right."""
    mask = hidden(rows, jax.random.key(2))
    likeliest = restored(model, rows, mask).argmax(-1)
    return float((mask & (likeliest == rows)).sum() / mask.sum())


def rows_of(tokenizer: Tokenizer, lines: list[tuple[str, ...]]) -> np.ndarray:
    """`<s> source </s> target </s>`, or a source alone, as rows [N, LENGTH]; long ones are cut."""
    rows = [[BOS_ID, *(i for text in texts for i in tokenizer.encode(text))] for texts in lines]
    return padded([row[:LENGTH] for row in rows], LENGTH, PAD_ID)


def main(steps: int = 800, tested: int = 500) -> None:
    pairs, held_out = common.corpus("train", common.PAIRS), common.corpus("test", tested)
    tokenizer = common.tokenizer_of(pairs[:2_000])
    model = Stack(common.MODEL, tokenizer.vocab_size, rngs=nnx.Rngs(1))
    model, losses = common.train(model, masked_loss, rows_of(tokenizer, pairs), steps, ROWS)
    print(f"loss {losses[0]:.3f} at step 1, {losses[-1]:.3f} at step {steps}")
    beside = accuracy(model, rows_of(tokenizer, held_out))
    alone = accuracy(model, rows_of(tokenizer, [(source,) for source, _ in held_out]))
    print(f"of the hidden tokens of {tested} held-out pairs {beside:.1%} are restored, ", end="")
    print(f"{alone:.1%} where a source is alone")


if __name__ == "__main__":
    main()
