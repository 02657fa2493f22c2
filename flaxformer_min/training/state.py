"""The state that a training step takes and returns, and its first value."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from flaxformer_min.config import ModelConfig
from flaxformer_min.model.build import Params, initializer


class TrainState(NamedTuple):
    """All that changes from step to step; with config and corpus it decides every later step."""

    step: Int[Array, ""]  # steps taken so far, and the number of the next batch
    params: Params
    opt_state: optax.OptState
    skipped: Int[Array, ""]  # steps so far whose loss or gradient was not finite
    skipped_in_a_row: Int[Array, ""]  # such steps since the last one that was finite


class Metrics(NamedTuple):
    """The numbers of one step, over the global batch."""

    loss: Float[Array, ""]  # label-smoothed, nats per target token
    tokens: Float[Array, ""]  # target tokens, EOS included
    gradient_norm: Float[Array, ""]  # of all gradients together, before clipping
    skipped: Int[Array, ""]  # as in the state after the step
    skipped_in_a_row: Int[Array, ""]


def init_state(
    config: ModelConfig, vocab_size: int, optimizer: optax.GradientTransformation, seed: int
) -> TrainState:
    """Returns the state before step 1, with weights drawn from `seed`.

    It can be traced by jax.jit, whose `out_shardings` then make each device draw only its share.
    """
    _, params = initializer(config, vocab_size)(jax.random.key(seed))
    return initial_state(params, optimizer)


def initial_state(params: Params, optimizer: optax.GradientTransformation) -> TrainState:
    """Returns the state before step 1 of a model with these parameters."""
    zero = jnp.zeros((), jnp.int32)
    return TrainState(zero, params, optimizer.init(params), zero, zero)
