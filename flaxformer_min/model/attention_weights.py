"""The attention weights of a forward pass at its three sites (paper, section 3.2.3).

The sites are self-attention in the encoder, self-attention in the decoder, and cross-attention.
Letters: B batch, L layers, H heads, S source length, T target length.
"""

import jax.numpy as jnp

from flaxformer_min.model.attention import AttentionWeights
from flaxformer_min.model.teacher_forcing import forced_states
from flaxformer_min.model.transformer import Source, Target, Transformer


def attention_weights(
    model: Transformer, source: Source, target: Target, *, pad_id: int, bos_id: int
) -> AttentionWeights:
    """Returns the weights of one forward pass on source [B, S] and target [B, T], without dropout.

    Source and target are token ids that end in EOS, padded. The function puts BOS before the
    target.
    """
    taps = {"encoder": {}, "decoder": {}}
    forced_states(model, source, target, pad_id=pad_id, bos_id=bos_id, taps=taps)
    sites = (
        taps["encoder"]["self_attention"],
        taps["decoder"]["self_attention"],
        taps["decoder"]["cross_attention"],
    )
    return AttentionWeights(*(jnp.moveaxis(site["weights"], 0, 1) for site in sites))
