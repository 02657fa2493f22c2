"""The label-smoothed cross-entropy (paper, section 5.4), as a sum and a number of tokens.

Sums are divided once, on the global batch, so that every token counts alike. The convention is
optax's and PyTorch's: the target distribution is (1 - smoothing) on the label plus smoothing / V
on every entry, the label included. (tensor2tensor spreads the smoothing over the other V - 1
entries and subtracts a constant: another number, hardly another optimum.)
"""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from flaxformer_min.blocks import project
from flaxformer_min.sharding import on_own_rows

Sums = tuple[Float[Array, ""], Float[Array, ""]]


def smoothed_cross_entropy(
    logits: Float[Array, "*N V"],
    labels: Int[Array, "*N"],
    weights: Float[Array, "*N"],
    smoothing: float,
) -> Sums:
    """(sum of weighted losses in nats, sum of weights) of logits [..., V] and labels [...].

    A position of weight 0 (padding) contributes nothing. Computed in at least float32.
    """
    logits = _wide(logits)
    picked = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    expected = (1 - smoothing) * picked + smoothing * logits.mean(-1)
    losses = jax.nn.logsumexp(logits, axis=-1) - expected
    return jnp.sum(losses * weights), jnp.sum(weights).astype(logits.dtype)


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
    """`smoothed_cross_entropy(states @ table.T, ...)`, never holding more than B x chunk x V.

    Target positions are taken `chunk` columns at a time, and where gradients are wanted each
    chunk's are formed while its logits are still at hand. On a mesh each device takes its own
    rows, and what they found is added up over the devices once, after the last chunk.
    """
    total = on_own_rows(_total, mesh, smoothing, chunk)(states, table, labels, weights).sum()
    return total, jnp.sum(weights).astype(total.dtype)


def _forward(states, table, labels, weights, smoothing, chunk, mesh):
    """The loss, with its gradients by states and table as residuals."""
    gradients = on_own_rows(_gradients, mesh, smoothing, chunk)
    total, states_grad, table_grad = gradients(states, table, labels, weights)
    total = total.sum()
    sums = total, jnp.sum(weights).astype(total.dtype)
    return sums, (states_grad, table_grad.sum(0))


def _backward(smoothing, chunk, mesh, residuals, cotangents):
    states_grad, table_grad = residuals
    scale = cotangents[0]  # the number of tokens does not depend on states or table
    return states_grad * scale.astype(states_grad.dtype), table_grad * scale, None, None


projected_cross_entropy.defvjp(_forward, _backward)


def _total(
    states: Float[Array, "B T D"],
    table: Float[Array, "V D"],
    labels: Int[Array, "B T"],
    weights: Float[Array, "B T"],
    smoothing: float,
    chunk: int,
) -> Float[Array, "1"]:
    """The sum of losses of some rows."""

    def add(total, columns):
        states_c, labels_c, weights_c = columns
        logits = project(states_c, table)
        return total + smoothed_cross_entropy(logits, labels_c, weights_c, smoothing)[0], None

    zero = jnp.zeros((), _wide(states).dtype)
    return jax.lax.scan(add, zero, _columns((states, labels, weights), chunk))[0][None]


def _gradients(
    states: Float[Array, "B T D"],
    table: Float[Array, "V D"],
    labels: Int[Array, "B T"],
    weights: Float[Array, "B T"],
    smoothing: float,
    chunk: int,
) -> tuple[Float[Array, "1"], Float[Array, "B T D"], Float[Array, "1 V D"]]:
    """The sum of losses of some rows, and its gradients by their states and the table."""

    def add(carry, columns):
        total, table_grad = carry
        states_c, labels_c, weights_c = columns
        logits = project(states_c, table)
        loss, _ = smoothed_cross_entropy(logits, labels_c, weights_c, smoothing)
        grad = _logits_gradient(logits, labels_c, weights_c, smoothing).astype(states.dtype)
        states_grad = jnp.matmul(grad, table.astype(grad.dtype), precision="highest")
        table_grad += jnp.matmul(
            grad.reshape(-1, grad.shape[-1]).T,
            states_c.reshape(-1, states_c.shape[-1]),
            precision="highest",
            preferred_element_type=table_grad.dtype,
        )
        return (total + loss, table_grad), states_grad

    zero = (jnp.zeros((), _wide(states).dtype), jnp.zeros_like(table))
    columns = _columns((states, labels, weights), chunk)
    (total, table_grad), states_grad = jax.lax.scan(add, zero, columns)
    states_grad = jnp.moveaxis(states_grad, 0, 1).reshape(states.shape[0], -1, states.shape[2])
    return total[None], states_grad[:, : states.shape[1]], table_grad[None]


def _logits_gradient(
    logits: Float[Array, "B C V"],
    labels: Int[Array, "B C"],
    weights: Float[Array, "B C"],
    smoothing: float,
) -> Float[Array, "B C V"]:
    """weight x (softmax - target distribution)."""
    vocab_size = logits.shape[-1]
    is_label = jnp.arange(vocab_size)[None, None] == labels[..., None]
    target = jnp.where(is_label, 1 - smoothing, 0) + smoothing / vocab_size
    return (jax.nn.softmax(logits) - target) * weights[..., None]


def _columns(arrays: tuple[Array, ...], chunk: int) -> tuple[Array, ...]:
    """[B, T, ...] -> [ceil(T / chunk), B, chunk, ...], filled up with zeros (weight 0)."""

    def cut(x):
        missing = -x.shape[1] % chunk
        x = jnp.pad(x, [(0, 0), (0, missing), *[(0, 0)] * (x.ndim - 2)])
        return jnp.moveaxis(x.reshape(x.shape[0], -1, chunk, *x.shape[2:]), 1, 0)

    return jax.tree.map(cut, arrays)


def _wide(x: Array) -> Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))
