"""Time and memory against the length of a sequence, and where attention overtakes the FFN.

    pip install -e '.[train,benchmark]' -c constraints.txt
    python -m benchmarks.sequence_length [--longest 4096] [--plot FILE.svg] [--json FILE]

One sequence of T source and T target tokens, the base model's widths (D 512, F 2048, 8 heads),
float32, forward and backward: one self-attention layer, one FFN, and a whole training step of a
2+2-layer model. Beside the times stand the formulas: attention costs 4 T D^2 + 2 T^2 D
multiplications forward (section 3.2.2's projections, and Table 1's T^2 D twice), the FFN 2 T D F,
so that attention overtakes it at T = F - 2 D. Memory is the compiler's, of temporaries. The process
is set up as `train.py` sets up its own.
"""

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from flaxformer_min.config import ModelConfig, OptimizerConfig
from flaxformer_min.data.batch import Batch
from flaxformer_min.model.build import split_model
from flaxformer_min.model.layers import FeedForward, MultiHeadAttention
from flaxformer_min.model.masks import causal_mask
from flaxformer_min.system.malloc import keep_work_space
from flaxformer_min.training.loss import make_loss
from flaxformer_min.training.optimizer import make_optimizer
from flaxformer_min.training.state import init_state
from flaxformer_min.training.step import make_train_step

MODEL = ModelConfig(num_layers=2, max_length=8192)
VOCAB_SIZE = 8_000


def layers() -> dict[str, Callable[[int], tuple[Any, tuple[Any, ...]]]]:
    """Name -> function of T that gives a compiled program and its arguments."""
    attention = nnx.split(MultiHeadAttention(MODEL, rngs=nnx.Rngs(0)))
    feed_forward = nnx.split(FeedForward(MODEL, rngs=nnx.Rngs(0)))

    def gradient_of(apply, parts, length):
        graphdef, weights = parts
        x = jax.random.normal(jax.random.key(1), (1, length, MODEL.d_model))

        def loss(weights, x):
            return jnp.sum(apply(nnx.merge(graphdef, weights), x) ** 2)

        return jax.jit(jax.grad(loss, (0, 1))).lower(weights, x).compile(), (weights, x)

    def attend(length):
        def apply(layer, x):
            return layer(x, layer.keys_values(x), causal_mask(length))

        return gradient_of(apply, attention, length)

    return {
        "attention": attend,
        "FFN": lambda length: gradient_of(lambda layer, x: layer(x), feed_forward, length),
        "step": whole_step,
    }


def whole_step(length: int) -> tuple[Any, tuple[Any, ...]]:
    optimizer = make_optimizer(OptimizerConfig(), MODEL.d_model)
    graphdef, _ = split_model(MODEL, VOCAB_SIZE)
    step = make_train_step(make_loss(graphdef, pad_id=0, bos_id=2, smoothing=0.1), optimizer)
    state = jax.jit(lambda: init_state(MODEL, VOCAB_SIZE, optimizer, 1))()
    tokens = jax.random.randint(jax.random.key(1), (1, length), 4, VOCAB_SIZE)
    arguments = state, Batch(tokens, tokens), jax.random.key(2)
    return jax.jit(step).lower(*arguments).compile(), arguments


def multiplications(name: str, length: int) -> float:
    """Of the forward pass, by the formula."""
    t, d, f = length, MODEL.d_model, MODEL.d_ff
    attention, feed_forward = 4 * t * d * d + 2 * t * t * d, 2 * t * d * f
    whole = MODEL.num_layers * (3 * attention + 2 * feed_forward) + t * d * VOCAB_SIZE
    return {"attention": attention, "FFN": feed_forward, "step": whole}[name]


def measure(lengths: list[int], rounds: int) -> dict[str, list[dict[str, float]]]:
    """Name -> a row for each length: milliseconds (median), MiB of temporaries, the formula."""
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in layers()}
    for length in lengths:
        programs = {name: make(length) for name, make in layers().items()}
        times: dict[str, list[float]] = {name: [] for name in programs}
        for _ in range(rounds + 1):  # in turns, the first one not counted
            for name, (program, arguments) in programs.items():
                started = time.perf_counter()
                jax.block_until_ready(program(*arguments))
                times[name].append(1e3 * (time.perf_counter() - started))
        for name, (program, _) in programs.items():
            row = {
                "length": length,
                "ms": statistics.median(times[name][1:]),
                "mib": program.memory_analysis().temp_size_in_bytes / 2**20,
                "multiplications": multiplications(name, length),
            }
            rows[name].append(row)
            print(
                f"{name:10} T {length:5}: {row['ms']:10,.1f} ms {row['mib']:9,.1f} MiB", flush=True
            )
    return rows


def crossover(rows: dict[str, list[dict[str, float]]]) -> float | None:
    """The length from which attention takes longer than the FFN, between two measured ones."""
    gaps = [
        (attention["length"], attention["ms"] / ffn["ms"])
        for attention, ffn in zip(rows["attention"], rows["FFN"], strict=True)
    ]
    for (before, low), (after, high) in itertools.pairwise(gaps):
        if low < 1 <= high:
            return before * (after / before) ** ((1 - low) / (high - low))
    return None


def plot(rows: dict[str, list[dict[str, float]]], path: str) -> None:
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    figure, (time_axis, memory_axis) = plt.subplots(1, 2, figsize=(9, 3.6))
    for name, measured in rows.items():
        lengths = [row["length"] for row in measured]
        (line,) = time_axis.plot(lengths, [row["ms"] for row in measured], "o-", label=name)
        scale = measured[-1]["ms"] / measured[-1]["multiplications"]
        formula = [scale * row["multiplications"] for row in measured]
        time_axis.plot(lengths, formula, ":", color=line.get_color())
        memory_axis.plot(lengths, [row["mib"] for row in measured], "o-", label=name)
    for axis, title in ((time_axis, "ms (dotted: the formula)"), (memory_axis, "MiB")):
        axis.set(xscale="log", yscale="log", xlabel="T", title=title)
    time_axis.legend()
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--longest", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--plot", help="an SVG file")
    parser.add_argument("--json", help="a file for the figures")
    options = parser.parse_args()
    keep_work_space()
    lengths = [64 << k for k in range(20) if 64 << k <= options.longest]
    rows = measure(lengths, options.rounds)
    print(f"attention overtakes the FFN: by the formula at T = {MODEL.d_ff - 2 * MODEL.d_model}, "
          f"measured at {crossover(rows)}")  # fmt: skip
    if options.plot:
        plot(rows, options.plot)
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
