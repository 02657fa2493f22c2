"""Training step by step in this process."""

from pathlib import Path

import jax
from jax.sharding import NamedSharding

from benchmarks.reliability.runs import Size, config_of, programs
from flaxformer_min.batching import Batch, assemble
from flaxformer_min.sharding import ROWS, make_mesh
from flaxformer_min.state import TrainState
from flaxformer_min.training import Trainer
from flaxformer_min.workdir import claim, prepare_data


def prepared(workdir: Path, folder: Path, size: Size, *flags: str) -> Trainer:
    """What a run has before step 1."""
    jax.config.update("jax_compilation_cache_dir", str(programs(folder)))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    config = config_of(folder, size, *flags)
    claim(workdir, config)
    return Trainer(config, make_mesh(config.mesh), prepare_data(config, workdir))


def batch_of(trainer: Trainer, step: int) -> Batch:
    """The batch of a step; the first step is 0."""
    data = trainer.data
    batch = assemble(data.plan, data.train, data.tokenizer.pad_id, step)
    return jax.device_put(batch, NamedSharding(trainer.mesh, ROWS))


def one_step(trainer: Trainer, state: TrainState, step: int) -> TrainState:
    """The state after the batch of `step`; the state given is no more."""
    key = jax.random.key(trainer.config.train.seed)
    # Several steps in flight can keep the devices of a CPU waiting for each other.
    return jax.block_until_ready(trainer.train_step(state, batch_of(trainer, step), key)[0])
