"""Meshes of eight CPU devices against one device: python -m benchmarks.sharding [--steps N].

The same batches, weights and dropout on every mesh, Adam at its peak rate throughout; printed are
the largest relative difference of a loss from that of one device, and the bytes that a device
holds. Fails where a difference exceeds 1e-5 or the loss has not fallen by a fifth.
"""

import argparse
import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import jax
import numpy as np
import optax
from jax.sharding import NamedSharding

from flaxformer_min.config import MeshConfig, ModelConfig
from flaxformer_min.data.batch import Batch
from flaxformer_min.model.build import split_model
from flaxformer_min.training.loss import make_loss
from flaxformer_min.training.sharding import ROWS, make_mesh, shardings
from flaxformer_min.training.state import init_state
from flaxformer_min.training.step import make_train_step

MESHES = [(1, 1, 1), (8, 1, 1), (4, 2, 1), (2, 2, 2), (1, 8, 1), (1, 1, 8)]
MODEL = ModelConfig(num_layers=2, d_model=64, d_ff=128, num_heads=8, d_k=8, d_v=8, dropout=0.1)
VOCAB, TOLERANCE, PEAK = 1000, 1e-5, 1e-3
ROWS_OF_A_BATCH, LENGTH = 32, 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=50)
    steps = parser.parse_args().steps
    print("| mesh | largest difference | first loss | last loss | parameters | optimizer |")
    print("|---|---|---|---|---|---|")
    alone: np.ndarray | None = None
    for sizes in MESHES:
        losses, parameters, optimizer = train(sizes, steps)
        alone = losses if alone is None else alone
        difference = np.abs(losses / alone - 1).max()
        print(
            f"| {' x '.join(map(str, sizes))} | {difference:.1e} | {losses[0]:.4f} | "
            f"{losses[-1]:.4f} | {parameters:,} B | {optimizer:,} B |",
            flush=True,
        )
        assert difference <= TOLERANCE and losses[-1] <= 0.8 * losses[0]


def train(sizes: tuple[int, int, int], steps: int) -> tuple[np.ndarray, int, int]:
    """Losses on a mesh, then the bytes of parameters and optimizer on its first device."""
    data, fsdp, tensor = sizes
    devices = jax.devices()[: data * fsdp * tensor]
    mesh = make_mesh(MeshConfig(data=data, fsdp=fsdp, tensor=tensor), devices)
    adam = optax.adam(PEAK, b1=0.9, b2=0.98, eps=1e-9)
    graphdef, _ = split_model(MODEL, VOCAB)
    loss = make_loss(graphdef, pad_id=0, bos_id=2, smoothing=0.1, mesh=mesh)
    step = jax.jit(make_train_step(loss, adam), donate_argnums=0)

    def init():
        return init_state(MODEL, VOCAB, adam, seed=1)

    state = jax.jit(init, out_shardings=shardings(mesh, jax.eval_shape(init)))()
    held = _bytes(state.params), _bytes(state.opt_state)
    losses = []
    for batch in batches(steps):
        batch = jax.device_put(batch, NamedSharding(mesh, ROWS))
        state, metrics = step(state, batch, jax.random.key(2))
        losses.append(float(metrics.loss))
    return np.array(losses), *held


def batches(count: int):
    """Ragged rows of a few frequent words; the target is the source backwards."""
    random = np.random.default_rng(3)
    for _ in range(count):
        words = (4 + random.zipf(1.5, (ROWS_OF_A_BATCH, LENGTH)) % (VOCAB - 4)).astype(np.int32)
        words[np.arange(LENGTH) >= random.integers(2, LENGTH + 1, (ROWS_OF_A_BATCH, 1))] = 0
        yield Batch(words, words[:, ::-1].copy())


def _bytes(tree) -> int:
    return sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(tree))


if __name__ == "__main__":
    main()
