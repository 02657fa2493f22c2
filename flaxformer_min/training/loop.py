"""The training loop: from a config to a trained, evaluated, saved model."""

import contextlib
import functools
import sys
from collections.abc import Generator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from flaxformer_min.checkpoints.format import difference, named_leaves
from flaxformer_min.checkpoints.load import load_for_inference
from flaxformer_min.checkpoints.store import Checkpoints
from flaxformer_min.config import Config
from flaxformer_min.data.batch import Batch
from flaxformer_min.data.batching import batch_iterator
from flaxformer_min.errors import UserError
from flaxformer_min.model.build import Params, count_parameters, split_model
from flaxformer_min.system.processes import compiled_together, is_first
from flaxformer_min.system.signals import AgreedStop, StopRequest
from flaxformer_min.training.cursor import Cursor
from flaxformer_min.training.log import MetricsLog, QuietLog
from flaxformer_min.training.loss import make_loss
from flaxformer_min.training.optimizer import make_optimizer, make_schedule
from flaxformer_min.training.prepared_data import Data, prepare_data
from flaxformer_min.training.profiler import Profiler
from flaxformer_min.training.sharding import (
    abstract,
    abstract_rows,
    check_mesh,
    make_mesh,
    place_rows,
    place_whole,
    rows_here,
    shardings,
)
from flaxformer_min.training.state import Metrics, TrainState, init_state, state_shapes
from flaxformer_min.training.step import make_train_step
from flaxformer_min.training.validation import GivenUp, Validation
from flaxformer_min.training.workdir import cache_programs, hold, write_config


def run(config: Config, workdir: Path, *, profile_steps: int = 0) -> int:
    """Trains in `workdir`, or goes on where its newest checkpoint stands; returns the exit status.

    Every `evaluate_every` steps the validation split is evaluated and every `checkpoint_every`
    steps the state is saved; both happen at the last step too. `profile_steps` > 0 writes a
    jax.profiler trace of that many steps. Raises UserError on what the user can mend,
    CheckpointError where saving fails, OSError where other writing does, and FloatingPointError
    where the numbers do.
    """
    mesh = make_mesh(config.mesh)
    check_mesh(config, mesh)
    with StopRequest() as stop, hold(workdir, config):
        data = prepare_data(config, workdir)
        cache_programs(workdir)
        with Checkpoints(workdir, config, data.tokenizer) as checkpoints:
            at = saved_position(checkpoints)
            if at.over(config.train):
                _say(f"{workdir} is finished, {_end(at, config)}; nothing to do")
                return 0
            trainer = Trainer(config, mesh, data)
            checkpoints.require_space(trainer.shapes)
            compiling = trainer.compile_ahead(at.step)  # while the state is made or read
            state = trainer.saved_state(checkpoints, at.step) if at.step else trainer.fresh_state()
            if is_first():
                write_config(workdir, config)
            with contextlib.ExitStack() as stack:
                log = trainer.open_log(workdir, at)
                stack.callback(log.close)
                traced = profile_steps if is_first() else 0
                profiler = Profiler(workdir, at.step, config.train.steps, traced)
                stack.callback(profiler.stop)
                stop.defer()
                compiling.result()
                at = trainer.loop(state, at, Run(checkpoints, log, profiler, AgreedStop(stop)))
        if at.over(config.train):
            _say(f"{workdir} is finished, {_end(at, config)}")
            return 0
        _say(f"{workdir} stopped at step {at.step}; the same command goes on")
        return stop.exit_status


def saved_position(checkpoints: Checkpoints) -> Cursor:
    """Where a run stands by its newest good checkpoint; at the start if there is none."""
    step = checkpoints.latest_good()
    if step is None:
        return Cursor()
    meta = checkpoints.meta(step)
    return Cursor(step, meta.progress, meta.evaluation)


class Run(NamedTuple):
    """What the loop writes to, and whom it listens to."""

    checkpoints: Checkpoints
    log: QuietLog
    profiler: Profiler
    stop: AgreedStop


class Trainer:
    """The data, the mesh and the compiled functions of a run; `loop` schedules them."""

    def __init__(self, config: Config, mesh: Mesh, data: Data):
        self.config, self.mesh, self.data = config, mesh, data
        self.optimizer = make_optimizer(config.optimizer, config.model.d_model)
        graphdef, _ = split_model(config.model, data.tokenizer.vocab_size)
        self.validation = Validation(config, data.tokenizer, data.validation, graphdef, mesh)
        loss = make_loss(
            graphdef,
            pad_id=data.tokenizer.pad_id,
            bos_id=data.tokenizer.bos_id,
            smoothing=config.train.label_smoothing,
            mesh=mesh,
        )
        train_step = make_train_step(loss, self.optimizer, config.optimizer.accumulation)
        self._program = jax.jit(train_step, donate_argnums=0)
        self._train_step = compiled_together(self._program)
        self._root_key = jax.random.key(config.train.seed)
        self.shapes = state_shapes(config.model, data.tokenizer.vocab_size, self.optimizer)

    def compile_ahead(self, step: int) -> Future[None]:
        """Begins to compile, in a thread, what the batch after `step` steps needs."""
        bucket, _ = self.data.plan.batch_ids(step)
        batch: Any = abstract_rows(self.mesh, *self.data.plan.buckets[bucket])
        state = abstract(self.mesh, self.shapes)

        def compile_it() -> None:
            self._program.lower(state, Batch(*batch), self._root_key).compile()

        thread = ThreadPoolExecutor(1)
        compiling = thread.submit(compile_it)
        thread.shutdown(wait=False)
        return compiling

    def fresh_state(self) -> TrainState:
        """The state before step 1, born sharded; the weights are `train.initialize_from`'s."""
        folder, like = self.config.train.initialize_from, self.shapes
        weights = None if folder is None else _weights_of(folder, like.params)
        state = jax.jit(self._init, out_shardings=shardings(self.mesh, like))()
        _say(f"{count_parameters(state.params):,} parameters")
        if weights is None:
            return state
        return state._replace(params=place_whole(self.mesh, weights))

    def saved_state(self, checkpoints: Checkpoints, step: int) -> TrainState:
        """The state after `step` steps, as it was saved."""
        _say(f"resuming from step {step}")
        return checkpoints.restore(step, abstract(self.mesh, self.shapes))

    def open_log(self, workdir: Path, at: Cursor) -> QuietLog:
        """The run's log, to go on from a position; only process 0 writes one."""
        config, plan = self.config, self.data.plan

        def pair_ids(step: int) -> np.ndarray:
            return plan.batch_ids(step - 1)[1]

        if not is_first():
            return QuietLog(pair_ids)
        schedule = make_schedule(config.optimizer, config.model.d_model)
        return MetricsLog(workdir, at, config.train.steps, schedule, pair_ids)

    def batches(self, start: int) -> Generator[Batch, None, None]:
        """The batches from step `start` on, on their devices; close() ends the thread behind."""
        data, rows_of = self.data, functools.partial(rows_here, self.mesh)
        batches = batch_iterator(data.plan, data.train, data.tokenizer.pad_id, start, rows_of)
        try:
            for batch in batches:
                yield place_rows(self.mesh, batch)
        finally:
            batches.close()

    def step(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        """The next state, and what is known of the step; the old state's buffers are reused."""
        return self._train_step(state, batch, self._root_key)

    def loop(self, state: TrainState, at: Cursor, run: Run) -> Cursor:
        """Steps from a position until the run is over or a stop is asked for; returns the last one.

        At every step boundary: the evaluation that is due, then the checkpoint that is, or that a
        stop makes so. One turn more than there are steps, so that both have one place.
        """
        train, batches = self.config.train, self.batches(at.step)
        try:
            while True:
                if at.evaluation_due(train):
                    at = self._evaluate(state.params, at, run)
                last = at.over(train) or run.stop()  # asked once: a signal comes any time
                if not at.saved and (last or at.regular(train)):
                    self._save(state, at, run)
                if last:
                    return at
                run.checkpoints.raise_if_failed()
                run.profiler.before(at.step, state)
                state, metrics = self.step(state, next(batches))
                at = at.next()
                run.log.push(at.step, metrics)
        finally:
            batches.close()

    def _init(self) -> TrainState:
        config, vocab_size = self.config, self.data.tokenizer.vocab_size
        return init_state(config.model, vocab_size, self.optimizer, config.train.seed)

    def _evaluate(self, params: Params, at: Cursor, run: Run) -> Cursor:
        """The position with its evaluation; as it was, if a stop was asked for meanwhile."""
        run.log.flush()
        try:
            record = self.validation(params, at.step, run.stop)
        except GivenUp:
            return at
        run.log.evaluation(at.step, record)
        run.log.restart_clock()
        return at.evaluated(record, self.config.train)

    def _save(self, state: TrainState, at: Cursor, run: Run) -> None:
        run.log.flush()
        run.checkpoints.save(
            state,
            at.step,
            evaluation=at.evaluation,
            progress=at.progress,
            interim=not at.regular(self.config.train),
        )
        run.log.restart_clock()


def _weights_of(folder: str, like: Params) -> Params:
    """The weights of another run's checkpoint; refused unless they have the shapes of `like`."""
    weights = load_for_inference(folder).params
    if found := difference(named_leaves(weights), named_leaves(like)):
        raise UserError(f"train.initialize_from: {folder} holds another model: {found}")
    return weights


def _say(text: str) -> None:
    """A line for the reader, from process 0."""
    if is_first():
        print(text, file=sys.stderr)


def _end(at: Cursor, config: Config) -> str:
    """Where a run ended, and what ended it before its last step."""
    place = f"at step {at.step}"
    if at.progress.exhausted(config.train.patience):
        best = at.progress.best_step
        return f"{place}: no evaluation since step {best} was better (train.patience)"
    return place
