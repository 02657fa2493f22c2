"""What training carries from step to step, and how it is born."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from flaxformer_min.config import ModelConfig
from flaxformer_min.model.build import Params, initializer, split_model


class TrainState(NamedTuple):
    """Everything that decides the future, beside the config and the corpus."""

    step: Int[Array, ""]  # batches taken so far; the next batch is number `step`
    params: Params
    opt_state: optax.OptState
    skipped: Int[Array, ""]  # steps whose loss or gradient was not finite
    skipped_in_a_row: Int[Array, ""]


class Metrics(NamedTuple):
    """Of one step, on the global batch."""

    loss: Float[Array, ""]  # label-smoothed, nats per target token
    tokens: Float[Array, ""]  # target tokens, EOS included
    gradient_norm: Float[Array, ""]
    skipped: Int[Array, ""]  # steps so far that were not finite
    skipped_in_a_row: Int[Array, ""]


def init_state(
    config: ModelConfig, vocab_size: int, optimizer: optax.GradientTransformation, seed: int
) -> TrainState:
    """A fresh state: step 0, weights drawn from `seed`. Traceable, so it can be born sharded."""
    _, params = initializer(config, vocab_size)(jax.random.key(seed))
    return initial_state(params, optimizer)


def initial_state(params: Params, optimizer: optax.GradientTransformation) -> TrainState:
    """The state at step 0 of a model with these parameters."""
    zero = jnp.zeros((), jnp.int32)
    return TrainState(zero, params, optimizer.init(params), zero, zero)


def state_shapes(
    config: ModelConfig, vocab_size: int, optimizer: optax.GradientTransformation
) -> TrainState:
    """`init_state` as shapes, without building the modules again."""
    _, params = split_model(config, vocab_size)
    return jax.eval_shape(lambda params: initial_state(params, optimizer), params)
