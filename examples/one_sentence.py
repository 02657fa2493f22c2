"""One sentence from text to translation by the package's pure functions, in the paper's order.

    python examples/one_sentence.py runs/demo/averaged "39 weeks and 2 days"

Every line of the model is here: no module is called, only functions of arrays, and the weights are
a tree of arrays. It is the paper's model alone (no biases in attention, sinusoidal positions, one
embedding). The last line compares what it found with the package's Translator. Letters: T queries,
S keys, D d_model, H heads, V vocabulary; the batch is one sentence.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np

from flaxformer_min.decoding.options import Options
from flaxformer_min.decoding.translator import Translator
from flaxformer_min.model.attention import scaled_dot_product_attention
from flaxformer_min.model.layers import layer_norm
from flaxformer_min.model.linear import dense, project
from flaxformer_min.model.masks import causal_mask, padding_mask
from flaxformer_min.model.positions import sinusoidal_positions

Array = jax.Array


def embed(table: Array, ids: Array) -> Array:
    """Ids [1, T] -> [1, T, D]: rows of the table times sqrt(D), plus positions (3.4, 3.5)."""
    width = table.shape[1]
    return table[ids] * width**0.5 + sinusoidal_positions(ids.shape[1], width)[None]


def heads(x: Array, kernel: Array, count: int) -> Array:
    """x W, cut into heads: [1, T, D] -> [1, H, T, K]."""
    return dense(x, kernel).reshape(1, x.shape[1], count, -1).swapaxes(1, 2)


def attention(weights: dict, x: Array, read: Array, mask: Array, count: int) -> Array:
    """Concat(head_1 .. head_H) W_O: queries of x [1, T, D], keys and values of `read` (3.2.2)."""
    query = heads(x, weights["query"], count)
    key, value = heads(read, weights["key"], count), heads(read, weights["value"], count)
    context = scaled_dot_product_attention(query, key, value, mask)  # [1, H, T, U]
    return dense(context.swapaxes(1, 2).reshape(1, x.shape[1], -1), weights["output"])


def feed_forward(weights: dict, x: Array) -> Array:
    """max(0, x W_1 + b_1) W_2 + b_2 (3.3)."""
    hidden = jax.nn.relu(dense(x, weights["up"], weights["up_bias"]))
    return dense(hidden, weights["down"], weights["down_bias"])


def add_and_norm(weights: dict, x: Array, output: Array) -> Array:
    """LayerNorm(x + Sublayer(x)) (3.1)."""
    return layer_norm(x + output, weights["scale"], weights["bias"])


def encode(params: dict, source: Array, mask: Array, count: int) -> Array:
    """Source ids [1, S] -> C, the memory [1, S, D]."""
    x = embed(params["embedding"], source)
    for layer in params["encoder"].values():
        mixed = attention(layer["self_attention"], x, x, mask, count)
        x = add_and_norm(layer["self_attention_residual"], x, mixed)
        own = feed_forward(layer["feed_forward"], x)
        x = add_and_norm(layer["feed_forward_residual"], x, own)
    return x


def decode(params: dict, written: Array, memory: Array, source_mask: Array, count: int) -> Array:
    """Ids that begin with BOS [1, T] -> the logits of what follows each of them [1, T, V]."""
    y, causal = embed(params["embedding"], written), causal_mask(written.shape[1])
    for layer in params["decoder"].values():
        mixed = attention(layer["self_attention"], y, y, causal, count)
        y = add_and_norm(layer["self_attention_residual"], y, mixed)
        read = attention(layer["cross_attention"], y, memory, source_mask, count)
        y = add_and_norm(layer["cross_attention_residual"], y, read)
        own = feed_forward(layer["feed_forward"], y)
        y = add_and_norm(layer["feed_forward_residual"], y, own)
    return project(y, params["embedding"])


def main(folder: str, text: str) -> None:
    translator = Translator.load(folder)
    params, tokenizer = translator.params, translator.tokenizer
    count = translator.config.model.num_heads
    ids = tokenizer.encode(text)
    print("pieces", *tokenizer.pieces(ids))
    print("ids   ", *ids)
    source = jnp.array([ids])
    source_mask = padding_mask(source, tokenizer.pad_id)  # nothing is padding in one sentence
    memory = encode(params, source, source_mask, count)
    _, length, width = memory.shape
    print(f"C, the memory: S = {length}, D = {width}; times sqrt(D) = {width**0.5:.2f}")
    written, total = [tokenizer.bos_id], 0.0
    next_logits = jax.jit(decode, static_argnums=4)  # compiled for each length
    most = length + translator.config.decode.max_length_offset
    while written[-1] != tokenizer.eos_id and len(written) <= most:
        logits = next_logits(params, jnp.array([written]), memory, source_mask, count)
        log_probs = jax.nn.log_softmax(logits[0, -1])
        likely = [i for i in np.argsort(-log_probs) if i not in tokenizer.never_generated][:3]
        chances = zip(tokenizer.pieces(likely), np.exp(log_probs[np.array(likely)]), strict=True)
        read = " ".join(tokenizer.pieces(written))
        print(f"{read}  ->  " + ", ".join(f"{piece} {chance:.1%}" for piece, chance in chances))
        written.append(int(likely[0]))
        total += float(log_probs[likely[0]])
    print(f"{text}  ->  {tokenizer.decode(written)}")
    (found,) = translator.translate([text], Options(beam_size=1))
    difference = abs(total - found.log_prob)
    print(
        f"log p = {total:.6f}; that of the Translator's greedy search differs by {difference:.0e}"
    )


if __name__ == "__main__":
    main(*sys.argv[1:3])
