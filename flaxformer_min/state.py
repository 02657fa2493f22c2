"""What training carries from step to step, and how it is born."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Int, Key

from flaxformer_min.config import ModelConfig
from flaxformer_min.model import Transformer

Params = dict[str, Any]  # nested by module names; leaves are arrays


class TrainState(NamedTuple):
    """Everything that decides the future, beside the config and the corpus."""

    step: Int[Array, ""]  # batches taken so far; the next batch is number `step`
    params: Params
    opt_state: optax.OptState
    skipped: Int[Array, ""]  # steps whose loss or gradient was not finite
    skipped_in_a_row: Int[Array, ""]


def split_model(config: ModelConfig, vocab_size: int) -> tuple[nnx.GraphDef, Params]:
    """The structure of a Transformer and its parameters as shapes, without allocating them."""
    return jax.eval_shape(_drawing(config, vocab_size), jax.eval_shape(jax.random.key, 0))


def init_state(
    config: ModelConfig, vocab_size: int, optimizer: optax.GradientTransformation, seed: int
) -> TrainState:
    """A fresh state: step 0, weights drawn from `seed`. Traceable, so it can be born sharded."""
    _, params = _drawing(config, vocab_size)(jax.random.key(seed))
    return _newborn(params, optimizer)


@functools.cache  # building the modules takes a good part of a start: once, for shapes and weights
def _drawing(
    config: ModelConfig, vocab_size: int
) -> Callable[[Key[Array, ""]], tuple[nnx.GraphDef, Params]]:
    """The jitted function of a key that draws a Transformer's weights."""

    def draw(key):
        graphdef, params = nnx.split(Transformer(config, vocab_size, rngs=nnx.Rngs(key)))
        return graphdef, nnx.to_pure_dict(params)

    return jax.jit(draw)


def _newborn(params: Params, optimizer: optax.GradientTransformation) -> TrainState:
    zero = jnp.zeros((), jnp.int32)
    return TrainState(zero, params, optimizer.init(params), zero, zero)


def state_shapes(
    config: ModelConfig, vocab_size: int, optimizer: optax.GradientTransformation
) -> TrainState:
    """`init_state` as shapes, without building the modules again."""
    _, params = split_model(config, vocab_size)
    return jax.eval_shape(lambda params: _newborn(params, optimizer), params)


def count_parameters(params: Params) -> int:
    """The number of scalars in a tree of arrays or shapes."""
    return sum(leaf.size for leaf in jax.tree.leaves(params))
