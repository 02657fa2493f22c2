"""Splits a Transformer into its structure and its parameters, which are a tree of arrays."""

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
    """Returns a Transformer's structure and the shapes of its parameters; allocates nothing."""
    return jax.eval_shape(initializer(config, vocab_size), jax.eval_shape(jax.random.key, 0))


def count_parameters(params: Params) -> int:
    """Returns the number of scalars in a tree of arrays or shapes."""
    return sum(leaf.size for leaf in jax.tree.leaves(params))


@functools.cache  # building the modules is slow: it is done once for the shapes and the weights
def initializer(
    config: ModelConfig, vocab_size: int
) -> Callable[[Key[Array, ""]], tuple[nnx.GraphDef, Params]]:
    """Returns a jitted function that draws a Transformer's weights from a random key.

    It returns the structure too, as `split_model` does.
    """

    def draw(key):
        graphdef, params = nnx.split(Transformer(config, vocab_size, rngs=nnx.Rngs(key)))
        return graphdef, nnx.to_pure_dict(params)

    return jax.jit(draw)
