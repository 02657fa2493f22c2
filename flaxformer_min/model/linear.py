"""The products of activations with weights that the layers and the output projection share."""

import jax.numpy as jnp
from jaxtyping import Array, Float


def dense(
    x: Float[Array, "B T I"], kernel: Float[Array, "I O"], bias: Float[Array, " O"] | None = None
) -> Float[Array, "B T O"]:
    """Computes x @ kernel + bias in x's dtype: [B, T, I] -> [B, T, O].

    Tokens are flattened first: the weight gradient then contracts one axis instead of two, which
    XLA's CPU backend does three times faster.
    """
    flat = x.reshape(-1, x.shape[-1])
    y = jnp.matmul(flat, kernel.astype(x.dtype), precision="highest").reshape(*x.shape[:-1], -1)
    return y if bias is None else y + bias.astype(x.dtype)[None, None]


def project(states: Float[Array, "B T D"], table: Float[Array, "V D"]) -> Float[Array, "B T V"]:
    """Computes the logits before the softmax: states @ table.T, without bias (section 3.4).

    States [B, T, D] become logits [B, T, V]. These are at least float32 whatever the states are:
    rounded to bfloat16, two likely words would often tie.
    """
    flat = states.reshape(-1, states.shape[-1])
    logits = jnp.matmul(
        flat,
        table.astype(flat.dtype).T,
        precision="highest",
        preferred_element_type=jnp.promote_types(flat.dtype, jnp.float32),
    )
    return logits.reshape(*states.shape[:-1], -1)
