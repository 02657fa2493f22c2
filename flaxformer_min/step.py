"""One training step as a pure function of (state, batch, key)."""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int, Key

from flaxformer_min.batching import Batch
from flaxformer_min.dropout import split
from flaxformer_min.loss import projected_cross_entropy
from flaxformer_min.masks import causal_mask, padding_mask
from flaxformer_min.model import Transformer
from flaxformer_min.sharding import gathered, row_shares
from flaxformer_min.state import Params, TrainState

# Target positions whose logits a device holds at once: what fits a CPU's cache, and elsewhere
# what keeps matrix units busy, 0.6 GB for 37,000 words.
LOSS_TOKENS_CPU, LOSS_TOKENS = 512, 4096


class Metrics(NamedTuple):
    """Of one step, on the global batch."""

    loss: Float[Array, ""]  # label-smoothed, nats per target token
    tokens: Float[Array, ""]  # target tokens, EOS included
    gradient_norm: Float[Array, ""]
    skipped: Int[Array, ""]  # steps so far that were not finite
    skipped_in_a_row: Int[Array, ""]


def shift_right(target: Int[Array, "B T"], bos_id: int) -> Int[Array, "B T"]:
    """What the decoder reads: BOS, then every token but the last (section 3.1)."""
    return jnp.pad(target, ((0, 0), (1, 0)), constant_values=bos_id)[:, :-1]


def forced_states(
    model: Transformer,
    source: Int[Array, "B S"],
    target: Int[Array, "B T"],
    *,
    pad_id: int,
    bos_id: int,
    key: Key[Array, ""] | None = None,
) -> Float[Array, "B T D"]:
    """Decoder states [B, T, D] where the decoder reads the target, whatever it would have said."""
    encoder_key, decoder_key = split(key, 2)
    source_mask = padding_mask(source, pad_id)
    target_in = shift_right(target, bos_id)
    target_mask = padding_mask(target_in, pad_id) & causal_mask(target_in.shape[1])
    memory = model.encode(source, source_mask, key=encoder_key)
    return model.decode_states(target_in, memory, target_mask, source_mask, key=decoder_key)


def loss_sums(
    graphdef: nnx.GraphDef,
    params: Params,
    batch: Batch,
    *,
    pad_id: int,
    bos_id: int,
    smoothing: float,
    key: Key[Array, ""] | None = None,
    mesh: Mesh | None = None,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """(sum of losses, number of target tokens) of a batch; no key means without dropout.

    `mesh` is the one that shares the batch's rows, if any does.
    """
    model = nnx.merge(graphdef, gathered(mesh, params))
    source, target = jnp.asarray(batch.source), jnp.asarray(batch.target)
    states = forced_states(model, source, target, pad_id=pad_id, bos_id=bos_id, key=key)
    weights = (target != pad_id).astype(jnp.float32)
    chunk, table = loss_chunk(len(target), target.shape[1], mesh), model.output_table
    return projected_cross_entropy(states, table, target, weights, smoothing, chunk, mesh)


def loss_chunk(rows: int, length: int, mesh: Mesh | None) -> int:
    """How many columns of a batch's target the loss takes at a time."""
    shares = row_shares(mesh)
    if mesh is None or mesh.devices.flat[0].platform == "cpu":
        return min(length, max(1, LOSS_TOKENS_CPU * shares // rows))
    chunks = math.ceil(rows * length / (LOSS_TOKENS * shares))
    return math.ceil(length / chunks)


def updated(
    optimizer: optax.GradientTransformation,
    state: TrainState,
    grads: Params,
    count: Float[Array, ""],
    finite: Bool[Array, ""],
) -> tuple[Params, optax.OptState]:
    """Parameters and optimizer state after the gradient grads / count, or as they are."""

    def update(params, opt_state):
        mean = jax.tree.map(lambda grad: grad / count, grads)
        updates, opt_state = optimizer.update(mean, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    # A branch leaves donated buffers where they are; choosing leaf by leaf would copy them all.
    return jax.lax.cond(finite, update, lambda *kept: kept, state.params, state.opt_state)


def make_train_step(
    graphdef: nnx.GraphDef,
    optimizer: optax.GradientTransformation,
    *,
    pad_id: int,
    bos_id: int,
    smoothing: float,
    accumulation: int = 1,
    mesh: Mesh | None = None,
) -> Callable[[TrainState, Batch, Key[Array, ""]], tuple[TrainState, Metrics]]:
    """The function (state, batch, root_key) -> (state, metrics), to be jitted by the caller.

    The gradient is that of the mean over all target tokens of the batch, also when its rows are
    split into `accumulation` micro-batches. Dropout's key is the root key folded with the step
    and the micro-batch. A step whose loss or gradient is not finite changes neither parameters
    nor optimizer; it is counted, and the step number goes on.
    """

    def micro_gradient(params, batch, key):
        def total(params):
            sums = functools.partial(loss_sums, pad_id=pad_id, bos_id=bos_id, smoothing=smoothing)
            return sums(graphdef, params, batch, key=key, mesh=mesh)

        return jax.value_and_grad(total, has_aux=True)(params)

    def gradient(params, batch, key):
        """Sums over the batch: ((loss, tokens), gradient)."""
        keys = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(accumulation))
        if accumulation == 1:
            return micro_gradient(params, batch, keys[0])
        # Strided rows: each micro-batch takes its share of every device's rows.
        micro = jax.tree.map(
            lambda x: x.reshape(-1, accumulation, x.shape[1]).swapaxes(0, 1), batch
        )

        def add(total, part):
            return jax.tree.map(jnp.add, total, micro_gradient(params, *part)), None

        shapes = jax.eval_shape(micro_gradient, params, jax.tree.map(lambda x: x[0], micro), key)
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
        return jax.lax.scan(add, zeros, (micro, keys))[0]

    def train_step(state, batch, root_key):
        key = jax.random.fold_in(root_key, state.step)
        (loss, tokens), grads = gradient(state.params, batch, key)
        count = jnp.maximum(tokens, 1)
        loss, norm = loss / count, optax.tree.norm(grads) / count
        finite = jnp.isfinite(loss) & jnp.isfinite(norm)
        params, opt_state = updated(optimizer, state, grads, count, finite)
        in_a_row = jnp.where(finite, 0, state.skipped_in_a_row + 1)
        skipped = state.skipped + jnp.where(finite, 0, 1)
        state = TrainState(state.step + 1, params, opt_state, skipped, in_a_row)
        return state, Metrics(loss, tokens, norm, skipped, in_a_row)

    return train_step
