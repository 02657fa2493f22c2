"""The label-smoothed cross-entropy (paper, section 5.4), as a sum and a number of tokens.

The sums over all micro-batches and devices are divided once, so that every token of the global
batch counts alike. The convention is optax's and PyTorch's: the target distribution is (1 -
smoothing) on the label plus smoothing / V on every entry, the label included. (tensor2tensor
spreads the smoothing over the other V - 1 entries and subtracts a constant, which gives another
number but hardly another optimum.)

`smoothed_cross_entropy` is the loss. Everything else in this file computes it, and its gradient by
`jax.vjp` of the same function, without ever holding the logits of a whole batch.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int, Key

from flaxformer_min.data.batch import Batch
from flaxformer_min.model.build import Params
from flaxformer_min.model.linear import project
from flaxformer_min.model.teacher_forcing import forced_states
from flaxformer_min.training.sharding import (
    ROW_AXES,
    ROWS,
    gather,
    gather_table,
    row_shares,
    split_lookup,
)

# The target positions whose logits a device holds at once. On a CPU they fit its cache; elsewhere
# they keep the matrix units busy and take 0.6 GB for a vocabulary of 37,000.
LOSS_TOKENS_CPU, LOSS_TOKENS = 512, 4096

Sums = tuple[Float[Array, ""], Float[Array, ""]]
# (params, batch, key) -> sum of losses in nats, number of target tokens; without a key there is no
# dropout. The batch is any tree of arrays [B, T] that the loss understands.
Loss = Callable[[Params, Any, Key[Array, ""] | None], Sums]


def smoothed_cross_entropy(
    logits: Float[Array, "*N V"],
    labels: Int[Array, "*N"],
    weights: Float[Array, "*N"],
    smoothing: float,
) -> Sums:
    """Returns (sum of weighted losses in nats, sum of weights) of logits [..., V] and labels [...].

    A position of weight 0 (padding) contributes nothing. The computation is in at least float32.

    >>> logits = jnp.log(jnp.array([[0.25, 0.25, 0.5], [0.1, 0.1, 0.8]]))
    >>> loss, tokens = smoothed_cross_entropy(logits, jnp.array([2, 0]), jnp.array([1.0, 0.0]), 0.0)
    >>> print(f"{loss:.4f} nats for {tokens:.0f} token")  # log 2: the second position is padding
    0.6931 nats for 1 token
    """
    logits = _wide(logits)
    is_label = jax.nn.one_hot(labels, logits.shape[-1], dtype=bool)
    picked = jnp.where(is_label, logits, 0).sum(-1)  # the transpose of a gather would be a scatter
    expected = (1 - smoothing) * picked + smoothing * logits.mean(-1)
    losses = jax.nn.logsumexp(logits, axis=-1) - expected
    return jnp.sum(losses * weights), jnp.sum(weights).astype(logits.dtype)


def make_loss(
    graphdef: nnx.GraphDef, *, pad_id: int, bos_id: int, smoothing: float, mesh: Mesh | None = None
) -> Loss:
    """Returns the loss of a Transformer on the target tokens of a batch, EOS included.

    If the rows of a batch are split over devices, `mesh` is their mesh.
    """

    def loss(params: Params, batch: Batch, key: Key[Array, ""] | None) -> Sums:
        model = nnx.merge(graphdef, params)
        table = model.output_table
        if mesh is not None and mesh.size > 1:
            table = gather_table(mesh, table, model.dtype)
            model = nnx.merge(graphdef, gather(mesh, params, model.dtype))
            model.lookup = functools.partial(split_lookup, mesh)
        source, target = jnp.asarray(batch.source), jnp.asarray(batch.target)
        states = forced_states(model, source, target, pad_id=pad_id, bos_id=bos_id, key=key)
        weights = (target != pad_id).astype(jnp.float32)
        chunk = chunk_size(len(target), target.shape[1], mesh)
        if model.logits_bias is not None:  # it is a weight whose input is always 1
            states = jnp.pad(states, ((0, 0), (0, 0), (0, 1)), constant_values=1)
            table = jnp.hstack([table, model.logits_bias[...][:, None]])
        return projected_cross_entropy(states, table, target, weights, smoothing, chunk, mesh)

    return loss


def chunk_size(rows: int, length: int, mesh: Mesh | None) -> int:
    """Returns how many target columns of a batch [rows, length] have logits made at a time."""
    shares = row_shares(mesh)
    if mesh is None or mesh.devices.flat[0].platform == "cpu":
        return min(length, max(1, LOSS_TOKENS_CPU * shares // rows))
    chunks = math.ceil(rows * length / (LOSS_TOKENS * shares))
    return math.ceil(length / chunks)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def projected_cross_entropy(
    states: Float[Array, "B T D"],
    table: Float[Array, "V D"],
    labels: Int[Array, "B T"],
    weights: Float[Array, "B T"],
    smoothing: float,
    chunk: int,
    mesh: Mesh | None = None,
) -> Sums:
    """Computes `smoothed_cross_entropy(states @ table.T, ...)` with at most B x chunk x V logits.

    The target positions are taken `chunk` columns at a time. If gradients are wanted, those of a
    chunk are computed while its logits are still in memory. On a mesh each device takes its own
    rows, and the devices' results are added up once, after the last chunk.
    """
    total = _on_own_rows(_total, mesh, smoothing, chunk)(states, table, labels, weights).sum()
    return total, jnp.sum(weights).astype(total.dtype)


def _forward(states, table, labels, weights, smoothing, chunk, mesh):
    """Returns the sums, and the gradients of the sum of losses by states and table."""
    gradients = _on_own_rows(_gradients, mesh, smoothing, chunk)
    total, states_grad, table_grad = gradients(states, table, labels, weights)
    total = total.sum()
    sums = total, jnp.sum(weights).astype(total.dtype)
    return sums, (states_grad, table_grad.sum(0))


def _backward(smoothing, chunk, mesh, gradients, cotangents):
    """Returns the gradients from `_forward`, scaled by the cotangent of the sum of losses."""
    states_grad, table_grad = gradients
    scale = cotangents[0]  # the number of tokens does not depend on states or table
    return (
        states_grad * scale.astype(states_grad.dtype),
        (table_grad * scale).astype(table_grad.dtype),
        None,
        None,
    )


projected_cross_entropy.defvjp(_forward, _backward)


def _total(states, table, labels, weights, smoothing, chunk):
    """Returns the sum of losses, [1], of some rows; takes what `projected_cross_entropy` takes."""

    def add(total, columns):
        states_c, labels_c, weights_c = columns
        logits = project(states_c, table)
        return total + smoothed_cross_entropy(logits, labels_c, weights_c, smoothing)[0], None

    zero = jnp.zeros((), _wide(states).dtype)
    return jax.lax.scan(add, zero, _columns((states, labels, weights), chunk))[0][None]


def _gradients(states, table, labels, weights, smoothing, chunk):
    """Returns `_total` [1] of some rows and its gradients by states [B, T, D] and table [1, V, D].

    The products are written out, because the table's gradient is summed in the table's own dtype,
    which is wider than that of the states where they are bfloat16.
    """

    def one(columns):
        states_c, labels_c, weights_c = columns

        def loss_of(logits):
            return smoothed_cross_entropy(logits, labels_c, weights_c, smoothing)[0]

        loss, pull_back = jax.vjp(loss_of, project(states_c, table))
        grad = pull_back(jnp.ones_like(loss))[0].astype(states.dtype)
        states_grad = jnp.matmul(grad, table.astype(grad.dtype), precision="highest")
        table_grad = jnp.matmul(
            grad.reshape(-1, grad.shape[-1]).T,
            states_c.reshape(-1, states_c.shape[-1]),
            precision="highest",
            preferred_element_type=_wide(table).dtype,
        )
        return (loss, table_grad), states_grad

    (total, table_grad), states_grad = _summed(one, _columns((states, labels, weights), chunk))
    states_grad = jnp.moveaxis(states_grad, 0, 1).reshape(states.shape[0], -1, states.shape[2])
    return total[None], states_grad[:, : states.shape[1]], table_grad[None].astype(table.dtype)


def _summed(one: Callable[[Any], tuple[Any, Array]], columns: tuple[Array, ...]) -> Any:
    """Returns the sum over chunks of `one`'s first results, and all of its second ones, stacked.

    A single chunk is not added to zeros, which would pass over the table's gradient once more.
    """
    first = jax.tree.map(lambda x: x[0], columns)
    if len(columns[0]) == 1:
        sums, own = one(first)
        return sums, own[None]

    def add(sums, columns):
        more, own = one(columns)
        return jax.tree.map(jnp.add, sums, more), own

    shapes, _ = jax.eval_shape(one, first)
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    return jax.lax.scan(add, zeros, columns)


def _columns(arrays: tuple[Array, ...], chunk: int) -> tuple[Array, ...]:
    """Cuts arrays [B, T, ...] into chunks of columns: [ceil(T / chunk), B, chunk, ...].

    The last chunk is filled up with zeros (weight 0). T = 5, chunk = 2:

        a b c d e   ->   a b | c d | e 0
    """

    def cut(x):
        missing = -x.shape[1] % chunk
        x = jnp.pad(x, [(0, 0), (0, missing), *[(0, 0)] * (x.ndim - 2)])
        return jnp.moveaxis(x.reshape(x.shape[0], -1, chunk, *x.shape[2:]), 1, 0)

    return jax.tree.map(cut, arrays)


def _on_own_rows(function: Callable, mesh: Mesh | None, *static: Any) -> Callable:
    """Makes a function of (states, table, labels, weights) that a device applies to its own rows.

    It calls `function` with these and with `static`. Each device of the mesh has the whole table,
    except under tensor parallelism, which is left to XLA. The devices' results are concatenated
    along their first axis.
    """

    def own(states, table, labels, weights):
        return function(states, table, labels, weights, *static)

    if mesh is None:
        return own
    return jax.shard_map(
        own,
        mesh=mesh,
        axis_names=set(ROW_AXES),
        in_specs=(ROWS, P(), ROWS, ROWS),
        out_specs=ROWS,
        check_vma=False,  # the scan over chunks starts from zeros, equal on all devices
    )


def _wide(x: Array) -> Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))
