"""The 2017 Transformer in NumPy float64, written from the paper's formulas, to test the package by.

It shares no code and no layout with the package: one sentence at a time, one head at a time, one
query at a time, and a forbidden key never enters a sum instead of getting a large negative score.
Slow and plain on purpose. Letters: S source, T target, D d_model, H heads, K d_k, U d_v, F d_ff,
V vocabulary. Projections are a list over heads, as in section 3.2.2.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.float64]
Allowed = NDArray[np.bool_]

NORM_EPSILON = 1e-6  # the paper gives none; tensor2tensor's


@dataclass(frozen=True)
class Attention:
    """W_Q, W_K [D, K] and W_V [D, U] of each head, and W_O [H * U, D].

    The paper has no biases, which are 0 then: [K] and [U] of each head, and [D].
    """

    query: list[Matrix]
    key: list[Matrix]
    value: list[Matrix]
    output: Matrix
    query_bias: list[Matrix] | list[float]
    key_bias: list[Matrix] | list[float]
    value_bias: list[Matrix] | list[float]
    output_bias: Matrix | float


@dataclass(frozen=True)
class Norm:
    """Scale and bias [D], and epsilon."""

    scale: Matrix
    bias: Matrix
    epsilon: float = NORM_EPSILON


@dataclass(frozen=True)
class FeedForward:
    """W_1 [D, F], b_1 [F], W_2 [F, D], b_2 [D]; swish instead of max(0, x) if asked for."""

    w1: Matrix
    b1: Matrix
    w2: Matrix
    b2: Matrix
    swish: bool = False


@dataclass(frozen=True)
class EncoderLayer:
    """Two sublayers, each with the norm that follows it."""

    self_attention: Attention
    self_attention_norm: Norm
    feed_forward: FeedForward
    feed_forward_norm: Norm


@dataclass(frozen=True)
class DecoderLayer:
    """Three sublayers, each with the norm that follows it."""

    self_attention: Attention
    self_attention_norm: Norm
    cross_attention: Attention
    cross_attention_norm: Norm
    feed_forward: FeedForward
    feed_forward_norm: Norm


@dataclass(frozen=True)
class Weights:
    """The whole model; tables are [V, D], learned positions [at least the length, D] or None."""

    source_table: Matrix
    target_table: Matrix
    output_table: Matrix
    encoder: list[EncoderLayer]
    decoder: list[DecoderLayer]
    source_positions: Matrix | None = None
    target_positions: Matrix | None = None
    output_bias: Matrix | float = 0.0


def sinusoids(length: int, d_model: int) -> Matrix:
    """PE(pos, 2i) = sin(pos / 10000^(2i/D)), PE(pos, 2i + 1) = cos of the same (section 3.5)."""
    table = np.zeros((length, d_model))
    for pos in range(length):
        for i in range(d_model // 2):
            angle = pos / 10000 ** (2 * i / d_model)
            table[pos, 2 * i] = math.sin(angle)
            table[pos, 2 * i + 1] = math.cos(angle)
    return table


def attention_weights(query: Matrix, key: Matrix, allowed: Allowed) -> Matrix:
    """softmax(Q K^T / sqrt(d_k)) over the allowed keys: [T, K], [S, K], [T, S] -> [T, S]."""
    weights = np.zeros((len(query), len(key)))
    for t, row in enumerate(allowed):
        keys = np.flatnonzero(row)
        if len(keys):  # no allowed key: the row stays 0
            scores = key[keys] @ query[t] / math.sqrt(query.shape[1])
            exponentials = np.exp(scores - scores.max())
            weights[t, keys] = exponentials / exponentials.sum()
    return weights


def multi_head(layer: Attention, queries: Matrix, memory: Matrix, allowed: Allowed) -> Matrix:
    """Concat(head_1 .. head_H) W_O (section 3.2.2): [T, D], [S, D], [T, S] -> [T, D]."""
    heads = []
    for head in range(len(layer.query)):
        query = queries @ layer.query[head] + layer.query_bias[head]
        key = memory @ layer.key[head] + layer.key_bias[head]
        value = memory @ layer.value[head] + layer.value_bias[head]
        heads.append(attention_weights(query, key, allowed) @ value)
    return np.concatenate(heads, axis=1) @ layer.output + layer.output_bias


def layer_norm(norm: Norm, x: Matrix) -> Matrix:
    """Each row to mean 0 and variance 1, then scale and bias: [T, D] -> [T, D]."""
    centred = x - x.mean(axis=1, keepdims=True)
    variance = (centred**2).mean(axis=1, keepdims=True)
    return centred / np.sqrt(variance + norm.epsilon) * norm.scale + norm.bias


def feed_forward(layer: FeedForward, x: Matrix) -> Matrix:
    """max(0, x W_1 + b_1) W_2 + b_2 (section 3.3): [T, D] -> [T, D]."""
    hidden = x @ layer.w1 + layer.b1
    hidden = hidden / (1 + np.exp(-hidden)) if layer.swish else np.maximum(0.0, hidden)
    return hidden @ layer.w2 + layer.b2


def embed(table: Matrix, positions: Matrix | None, ids: NDArray[np.integer]) -> Matrix:
    """sqrt(D) E[x] + position (sections 3.4 and 3.5): [T] -> [T, D]."""
    d_model = table.shape[1]
    added = sinusoids(len(ids), d_model) if positions is None else positions[: len(ids)]
    return math.sqrt(d_model) * table[ids] + added


def run_encoder(weights: Weights, ids: NDArray[np.integer], allowed: Allowed) -> Matrix:
    """The encoder's layers, where a token may see those that are allowed: [S], [S, S] -> [S, D]."""
    x = embed(weights.source_table, weights.source_positions, ids)
    for layer in weights.encoder:
        attended = multi_head(layer.self_attention, x, x, allowed)
        x = layer_norm(layer.self_attention_norm, x + attended)
        x = layer_norm(layer.feed_forward_norm, x + feed_forward(layer.feed_forward, x))
    return x


def encode(weights: Weights, source: NDArray[np.integer], pad_id: int = 0) -> Matrix:
    """The encoder's output for one sentence: [S] -> [S, D]."""
    return run_encoder(weights, source, np.tile(source != pad_id, (len(source), 1)))


def decode(
    weights: Weights,
    target_in: NDArray[np.integer],
    memory: Matrix,
    source: NDArray[np.integer],
    pad_id: int = 0,
) -> Matrix:
    """The logits for one sentence: target_in [T], memory [S, D], source [S] -> [T, V]."""
    length = len(target_in)
    earlier = np.array([[s <= t for s in range(length)] for t in range(length)])
    allowed = earlier & (target_in != pad_id)[None, :]
    source_allowed = np.tile(source != pad_id, (length, 1))
    y = embed(weights.target_table, weights.target_positions, target_in)
    for layer in weights.decoder:
        attended = multi_head(layer.self_attention, y, y, allowed)
        y = layer_norm(layer.self_attention_norm, y + attended)
        read = multi_head(layer.cross_attention, y, memory, source_allowed)
        y = layer_norm(layer.cross_attention_norm, y + read)
        y = layer_norm(layer.feed_forward_norm, y + feed_forward(layer.feed_forward, y))
    return y @ weights.output_table.T + weights.output_bias


def smoothed_loss(
    logits: Matrix, labels: NDArray[np.integer], weights: Matrix, smoothing: float
) -> float:
    """Sum of cross-entropies against (1 - eps) onehot + eps / V: [T, V], [T], [T] -> scalar."""
    total = 0.0
    for row, label, weight in zip(logits, labels, weights, strict=True):
        log_probs = row - row.max() - math.log(np.exp(row - row.max()).sum())
        wanted = np.full(len(row), smoothing / len(row))
        wanted[label] += 1.0 - smoothing
        total -= float(weight) * float(wanted @ log_probs)
    return total
