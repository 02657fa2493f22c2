"""The training loop: from a config to a trained, evaluated, saved model."""

import contextlib
import functools
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from flaxformer_min.checkpoints.leaves import difference, named_leaves
from flaxformer_min.checkpoints.load import load_for_inference
from flaxformer_min.checkpoints.progress import Progress
from flaxformer_min.checkpoints.store import Checkpoints
from flaxformer_min.config import FREE_ON_RESUME, Config, flat
from flaxformer_min.data.batch import Batch
from flaxformer_min.data.batching import Data, batch_iterator
from flaxformer_min.decoding.bleu import bleu_metric
from flaxformer_min.decoding.translator import Translator
from flaxformer_min.errors import UserError
from flaxformer_min.model.build import Params, count_parameters
from flaxformer_min.system.meter import Meter, say
from flaxformer_min.system.processes import compiled_together, is_first
from flaxformer_min.system.signals import AgreedStop, StopRequest
from flaxformer_min.training import sharding
from flaxformer_min.training.cursor import Cursor
from flaxformer_min.training.log import MetricsLog, QuietLog
from flaxformer_min.training.optimizer import make_schedule
from flaxformer_min.training.prepared_data import prepare_data, read_digests
from flaxformer_min.training.profiler import Profiler
from flaxformer_min.training.state import Metrics, TrainState
from flaxformer_min.training.step import StepProgram
from flaxformer_min.training.validation import GivenUp, Validation, measure_of
from flaxformer_min.training.workdir import hold, write_config


def run(config: Config, workdir: Path, *, profile_steps: int = 0) -> int:
    """Trains in `workdir`, or goes on from its newest checkpoint; returns the exit status.

    Every `evaluate_every` steps the validation split is evaluated and every `checkpoint_every`
    steps the state is saved; both happen at the last step too. `profile_steps` > 0 writes a
    jax.profiler trace of that many steps. Raises UserError for a mistake that the user can mend,
    CheckpointError if saving fails, OSError if other writing does, and FloatingPointError if too
    many steps in a row are not finite.
    """
    if jax.config.values["jax_enable_x64"]:
        raise UserError("JAX_ENABLE_X64 is on, and training is in float32: turn it off")
    mesh = sharding.make_mesh(config.mesh)
    sharding.check_mesh(config, mesh)
    bleu_metric(config)  # a package that it lacks is told before the data is prepared
    with StopRequest() as stop, hold(workdir, config):
        data = prepare_data(config, workdir)
        with Checkpoints(workdir, config, data.tokenizer) as checkpoints:
            measure = measure_of(config, read_digests(workdir)["validation"])
            start = saved_cursor(checkpoints, measure)
            if start.over(config.train):
                _say(f"{workdir} is finished, {_end(start, config)}; nothing to do")
                return 0
            trainer = Trainer(config, mesh, data)
            end = _train(trainer, start, workdir, checkpoints, stop, profile_steps)
        if end.over(config.train):
            _say(f"{workdir} is finished, {_end(end, config)}")
            return 0
        _say(f"{workdir} stopped at step {end.step}; the same command goes on")
        return stop.exit_status


def _train(
    trainer: "Trainer",
    start: Cursor,
    workdir: Path,
    checkpoints: Checkpoints,
    stop: StopRequest,
    profile_steps: int,
) -> Cursor:
    """Trains from a cursor until the run is over or stopped; returns the cursor at that point."""
    checkpoints.require_space(trainer.program.shapes)
    compiling = trainer.compile_ahead(start.step)  # in a thread, until compiling.result()
    state = trainer.saved_state(checkpoints, start.step) if start.step else trainer.fresh_state()
    if is_first():
        write_config(workdir, trainer.config)
    profiler = Profiler(workdir, start.step, trainer.config.train.steps, profile_steps)
    with contextlib.closing(trainer.open_log(workdir, start)) as log, contextlib.closing(profiler):
        stop.defer()  # from here on there is a state to save
        compiling.result()
        return trainer.loop(state, start, Run(checkpoints, log, profiler, AgreedStop(stop)))


def saved_cursor(checkpoints: Checkpoints, measure: str) -> Cursor:
    """Returns the cursor of the newest good checkpoint, or that of step 0 if there is none.

    If its evaluations were measured otherwise than those to come, the best of them and the patience
    do not count any more.
    """
    step = checkpoints.latest_good()
    if step is None:
        return Cursor(progress=Progress(measure=measure))
    meta = checkpoints.meta(step)
    progress = meta.progress
    if progress.measure not in (measure, None):
        if progress.best_step is not None:
            _say(
                f"evaluated otherwise than before (data.validation or decode): the best so far, "
                f"step {progress.best_step}, does not count, and train.patience starts anew"
            )
        progress = Progress()
    return Cursor(step, progress._replace(measure=measure), meta.evaluation)


class Run(NamedTuple):
    """Where the loop saves, logs and traces, and how it learns that it has to stop."""

    checkpoints: Checkpoints
    log: QuietLog
    profiler: Profiler
    stop: AgreedStop


class Trainer:
    """The data, the mesh and the compiled functions of a run; `loop` trains with them."""

    def __init__(self, config: Config, mesh: Mesh, data: Data):
        self.config, self.mesh, self.data = config, mesh, data
        tokenizer = data.tokenizer
        self.program = StepProgram(config, mesh, pad_id=tokenizer.pad_id, bos_id=tokenizer.bos_id)
        self._train_step = compiled_together(self.program.jitted)
        self._root_key = jax.random.key(config.train.seed)
        self._translator = Translator(config, tokenizer, params={})  # an evaluation sets them
        self._long_lines = self._translator.long_lines()  # named once, not in every evaluation
        graphdef = self.program.graphdef
        self.validation = Validation(config, data, graphdef, mesh, self._translate)

    def compile_ahead(self, step: int) -> Future[jax.stages.Compiled]:
        """Begins to compile the training step for the first batch after `step` steps, in a thread.

        The step is compiled for the shape of that batch alone.
        """
        bucket, _ = self.data.plan.batch_ids(step)
        thread = ThreadPoolExecutor(1)
        compiling = thread.submit(self.program.compile, self.data.plan.buckets[bucket])
        thread.shutdown(wait=False)
        return compiling

    def fresh_state(self) -> TrainState:
        """Returns the state before step 1, split over the devices.

        Its weights are drawn, or taken from the checkpoint `train.initialize_from`.
        """
        folder = self.config.train.initialize_from
        weights = None if folder is None else _weights_of(folder, self.program.shapes.params)
        state = self.program.drawn()
        _say(f"{count_parameters(state.params):,} parameters")
        if weights is None:
            return state
        return state._replace(params=sharding.place_whole(self.mesh, weights))

    def saved_state(self, checkpoints: Checkpoints, step: int) -> TrainState:
        """Returns the state after `step` steps from the checkpoint of that step."""
        _say(f"resuming from step {step}")
        return checkpoints.restore(step, self.program.shapes)

    def open_log(self, workdir: Path, cursor: Cursor) -> QuietLog:
        """Opens the log of the run from a cursor on; only process 0 writes one."""
        config, plan = self.config, self.data.plan

        def pair_ids(step: int) -> np.ndarray:
            return plan.batch_ids(step - 1)[1]

        if not is_first():
            return QuietLog(pair_ids)
        schedule = make_schedule(config.optimizer, config.model.d_model)
        hparams = {key: value for key, value in flat(config).items() if key not in FREE_ON_RESUME}
        return MetricsLog(workdir, cursor, config.train.steps, schedule, pair_ids, hparams)

    def batches(self, start: int) -> Generator[Batch, None, None]:
        """Yields the batches from number `start` on, placed on the devices.

        They are made in a thread, which ends when this generator is closed.
        """
        data, own_rows = self.data, functools.partial(sharding.rows_here, self.mesh)
        batches = batch_iterator(data.plan, data.train, data.tokenizer.pad_id, start, own_rows)
        with contextlib.closing(batches):
            for batch in batches:
                yield sharding.place_rows(self.mesh, batch)

    def step(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        """Takes one step and returns the next state and the metrics of the step.

        The old state's buffers are reused.
        """
        return self._train_step(state, batch, self._root_key)

    def loop(self, state: TrainState, cursor: Cursor, run: Run) -> Cursor:
        """Trains from a cursor until the run is over or has to stop; returns the cursor at its end.

        Between two steps come the evaluation that is due and then the checkpoint, if one is due or
        the run ends at that step. Both also come before the first step and after the last one.
        """
        train, batches = self.config.train, self.batches(cursor.step)
        with contextlib.closing(batches):
            while True:
                if cursor.evaluation_due(train):
                    cursor = self._evaluate(state.params, cursor, run)
                last = cursor.over(train) or run.stop()  # asked once: a signal may come at any time
                if not cursor.saved and (last or cursor.checkpoint_due(train)):
                    self._save(state, cursor, run)
                if last:
                    return cursor
                run.checkpoints.raise_if_failed()
                run.profiler.before(cursor.step, state)
                state, metrics = self.step(state, next(batches))
                cursor = cursor.after_step()
                run.log.push(cursor.step, metrics)

    def _evaluate(self, params: Params, cursor: Cursor, run: Run) -> Cursor:
        """Evaluates; returns the cursor after that, unchanged if a stop was requested meanwhile."""
        run.log.flush()
        try:
            record = self.validation(params, cursor.step, run.stop)
        except GivenUp:
            return cursor
        run.log.evaluation(cursor.step, record)
        run.log.restart_clock()
        return cursor.after_evaluation(record, self.config.train)

    def _translate(
        self, params: Params, lines: Sequence[str], first_line: int
    ) -> Iterator[list[tuple[int, str]]]:
        """Yields translations of `lines` by beam search, batch by batch, as Validation wants."""
        self._translator.params = params
        with Meter("translating for BLEU", len(lines), "lines", plain=is_first()) as meter:
            for batch in self._translator.decode(
                lines, first_line=first_line, long_lines=self._long_lines
            ):
                meter.update(len(batch))
                yield [(place, translation.text) for place, translation in batch]

    def _save(self, state: TrainState, cursor: Cursor, run: Run) -> None:
        run.log.flush()
        run.checkpoints.save(
            state,
            cursor.step,
            evaluation=cursor.evaluation,
            progress=cursor.progress,
            interim=not cursor.checkpoint_due(self.config.train),
        )
        run.log.restart_clock()


def _weights_of(folder: str, like: Params) -> Params:
    """Loads the weights of another run's checkpoint.

    Raises UserError unless they have the names, shapes and dtypes of `like`.
    """
    weights = load_for_inference(folder).params
    if found := difference(named_leaves(weights), named_leaves(like)):
        raise UserError(f"train.initialize_from: {folder} holds another model: {found}")
    return weights


def _say(text: str) -> None:
    """Prints a line to standard error, in process 0 alone."""
    if is_first():
        say(text)


def _end(cursor: Cursor, config: Config) -> str:
    """Says where a run ended, and why if that was before its last step."""
    place = f"at step {cursor.step}"
    if cursor.progress.exhausted(config.train.patience):
        best = cursor.progress.best_step
        return f"{place}: no evaluation since step {best} was better (train.patience)"
    return place
