"""Who attended to whom: the attention weights of the three sites (paper, section 3.2.3)."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from flaxformer_min.blocks import DecoderLayer, KeysValues, SourceMask, TargetMask
from flaxformer_min.masks import causal_mask, padding_mask
from flaxformer_min.model import Transformer
from flaxformer_min.step import shift_right


class AttentionWeights(NamedTuple):
    """Of every layer and head, [B, L, H, queries, keys]; each row sums to 1.

    Entries that a mask hides are exactly 0. The decoder's query t is what it read to emit token t:
    BOS for the first token, token t - 1 later; its keys are the same.
    """

    encoder: Float[Array, "B L H S S"]
    decoder: Float[Array, "B L H T T"]
    cross: Float[Array, "B L H T S"]


def attention_weights(
    model: Transformer,
    source: Int[Array, "B S"],
    target: Int[Array, "B T"],
    *,
    pad_id: int,
    bos_id: int,
) -> AttentionWeights:
    """The weights by which `model` reads source and target ids, padded, without dropout."""
    source_mask, target_in = padding_mask(source, pad_id), shift_right(target, bos_id)
    target_mask = padding_mask(target_in, pad_id) & causal_mask(target_in.shape[1])
    encoder, decoder, cross = [], [], []
    x = model.embed_source(source)
    for layer in model.encoder:
        attention = layer.self_attention
        encoder.append(attention.weights(x, attention.keys_values(x), source_mask))
        x = layer(x, source_mask)
    memories = model.memory_keys_values(x)
    x = model.embed_target(target_in)
    for layer, read in zip(model.decoder, memories, strict=True):
        weights = _of_decoder_layer(layer, x, read, target_mask, source_mask)
        decoder.append(weights[0])
        cross.append(weights[1])
        x = layer(x, read, target_mask, source_mask)
    return AttentionWeights(*(jnp.stack(site, axis=1) for site in (encoder, decoder, cross)))


def _of_decoder_layer(
    layer: DecoderLayer,
    x: Float[Array, "B T D"],
    read: KeysValues,
    target_mask: TargetMask,
    source_mask: SourceMask,
) -> tuple[Float[Array, "B H T T"], Float[Array, "B H T S"]]:
    """The weights of its two attentions."""
    past = layer.self_attention.keys_values(x)
    own = layer.self_attention.weights(x, past, target_mask)
    attended = layer.self_attention(x, past, target_mask)
    query = layer.self_attention_residual(x, attended, None)
    return own, layer.cross_attention.weights(query, read, source_mask)
