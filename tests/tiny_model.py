"""A model of odd sizes, ids for it, and its weights under the names of the NumPy reference.

Sizes are distinct, so that a swapped axis cannot pass: L 2, H 2, M 3, B 5, K 7, S 11, T 13, U 17,
F 19, D 26, V 31.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import numpy_transformer as reference
from flax import nnx

from flaxformer_min.config import ModelConfig
from flaxformer_min.model.build import split_model
from flaxformer_min.model.masks import causal_mask, padding_mask

CONFIG = ModelConfig(
    num_layers=2, d_model=26, d_ff=19, num_heads=2, d_k=7, d_v=17, max_length=29, dropout=0.1
)
VOCAB_SIZE, SOURCE_LENGTH, TARGET_LENGTH, HYPOTHESES = 31, 11, 13, 3
VARIANTS = {
    "paper": CONFIG,
    "learned positions": dataclasses.replace(CONFIG, positions="learned", num_layers=1),
    "target shared": dataclasses.replace(CONFIG, share_embeddings="target", num_layers=1),
    "nothing shared": dataclasses.replace(CONFIG, share_embeddings="none", num_layers=1),
    "narrow heads": dataclasses.replace(CONFIG, num_heads=3, d_k=2, d_v=1, num_layers=1),
    "Marian's": dataclasses.replace(
        CONFIG,
        num_layers=1,
        num_decoder_layers=2,
        biases=True,
        activation="swish",
        layer_norm_epsilon=0.01,
    ),
}


def build(config, params):
    """The model that holds the given parameters."""
    return nnx.merge(split_model(config, VOCAB_SIZE)[0], params)


def random_params(config=CONFIG, dtype=np.float32):
    """A model's parameters, every one of them random, norms and biases too."""
    rng = np.random.default_rng(7)

    def draw(path, leaf):
        centre = 1.0 if path[-1].key == "scale" else 0.0
        return jnp.asarray(centre + 0.3 * rng.standard_normal(leaf.shape), dtype)

    return jax.tree_util.tree_map_with_path(draw, split_model(config, VOCAB_SIZE)[1])


def silenced(params, *kernels):
    """The parameters with every kernel of the given names set to 0."""

    def mute(path, leaf):
        return leaf * 0 if path[-1].key in kernels else leaf

    return jax.tree_util.tree_map_with_path(mute, params)


def padded_ids(seed, lengths, width):
    """Random ids from unk (1) upward, [B, width], each row padded after its length."""
    ids = np.random.default_rng(seed).integers(1, VOCAB_SIZE, (len(lengths), width))
    return jnp.asarray(np.where(np.arange(width) < np.array(lengths)[:, None], ids, 0), jnp.int32)


def forward(config, params, source, target_in, key=None):
    """Memory [B, S, D] and logits [B, T, V], as training and scoring compute them.

    Run op by op: cheap for a test that needs one call, since the ops are compiled once for all.
    """
    model, source_mask = build(config, params), padding_mask(source)
    target_mask = padding_mask(target_in) & causal_mask(target_in.shape[1])
    memory = model.encode(source, source_mask, key=key)
    return memory, model.decode(target_in, memory, target_mask, source_mask, key=key)


compiled_forward = jax.jit(forward, static_argnums=0)

SOURCE = padded_ids(1, [11, 4, 7, 1, 10], SOURCE_LENGTH)
TARGET_IN = padded_ids(2, [6, 13, 1, 9, 12], TARGET_LENGTH)


def reference_weights(params, config):
    """The package's parameters under the reference's names, in float64."""
    params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)

    def attention(p):
        names, no_bias = ("query", "key", "value"), [0.0] * config.num_heads
        kernels = [np.split(p[name], config.num_heads, axis=1) for name in names]
        biases = [
            np.split(p[f"{name}_bias"], config.num_heads) if f"{name}_bias" in p else no_bias
            for name in names
        ]
        return reference.Attention(*kernels, p["output"], *biases, p.get("output_bias", 0.0))

    def norm(p):
        return reference.Norm(p["scale"], p["bias"], config.layer_norm_epsilon)

    def ffn(p):
        swish = config.activation == "swish"
        return reference.FeedForward(p["up"], p["up_bias"], p["down"], p["down_bias"], swish)

    def layer(kind, p):
        sites = [name for name in ("self_attention", "cross_attention") if name in p]
        parts = [part for s in sites for part in (attention(p[s]), norm(p[s + "_residual"]))]
        return kind(*parts, ffn(p["feed_forward"]), norm(p["feed_forward_residual"]))

    table = params["embedding"]
    return reference.Weights(
        source_table=params.get("source_embedding", table),
        target_table=table,
        output_table=params.get("output_embedding", table),
        encoder=[layer(reference.EncoderLayer, p) for _, p in sorted(params["encoder"].items())],
        decoder=[layer(reference.DecoderLayer, p) for _, p in sorted(params["decoder"].items())],
        source_positions=params.get("source_positions"),
        target_positions=params.get("target_positions"),
        output_bias=params.get("logits_bias", 0.0),
    )
