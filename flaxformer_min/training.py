"""The training loop: from a config to a trained, evaluated, saved model."""

import sys
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from flaxformer_min.batching import Batch, batch_iterator
from flaxformer_min.checkpoint import Checkpoints, load_for_inference
from flaxformer_min.checkpoint_directory import difference, named_leaves
from flaxformer_min.config import Config
from flaxformer_min.errors import UserError
from flaxformer_min.metrics import MetricsLog
from flaxformer_min.profiler import Profiler
from flaxformer_min.schedule import make_optimizer, make_schedule
from flaxformer_min.sharding import ROWS, abstract, check_mesh, make_mesh, shardings
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
        mesh = make_mesh(config.mesh)
        check_mesh(config, mesh)
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
            trainer = Trainer(config, mesh, data)
            state = trainer.saved_state(checkpoints, start) if start else trainer.fresh_state()
            schedule = make_schedule(config.optimizer, config.model.d_model)
            log = MetricsLog(workdir, start, steps, schedule)
            profiler = Profiler(workdir, start, steps, profile_steps)
            stop.defer()
            try:
                reached = trainer.loop(state, start, checkpoints, log, profiler, stop)
            finally:
                profiler.stop()
                log.close()
        if reached == steps:
            return 0
        print(f"{workdir} stopped at step {reached}; the same command goes on", file=sys.stderr)
        return stop.exit_status


class Trainer:
    """The data, the mesh and the compiled functions of a run; `loop` schedules them."""

    def __init__(self, config: Config, mesh: Mesh, data: Data):
        self.config, self.mesh, self.data = config, mesh, data
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
            mesh=mesh,
        )
        self.train_step = jax.jit(train_step, donate_argnums=0)

    def fresh_state(self) -> TrainState:
        """The state before step 1, born sharded; the weights are `train.initialize_from`'s."""
        folder, like = self.config.train.initialize_from, self._shapes()
        weights = None if folder is None else _weights_of(folder, like.params)
        state = jax.jit(self._init, out_shardings=shardings(self.mesh, like))()
        print(f"{count_parameters(state.params):,} parameters", file=sys.stderr)
        if weights is None:
            return state
        return state._replace(params=jax.device_put(weights, shardings(self.mesh, weights)))

    def saved_state(self, checkpoints: Checkpoints, step: int) -> TrainState:
        """The state after `step` steps, as it was saved."""
        print(f"resuming from step {step}", file=sys.stderr)
        return checkpoints.restore(step, abstract(self.mesh, self._shapes()))

    def loop(
        self,
        state: TrainState,
        start: int,
        checkpoints: Checkpoints,
        log: MetricsLog,
        profiler: Profiler,
        stop: StopRequest,
    ) -> int:
        """Steps from `start` to `train.steps`, or until a stop is asked for; returns the last one.

        One turn more than there are steps, so that evaluating and saving have one place.
        """
        train, root_key = self.config.train, jax.random.key(self.config.train.seed)
        rows = NamedSharding(self.mesh, ROWS)
        pad_id = self.data.tokenizer.pad_id
        batches, step = batch_iterator(self.data.plan, self.data.train, pad_id, start), start
        try:
            while True:
                done, record = step == train.steps, None
                if step > start and (done or step % train.evaluate_every == 0):
                    record = self._evaluate(state.params, step, log)
                last = done or stop.requested
                if step > start and (last or step % train.checkpoint_every == 0):
                    log.flush()
                    checkpoints.save(state, step, record)
                    log.restart_clock()
                if last:
                    return step
                profiler.before(step, state)
                batch: Batch = jax.device_put(next(batches), rows)
                state, metrics = self.train_step(state, batch, root_key)
                step += 1
                log.push(step, metrics)
        finally:
            batches.close()

    def _init(self) -> TrainState:
        config, vocab_size = self.config, self.data.tokenizer.vocab_size
        return init_state(config.model, vocab_size, self.optimizer, config.train.seed)

    def _shapes(self) -> TrainState:
        return jax.eval_shape(self._init)

    def _evaluate(self, params: Params, step: int, log: MetricsLog) -> dict[str, Any]:
        log.flush()
        record = self.validation(params, step)
        log.evaluation(step, record)
        log.restart_clock()
        return record


def _weights_of(folder: str, like: Params) -> Params:
    """The weights of another run's checkpoint; refused unless they have the shapes of `like`."""
    weights = load_for_inference(folder).params
    if found := difference(named_leaves(weights), named_leaves(like)):
        raise UserError(f"train.initialize_from: {folder} holds another model: {found}")
    return weights
