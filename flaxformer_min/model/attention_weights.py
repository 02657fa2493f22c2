"""Who attended to whom: the attention weights of the three sites (paper, section 3.2.3)."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from flaxformer_min.model.teacher_forcing import forced_states
from flaxformer_min.model.transformer import Source, Target, Transformer


class AttentionWeights(NamedTuple):
    """The weights of every layer and head, [B, L, H, queries, keys]; each row sums to 1.

    Entries that a mask hides are exactly 0. Query t of the decoder is its input when it emits token
    t: BOS for the first token, token t - 1 later. Its keys are the same inputs.
    """

    encoder: Float[Array, "B L H S S"]
    decoder: Float[Array, "B L H T T"]
    cross: Float[Array, "B L H T S"]


def attention_weights(
    model: Transformer, source: Source, target: Target, *, pad_id: int, bos_id: int
) -> AttentionWeights:
    """The weights of the model's own forward pass on source and target ids, without dropout."""
    taps = {"encoder": {}, "decoder": {}}
    forced_states(model, source, target, pad_id=pad_id, bos_id=bos_id, taps=taps)
    sites = (
        taps["encoder"]["self_attention"],
        taps["decoder"]["self_attention"],
        taps["decoder"]["cross_attention"],
    )
    return AttentionWeights(*(jnp.moveaxis(site["weights"], 0, 1) for site in sites))
