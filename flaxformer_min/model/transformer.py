"""The Transformer (paper, section 3): two stacks around one embedding matrix.

Letters: B batch, S source length, T target length, D d_model, V vocabulary.
"""

import operator
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from flaxformer_min.config import ModelConfig
from flaxformer_min.model.attention import BOOLEANS, FLOATS, IDS, check
from flaxformer_min.model.dropout import MaybeKey, dropout, split
from flaxformer_min.model.layers import (
    DecoderLayer,
    EncoderLayer,
    Memory,
    SourceMask,
    States,
    TargetMask,
    zeros,
)
from flaxformer_min.model.linear import project
from flaxformer_min.model.positions import sinusoidal_positions
from flaxformer_min.model.taps import Taps, note

Source = Int[Array, "B S"]  # token ids
Target = Int[Array, "B T"]
Logits = Float[Array, "B T V"]


class Transformer(nnx.Module):
    """The model. It owns every weight and holds no state, no mode and no random numbers.

    A `key` turns dropout on; without one the model works as in evaluation. `encode` and `decode`
    must get different keys. Masks are boolean, True = may attend (model/masks.py). Weights are
    float32; the dtype of the activations is `config.compute_dtype`. What `taps` collect from the
    layers is stacked, with the layer as the first axis.
    """

    lookup: Callable[[Array, Array], Array] = operator.getitem  # another in training on a mesh

    def __init__(self, config: ModelConfig, vocab_size: int, *, rngs: nnx.Rngs):
        if vocab_size < 1:
            raise ValueError(f"vocab_size is {vocab_size}: it must be at least 1")
        if config.positions == "sinusoidal":
            sinusoidal_positions(1, config.d_model)  # it refuses an odd d_model
        self.config = config
        layers = config.num_layers, config.num_decoder_layers or config.num_layers
        self.encoder = nnx.List([EncoderLayer(config, rngs=rngs) for _ in range(layers[0])])
        self.decoder = nnx.List([DecoderLayer(config, rngs=rngs) for _ in range(layers[1])])
        # Section 3.4: with "all" this one matrix embeds both languages and makes the logits.
        self.embedding = _table(rngs, vocab_size, config.d_model)
        if config.share_embeddings != "all":
            self.source_embedding = _table(rngs, vocab_size, config.d_model)
        if config.share_embeddings == "none":
            self.output_embedding = _table(rngs, vocab_size, config.d_model)
        self.logits_bias = zeros(vocab_size, config.biases)
        if config.positions == "learned":
            self.source_positions = _table(rngs, config.max_length, config.d_model)
            self.target_positions = _table(rngs, config.max_length, config.d_model)

    def encode(
        self, source: Source, source_mask: SourceMask, *, key: MaybeKey = None, taps: Taps = None
    ) -> Memory:
        """Encodes source ids [B, S] as memory [B, S, D], the last encoder layer's output."""
        check(source=(source, IDS, "B S"), source_mask=(source_mask, BOOLEANS, "#B 1 1 S"))
        table = self.embedding if self.config.share_embeddings == "all" else self.source_embedding
        x = self.embed(table, source, self.positions("source", source.shape[1])[None], taps)
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
        """Returns decoder states [B, T, D] for shifted target ids [B, T] and memory [B, S, D]."""
        check(
            target_in=(target_in, IDS, "B T"),
            memory=(memory, FLOATS, "B S D"),
            target_mask=(target_mask, BOOLEANS, "#B 1 T T"),
            source_mask=(source_mask, BOOLEANS, "#B 1 1 S"),
        )
        positions = self.positions("target", target_in.shape[1])[None]
        x = self.embed(self.embedding, target_in, positions, taps)
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
        """Returns logits [B, T, V]: `decode_states`, projected to the vocabulary."""
        states = self.decode_states(target_in, memory, target_mask, source_mask, key=key)
        return self.project(states)

    def project(self, states: States, table: Float[Array, "V D"] | None = None) -> Logits:
        """Projects states [B, T, D] to logits [B, T, V] by the output table, before the softmax."""
        logits = project(states, self.output_table if table is None else table)
        return logits if self.logits_bias is None else logits + self.logits_bias[...][None, None]

    @property
    def output_table(self) -> Float[Array, "V D"]:
        """The matrix [V, D] of the projection to logits."""
        share = self.config.share_embeddings
        return (self.output_embedding if share == "none" else self.embedding)[...]

    def positions(self, side: Literal["source", "target"], length: int) -> Float[Array, "length D"]:
        """Returns the table of positions 0 to length - 1, [length, D], of `config.positions`."""
        if self.config.positions == "sinusoidal":
            return jnp.asarray(sinusoidal_positions(length, self.config.d_model))
        table = self.source_positions if side == "source" else self.target_positions
        return table[...][:length]

    def embed(
        self, table: nnx.Param, ids: Target, positions: Float[Array, "#B #T D"], taps: Taps = None
    ) -> States:
        """Embeds ids [B, T] as [B, T, D]: rows of `table` times sqrt(D), plus `positions`.

        Ids that a NumPy array holds must be below V; on a device, others are clamped by XLA.
        """
        known = isinstance(ids, np.ndarray) and ids.size > 0
        if known and not 0 <= ids.min() <= ids.max() < len(table[...]):
            wrong = f"ids are from {ids.min()} to {ids.max()}"
            raise ValueError(f"{wrong}: they must be from 0 to {len(table[...]) - 1}")
        scaled = self.lookup(table[...], ids) * self.config.d_model**0.5
        x = (scaled + positions).astype(self.dtype)
        note(taps, embedding=scaled, positions=positions, input=x)
        return x

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype of activations: bfloat16 if the config says so, else that of the weights."""
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
    """Applies dropout to x [B, T, D], then each layer in order as `layer(x, *context, key, taps)`.

    It returns the last layer's output [B, T, D]. `config.remat` keeps only the input of each layer
    for the backward pass and computes the rest again. `config.scan_layers` compiles one layer and
    loops over it. Outside of this function each layer keeps its own weights, so that a checkpoint
    is the same with and without it.
    """
    first_key, *keys = split(key, len(layers) + 1)
    x = dropout(x, config.dropout, first_key)
    if not layers:
        return x
    structure = nnx.split(layers[0])[0]  # all layers have the same structure
    parts = list(zip([nnx.split(layer)[1] for layer in layers], keys, strict=True))

    def one(x, part):
        (weights, key), seen = part, None if taps is None else {}
        x = nnx.merge(structure, weights)(x, *context, key, seen)
        return x, seen  # returned, because a compiled function can hand out nothing else

    if config.remat:
        # `prevent_cse` keeps XLA from merging a layer with its copy in the backward pass. It is not
        # needed for a loop, whose body XLA never merges with its copy.
        one = jax.checkpoint(one, prevent_cse=not config.scan_layers)
    if config.scan_layers:
        x, seen = jax.lax.scan(one, x, _stacked(parts))
    else:
        x, seen = _unrolled(one, x, parts)
    note(taps, **(seen or {}), states=x)
    return x


def _unrolled(one: Callable[..., Any], x: States, parts: Sequence[Any]) -> tuple[States, Any]:
    """Does what `jax.lax.scan` does without its loop: one program holds all layers."""
    if isinstance(x, jax.core.Tracer):
        one = jax.jit(one)  # traced once for all layers; outside of a trace each call would compile
    each = []
    for part in parts:
        x, seen = one(x, part)
        each.append(seen)
    return x, _stacked(each)


def _stacked(trees: Sequence[Any]) -> Any:
    """Stacks trees of equal structure into one tree, whose leaves have a new first axis."""
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


def _table(rngs: nnx.Rngs, rows: int, d_model: int) -> nnx.Param:
    """Returns a [rows, D] matrix, drawn normal with standard deviation D^-0.5."""
    return nnx.Param(jax.random.normal(rngs.params(), (rows, d_model)) * d_model**-0.5)
