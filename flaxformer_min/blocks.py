"""The layers of the paper (sections 3.1 to 3.3): modules own weights, functions do the maths."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Key, Shaped

from flaxformer_min.attention import Block, attend, attend_blocks, cudnn_attention
from flaxformer_min.config import ModelConfig
from flaxformer_min.dropout import dropout, split

LAYER_NORM_EPSILON = 1e-6  # the paper gives none; this is tensor2tensor's

SourceMask = Bool[Array, "#B 1 1 S"]  # masks.padding_mask(source)
TargetMask = Bool[Array, "#B 1 T T"]  # masks.padding_mask(target_in) & masks.causal_mask(T)
MaybeKey = Key[Array, ""] | None


class KeysValues(NamedTuple):
    """What a query reads: keys [B, H, S, K] and values [B, H, S, U]."""

    keys: Float[Array, "B H S K"]
    values: Float[Array, "B H S U"]


class Cache(NamedTuple):
    """One layer's self-attention past: some positions of all M hypotheses of each sentence.

    keys [B, H, K, L x M] and values [B, H, L x M, U]; what place m of position l holds is at
    l x M + m. It is written once and never moves: when hypotheses change places, only the mask
    that says whose past is whose does.
    """

    keys: Float[Array, "B H K LM"]
    values: Float[Array, "B H LM U"]

    def written(self, new: KeysValues, index: Int[Array, " B"]) -> "Cache":
        """With the keys and values, [B, H, M, K or U], of position index[b] if that lies here."""
        keys = new.keys.swapaxes(2, 3).astype(self.keys.dtype)
        values = new.values.astype(self.values.dtype)
        places = index * new.keys.shape[2]
        return Cache(put(self.keys, keys, places, 3), put(self.values, values, places, 2))


def put(
    x: Shaped[Array, "B ..."], new: Shaped[Array, "B ..."], places: Int[Array, " B"], axis: int
) -> Shaped[Array, "B ..."]:
    """x with new[b] from places[b] on along `axis`; without it where that is outside of x."""
    window = jax.lax.ScatterDimensionNumbers(
        update_window_dims=tuple(range(x.ndim - 1)),
        inserted_window_dims=(),
        scatter_dims_to_operand_dims=(axis - 1,),
    )

    def put_row(x, new, place):
        return jax.lax.scatter(x, place[None], new, window, mode="drop")

    return jax.vmap(put_row)(x, new, places)


def dense(x: Float[Array, "B T I"], kernel: Float[Array, "I O"]) -> Float[Array, "B T O"]:
    """x @ kernel in x's dtype.

    Tokens are flattened first: the weight gradient then contracts one axis instead of two,
    which XLA's CPU backend does three times faster.
    """
    flat = x.reshape(-1, x.shape[-1])
    return jnp.matmul(flat, kernel.astype(x.dtype), precision="highest").reshape(*x.shape[:-1], -1)


def project(states: Float[Array, "B T D"], table: Float[Array, "V D"]) -> Float[Array, "B T V"]:
    """The pre-softmax projection, states @ table.T, without bias (section 3.4).

    Logits are at least float32 whatever the states are: rounded to bfloat16, two likely words
    would often tie.
    """
    flat = states.reshape(-1, states.shape[-1])
    logits = jnp.matmul(
        flat,
        table.astype(flat.dtype).T,
        precision="highest",
        preferred_element_type=jnp.promote_types(flat.dtype, jnp.float32),
    )
    return logits.reshape(*states.shape[:-1], -1)


def layer_norm(
    x: Float[Array, "B T D"], scale: Float[Array, " D"], bias: Float[Array, " D"]
) -> Float[Array, "B T D"]:
    """(x - mean) / sqrt(variance + epsilon) * scale + bias over D, in at least float32."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    centred = wide - wide.mean(-1, keepdims=True)
    variance = jnp.square(centred).mean(-1, keepdims=True)
    normed = centred * jax.lax.rsqrt(variance + LAYER_NORM_EPSILON)
    return (normed * scale[None, None] + bias[None, None]).astype(x.dtype)


def xavier(rngs: nnx.Rngs, fan_in: int, fan_out: int) -> nnx.Param:
    """A [fan_in, fan_out] kernel, Xavier uniform."""
    return nnx.Param(jax.nn.initializers.xavier_uniform()(rngs.params(), (fan_in, fan_out)))


class Residual(nnx.Module):
    """What surrounds every sublayer (section 5.4): LayerNorm(x + Dropout(Sublayer(x)))."""

    def __init__(self, config: ModelConfig):
        self.rate = config.dropout
        self.scale = nnx.Param(jnp.ones(config.d_model))
        self.bias = nnx.Param(jnp.zeros(config.d_model))

    def __call__(
        self, x: Float[Array, "B T D"], sublayer: Float[Array, "B T D"], key: MaybeKey
    ) -> Float[Array, "B T D"]:
        return layer_norm(x + dropout(sublayer, self.rate, key), self.scale[...], self.bias[...])


class MultiHeadAttention(nnx.Module):
    """Concat(head_1 .. head_H) W_O (section 3.2.2), without biases.

    Kernels are [D, H x K] and [H x U, D], head by head: the Xavier fans are D and H x K.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.num_heads = config.num_heads
        self.rate = config.attention_dropout
        self.cudnn = config.attention == "cudnn"
        self.query = xavier(rngs, config.d_model, config.num_heads * config.d_k)
        self.key = xavier(rngs, config.d_model, config.num_heads * config.d_k)
        self.value = xavier(rngs, config.d_model, config.num_heads * config.d_v)
        self.output = xavier(rngs, config.num_heads * config.d_v, config.d_model)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        read: KeysValues,
        mask: Bool[Array, "#B 1 #T S"],
        key: MaybeKey = None,
    ) -> Float[Array, "B T D"]:
        """Lets each position of x [B, T, D] read from `read`; the result is [B, T, D]."""
        query = self.heads(x, self.query[...])
        if self.cudnn and key is not None:  # in training; evaluation runs on any machine
            return self.merge(cudnn_attention(query, *read, mask))
        context, _ = attend(query, *read, mask, dropout_rate=self.rate, dropout_key=key)
        return self.merge(context)

    def weights(
        self, x: Float[Array, "B T D"], read: KeysValues, mask: Bool[Array, "#B 1 #T S"]
    ) -> Float[Array, "B H T S"]:
        """How much each position of x [B, T, D] reads from each key of `read`: [B, H, T, S]."""
        return attend(self.heads(x, self.query[...]), *read, mask)[1]

    def heads(self, x: Float[Array, "B T D"], kernel: Float[Array, "D HK"]) -> Float[Array, "..."]:
        """Projects x and splits it into heads: [B, T, D] -> [B, H, T, K]."""
        batch, length, _ = x.shape
        return dense(x, kernel).reshape(batch, length, self.num_heads, -1).swapaxes(1, 2)

    def keys_values(self, x: Float[Array, "B S D"]) -> KeysValues:
        """The keys and values of x [B, S, D]."""
        return KeysValues(self.heads(x, self.key[...]), self.heads(x, self.value[...]))

    def merge(self, context: Float[Array, "B H T U"]) -> Float[Array, "B T D"]:
        """Concatenates the heads and projects them: [B, H, T, U] -> [B, T, D]."""
        batch, _, length, _ = context.shape
        return dense(context.swapaxes(1, 2).reshape(batch, length, -1), self.output[...])

    def step(
        self,
        x: Float[Array, "B M D"],
        past: list[Cache],
        ancestors: Bool[Array, "B M L M"],
        index: Int[Array, " B"],
    ) -> tuple[Float[Array, "B M D"], list[Cache]]:
        """Self-attention of one new token per hypothesis, at position index[b], on its cached past.

        The M hypotheses of a sentence are M queries on one cache; `ancestors` says which of its
        places each of them may read. `past` holds the positions in blocks; those that no sentence
        has come to are not read.
        """
        batch, hypotheses, _ = x.shape
        new, furthest = self.keys_values(x), jnp.max(index)
        written, blocks, first = [], [], 0
        for cache in past:
            end = first + cache.keys.shape[3] // hypotheses
            mask = ancestors[:, None, :, first:end].reshape(batch, 1, hypotheses, -1)
            cache = cache.written(new, index - first)
            blocks.append(Block(cache.keys, cache.values, mask, furthest >= first))
            written.append(cache)
            first = end
        context = attend_blocks(self.heads(x, self.query[...]), blocks)
        return self.merge(context), written


class FeedForward(nnx.Module):
    """max(0, x W_1 + b_1) W_2 + b_2 (section 3.3)."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.rate = config.ffn_dropout
        self.up = xavier(rngs, config.d_model, config.d_ff)
        self.up_bias = nnx.Param(jnp.zeros(config.d_ff))
        self.down = xavier(rngs, config.d_ff, config.d_model)
        self.down_bias = nnx.Param(jnp.zeros(config.d_model))

    def __call__(self, x: Float[Array, "B T D"], key: MaybeKey = None) -> Float[Array, "B T D"]:
        hidden = jax.nn.relu(dense(x, self.up[...]) + self.up_bias[...].astype(x.dtype)[None, None])
        hidden = dropout(hidden, self.rate, key)
        return dense(hidden, self.down[...]) + self.down_bias[...].astype(x.dtype)[None, None]


class EncoderLayer(nnx.Module):
    """Self-attention, then the FFN, each in its residual (section 3.1)."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.self_attention = MultiHeadAttention(config, rngs=rngs)
        self.self_attention_residual = Residual(config)
        self.feed_forward = FeedForward(config, rngs=rngs)
        self.feed_forward_residual = Residual(config)

    def __call__(
        self, x: Float[Array, "B S D"], mask: SourceMask, key: MaybeKey = None
    ) -> Float[Array, "B S D"]:
        keys = split(key, 4)
        attended = self.self_attention(x, self.self_attention.keys_values(x), mask, keys[0])
        x = self.self_attention_residual(x, attended, keys[1])
        return self.feed_forward_residual(x, self.feed_forward(x, keys[2]), keys[3])


class DecoderLayer(nnx.Module):
    """Masked self-attention, attention to the encoder's memory, then the FFN (section 3.1)."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.self_attention = MultiHeadAttention(config, rngs=rngs)
        self.self_attention_residual = Residual(config)
        self.cross_attention = MultiHeadAttention(config, rngs=rngs)
        self.cross_attention_residual = Residual(config)
        self.feed_forward = FeedForward(config, rngs=rngs)
        self.feed_forward_residual = Residual(config)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        memory: KeysValues,
        target_mask: TargetMask,
        source_mask: SourceMask,
        key: MaybeKey = None,
    ) -> Float[Array, "B T D"]:
        self_key, rest_key = split(key, 2)
        keys = split(self_key, 2)
        attended = self.self_attention(x, self.self_attention.keys_values(x), target_mask, keys[0])
        x = self.self_attention_residual(x, attended, keys[1])
        return self._after_self_attention(x, memory, source_mask, rest_key)

    def step(
        self,
        x: Float[Array, "B M D"],
        memory: KeysValues,
        source_mask: SourceMask,
        past: list[Cache],
        ancestors: Bool[Array, "B M L M"],
        index: Int[Array, " B"],
    ) -> tuple[Float[Array, "B M D"], list[Cache]]:
        """The layer for one new token of each of M hypotheses: [B, M, D] and its new past.

        Cross-attention takes the M hypotheses of a sentence as M queries, so its keys and values
        are held once per sentence.
        """
        attended, past = self.self_attention.step(x, past, ancestors, index)
        x = self.self_attention_residual(x, attended, None)
        return self._after_self_attention(x, memory, source_mask, None), past

    def _after_self_attention(
        self, x: Float[Array, "B T D"], memory: KeysValues, source_mask: SourceMask, key: MaybeKey
    ) -> Float[Array, "B T D"]:
        keys = split(key, 4)
        attended = self.cross_attention(x, memory, source_mask, keys[0])
        x = self.cross_attention_residual(x, attended, keys[1])
        return self.feed_forward_residual(x, self.feed_forward(x, keys[2]), keys[3])
