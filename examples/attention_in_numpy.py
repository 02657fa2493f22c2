"""Attention(Q, K, V) = softmax(Q K^T / sqrt(d_k)) V in NumPy, and what follows from the formula.

    python examples/attention_in_numpy.py

Letters as in the paper: T queries, S keys, K = d_k, U = d_v. A mask is boolean, True = may attend.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from flaxformer_min.model.attention import scaled_dot_product_attention

Matrix = NDArray[np.float64]


class Steps(NamedTuple):
    """The four things that attention computes, in their order."""

    scores: Matrix  # S = Q K^T, [T, S]: how well each query and each key match
    scaled: Matrix  # S / sqrt(d_k)
    weights: Matrix  # A, each row sums to 1: how much each query reads from each key
    output: Matrix  # O = A V, [T, U]: what each query has read


def attention(
    query: Matrix, key: Matrix, value: Matrix, mask: NDArray[np.bool_] | bool = True
) -> Steps:
    """Lets queries [T, K] read from keys [S, K] and values [S, U]."""
    scores = query @ key.T
    scaled = scores / np.sqrt(query.shape[1])
    allowed = np.where(mask, scaled, -np.inf)
    exponentials = np.exp(allowed - allowed.max(axis=1, keepdims=True))
    weights = exponentials / exponentials.sum(axis=1, keepdims=True)
    return Steps(scores, scaled, weights, weights @ value)


def of_the_package(query: Matrix, key: Matrix, value: Matrix) -> Matrix:
    """The package's function on the same matrices; it takes a batch of heads [B, H, T, K]."""
    one = [jnp.asarray(x, jnp.float32)[None, None] for x in (query, key, value)]
    mask = jnp.ones((1, 1, len(query), len(key)), bool)
    return np.asarray(scaled_dot_product_attention(*one, mask))[0, 0]


def worked_row() -> Steps:
    """One query, "love", and the keys "I", "love", "you": it reads 0.4, 0.1 and 0.5 of them.

    With d_k = 4 a query [2, 0, 0, 0] and keys [log w, 0, 0, 0] have scaled scores log w.
    """
    key = np.zeros((3, 4))
    key[:, 0] = np.log([0.4, 0.1, 0.5])
    value = np.array([[1.0, 0.0, 10.0], [0.0, 1.0, 20.0], [0.0, 0.0, 30.0]])
    return attention(np.array([[2.0, 0.0, 0.0, 0.0]]), key, value)


def main() -> None:
    draw = np.random.default_rng(1)
    print('"love" reads from "I", "love", "you":')
    for name, array in worked_row()._asdict().items():
        print(f"  {name:8}", np.round(array[0], 3))

    query, key, value = (draw.standard_normal((n, d)) for n, d in ((2, 64), (3, 64), (3, 5)))
    steps = attention(query, key, value)
    difference = np.abs(steps.output - of_the_package(query, key, value)).max()
    print(f"2 queries, 3 keys, K = 64: the package's output differs by {difference:.0e}")

    cosine = query[0] @ key[0] / np.linalg.norm(query[0]) / np.linalg.norm(key[0])
    lengths = np.linalg.norm(query[0]), np.linalg.norm(key[0])
    print(f"a score is two lengths times a cosine: {lengths[0]:.2f} x {lengths[1]:.2f}", end=" ")
    print(f"x {cosine:.3f} = {steps.scores[0, 0]:.3f}")
    other = attention(query, key, value + 1)
    print("other values leave the weights as they are:", end=" ")
    print(np.array_equal(steps.weights, other.weights))

    many = draw.standard_normal((2, 10_000, 64))
    variance = np.sum(many[0] * many[1], axis=1).var()
    print(f"the variance of a score is {variance:.1f}, about d_k = 64; divided by 8 it is 1")
    hard, soft = (attention(factor * query, key, value).weights.max() for factor in (8, 1))
    print(f"the largest weight without the division {hard:.3f}, with it {soft:.3f}")

    x, w = draw.standard_normal((5, 7)), draw.standard_normal((2, 7, 7))
    tied, apart = (attention(x @ w[0], x @ w[i], x).scores for i in (0, 1))
    print(f"W_Q = W_K: i asks j as j asks i, {np.allclose(tied, tied.T)}; apart: ", end="")
    print(np.allclose(apart, apart.T))

    order = draw.permutation(5)
    whole, permuted = (attention(y, y, y).output for y in (x, x[order]))
    print("without positions permuted words give permuted outputs:", end=" ")
    print(np.allclose(whole[order], permuted))

    causal = np.tril(np.ones((5, 5), bool))
    padding = np.array([True, True, True, False, False])[None]  # of the keys, for every query
    for name, mask in (("causal", causal), ("padding", padding), ("both", causal & padding)):
        weights = attention(x, x, x, mask).weights
        print(f"{name}: row 4 of the weights", np.round(weights[3], 2))


if __name__ == "__main__":
    main()
