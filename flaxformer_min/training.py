"""The training loop: from a config to a trained, evaluated, saved model."""

import sys
from pathlib import Path
from typing import Any

import jax
from jax.sharding import NamedSharding

from flaxformer_min.batching import Batch, batch_iterator
from flaxformer_min.checkpoint import Checkpoints, load_for_inference
from flaxformer_min.checkpoint_directory import difference, named_leaves
from flaxformer_min.config import Config
from flaxformer_min.errors import UserError
from flaxformer_min.metrics import MetricsLog
from flaxformer_min.profiler import Profiler
from flaxformer_min.schedule import make_optimizer, make_schedule
from flaxformer_min.sharding import ROWS, abstract, make_mesh, shardings
from flaxformer_min.signals import StopRequest
from flaxformer_min.state import Params, TrainState, count_parameters, init_state, split_model
from flaxformer_min.step import make_train_step
from flaxformer_min.validation import Validation
from flaxformer_min.workdir import Data, claim, prepare_data


def run(config: Config, workdir: Path, *, profile_steps: int = 0) -> int:
    """Trains in `workdir`, or goes on where its newest checkpoint stands; returns the exit status.

    Every `evaluate_every` steps the validation split is evaluated and every `checkpoint_every`
    steps the state is saved; both happen at the last step too. `profile_steps` > 0 writes a
    jax.profiler trace of that many steps. Raises UserError on what the user can mend,
    CheckpointError where saving fails and FloatingPointError where the numbers do.
    """
    with StopRequest() as stop:
        claim(workdir, config)
        data = prepare_data(config, workdir)
        with Checkpoints(
            workdir,
            config,
            data.tokenizer.model_bytes,
            keep_last=config.train.keep_last,
            keep_best=config.train.keep_best,
        ) as checkpoints:
            start, steps = checkpoints.latest_good() or 0, config.train.steps
            if start >= steps:
                print(f"{workdir} is finished, at step {start}; nothing to do", file=sys.stderr)
                return 0
            trainer = Trainer(config, data)
            state = trainer.initial_state(checkpoints, start)
            schedule = make_schedule(config.optimizer, config.model.d_model)
            log = MetricsLog(workdir, start, steps, schedule)
            profiler = Profiler(workdir, start, steps, profile_steps)
            stop.defer()
            try:
                trainer.loop(state, start, checkpoints, log, profiler, stop)
            finally:
                profiler.stop()
                log.close()
        if stop.requested:  # and the checkpoint is on the disk
            print(f"{workdir} stopped; the same command goes on", file=sys.stderr)
    return stop.exit_status


class Trainer:
    """The data, the mesh and the compiled functions of a run; `loop` schedules them."""

    def __init__(self, config: Config, data: Data):
        self.config, self.data = config, data
        self.mesh = make_mesh(config.mesh)
        self._check_rows()
        self.optimizer = make_optimizer(config.optimizer, config.model.d_model)
        graphdef, _ = split_model(config.model, data.tokenizer.vocab_size)
        self.validation = Validation(config, data.tokenizer, data.validation, graphdef)
        train_step = make_train_step(
            graphdef,
            self.optimizer,
            pad_id=data.tokenizer.pad_id,
            bos_id=data.tokenizer.bos_id,
            smoothing=config.train.label_smoothing,
            accumulation=config.optimizer.accumulation,
        )
        self.train_step = jax.jit(train_step, donate_argnums=0)

    def initial_state(self, checkpoints: Checkpoints, start: int) -> TrainState:
        """The state saved at step `start`, or a fresh one for step 0; born sharded."""
        config, tokenizer = self.config, self.data.tokenizer

        def make() -> TrainState:
            seed = config.train.seed
            return init_state(config.model, tokenizer.vocab_size, self.optimizer, seed)

        like = abstract(self.mesh, jax.eval_shape(make))
        if start:
            print(f"resuming from step {start}", file=sys.stderr)
            return checkpoints.restore(start, like)
        state = jax.jit(make, out_shardings=shardings(self.mesh, like))()
        print(f"{count_parameters(state.params):,} parameters", file=sys.stderr)
        if config.train.initialize_from is None:
            return state
        params = _weights_of(config.train.initialize_from, state.params)
        return state._replace(params=params)

    def loop(
        self,
        state: TrainState,
        start: int,
        checkpoints: Checkpoints,
        log: MetricsLog,
        profiler: Profiler,
        stop: StopRequest,
    ) -> None:
        """Steps `start` to `train.steps`, or to the step at which a stop is asked for.

        One turn more than there are steps, so that evaluating and saving have one place.
        """
        train, root_key = self.config.train, jax.random.key(self.config.train.seed)
        rows = NamedSharding(self.mesh, ROWS)
        pad_id = self.data.tokenizer.pad_id
        batches = batch_iterator(self.data.plan, self.data.train, pad_id, start)
        try:
            for step in range(start, train.steps + 1):
                done, record = step == train.steps, None
                if step > start and (done or step % train.evaluate_every == 0):
                    record = self._evaluate(state.params, step, log)
                last = done or stop.requested
                if step > start and (last or step % train.checkpoint_every == 0):
                    log.flush()
                    checkpoints.save(state, step, record)
                    log.restart_clock()
                if last:
                    return
                profiler.before(step)
                batch: Batch = jax.device_put(next(batches), rows)
                state, metrics = self.train_step(state, batch, root_key)
                log.push(step + 1, metrics)
        finally:
            batches.close()

    def _evaluate(self, params: Params, step: int, log: MetricsLog) -> dict[str, Any]:
        log.flush()
        record = self.validation(params, step)
        log.evaluation(step, record)
        log.restart_clock()
        return record

    def _check_rows(self) -> None:
        """Rows of every batch must divide over the devices and micro-batches that share them."""
        config, mesh = self.config, self.mesh.shape
        shares = mesh["data"] * mesh["fsdp"] * config.optimizer.accumulation
        if config.data.row_multiple % shares:
            raise UserError(
                f"data.row_multiple is {config.data.row_multiple}: it must be a multiple of mesh "
                f"data x fsdp x optimizer.accumulation = {shares}"
            )


def _weights_of(folder: str, like: Params) -> Params:
    """The weights of another run's checkpoint, on the devices of `like`."""
    params = load_for_inference(folder).params
    if found := difference(named_leaves(params), named_leaves(like)):
        raise UserError(f"train.initialize_from: {folder} holds another model: {found}")
    return jax.tree.map(lambda new, old: jax.device_put(new, old.sharding), params, like)
