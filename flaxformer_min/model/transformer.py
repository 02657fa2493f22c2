"""The Transformer (paper, section 3): two stacks around one embedding matrix.

Letters: B batch, S source length, T target length, D d_model, V vocabulary.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from flaxformer_min.config import ModelConfig
from flaxformer_min.model.dropout import MaybeKey, dropout, split
from flaxformer_min.model.layers import (
    DecoderLayer,
    EncoderLayer,
    Memory,
    SourceMask,
    States,
    TargetMask,
)
from flaxformer_min.model.linear import project
from flaxformer_min.model.positions import sinusoidal_positions
from flaxformer_min.model.taps import Taps

Source = Int[Array, "B S"]  # token ids
Target = Int[Array, "B T"]
Logits = Float[Array, "B T V"]


class Transformer(nnx.Module):
    """Owns every weight; holds no state, no mode and no random numbers.

    A `key` turns dropout on, no key means evaluation; give `encode` and `decode` different ones.
    Masks are boolean, True = may attend (see masks.py). Weights are float32; the activations are
    `config.compute_dtype`. What `taps` collect of the layers has the layer as its first axis.
    """

    def __init__(self, config: ModelConfig, vocab_size: int, *, rngs: nnx.Rngs):
        self.config = config
        layers = range(config.num_layers)
        self.encoder = nnx.List([EncoderLayer(config, rngs=rngs) for _ in layers])
        self.decoder = nnx.List([DecoderLayer(config, rngs=rngs) for _ in layers])
        # Section 3.4: with "all" this one matrix embeds both languages and makes the logits.
        self.embedding = _table(rngs, vocab_size, config.d_model)
        if config.share_embeddings != "all":
            self.source_embedding = _table(rngs, vocab_size, config.d_model)
        if config.share_embeddings == "none":
            self.output_embedding = _table(rngs, vocab_size, config.d_model)
        if config.positions == "learned":
            self.source_positions = _table(rngs, config.max_length, config.d_model)
            self.target_positions = _table(rngs, config.max_length, config.d_model)

    def encode(
        self, source: Source, source_mask: SourceMask, *, key: MaybeKey = None, taps: Taps = None
    ) -> Memory:
        """Source ids [B, S] -> memory [B, S, D], the last encoder layer's output."""
        table = self.embedding if self.config.share_embeddings == "all" else self.source_embedding
        x = self.embed(table, source, self.positions("source", source.shape[1])[None])
        return run_layers(self.encoder, x, (source_mask,), self.config, key, taps)

    def decode_states(
        self,
        target_in: Target,
        memory: Memory,
        target_mask: TargetMask,
        source_mask: SourceMask,
        *,
        key: MaybeKey = None,
        taps: Taps = None,
    ) -> States:
        """Target ids shifted right [B, T] and memory [B, S, D] -> decoder states [B, T, D]."""
        positions = self.positions("target", target_in.shape[1])[None]
        x = self.embed(self.embedding, target_in, positions)
        context = (memory, target_mask, source_mask)
        return run_layers(self.decoder, x, context, self.config, key, taps)

    def decode(
        self,
        target_in: Target,
        memory: Memory,
        target_mask: TargetMask,
        source_mask: SourceMask,
        *,
        key: MaybeKey = None,
    ) -> Logits:
        """Logits [B, T, V]: `decode_states`, projected to the vocabulary."""
        states = self.decode_states(target_in, memory, target_mask, source_mask, key=key)
        return self.project(states)

    def project(self, states: States) -> Logits:
        """The pre-softmax projection: states [B, T, D] -> logits [B, T, V]."""
        return project(states, self.output_table)

    @property
    def output_table(self) -> Float[Array, "V D"]:
        """The matrix of the pre-softmax projection, [V, D]."""
        share = self.config.share_embeddings
        return (self.output_embedding if share == "none" else self.embedding)[...]

    def positions(self, side: Literal["source", "target"], length: int) -> Float[Array, "length D"]:
        """The table of positions 0 to length - 1 that `config.positions` asks for, [length, D]."""
        if self.config.positions == "sinusoidal":
            return jnp.asarray(sinusoidal_positions(length, self.config.d_model))
        table = self.source_positions if side == "source" else self.target_positions
        return table[...][:length]

    def embed(self, table: nnx.Param, ids: Target, positions: Float[Array, "#B #T D"]) -> States:
        """Ids [B, T] -> embedding times sqrt(D), plus position (sections 3.4, 3.5), [B, T, D]."""
        scaled = table[...][ids] * self.config.d_model**0.5
        return (scaled + positions).astype(self.dtype)

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype of activations: bfloat16 if asked for, else that of the weights."""
        bfloat16 = self.config.compute_dtype == "bfloat16"
        return jnp.dtype(jnp.bfloat16) if bfloat16 else self.embedding[...].dtype


def run_layers(
    layers: Sequence[nnx.Module],
    x: States,
    context: tuple[Array, ...],
    config: ModelConfig,
    key: MaybeKey = None,
    taps: Taps = None,
) -> States:
    """Dropout on x [B, T, D], then each layer in order as `layer(x, *context, key, taps)`.

    `config.remat` keeps only the input of each layer for the backward pass and computes the rest
    again. `config.scan_layers` compiles one layer and loops over it; outside of this function the
    layers keep weights of their own, so that checkpoints do not know of it.
    """
    first_key, *keys = split(key, len(layers) + 1)
    x = dropout(x, config.dropout, first_key)
    if not layers:
        return x
    structure = nnx.split(layers[0])[0]  # all layers have the same
    parts = list(zip([nnx.split(layer)[1] for layer in layers], keys, strict=True))

    def one(x, part):
        (weights, key), seen = part, None if taps is None else {}
        x = nnx.merge(structure, weights)(x, *context, key, seen)
        return x, seen  # returned, because a compiled function can hand out nothing else

    if config.remat:
        # A loop's body cannot be merged with its copy in the backward pass anyway.
        one = jax.checkpoint(one, prevent_cse=not config.scan_layers)
    if config.scan_layers:
        x, seen = jax.lax.scan(one, x, _stacked(parts))
    else:
        x, seen = _unrolled(one, x, parts)
    if taps is not None and seen is not None:
        taps.update(seen)
    return x


def _unrolled(one: Callable[..., Any], x: States, parts: Sequence[Any]) -> tuple[States, Any]:
    """The result of `jax.lax.scan` without its loop: one program with all layers in it."""
    if isinstance(x, jax.core.Tracer):
        one = jax.jit(one)  # traced once, not for every layer; eagerly each call would compile
    each = []
    for part in parts:
        x, seen = one(x, part)
        each.append(seen)
    return x, _stacked(each)


def _stacked(trees: Sequence[Any]) -> Any:
    """Trees of equal structure as one tree, whose leaves have another first axis."""
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


def _table(rngs: nnx.Rngs, rows: int, d_model: int) -> nnx.Param:
    """A [rows, D] matrix, normal with standard deviation D^-0.5."""
    return nnx.Param(jax.random.normal(rngs.params(), (rows, d_model)) * d_model**-0.5)
