"""Teacher forcing: the decoder's input is the target, whatever the model predicts (section 3.1)."""

import jax.numpy as jnp

from flaxformer_min.model.attention import IDS, check
from flaxformer_min.model.dropout import MaybeKey, split
from flaxformer_min.model.layers import States
from flaxformer_min.model.masks import causal_mask, padding_mask
from flaxformer_min.model.taps import Taps, inside
from flaxformer_min.model.transformer import Source, Target, Transformer


def shift_right(target: Target, bos_id: int) -> Target:
    """Returns the decoder's input for a target [B, T]: BOS, then every token but the last.

    >>> print(shift_right(jnp.array([[7, 5, 3]]), bos_id=2))
    [[2 7 5]]
    """
    check(target=(target, IDS, "B T"))
    return jnp.pad(target, ((0, 0), (1, 0)), constant_values=bos_id)[:, :-1]


def forced_states(
    model: Transformer,
    source: Source,
    target: Target,
    *,
    pad_id: int,
    bos_id: int,
    key: MaybeKey = None,
    taps: Taps = None,
) -> States:
    """Returns decoder states [B, T, D] for source ids [B, S] and target ids [B, T], both padded.

    A `key` turns dropout on. `taps` collect values of the encoder under "encoder" and of the
    decoder under "decoder" (model/taps.py).
    """
    encoder_key, decoder_key = split(key, 2)
    source_mask = padding_mask(source, pad_id)
    target_in = shift_right(target, bos_id)
    # BOS is never padding, although it has pad's id in Marian's models: the mask is shifted alike.
    before = ((0, 0), (0, 0), (0, 0), (1, 0))
    visible = jnp.pad(padding_mask(target, pad_id), before, constant_values=True)[..., :-1]
    target_mask = visible & causal_mask(target.shape[1])
    memory = model.encode(source, source_mask, key=encoder_key, taps=inside(taps, "encoder"))
    return model.decode_states(
        target_in, memory, target_mask, source_mask, key=decoder_key, taps=inside(taps, "decoder")
    )
