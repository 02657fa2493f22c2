"""The layers of the paper (sections 3.1 to 3.3): modules own weights, functions do the maths.

Letters: B batch, S source length, T target length, D d_model, H heads, K d_k, U d_v.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float

from flaxformer_min.config import ModelConfig
from flaxformer_min.model.attention import (
    Context,
    Keys,
    Mask,
    Query,
    Values,
    attend,
    cudnn_attention,
)
from flaxformer_min.model.dropout import MaybeKey, dropout, split
from flaxformer_min.model.linear import dense
from flaxformer_min.model.taps import Taps, inside, note

SourceMask = Bool[Array, "#B 1 1 S"]  # masks.padding_mask(source)
TargetMask = Bool[Array, "#B 1 T T"]  # masks.padding_mask(target_in) & masks.causal_mask(T)
States = Float[Array, "B T D"]
Memory = Float[Array, "B S D"]  # the encoder's output


class KeysValues(NamedTuple):
    """What queries attend to: keys [B, H, S, K] and values [B, H, S, U]."""

    keys: Keys
    values: Values


def layer_norm(
    x: States, scale: Float[Array, " D"], bias: Float[Array, " D"], epsilon: float = 1e-6
) -> States:
    """Computes (x - mean) / sqrt(variance + epsilon) * scale + bias over D, in at least float32."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    centred = wide - wide.mean(-1, keepdims=True)
    variance = jnp.square(centred).mean(-1, keepdims=True)
    normed = centred * jax.lax.rsqrt(variance + epsilon)
    return (normed * scale[None, None] + bias[None, None]).astype(x.dtype)


def xavier(rngs: nnx.Rngs, fan_in: int, fan_out: int) -> nnx.Param:
    """Returns a [fan_in, fan_out] kernel drawn from the Xavier uniform distribution."""
    return nnx.Param(jax.nn.initializers.xavier_uniform()(rngs.params(), (fan_in, fan_out)))


def zeros(size: int, wanted: bool = True) -> nnx.Param | None:
    """Returns a bias [size] of zeros, or None for a projection that has no bias."""
    return nnx.Param(jnp.zeros(size)) if wanted else None


class Residual(nnx.Module):
    """The residual connection of a sublayer (section 5.4): LayerNorm(x + Dropout(Sublayer(x)))."""

    def __init__(self, config: ModelConfig):
        self.rate, self.epsilon = config.dropout, config.layer_norm_epsilon
        self.scale = nnx.Param(jnp.ones(config.d_model))
        self.bias = nnx.Param(jnp.zeros(config.d_model))

    def __call__(
        self, x: States, sublayer: Callable[[States], States], key: MaybeKey, taps: Taps = None
    ) -> States:
        """Applies `sublayer`, a function from [B, T, D] to [B, T, D], and all that surrounds it.

        `taps` get the sublayer's output, the residual sum and its norm, each [B, T, D].
        """
        output = sublayer(x)
        total = x + dropout(output, self.rate, key)
        normed = layer_norm(total, self.scale[...], self.bias[...], self.epsilon)
        note(taps, output=output, sum=total, norm=normed)
        return normed


class MultiHeadAttention(nnx.Module):
    """Concat(head_1 .. head_H) W_O (section 3.2.2); biases only if `config.biases`.

    The kernels are [D, H x K] for queries and keys, [D, H x U] for values and [H x U, D] for the
    output. A kernel holds all heads side by side, and Xavier's fans are the sizes of the whole
    kernel.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.num_heads = config.num_heads
        self.rate = config.attention_dropout
        self.cudnn = config.attention == "cudnn"
        keys, values = config.num_heads * config.d_k, config.num_heads * config.d_v
        self.query = xavier(rngs, config.d_model, keys)
        self.key = xavier(rngs, config.d_model, keys)
        self.value = xavier(rngs, config.d_model, values)
        self.output = xavier(rngs, values, config.d_model)
        self.query_bias, self.key_bias = zeros(keys, config.biases), zeros(keys, config.biases)
        self.value_bias = zeros(values, config.biases)
        self.output_bias = zeros(config.d_model, config.biases)

    def __call__(
        self,
        x: States,
        keys_values: KeysValues,
        mask: Mask,
        key: MaybeKey = None,
        taps: Taps = None,
    ) -> States:
        """Lets each position of x [B, T, D] attend to S keys and returns [B, T, D].

        `taps` get query, keys and values, and the fields of `Attended`. With `config.attention`
        "cudnn", training uses the fused kernel, which has no weights to show.
        """
        query = self.queries(x)
        if self.cudnn and key is not None:  # in training only: evaluation must run on any machine
            return self.merge(cudnn_attention(query, *keys_values, mask))
        drop = functools.partial(dropout, rate=self.rate, key=key)
        attended = attend(query, *keys_values, mask, drop)
        note(taps, query=query, **keys_values._asdict(), **attended._asdict())
        return self.merge(attended.context)

    def heads(self, x: States, kernel: nnx.Param, bias: nnx.Param | None) -> Float[Array, "..."]:
        """Projects x and splits it into heads: [B, T, D] -> [B, H, T, K], or U for values."""
        batch, length, _ = x.shape
        projected = _affine(x, kernel, bias)
        return projected.reshape(batch, length, self.num_heads, -1).swapaxes(1, 2)

    def queries(self, x: States) -> Query:
        """Returns the queries [B, H, T, K] of x [B, T, D]."""
        return self.heads(x, self.query, self.query_bias)

    def keys_values(self, x: Memory) -> KeysValues:
        """Returns the keys [B, H, S, K] and the values [B, H, S, U] of x [B, S, D]."""
        keys = self.heads(x, self.key, self.key_bias)
        return KeysValues(keys, self.heads(x, self.value, self.value_bias))

    def merge(self, context: Context) -> States:
        """Concatenates the heads and projects them: [B, H, T, U] -> [B, T, D]."""
        batch, _, length, _ = context.shape
        concatenated = context.swapaxes(1, 2).reshape(batch, length, -1)
        return _affine(concatenated, self.output, self.output_bias)


class FeedForward(nnx.Module):
    """The feed-forward network (FFN): max(0, x W_1 + b_1) W_2 + b_2 (section 3.3).

    With `config.activation` "swish", x * sigmoid(x) takes the place of max(0, x).
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.rate = config.ffn_dropout
        self.activation = jax.nn.relu if config.activation == "relu" else jax.nn.silu
        self.up, self.up_bias = xavier(rngs, config.d_model, config.d_ff), zeros(config.d_ff)
        self.down, self.down_bias = xavier(rngs, config.d_ff, config.d_model), zeros(config.d_model)

    def __call__(self, x: States, key: MaybeKey = None, taps: Taps = None) -> States:
        """Applies the network to each position by itself: [B, T, D] -> [B, T, D].

        `taps` get the output of the activation as "hidden", [B, T, F].
        """
        hidden = self.activation(_affine(x, self.up, self.up_bias))
        note(taps, hidden=hidden)
        return _affine(dropout(hidden, self.rate, key), self.down, self.down_bias)


def _affine(
    x: Float[Array, "B T I"], kernel: nnx.Param, bias: nnx.Param | None
) -> Float[Array, "B T O"]:
    return dense(x, kernel[...], None if bias is None else bias[...])


class EncoderLayer(nnx.Module):
    """Self-attention and then the FFN, each in a residual connection (section 3.1)."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.self_attention = MultiHeadAttention(config, rngs=rngs)
        self.self_attention_residual = Residual(config)
        self.feed_forward = FeedForward(config, rngs=rngs)
        self.feed_forward_residual = Residual(config)

    def __call__(self, x: Memory, mask: Mask, key: MaybeKey = None, taps: Taps = None) -> Memory:
        """Applies the layer: x [B, S, D] -> [B, S, D]."""
        keys, attention, feed_forward = split(key, 4), self.self_attention, self.feed_forward
        seen, fed = inside(taps, "self_attention"), inside(taps, "feed_forward")

        def attend_to_itself(x: States) -> States:
            return attention(x, attention.keys_values(x), mask, keys[0], seen)

        x = self.self_attention_residual(x, attend_to_itself, keys[1], seen)
        return self.feed_forward_residual(x, lambda x: feed_forward(x, keys[2], fed), keys[3], fed)


class DecoderLayer(nnx.Module):
    """Masked self-attention, attention to the encoder's output, then the FFN (section 3.1).

    Each of the three sublayers is in a residual connection. Attention to the encoder's output is
    called cross-attention in this program.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.self_attention = MultiHeadAttention(config, rngs=rngs)
        self.self_attention_residual = Residual(config)
        self.cross_attention = MultiHeadAttention(config, rngs=rngs)
        self.cross_attention_residual = Residual(config)
        self.feed_forward = FeedForward(config, rngs=rngs)
        self.feed_forward_residual = Residual(config)

    def __call__(
        self,
        x: States,
        memory: Memory,
        target_mask: TargetMask,
        source_mask: SourceMask,
        key: MaybeKey = None,
        taps: Taps = None,
    ) -> States:
        """Applies the layer: x [B, T, D] -> [B, T, D]; `memory` [B, S, D] is from the encoder."""
        attention = self.self_attention

        def attend_to_itself(x: States, key: MaybeKey) -> States:
            seen = inside(taps, "self_attention")
            return attention(x, attention.keys_values(x), target_mask, key, seen)

        keys_values = self.cross_attention.keys_values(memory)
        return self.sublayers(x, attend_to_itself, keys_values, source_mask, key, taps)

    def sublayers(
        self,
        x: States,
        attend_to_itself: Callable[[States, MaybeKey], States],
        memory_keys_values: KeysValues,
        source_mask: SourceMask,
        key: MaybeKey = None,
        taps: Taps = None,
    ) -> States:
        """Applies the three sublayers in their order: x [B, T, D] -> [B, T, D].

        `attend_to_itself` is the first sublayer. It is an argument because decoding one token at a
        time takes the keys and values of earlier tokens from a cache (model/cached.py).
        `memory_keys_values` are those of the encoder's output, for the second sublayer.
        """
        first_key, rest_key = split(key, 2)
        keys, feed_forward = [*split(first_key, 2), *split(rest_key, 4)], self.feed_forward
        seen, fed = inside(taps, "cross_attention"), inside(taps, "feed_forward")
        itself = inside(taps, "self_attention")

        def attend_to_memory(x: States) -> States:
            return self.cross_attention(x, memory_keys_values, source_mask, keys[2], seen)

        x = self.self_attention_residual(x, lambda x: attend_to_itself(x, keys[0]), keys[1], itself)
        x = self.cross_attention_residual(x, attend_to_memory, keys[3], seen)
        return self.feed_forward_residual(x, lambda x: feed_forward(x, keys[4], fed), keys[5], fed)
