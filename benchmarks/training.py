"""A training step of this program beside those of flax's wmt example and of PyTorch.

    pip install -e '.[train,benchmark]' -c constraints.txt
    python -m benchmarks.training [--data-dir MULTI30K] [--rounds 9] [--levelled] [--json FILE]

Each program runs in a process of its own, one at a time, in turns: a round is the same batches for
every program. Reported are the median step, the ratio to this program round by round (median,
least, most), real target tokens a second, the time of the first pass (compilation) and the peak of
resident memory. "matmul" is the rate of float32 products of the model's own shape, the yardstick
for what the machine can do. The workloads: full batches at two sizes, as the papers of the field
count, and one epoch's own batches, with their padding, of a corpus (the built-in one by default).

With --levelled, the other programs run again with one difference to ours taken away at a time, and
then with none of these left ("like ours"): work space is kept for the next step, dropout has the
paper's sites alone, there are no metrics beside the loss, and torch's attention has no biases and
its stacks no final norms. Our program runs again too, giving its work space back.
"""

import argparse
import dataclasses
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.sizes import LARGE, SMALL, Size, Step

Batches = list[tuple[np.ndarray, np.ndarray]]


def ours(size: Size, alike: Collection[str] = ()) -> Step:
    """The step that `train.py` runs, in a process set up as it does.

    Without "space" among `alike` it gives its work space back after every step.
    """
    import jax

    from flaxformer_min.config import OptimizerConfig
    from flaxformer_min.data.batch import Batch
    from flaxformer_min.model.build import split_model
    from flaxformer_min.system.malloc import keep_work_space
    from flaxformer_min.training.loss import make_loss
    from flaxformer_min.training.optimizer import make_optimizer
    from flaxformer_min.training.state import init_state
    from flaxformer_min.training.step import make_train_step

    if "space" in alike:
        keep_work_space()
    model = model_config(size)
    optimizer = make_optimizer(OptimizerConfig(), model.d_model)
    graphdef, _ = split_model(model, size.vocab_size)
    train_step = make_train_step(make_loss(graphdef, pad_id=0, bos_id=2, smoothing=0.1), optimizer)
    step = jax.jit(train_step, donate_argnums=0)
    state = jax.jit(lambda: init_state(model, size.vocab_size, optimizer, 1))()
    key = jax.random.key(1)

    def run(source, target):
        nonlocal state
        state, metrics = step(state, Batch(source, target), key)
        return float(metrics.loss)

    return run


def model_config(size: Size):
    from flaxformer_min.config import ModelConfig

    width = size.d_model // size.num_heads
    return ModelConfig(
        num_layers=size.num_layers,
        d_model=size.d_model,
        d_ff=size.d_ff,
        num_heads=size.num_heads,
        d_k=width,
        d_v=width,
        dropout=size.dropout,
    )


def matmul(size: Size, alike: Collection[str] = ()) -> Step:
    """One float32 product [tokens, D] x [D, F] after another, as many as make a step's FLOPs."""
    import jax
    import jax.numpy as jnp

    @jax.jit
    def products(x, w):
        return jax.lax.fori_loop(0, 50, lambda _, x: (x @ w)[:, : x.shape[1]], x)

    w = jnp.ones((size.d_model, size.d_ff)) / size.d_model

    def run(source, target):
        x = jnp.ones((target.size, size.d_model))
        started = time.perf_counter()
        jax.block_until_ready(products(x, w))
        return 50 * 2 * x.size * w.shape[1] / (time.perf_counter() - started)

    return run


def flax_wmt(size: Size, alike: Collection[str] = ()) -> Step:
    from benchmarks.flax_wmt import make_step

    return make_step(size, alike)


def torch_float32(size: Size, alike: Collection[str] = ()) -> Step:
    from benchmarks.torch_transformer import make_step

    return make_step(size, alike=alike)


def torch_bfloat16(size: Size, alike: Collection[str] = ()) -> Step:
    from benchmarks.torch_transformer import make_step

    return make_step(size, alike=alike, bfloat16=True)


class Variant(NamedTuple):
    """A program, and in what it is made like ours."""

    make: Callable[[Size, Collection[str]], Step]
    alike: tuple[str, ...] = ()


PROGRAMS = {
    "flaxformer_min": Variant(ours, ("space",)),
    "flax wmt": Variant(flax_wmt),
    "torch float32": Variant(torch_float32),
    "torch bfloat16": Variant(torch_bfloat16),
    "matmul": Variant(matmul),
}
LEVELLED = {
    "ours, space given back": Variant(ours),
    "flax wmt, space kept": Variant(flax_wmt, ("space",)),
    "flax wmt, dropout": Variant(flax_wmt, ("dropout",)),
    "flax wmt, metrics": Variant(flax_wmt, ("metrics",)),
    "flax wmt like ours": Variant(flax_wmt, ("space", "dropout", "metrics")),
    "torch, space kept": Variant(torch_float32, ("space",)),
    "torch, dropout": Variant(torch_float32, ("dropout",)),
    "torch, layers": Variant(torch_float32, ("layers",)),
    "torch like ours": Variant(torch_float32, ("space", "dropout", "layers")),
}
# What system/malloc.py sets for this program, for programs that do not call it.
KEEP_SPACE = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(2**62),
    "MALLOC_ARENA_MAX": "1",  # all threads use the heap that is kept
    "JAX_CPU_ENABLE_ASYNC_DISPATCH": "false",
}


def step_flops(size: Size, source: np.ndarray, target: np.ndarray) -> float:
    """Forward and backward: 6 per weight and position it is used at, 12 D per attended pair."""
    (rows, s), t = source.shape, target.shape[1]
    d, f = size.d_model, size.d_ff
    encoder = s * (4 * d * d + 2 * d * f) + 2 * s * s * d
    decoder = t * (6 * d * d + 2 * d * f) + s * 2 * d * d + 2 * t * t * d + 2 * t * s * d
    return 6.0 * rows * (size.num_layers * (encoder + decoder) + t * d * size.vocab_size)


def full_batches(rows: int, length: int, size: Size, count: int = 3) -> Batches:
    """Batches without a pad."""
    random = np.random.default_rng(1)
    shape = (count, 2, rows, length)
    return [(s, t) for s, t in random.integers(4, size.vocab_size, shape, dtype=np.int32)]


def corpus_batches(data_dir: str | None, size: Size, cache: Path, count: int = 8) -> Batches:
    """The first batches of an epoch at 4,096 tokens and at most 4 shapes."""
    from flaxformer_min.config_file import load_config
    from flaxformer_min.data.batching import BatchPlan, assemble
    from flaxformer_min.data.corpus import prepare_split
    from flaxformer_min.data.sources import read_pairs
    from flaxformer_min.data.tokenizer_training import prepare_tokenizer

    configs = Path(__file__).parent.parent / "configs"
    name, flags = "demo.py", []
    if data_dir:
        name, flags = "multi30k_en_de.py:cpu", ["--data.dir", data_dir]
    config = load_config(f"{configs / name}", flags)
    data = dataclasses.replace(config.data, tokens_per_batch=4_096, num_buckets=4)
    lines = (line for pair in read_pairs(data, data.train) for line in pair)
    tokenizer = prepare_tokenizer(data, lines)
    assert tokenizer.vocab_size <= size.vocab_size and tokenizer.pad_id == 0
    corpus, _ = prepare_split(data, data.train, tokenizer, cache)
    plan = BatchPlan(corpus.lengths, data)
    return [tuple(assemble(plan, corpus, tokenizer.pad_id, step)) for step in range(count)]


class Program:
    """One program in a process of its own, which works only while it is asked to."""

    def __init__(self, name: str, size: Size, batches: Path) -> None:
        variant = (PROGRAMS | LEVELLED)[name]
        kept = "space" in variant.alike and variant.make is not ours
        command = [
            sys.executable,
            "-m",
            "benchmarks.training",
            "--work",
            name,
            json.dumps(size),
            str(batches),
        ]
        self._process = subprocess.Popen(
            command,
            cwd=Path(__file__).parent.parent,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | (KEEP_SPACE if kept else {}),
            text=True,
        )

    def round(self) -> dict[str, Any]:
        """Runs all batches once: seconds, the mean of what the steps returned, peak memory."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        self._process.communicate()


def work(name: str, size: Size, path: str) -> None:
    """The process of a Program: a line in, a round's figures out."""
    arrays = np.load(path)
    batches = [(arrays[f"s{i}"], arrays[f"t{i}"]) for i in range(len(arrays) // 2)]
    variant = (PROGRAMS | LEVELLED)[name]
    step = variant.make(size, variant.alike)
    for _ in sys.stdin:
        started = time.perf_counter()
        values = [step(source, target) for source, target in batches]
        figures = {
            "seconds": time.perf_counter() - started,
            "value": statistics.fmean(values),
            "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        }
        print(json.dumps(figures), flush=True)


def compare(size: Size, batches: Batches, names: list[str], rounds: int) -> dict[str, Any]:
    """The figures of every program on the same batches."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "batches.npz"
        arrays = {f"s{i}": s for i, (s, _) in enumerate(batches)}
        np.savez(path, **arrays, **{f"t{i}": t for i, (_, t) in enumerate(batches)})
        programs = {name: Program(name, size, path) for name in names}
        first = {name: program.round() for name, program in programs.items()}
        for program in programs.values():
            program.round()  # warm
        measured = [
            {name: program.round() for name, program in programs.items()} for _ in range(rounds)
        ]
        for program in programs.values():
            program.close()
    return {name: _figures(name, size, batches, first, measured) for name in names}


def _figures(name, size, batches, first, measured) -> dict[str, Any]:
    seconds = [turn[name]["seconds"] for turn in measured]
    if name == "matmul":
        return {"gflops": statistics.median(turn[name]["value"] for turn in measured) / 1e9}
    ratios = [turn[name]["seconds"] / turn["flaxformer_min"]["seconds"] for turn in measured]
    tokens = sum(int((target > 0).sum()) for _, target in batches)
    flops = sum(step_flops(size, *batch) for batch in batches)
    median = statistics.median(seconds)
    return {
        "step_ms": 1e3 * median / len(batches),
        "times_ours": [statistics.median(ratios), min(ratios), max(ratios)],
        "tokens_per_second": tokens / median,
        "gflops": flops / median / 1e9,
        "first_pass_s": first[name]["seconds"],
        "peak_mib": measured[-1][name]["peak_mib"],
        "loss": measured[-1][name]["value"],
    }


def padding_share(batches: Batches) -> float:
    """The share of source and target positions that are padding."""
    real = sum(int((side > 0).sum()) for batch in batches for side in batch)
    return 1 - real / sum(side.size for batch in batches for side in batch)


def print_table(title: str, batches: Batches, figures: dict[str, Any]) -> None:
    print(f"\n{title}: {100 * padding_share(batches):.1f}% padding")
    heads = ("step ms", 9), ("times ours (spread)", 22), ("tokens/s", 10), ("GFLOP/s", 9)
    heads += ("first s", 9), ("peak MiB", 10)
    print(" " * 23 + "".join(f"{head:>{width}}" for head, width in heads))
    for name, row in figures.items():
        if name == "matmul":
            print(f"{name:23}{row['gflops']:>50,.0f}")
            continue
        ratio, least, most = row["times_ours"]
        cells = (
            f"{row['step_ms']:,.0f}",
            f"{ratio:.2f} ({least:.2f} to {most:.2f})",
            f"{row['tokens_per_second']:,.0f}",
            f"{row['gflops']:,.0f}",
            f"{row['first_pass_s']:.1f}",
            f"{row['peak_mib']:,.0f}",
        )
        widths = (width for _, width in heads)
        print(f"{name:23}" + "".join(f"{c:>{w}}" for c, w in zip(cells, widths, strict=True)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-dir", help="where Multi30k is; the built-in corpus by default")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", nargs="*", choices=PROGRAMS | LEVELLED, default=list(PROGRAMS))
    parser.add_argument("--levelled", action="store_true", help="a row for each difference to ours")
    parser.add_argument("--workload", nargs="*", default=["small", "corpus", "large"])
    parser.add_argument("--json", help="a file for the figures")
    options = parser.parse_args()
    names = [*options.only, *(LEVELLED if options.levelled else ())]
    with tempfile.TemporaryDirectory() as cache:
        makers = {
            "small": ("small, 128 x 32", SMALL, lambda: full_batches(128, 32, SMALL)),
            "corpus": (
                "small, batches of the corpus",
                SMALL,
                lambda: corpus_batches(options.data_dir, SMALL, Path(cache)),
            ),
            "large": ("large, 32 x 32", LARGE, lambda: full_batches(32, 32, LARGE)),
        }
        results = {}
        for workload in options.workload:
            title, size, make = makers[workload]
            batches = make()
            results[title] = compare(size, batches, names, options.rounds)
            print_table(title, batches, results[title])
    if options.json:
        Path(options.json).write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--work"]:
        name, size, path = sys.argv[2:]
        work(name, Size(*json.loads(size)), path)
    else:
        main()
