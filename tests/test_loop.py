"""Whole runs: repeated, stopped, continued and killed, they end the same."""

import contextlib
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from trees import assert_same_bits

from flaxformer_min.checkpoints.format import Meta, read_meta
from flaxformer_min.checkpoints.load import load_for_inference
from flaxformer_min.checkpoints.progress import Progress
from flaxformer_min.checkpoints.retention import find_checkpoints
from flaxformer_min.checkpoints.store import Checkpoints
from flaxformer_min.config import Config
from flaxformer_min.data.batching import assemble
from flaxformer_min.decoding.translator import Translator
from flaxformer_min.errors import UserError
from flaxformer_min.training import loop, validation
from flaxformer_min.training import step as training_step
from flaxformer_min.training.loop import Trainer
from flaxformer_min.training.loss import make_loss
from flaxformer_min.training.prepared_data import prepare_data
from flaxformer_min.training.profiler import Profiler
from flaxformer_min.training.sharding import ROWS, make_mesh
from flaxformer_min.training.state import TrainState
from flaxformer_min.training.validation import Validation
from flaxformer_min.training.workdir import claim, hold
from tools import tiny_config
from tools.tiny_config import changed

pytestmark = pytest.mark.run
ROOT = Path(__file__).parent.parent
BLEU = {"score": 1.0, "signature": "none"}


def losses(workdir: Path) -> list[tuple[str, str]]:
    """(step, loss) of every training step, as the text in metrics.jsonl."""
    return re.findall(
        r'"step": (\d+), "kind": "train", "loss": ([^,]+),', (workdir / "metrics.jsonl").read_text()
    )


def evaluations(workdir: Path) -> list[dict]:
    lines = map(json.loads, log_lines(workdir))
    return [line for line in lines if "validation_loss" in line]


def metas(workdir: Path) -> list[Meta]:
    """Of every checkpoint: its step, evaluation, progress ..."""
    return [read_meta(workdir / "checkpoints" / str(step)) for step in steps_of(workdir)]


def steps_of(workdir: Path) -> list[int]:
    return list(find_checkpoints(workdir / "checkpoints"))


def assert_ended_alike(workdir: Path, finished: Path):
    assert losses(workdir) == losses(finished)
    assert evaluations(workdir) == evaluations(finished)
    assert metas(workdir) == metas(finished)
    one, other = load_for_inference(workdir), load_for_inference(finished)
    assert (one.step, one.tokenizer.sha256) == (other.step, other.tokenizer.sha256)
    assert_same_bits(one.params, other.params)


def test_a_run_learns_and_keeps_what_it_was_told_to_keep(finished):
    numbers = [float(loss) for _, loss in losses(finished)]
    assert numbers[0] > 5 and numbers[-1] < 0.8 * numbers[0]
    assert steps_of(finished) == [100, 150, 200]


def test_a_run_with_more_steps_goes_on_and_ends_like_one_never_stopped(tiny, finished, tmp_path):
    assert loop.run(changed(tiny, "train", steps=100), tmp_path, profile_steps=2) == 0
    assert losses(tmp_path) == losses(finished)[:100]
    assert list((tmp_path / "profile").rglob("*.xplane.pb"))
    assert loop.run(tiny, tmp_path) == 0
    assert_ended_alike(tmp_path, finished)


@contextlib.contextmanager
def signalled_in(owner: Any, name: str, call: int, number: int = signal.SIGTERM):
    """Within it, the process gets a signal when `name` is called for the `call`-th time."""
    original, calls = getattr(owner, name), itertools.count(1)

    def interrupted(*arguments, **options):
        if next(calls) == call:
            os.kill(os.getpid(), number)
        return original(*arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, interrupted)
        yield


def test_a_run_stopped_in_every_phase_ends_like_one_never_stopped(tiny, finished, tmp_path):
    phases = [
        (Trainer, "step", 1, [1]),
        (Checkpoints, "save", 1, [50, 51]),  # the stop is noticed one step after it
        (validation, "evaluation_batches", 1, [50, 100]),
        (Translator, "decode", 1, [50, 100]),
        (Trainer, "step", 18, [50, 100, 118]),
        (
            Validation,
            "translations",
            1,
            [50, 100, 150, 200],
        ),  # the last is interim: it counts for nothing
    ]
    for owner, name, call, steps in phases:
        with signalled_in(owner, name, call):
            assert loop.run(tiny, tmp_path) == 143
        assert steps_of(tmp_path) == steps
    assert loop.run(tiny, tmp_path) == 0
    assert_ended_alike(tmp_path, finished)
    assert not (tmp_path / "checkpoints" / "118").exists()


def test_a_stopped_process_leaves_no_child_and_the_same_command_goes_on(
    tiny, finished, corpus, tmp_path
):
    verbs = ["train.py"], ["-m", "flaxformer_min", "train"]
    signals, statuses = (signal.SIGTERM, signal.SIGINT), (143, 130)
    done = 0
    for verb, number, status in zip(verbs, signals, statuses, strict=True):
        config = f"{tiny_config.__file__}:{corpus}"
        command = [sys.executable, *verb, "--config", config, "--workdir", str(tmp_path)]
        with subprocess.Popen(
            command, cwd=ROOT, stderr=subprocess.PIPE, text=True, start_new_session=True
        ) as process:
            while process.poll() is None and len(list(log_lines(tmp_path))) <= done:
                time.sleep(0.01)
            os.killpg(process.pid, number)
            _, errors = process.communicate()
        assert process.returncode == status, errors
        assert re.search(r"stopped at step \d+; the same command goes on\n$", errors)
        with pytest.raises(ProcessLookupError):
            os.killpg(process.pid, 0)
        done = max(json.loads(line)["step"] for line in log_lines(tmp_path))
        assert steps_of(tmp_path)[-1] == done < tiny.train.steps
    assert loop.run(tiny, tmp_path) == 0
    assert_ended_alike(tmp_path, finished)


def log_lines(workdir: Path) -> list[str]:
    path = workdir / "metrics.jsonl"
    return path.read_text().splitlines() if path.exists() else []


def test_a_finished_run_run_again_does_nothing_and_says_so(tiny, finished, tmp_path, capsys):
    def content():
        files = (path for path in tmp_path.rglob("*") if path.is_file())
        return {path: path.read_bytes() for path in files}

    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    before = content()
    assert loop.run(tiny, tmp_path) == 0
    assert "is finished, at step 200; nothing to do" in capsys.readouterr().err
    assert content() == before


def test_training_on_other_text_than_before_is_refused(tiny, finished, tmp_path):
    workdir, data = tmp_path / "workdir", tmp_path / "data"
    for name in ("config.json", "tokenizer.model", "corpus.json", "checkpoints"):
        copy = shutil.copytree if (finished / name).is_dir() else shutil.copy
        workdir.mkdir(exist_ok=True)
        copy(finished / name, workdir / name)
    data.mkdir()
    tiny_config.write_corpus(data)
    elsewhere = changed(tiny, "data", dir=str(data))
    claim(workdir, elsewhere)
    prepare_data(elsewhere, workdir)  # the same text in another place is welcome
    with (data / "train.en").open("r+") as file:
        file.write("X")
    before = (workdir / "config.json").read_bytes()
    with pytest.raises(UserError, match=r"data\.train: .* was trained on other text"):
        loop.run(changed(elsewhere, "train", steps=300), workdir)
    assert (workdir / "config.json").read_bytes() == before


def prepared(config: Config, workdir: Path) -> Trainer:
    claim(workdir, config)
    return Trainer(config, make_mesh(config.mesh), prepare_data(config, workdir))


def advanced(trainer: Trainer, state: TrainState, start: int, end: int) -> TrainState:
    """The state after the steps from `start` to `end`."""
    with contextlib.closing(trainer.batches(start)) as batches:
        for _ in range(start, end):
            state, metrics = trainer.step(state, next(batches))
            float(metrics.loss)  # on few cores, eight devices in many steps at once can starve
    return state


def test_the_first_step_finds_its_program_compiled_ahead(tiny, tmp_path, caplog):
    trainer = prepared(tiny, tmp_path)
    state = trainer.fresh_state()
    jax.config.update("jax_log_compiles", True)  # in all threads, which the context would not
    try:
        trainer.compile_ahead(3).result()
        assert caplog.text.count("Compiling jit(train_step)") == 1
        with contextlib.closing(trainer.batches(3)) as batches:
            trainer.step(state, next(batches))
    finally:
        jax.config.update("jax_log_compiles", False)
    assert caplog.text.count("Compiling jit(train_step)") == 1


def test_what_keeps_a_program_from_being_compiled_ahead_ends_the_run(tiny, tmp_path, monkeypatch):
    def failing(*_):
        raise MemoryError("no room for the program")

    monkeypatch.setattr(training_step, "make_loss", lambda *_, **__: failing)
    with pytest.raises(MemoryError, match="no room for the program"):
        loop.run(tiny, tmp_path)
    assert not losses(tmp_path)


@pytest.mark.parametrize(("accumulation", "shapes"), [(1, 1), (4, 2)])
def test_a_state_restored_at_any_step_of_three_epochs_ends_with_the_same_bits(
    tiny, tmp_path, accumulation, shapes
):
    config = changed(tiny, "optimizer", accumulation=accumulation)
    config = changed(config, "data", num_buckets=shapes)
    config = changed(changed(config, "mesh", data=4, tensor=2), "train", keep_last=9)
    trainer = prepared(config, tmp_path)
    epoch = trainer.data.plan.batches_per_epoch
    points = sorted({1, epoch - 1, epoch, epoch + 1, 2 * epoch, 3 * epoch - 1})
    with Checkpoints(tmp_path, config, trainer.data.tokenizer) as checkpoints:
        state, at = trainer.fresh_state(), 0
        for point in points:
            state, at = advanced(trainer, state, at, point), point
            checkpoints.save(state, point)
        end = jax.device_get(advanced(trainer, state, at, 3 * epoch))
        checkpoints.wait()
        for point in points:
            state = trainer.saved_state(checkpoints, point)
            assert_same_bits(jax.device_get(advanced(trainer, state, point, 3 * epoch)), end)


def test_patience_ends_a_run_unless_it_is_evaluated_otherwise(tiny, tmp_path, monkeypatch, capsys):
    def evaluation(self, params, step, stop_requested):
        loss = {50: 3.0, 100: 2.0, 150: 2.0, 200: 2.5, 250: 9.0, 300: 9.0}[step]
        return {
            "validation_loss": loss,
            "validation_perplexity": 9.0,
            "bleu": BLEU | {"step": step},
        }

    monkeypatch.setattr(Validation, "__call__", evaluation)
    patient = changed(
        tiny, "train", steps=300, evaluate_every=50, patience=2, best_metric="loss", keep_last=2
    )
    with signalled_in(Trainer, "step", 170):
        assert loop.run(patient, tmp_path) == 143

    def progress(step: int) -> Progress:
        return read_meta(tmp_path / "checkpoints" / str(step)).progress._replace(measure=None)

    assert progress(170) == Progress(-2.0, 100, 1)
    assert loop.run(patient, tmp_path) == 0
    end = "is finished, at step 200: no evaluation since step 100 was better (train.patience)"
    assert end in capsys.readouterr().err
    assert progress(200) == Progress(-2.0, 100, 2)
    for same in (patient, changed(patient, "decode", beam_size=3)):  # a loss needs no search
        assert loop.run(same, tmp_path) == 0
        assert f"{end}; nothing to do" in capsys.readouterr().err
    other = changed(patient, "data", validation=("train.en", "train.de"))
    assert loop.run(other, tmp_path) == 0
    said = capsys.readouterr().err
    assert said.count("the best so far, step 100, does not count, and train.patience starts") == 1
    assert "is finished, at step 300\n" in said
    assert progress(300) == Progress(-9.0, 250, 1)
    assert list(find_checkpoints(tmp_path / "checkpoints")) == [250, 300]  # 100 is no best any more
    assert load_for_inference(tmp_path, "best").step == 250


def test_ten_steps_that_are_not_finite_end_the_run_without_a_checkpoint(
    tiny, tmp_path, monkeypatch
):
    def make_broken_loss(graphdef, **options):
        def broken_loss(params, batch, key):
            loss, tokens = make_loss(graphdef, **options)(params, batch, key)
            return loss * jnp.nan, tokens

        return broken_loss

    monkeypatch.setattr(training_step, "make_loss", make_broken_loss)
    config = changed(tiny, "data", num_buckets=1)
    config = changed(config, "train", evaluate_every=10, checkpoint_every=10)
    with pytest.raises(
        FloatingPointError, match=r"^steps 1 to 10 were not finite; .*: [\d, ]+$"
    ) as e:
        loop.run(config, tmp_path)
    monkeypatch.undo()
    with hold(tmp_path, config):
        _, ids = prepare_data(config, tmp_path).plan.batch_ids(9)
    assert str(e.value).endswith(": " + ", ".join(map(str, sorted(ids))))
    assert steps_of(tmp_path) == []


def test_fine_tuning_starts_from_the_weights_and_tokenizer_of_another_run(tiny, finished, tmp_path):
    trainer = prepared(changed(tiny, "train", initialize_from=str(finished)), tmp_path)
    tokenizer = (finished / "tokenizer.model").read_bytes()
    assert (tmp_path / "tokenizer.model").read_bytes() == tokenizer
    state, weights = trainer.fresh_state(), load_for_inference(finished).params
    assert_same_bits(state.params, weights)
    adam = state.opt_state[0]
    assert int(state.step) == int(adam.count) == 0
    assert not any(leaf.any() for leaf in jax.tree.leaves((adam.mu, adam.nu)))
    batch = assemble(trainer.data.plan, trainer.data.train, trainer.data.tokenizer.pad_id, 0)
    batch = jax.device_put(batch, NamedSharding(trainer.mesh, ROWS))
    _, metrics = trainer.step(state, batch)
    assert float(metrics.loss) < 0.8 * float(losses(finished)[0][1])
    assert_same_bits(weights, load_for_inference(finished).params)  # the step was given a copy


@pytest.mark.parametrize(
    ("section", "values", "message"),
    [
        (
            "model",
            {"d_ff": 48},
            r"holds another model: .* is float32\[32, 16\] there and float32\[48, 16\]",
        ),
        ("model", {"num_layers": 2}, "holds another model: .* is missing there"),
        ("data", {"vocab_size": 291}, "data.vocab_size is 291, but the tokenizer of .* has 290"),
        ("data", {"tokenizer": "other.model"}, "data.tokenizer is another than that of"),
    ],
)
def test_fine_tuning_another_model_is_refused(
    tiny, finished, corpus, tmp_path, section, values, message
):
    if "tokenizer" in values:
        model = (finished / "tokenizer.model").read_bytes()
        (corpus / "other.model").write_bytes(model.replace(b"nfc", b"nfd"))
    config = changed(tiny, "train", initialize_from=str(finished))
    with pytest.raises(UserError, match=message):
        prepared(changed(config, section, **values), tmp_path).fresh_state()


def test_rows_that_do_not_divide_over_devices_and_micro_batches_are_refused(tiny, tmp_path):
    with pytest.raises(UserError, match=r"data.row_multiple is 8: .* multiple of .* = 16"):
        loop.run(changed(tiny, "data", row_multiple=8), tmp_path)
    assert not list(tmp_path.iterdir())


def test_the_validation_loss_is_minus_the_mean_score_of_a_token(finished, corpus):
    translator = Translator.load(finished)
    sides = [(corpus / f"validation.{side}").read_text().splitlines() for side in ("en", "de")]
    targets = translator.tokenizer.encode_batch(sides[1])
    tokens = sum(min(len(ids), translator.config.model.max_length) for ids in targets)
    expected = -sum(translator.score(list(zip(*sides, strict=True)))) / tokens
    last = json.loads(log_lines(finished)[-1])
    assert last["validation_loss"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("start", "end", "count", "traced"),
    [
        (0, 99, 3, [10, 11, 12]),
        (50, 99, 2, [60, 61]),  # a resumed run compiles too
        (0, 12, 4, [8, 9, 10, 11]),
        (7, 9, 5, [7, 8]),
        (0, 99, 0, []),
    ],
)
def test_a_trace_begins_after_ten_steps_where_there_are_so_many(
    tmp_path, monkeypatch, start, end, count, traced
):
    running = []
    monkeypatch.setattr(jax.profiler, "start_trace", running.append)
    monkeypatch.setattr(jax.profiler, "stop_trace", running.clear)
    profiler, found = Profiler(tmp_path, start, end, count), []
    for step in range(start, end):
        profiler.before(step, None)
        found += [step] * len(running)
    profiler.close()
    assert (found, running) == (traced, [])


def test_a_run_for_which_the_disk_has_no_space_is_refused_before_its_first_step(
    tiny, tmp_path, monkeypatch
):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=0))
    with pytest.raises(UserError, match=r"0 bytes are free and .* needed, for 5 checkpoints"):
        loop.run(tiny, tmp_path)
    assert steps_of(tmp_path) == []
    assert not (tmp_path / "metrics.jsonl").exists()


def test_a_trace_ends_when_its_last_step_is_over(tmp_path, monkeypatch):
    events = []
    monkeypatch.setattr(jax, "block_until_ready", lambda state: events.append(state))
    monkeypatch.setattr(jax.profiler, "start_trace", lambda folder: events.append("start"))
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: events.append("stop"))
    profiler = Profiler(tmp_path, 0, 99, 2)
    for step in range(20):
        profiler.before(step, f"state {step}")
    assert events == ["start", "state 12", "stop"]
