"""One training step as a pure function of (state, batch, key)."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Key

from flaxformer_min.model.build import Params
from flaxformer_min.training.loss import Loss, Sums
from flaxformer_min.training.state import Metrics, TrainState

TrainStep = Callable[[TrainState, Any, Key[Array, ""]], tuple[TrainState, Metrics]]


def make_train_step(
    loss: Loss, optimizer: optax.GradientTransformation, accumulation: int = 1
) -> TrainStep:
    """The function (state, batch, root_key) -> (state, metrics), to be jitted by the caller.

    `loss(params, batch, key)` gives (sum of losses, number of target tokens); a batch is any tree
    of arrays [B, T]. The gradient is that of the mean over all target tokens of the batch, also
    when its rows are split into `accumulation` micro-batches. Dropout's key is the root key folded
    with the step and the micro-batch. A step whose loss or gradient is not finite changes neither
    parameters nor optimizer; it is counted, and the step number goes on.
    """

    def train_step(state, batch, root_key):
        key = jax.random.fold_in(root_key, state.step)
        (total, tokens), grads = gradient_sums(loss, state.params, batch, key, accumulation)
        count = jnp.maximum(tokens, 1)
        mean, norm = total / count, optax.tree.norm(grads) / count
        finite = jnp.isfinite(mean) & jnp.isfinite(norm)
        params, opt_state = updated(optimizer, state, grads, count, finite)
        in_a_row = jnp.where(finite, 0, state.skipped_in_a_row + 1)
        skipped = state.skipped + jnp.where(finite, 0, 1)
        state = TrainState(state.step + 1, params, opt_state, skipped, in_a_row)
        return state, Metrics(mean, tokens, norm, skipped, in_a_row)

    return train_step


def gradient_sums(
    loss: Loss, params: Params, batch: Any, key: Key[Array, ""], accumulation: int
) -> tuple[Sums, Params]:
    """((sum of losses, tokens), gradient of that sum) of a batch, one micro-batch at a time."""
    gradient = jax.value_and_grad(loss, has_aux=True)
    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(accumulation))
    if accumulation == 1:
        return gradient(params, batch, keys[0])
    # Row r goes to micro-batch r % accumulation: each has its share of every device's rows.
    micro = jax.tree.map(lambda x: x.reshape(-1, accumulation, x.shape[1]).swapaxes(0, 1), batch)

    def add(total, part):
        return jax.tree.map(jnp.add, total, gradient(params, *part)), None

    shapes = jax.eval_shape(gradient, params, jax.tree.map(lambda x: x[0], micro), key)
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    return jax.lax.scan(add, zeros, (micro, keys))[0]


def updated(
    optimizer: optax.GradientTransformation,
    state: TrainState,
    grads: Params,
    count: Float[Array, ""],
    finite: Bool[Array, ""],
) -> tuple[Params, optax.OptState]:
    """Parameters and optimizer state after the gradient grads / count; as before if not finite."""

    def update(params, opt_state):
        mean = jax.tree.map(lambda grad: grad / count, grads)
        updates, opt_state = optimizer.update(mean, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    # A branch leaves donated buffers where they are; choosing leaf by leaf would copy them all.
    return jax.lax.cond(finite, update, lambda *kept: kept, state.params, state.opt_state)
