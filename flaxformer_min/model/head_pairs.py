"""Attention's two products in training; on TPUs heads are taken in pairs.

The registers and the matrix unit of a TPU are 128 numbers wide, and a head of the paper is 64 wide:
heads one by one leave half of them empty, and to bring them into a layout of their own takes a copy
of each query, key, value and context. So a pair of heads stays side by side, as it is projected,
and each of the two is multiplied with the other one's numbers set to 0. Adding zeros changes no
sum, and the matrix unit takes no longer.

Letters as in model/attention.py; P pairs of heads, W the width of a pair.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array

LANES = 128  # numbers side by side in a register of a TPU
Product = Callable[..., Array]  # of two arrays of heads and the dtype of the result


def training_products(scores: Product, sums: Product) -> tuple[Product, Product]:
    """Returns functions that do what Q K^T, `scores`, and weights times V, `sums`, do."""
    paired_scores = functools.partial(_paired_scores, scores)
    paired_sums = functools.partial(_paired_sums, sums)
    return (
        functools.partial(_product, scores, paired_scores),
        functools.partial(_product, sums, paired_sums),
    )


def _product(plain: Product, paired: Product, x: Array, y: Array, dtype: jnp.dtype) -> Array:
    """Multiplies by `paired` on TPUs and by `plain` elsewhere, and so for the gradient.

    The cotangent of float32 scores is rounded to the dtype of queries and keys: a TPU multiplies
    float32 in six passes.
    """

    @jax.custom_vjp
    def product(x, y):
        tpu, default = (functools.partial(each, dtype=dtype) for each in (paired, plain))
        return jax.lax.platform_dependent(x, y, tpu=tpu, default=default)

    def backward(inputs, cotangent):
        narrow = inputs[0].dtype

        def gradient(function):
            product = functools.partial(function, dtype=narrow)
            return lambda x, y, cotangent: jax.vjp(product, x, y)[1](cotangent)

        cotangent = cotangent.astype(narrow)
        tpu, default = gradient(paired), gradient(plain)
        return jax.lax.platform_dependent(*inputs, cotangent, tpu=tpu, default=default)

    product.defvjp(lambda x, y: (product(x, y), (x, y)), backward)
    return product(x, y)


def _paired_scores(plain, query, key, dtype):
    if not _fits(query):
        return plain(query, key, dtype)
    each = [plain(half, _pairs(key), dtype) for half in _halves(query)]
    scores = jnp.stack(each, 2)
    return scores.reshape(*query.shape[:3], -1)


def _paired_sums(plain, weights, value, dtype):
    if not _fits(value):
        return plain(weights, value, dtype)
    b, h, *sizes = weights.shape
    each = zip(_unstacked(weights.reshape(b, h // 2, 2, *sizes)), _halves(value), strict=True)
    flat = _flat(sum(plain(own, half, dtype) for own, half in each))
    return flat.reshape(*flat.shape[:2], value.shape[1], -1).swapaxes(1, 2)


@jax.custom_vjp
def _unstacked(weights):
    return weights[:, :, 0], weights[:, :, 1]


# By itself the gradient would be a sum of padded arrays.
_unstacked.defvjp(lambda x: (_unstacked(x), None), lambda _, parts: (jnp.stack(parts, 2),))


def _fits(heads):
    return heads.shape[1] % 2 == 0 and heads.shape[3] * 2 == LANES


def _flat(heads):
    """Lays heads [B, H, T, K] side by side: [B, T, H x K]."""
    b, h, t, k = heads.shape
    return heads.swapaxes(1, 2).reshape(b, t, h * k)


def _pairs(heads):
    """Lays heads [B, H, T, K] side by side in pairs: [B, P, T, W].

    XLA meets the projection here that it has just taken apart, so that it need not.
    """
    flat = _flat(heads)
    return flat.reshape(*flat.shape[:2], -1, LANES).swapaxes(1, 2)


def _halves(heads):
    """Returns the pairs of `_pairs` twice: without the second heads, and without the first."""
    pairs, is_first = _pairs(heads), jnp.arange(LANES) < LANES // 2
    return jnp.where(is_first, pairs, 0), jnp.where(is_first, 0, pairs)
