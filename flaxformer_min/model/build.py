"""A Transformer taken apart: its structure, and its parameters as a tree of arrays."""

import functools
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from jaxtyping import Array, Key

from flaxformer_min.config import ModelConfig
from flaxformer_min.model.transformer import Transformer

Params = dict[str, Any]  # nested by module names; leaves are arrays


def split_model(config: ModelConfig, vocab_size: int) -> tuple[nnx.GraphDef, Params]:
    """The structure of a Transformer and its parameters as shapes, without allocating them."""
    return jax.eval_shape(initializer(config, vocab_size), jax.eval_shape(jax.random.key, 0))


def count_parameters(params: Params) -> int:
    """The number of scalars in a tree of arrays or shapes."""
    return sum(leaf.size for leaf in jax.tree.leaves(params))


@functools.cache  # building the modules takes a good part of a start: once, for shapes and weights
def initializer(
    config: ModelConfig, vocab_size: int
) -> Callable[[Key[Array, ""]], tuple[nnx.GraphDef, Params]]:
    """The jitted function of a key that draws a Transformer's weights."""

    def draw(key):
        graphdef, params = nnx.split(Transformer(config, vocab_size, rngs=nnx.Rngs(key)))
        return graphdef, nnx.to_pure_dict(params)

    return jax.jit(draw)
