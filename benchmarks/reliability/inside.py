"""Training step by step in this process."""

from pathlib import Path

import jax

from benchmarks.reliability.runs import Size, config_of, programs
from flaxformer_min.data.batch import Batch
from flaxformer_min.training.loop import Trainer
from flaxformer_min.training.prepared_data import prepare_data
from flaxformer_min.training.sharding import make_mesh
from flaxformer_min.training.state import Metrics, TrainState
from flaxformer_min.training.workdir import hold


def prepared(workdir: Path, folder: Path, size: Size, *flags: str) -> Trainer:
    """What a run has before step 1."""
    jax.config.update("jax_compilation_cache_dir", str(programs(folder)))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    config = config_of(folder, size, *flags)
    with hold(workdir, config):
        return Trainer(config, make_mesh(config.mesh), prepare_data(config, workdir))


def one_step(trainer: Trainer, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
    """As `Trainer.step`, but waits: many steps in flight can lock up the devices of a CPU."""
    return jax.block_until_ready(trainer.step(state, batch))
