"""The memory of a training step against its batch: python -m benchmarks.memory [--length T].

The small model of benchmarks/training.py, compiled for batches of 32 to 1,024 rows and not run. A
step's work space (the compiler's "temporaries") is all that grows with the batch; parameters and
optimizer state come on top. "remat" is with model.remat, "and scan" with model.scan_layers too, and
"logits" is what [B, T, V] in float32 would take, which no step holds.
"""

import argparse
import dataclasses

import jax
import jax.numpy as jnp

from benchmarks.sizes import SMALL
from benchmarks.training import model_config
from flaxformer_min.config import OptimizerConfig
from flaxformer_min.data.batch import Batch
from flaxformer_min.model.build import split_model
from flaxformer_min.training.loss import make_loss
from flaxformer_min.training.optimizer import make_optimizer
from flaxformer_min.training.state import init_state
from flaxformer_min.training.step import make_train_step

ROWS = (32, 128, 512, 1_024)


def work_space(rows: int, length: int, *, remat: bool = False, scan_layers: bool = False) -> float:
    """MiB of temporaries of a step on `rows` pairs, each `length` tokens a side."""
    model = dataclasses.replace(model_config(SMALL), remat=remat, scan_layers=scan_layers)
    optimizer = make_optimizer(OptimizerConfig(), model.d_model)
    graphdef, _ = split_model(model, SMALL.vocab_size)
    step = make_train_step(make_loss(graphdef, pad_id=0, bos_id=2, smoothing=0.1), optimizer)
    state = jax.eval_shape(lambda: init_state(model, SMALL.vocab_size, optimizer, 1))
    side = jax.ShapeDtypeStruct((rows, length), jnp.int32)
    lowered = jax.jit(step, donate_argnums=0).lower(state, Batch(side, side), jax.random.key(1))
    return lowered.compile().memory_analysis().temp_size_in_bytes / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--length", type=int, default=32)
    length = parser.parse_args().length
    print(f"{'rows':>6}{'tokens':>9}{'MiB':>8}{'remat':>8}{'and scan':>10}{'logits':>8}")
    for rows in ROWS:
        kept, again = work_space(rows, length), work_space(rows, length, remat=True)
        loop = work_space(rows, length, remat=True, scan_layers=True)
        logits = rows * length * SMALL.vocab_size * 4 / 2**20
        row = f"{rows:6,}{rows * length:9,}{kept:8,.0f}{again:8,.0f}{loop:10,.0f}{logits:8,.0f}"
        print(row, flush=True)


if __name__ == "__main__":
    main()
