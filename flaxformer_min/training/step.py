"""One training step as a pure function of (state, batch, key), and as a config's program."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Key

from flaxformer_min.config import Config
from flaxformer_min.data.batch import Batch, Bucket
from flaxformer_min.model.build import Params, split_model
from flaxformer_min.training.loss import Loss, Sums, make_loss
from flaxformer_min.training.optimizer import make_optimizer
from flaxformer_min.training.sharding import abstract, abstract_rows, shardings
from flaxformer_min.training.state import Metrics, TrainState, init_state, initial_state


def make_train_step(
    loss: Loss, optimizer: optax.GradientTransformation, accumulation: int = 1
) -> Callable[[TrainState, Any, Key[Array, ""]], tuple[TrainState, Metrics]]:
    """Makes the function (state, batch, root_key) -> (state, metrics), to be jitted by the caller.

    `loss(params, batch, key)` gives (sum of losses, number of target tokens); a batch is any tree
    of arrays [B, T]. The gradient is that of the mean over all target tokens of the batch, also
    when its rows are split into `accumulation` micro-batches. Dropout's key is the root key folded
    with the step and the number of the micro-batch. A step whose loss or gradient is not finite
    changes neither parameters nor optimizer state; it is counted as skipped, and the step number
    goes on.
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
    """Returns ((sum of losses, tokens), gradient of that sum) of a batch, by micro-batches.

    The micro-batches are computed one after another.
    """
    gradient = jax.value_and_grad(loss, has_aux=True)
    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(accumulation))
    if accumulation == 1:
        return gradient(params, batch, keys[0])
    # Row r goes to micro-batch r % accumulation, which thus has a share of every device's rows.
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
    """Returns parameters and optimizer state after an update by the gradient grads / count.

    They are those of `state` unless `finite`.
    """

    def update(params, opt_state):
        mean = jax.tree.map(lambda grad: grad / count, grads)
        updates, opt_state = optimizer.update(mean, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    # A branch leaves donated buffers where they are; choosing leaf by leaf would copy them all.
    return jax.lax.cond(finite, update, lambda *kept: kept, state.params, state.opt_state)


class StepProgram:
    """The training step of a config on a mesh: a run executes it, a plan only compiles it.

    `jitted` is the function of `make_train_step`, which reuses the buffers of the state it is
    given; `drawn` makes the first state; `shapes` are the shapes and shardings of a state.
    """

    def __init__(self, config: Config, mesh: Mesh, *, pad_id: int, bos_id: int):
        self._mesh, model, vocab_size = mesh, config.model, config.data.vocab_size
        self.graphdef, params = split_model(model, vocab_size)
        self.optimizer = make_optimizer(config.optimizer, model.d_model)
        state = jax.eval_shape(lambda params: initial_state(params, self.optimizer), params)
        self.shapes = abstract(mesh, state)
        ids, smoothing = {"pad_id": pad_id, "bos_id": bos_id}, config.train.label_smoothing
        loss = make_loss(self.graphdef, **ids, smoothing=smoothing, mesh=mesh)
        train_step = make_train_step(loss, self.optimizer, config.optimizer.accumulation)
        self.jitted = jax.jit(train_step, donate_argnums=0)
        # () -> the state before step 1, of which each device draws only its share
        draw = functools.partial(init_state, model, vocab_size, self.optimizer, config.train.seed)
        self.drawn = jax.jit(draw, out_shardings=shardings(mesh, self.shapes))

    def compile(self, bucket: Bucket) -> jax.stages.Compiled:
        """Compiles the step for batches of the shape `bucket`; nothing is allocated."""
        sides: Any = abstract_rows(self._mesh, *bucket)
        key = jax.eval_shape(jax.random.key, 0)
        return self.jitted.lower(self.shapes, Batch(*sides), key).compile()
