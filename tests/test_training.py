"""Whole runs: repeated, stopped, continued and killed, they end the same."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
import tiny_config
from jax.sharding import NamedSharding
from tiny_config import changed

from flaxformer_min import training
from flaxformer_min.batching import assemble
from flaxformer_min.checkpoint import counted_steps, load_for_inference
from flaxformer_min.config import Config
from flaxformer_min.errors import UserError
from flaxformer_min.profiler import Profiler
from flaxformer_min.sharding import ROWS, make_mesh
from flaxformer_min.training import Trainer
from flaxformer_min.translate import Translator
from flaxformer_min.validation import Validation
from flaxformer_min.workdir import claim, prepare_data

ROOT = Path(__file__).parent.parent


def losses(workdir: Path) -> list[tuple[str, str]]:
    """(step, loss) of every training step, as the text in metrics.jsonl."""
    return re.findall(r'"step": (\d+), "loss": ([^,]+),', (workdir / "metrics.jsonl").read_text())


def steps_of(workdir: Path) -> list[int]:
    return counted_steps(workdir / "checkpoints")


def assert_same_bits(left, right):
    jax.tree.map(np.testing.assert_array_equal, left, right)


def assert_ended_alike(workdir: Path, finished: Path):
    assert losses(workdir) == losses(finished)
    one, other = load_for_inference(workdir), load_for_inference(finished)
    assert (one.step, one.tokenizer.sha256) == (other.step, other.tokenizer.sha256)
    assert_same_bits(one.params, other.params)


def test_a_run_learns_and_keeps_what_it_was_told_to_keep(finished):
    numbers = [float(loss) for _, loss in losses(finished)]
    assert numbers[0] > 5 and numbers[-1] < 0.8 * numbers[0]
    assert steps_of(finished) == [100, 150, 200]


def test_a_run_with_more_steps_goes_on_and_ends_like_one_never_stopped(tiny, finished, tmp_path):
    assert training.run(changed(tiny, "train", steps=100), tmp_path, profile_steps=2) == 0
    assert losses(tmp_path) == losses(finished)[:100]
    assert list((tmp_path / "profile").rglob("*.xplane.pb"))
    assert training.run(tiny, tmp_path) == 0
    assert_ended_alike(tmp_path, finished)


def test_a_signal_during_an_evaluation_saves_that_step(tiny, finished, tmp_path, monkeypatch):
    def interrupted(self, params, step, bleu=Validation.bleu):
        os.kill(os.getpid(), signal.SIGINT)
        return bleu(self, params, step)

    with monkeypatch.context() as patch:
        patch.setattr(Validation, "bleu", interrupted)
        assert training.run(tiny, tmp_path) == 130
    assert steps_of(tmp_path) == [50, 100]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert training.run(tiny, tmp_path) == 0
    assert_ended_alike(tmp_path, finished)


def test_a_stopped_process_exits_with_its_signal_and_the_same_command_goes_on(
    tiny, finished, corpus, tmp_path
):
    verbs = ["train.py"], ["-m", "flaxformer_min", "train"]
    signals, statuses = (signal.SIGTERM, signal.SIGINT), (143, 130)
    done = 0
    for verb, number, status in zip(verbs, signals, statuses, strict=True):
        config = f"{tiny_config.__file__}:{corpus}"
        command = [sys.executable, *verb, "--config", config, "--workdir", str(tmp_path)]
        with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
            while process.poll() is None and len(list(log_lines(tmp_path))) <= done:
                time.sleep(0.01)
            process.send_signal(number)
            _, errors = process.communicate()
        assert process.returncode == status, errors
        assert re.search(r"stopped at step \d+; the same command goes on\n$", errors)
        done = max(json.loads(line)["step"] for line in log_lines(tmp_path))
        assert steps_of(tmp_path)[-1] == done < tiny.train.steps
    assert training.run(tiny, tmp_path) == 0
    assert_ended_alike(tmp_path, finished)


def log_lines(workdir: Path) -> list[str]:
    path = workdir / "metrics.jsonl"
    return path.read_text().splitlines() if path.exists() else []


def test_a_finished_run_run_again_does_nothing_and_says_so(tiny, finished, capsys):
    def content():
        files = (path for path in finished.rglob("*") if path.is_file())
        return {path: path.read_bytes() for path in files}

    before = content()
    assert training.run(tiny, finished) == 0
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
    with pytest.raises(UserError, match=r"data\.train: .* was trained on other text"):
        prepare_data(elsewhere, workdir)


def prepared(config: Config, workdir: Path) -> Trainer:
    claim(workdir, config)
    return Trainer(config, make_mesh(config.mesh), prepare_data(config, workdir))


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
    _, metrics = trainer.train_step(state, batch, jax.random.key(1))
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
        (corpus / "other.model").write_bytes(model.replace(b"identity", b"identitz"))
    config = changed(tiny, "train", initialize_from=str(finished))
    with pytest.raises(UserError, match=message):
        prepared(changed(config, section, **values), tmp_path).fresh_state()


def test_rows_that_do_not_divide_over_devices_and_micro_batches_are_refused(tiny, tmp_path):
    with pytest.raises(UserError, match=r"data.row_multiple is 8: .* multiple of .* = 16"):
        training.run(changed(tiny, "data", row_multiple=8), tmp_path)
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
    profiler.stop()
    assert (found, running) == (traced, [])


SIGNALLED = """
import time
from flaxformer_min.signals import StopRequest
with StopRequest() as stop:
    if {deferring}:
        stop.defer()
    print("ready", flush=True)
    while not stop.requested:
        time.sleep(0.001)
    print("requested", flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("deferring", [False, True])
def test_a_second_signal_ends_the_process_at_once_and_a_first_one_before_training(deferring):
    command = [sys.executable, "-c", SIGNALLED.format(deferring=deferring)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for answer in ("ready\n", "requested\n")[: 1 + deferring]:
            assert process.stdout.readline() == answer
            process.terminate()
        assert process.wait(timeout=30) == 143
