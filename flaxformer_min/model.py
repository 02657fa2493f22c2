"""The Transformer (paper, section 3): two stacks around one embedding matrix.

Letters: B batch, S source length, T target length, D d_model, H heads, K d_k, U d_v, V vocabulary,
M hypotheses of a sentence, L positions in a decoding cache.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from flaxformer_min.blocks import (
    Cache,
    DecoderLayer,
    EncoderLayer,
    KeysValues,
    MaybeKey,
    SourceMask,
    TargetMask,
    project,
    put,
)
from flaxformer_min.config import ModelConfig
from flaxformer_min.dropout import dropout, split
from flaxformer_min.positions import sinusoidal_positions

# A decoding cache comes in blocks of positions, each read as a whole or not at all. A block has so
# many, or a quarter of all before it if that is more; the last one has the rest.
FIRST_BLOCK = 16


class DecodingCache(NamedTuple):
    """What hypotheses have read so far; ancestors[b, m, l, n]: m descends from what n was at l."""

    ancestors: Bool[Array, "B M L M"]
    layers: list[list[Cache]]  # of each layer, one for each block of positions

    def moved(self, parents: Int[Array, "B M"]) -> "DecodingCache":
        """After hypothesis m has become a child of hypothesis parents[b, m]."""
        ancestors = jnp.take_along_axis(self.ancestors, parents[:, :, None, None], axis=1)
        return self._replace(ancestors=ancestors)


class Transformer(nnx.Module):
    """Owns every weight; holds no state, no mode and no random numbers.

    A `key` turns dropout on, no key means evaluation; give `encode` and `decode` different ones.
    Masks are boolean, True = may attend (see masks.py). Weights are float32; the activations are
    `config.compute_dtype`.
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
        self,
        source: Int[Array, "B S"],
        source_mask: SourceMask,
        *,
        key: MaybeKey = None,
    ) -> Float[Array, "B S D"]:
        """Source ids [B, S] -> memory [B, S, D], the last encoder layer's output."""
        keys = split(key, len(self.encoder) + 1)
        x = dropout(self.embed_source(source), self.config.dropout, keys[0])

        def run(layer, x, key):
            return layer(x, source_mask, key)

        return through(self.encoder, run, x, keys[1:], self.config)

    def decode_states(
        self,
        target_in: Int[Array, "B T"],
        memory: Float[Array, "B S D"],
        target_mask: TargetMask,
        source_mask: SourceMask,
        *,
        key: MaybeKey = None,
    ) -> Float[Array, "B T D"]:
        """Target ids shifted right [B, T] and memory [B, S, D] -> decoder states [B, T, D]."""
        keys = split(key, len(self.decoder) + 1)
        x = dropout(self.embed_target(target_in), self.config.dropout, keys[0])

        def run(layer, x, key):
            read = layer.cross_attention.keys_values(memory)
            return layer(x, read, target_mask, source_mask, key)

        return through(self.decoder, run, x, keys[1:], self.config)

    def decode(
        self,
        target_in: Int[Array, "B T"],
        memory: Float[Array, "B S D"],
        target_mask: TargetMask,
        source_mask: SourceMask,
        *,
        key: MaybeKey = None,
    ) -> Float[Array, "B T V"]:
        """As `decode_states`, projected to logits [B, T, V]."""
        states = self.decode_states(target_in, memory, target_mask, source_mask, key=key)
        return self.project(states)

    def project(self, states: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """The pre-softmax projection of states [B, T, D], [B, T, V]."""
        return project(states, self.output_table)

    @property
    def output_table(self) -> Float[Array, "V D"]:
        """The matrix of the pre-softmax projection, [V, D]."""
        share = self.config.share_embeddings
        return (self.output_embedding if share == "none" else self.embedding)[...]

    def init_cache(self, batch: int, hypotheses: int, length: int) -> DecodingCache:
        """An empty decoding cache with room for `length` positions."""
        config, dtype = self.config, self._dtype
        heads = batch, config.num_heads
        sizes = [positions * hypotheses for positions in cache_blocks(length)]
        keys = [jnp.zeros((*heads, config.d_k, size), dtype) for size in sizes]
        values = [jnp.zeros((*heads, size, config.d_v), dtype) for size in sizes]
        past = [Cache(*block) for block in zip(keys, values, strict=True)]
        ancestors = jnp.zeros((batch, hypotheses, length, hypotheses), bool)
        return DecodingCache(ancestors, [past for _ in self.decoder])

    def memory_keys_values(self, memory: Float[Array, "B S D"]) -> list[KeysValues]:
        """What each decoder layer reads of memory [B, S, D], the same at every step of decoding."""
        return [layer.cross_attention.keys_values(memory) for layer in self.decoder]

    def decode_step(
        self,
        tokens: Int[Array, "B M"],
        index: Int[Array, " B"],
        cache: DecodingCache,
        memories: list[KeysValues],
        source_mask: SourceMask,
    ) -> tuple[Float[Array, "B M V"], DecodingCache]:
        """One token of each hypothesis, [B, M], at position index[b] -> logits [B, M, V] and cache.

        Equal to the column index[b] of `decode` on the whole prefix. At index 0 another sentence
        begins: whatever the cache holds is not read.
        """
        batch, hypotheses, length, _ = cache.ancestors.shape
        assert self.config.positions == "sinusoidal" or length <= self.config.max_length
        table = jnp.asarray(self._positions("target", length))
        x = self._embed(self.embedding, tokens, table[index][:, None])
        itself = jnp.eye(hypotheses, dtype=bool)[None, :, None]
        itself = jnp.broadcast_to(itself, (batch, hypotheses, 1, hypotheses))
        ancestors = put(cache.ancestors & (index > 0)[:, None, None, None], itself, index, 2)
        layers = []
        for layer, read, past in zip(self.decoder, memories, cache.layers, strict=True):
            x, past = layer.step(x, read, source_mask, past, ancestors, index)
            layers.append(past)
        return self.project(x), DecodingCache(ancestors, layers)

    def embed_source(self, source: Int[Array, "B S"]) -> Float[Array, "B S D"]:
        """What the first encoder layer reads of source ids [B, S], before dropout."""
        table = self.embedding if self.config.share_embeddings == "all" else self.source_embedding
        return self._embed(table, source, self._positions("source", source.shape[1])[None])

    def embed_target(self, target_in: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        """What the first decoder layer reads of target ids shifted right [B, T], before dropout."""
        positions = self._positions("target", target_in.shape[1])
        return self._embed(self.embedding, target_in, positions[None])

    def _positions(self, side: str, length: int) -> Float[Array, "length D"]:
        if self.config.positions == "sinusoidal":
            return jnp.asarray(sinusoidal_positions(length, self.config.d_model))
        table = self.source_positions if side == "source" else self.target_positions
        return table[...][:length]

    def _embed(
        self,
        table: nnx.Param,
        ids: Int[Array, "B T"],
        positions: Float[Array, "#B #T D"],
    ) -> Float[Array, "B T D"]:
        """Section 3.4 and 3.5: embedding times sqrt(D), plus the position."""
        scaled = table[...][ids] * self.config.d_model**0.5
        return (scaled + positions).astype(self._dtype)

    @property
    def _dtype(self) -> jnp.dtype:
        """bfloat16 if asked for; else what the weights are, so that float64 weights stay so."""
        bfloat16 = self.config.compute_dtype == "bfloat16"
        return jnp.dtype(jnp.bfloat16) if bfloat16 else self.embedding[...].dtype


def through(
    layers: Sequence[nnx.Module],
    run: Callable[[Any, Float[Array, "B T D"], MaybeKey], Float[Array, "B T D"]],
    x: Float[Array, "B T D"],
    keys: Sequence[MaybeKey],
    config: ModelConfig,
) -> Float[Array, "B T D"]:
    """x [B, T, D] through the layers in order, `run(layer, x, key)` being one of them.

    `config.remat` keeps only what enters a layer for the backward pass and computes the rest
    again. `config.scan_layers` compiles one layer and loops over it; outside, the layers keep
    weights of their own, so that checkpoints do not know of it.
    """
    if not layers:
        return x
    structure = nnx.split(layers[0])[0]  # all layers have the same
    weights = [nnx.split(layer)[1] for layer in layers]

    def one(x, part):
        weights, key = part
        return run(nnx.merge(structure, weights), x, key), None

    if config.remat:
        # A loop's body cannot be merged with its copy in the backward pass anyway.
        one = jax.checkpoint(one, prevent_cse=not config.scan_layers)
    if config.scan_layers:
        stack = lambda *leaves: jnp.stack(leaves)  # noqa: E731
        return jax.lax.scan(one, x, jax.tree.map(stack, *zip(weights, keys, strict=True)))[0]
    if isinstance(x, jax.core.Tracer):
        one = jax.jit(one)  # traced once, not for every layer; eagerly each call would compile it
    for part in zip(weights, keys, strict=True):
        x, _ = one(x, part)
    return x


def _table(rngs: nnx.Rngs, rows: int, d_model: int) -> nnx.Param:
    """A [rows, D] matrix, normal with standard deviation D^-0.5."""
    return nnx.Param(jax.random.normal(rngs.params(), (rows, d_model)) * d_model**-0.5)


def cache_blocks(length: int) -> list[int]:
    """The sizes of a decoding cache's blocks, `length` together."""
    sizes: list[int] = []
    while (total := sum(sizes)) < length:
        sizes.append(min(max(FIRST_BLOCK, total // 4), length - total))
    return sizes
