"""The log of a run: every step once, valid JSON, the same in TensorBoard events."""

import contextlib
import json
import math
import re
import resource
import struct
import time
from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp
import pytest
from tensorboardX.proto.event_pb2 import Event

from flaxformer_min.training.cursor import Cursor
from flaxformer_min.training.log import MetricsLog
from flaxformer_min.training.optimizer import warmup_inverse_sqrt
from flaxformer_min.training.state import Metrics

HPARAMS = {"model.d_model": 16, "data.source": "files", "model.biases": False, "train.rate": None}


def lines(workdir: Path) -> list[dict]:
    def refuse(word):
        raise AssertionError(f"{word} is not JSON")

    text = (workdir / "metrics.jsonl").read_text()
    assert text.endswith("\n")
    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


def events(workdir: Path) -> list[tuple[str, int, float]]:
    """(name, step, value) of every scalar in the event files."""
    found = []
    for path in sorted((workdir / "tensorboard").iterdir()):
        data = path.read_bytes()
        while data:
            (size,) = struct.unpack("<Q", data[:8])
            event = Event.FromString(data[12 : 12 + size])
            found += [
                (v.tag, event.step, v.simple_value)
                for v in event.summary.value
                if v.WhichOneof("value") == "simple_value"
            ]
            data = data[16 + size :]
    return found


def open_log(workdir: Path, step: int = 0, evaluation: dict | None = None) -> MetricsLog:
    at, schedule = Cursor(step, evaluation=evaluation), warmup_inverse_sqrt(16, 10, peak=0.5)
    return MetricsLog(workdir, at, 40, schedule, lambda step: [1000 + step, 7], HPARAMS)


def metrics(loss: float, skipped: int = 0, in_a_row: int = 0) -> Metrics:
    floats = [jnp.float32(value) for value in (loss, 24, 1.5)]
    return Metrics(*floats, jnp.int32(skipped), jnp.int32(in_a_row))


def test_a_run_logs_every_step_once_and_its_evaluations(finished):
    training, evaluations = (
        [line for line in lines(finished) if line["kind"] == kind]
        for kind in ("train", "validation")
    )
    assert len(training) + len(evaluations) == len(lines(finished))
    assert [line["step"] for line in training] == list(range(1, 201))
    for line in training:
        assert set(line) == {
            "step", "kind", "loss", "tokens", "gradient_norm", "learning_rate", "tokens_per_second",
        }  # fmt: skip
        assert all(value > 0 for name, value in line.items() if name != "kind")
    assert [line["step"] for line in evaluations] == [100, 200]
    for line in evaluations:
        assert line["validation_perplexity"] == pytest.approx(math.exp(line["validation_loss"]))
        assert (line["bleu"]["step"], line["bleu"]["lines"]) == (line["step"], 41)
        assert {"score", "signature", "beam_size", "length_penalty_alpha"} <= set(line["bleu"])


def test_an_evaluation_shows_the_same_three_lines_each_time_with_their_translations(
    finished, corpus
):
    pairs = [(corpus / f"validation.{side}").read_text().splitlines() for side in ("en", "de")]
    known = set(zip(*pairs, strict=True))
    first, last = (line["samples"] for line in lines(finished) if line["kind"] == "validation")
    for one, other in zip(first, last, strict=True):
        assert (one["source"], one["reference"]) == (other["source"], other["reference"])
        assert (one["source"], one["reference"]) in known and isinstance(one["translation"], str)
    assert len(first) == 3


def test_tensorboard_events_hold_the_same_numbers_in_groups(finished):
    found = {(name, step): value for name, step, value in events(finished)}
    for line in lines(finished):
        for name in line.keys() - {"step", "kind", "bleu", "samples"}:
            tag = f"{line['kind']}/{name.removeprefix('validation_')}"
            assert found[tag, line["step"]] == pytest.approx(line[name], rel=1e-6)
        if "bleu" in line:
            assert found["validation/bleu", line["step"]] == pytest.approx(line["bleu"]["score"])
    assert {name.split("/")[0] for name, _ in found} == {"train", "validation"}


def test_tensorboard_has_the_settings_of_a_run_and_its_samples_as_text(tmp_path):
    log = open_log(tmp_path)
    hostile = {"source": "a|b <b>", "reference": "*c* `d`", "translation": ""}
    bleu = {"score": 9.0, "signature": "x"}
    log.evaluation(
        7,
        {"validation_loss": 1.0, "validation_perplexity": 2.7, "bleu": bleu, "samples": [hostile]},
    )
    log.close()
    (path,) = (tmp_path / "tensorboard").iterdir()
    (session,) = re.findall(rb"model\.d_model.{1,9}\x00\x00\x000@", path.read_bytes(), re.DOTALL)[
        :1
    ]
    assert session and b"validation/samples" in path.read_bytes()
    row = b"| <code>a&#124;b &lt;b&gt;</code> | <code>*c* `d`</code> | <code></code> |"
    assert row in path.read_bytes()


def test_opening_the_log_at_a_step_drops_later_lines_and_a_cut_one(tmp_path):
    whole = [{"step": step, "loss": 0.5} for step in (1, 2, 3)]
    evaluation = {"step": 2, "validation_loss": 1.0}
    text = "".join(json.dumps(line) + "\n" for line in [*whole[:2], evaluation, whole[2]])
    (tmp_path / "metrics.jsonl").write_text(text + '{"step": 4, "lo')
    open_log(tmp_path, 2, evaluation).close()
    assert lines(tmp_path) == [*whole[:2], evaluation]
    open_log(tmp_path, 2).close()  # the evaluation at this step is to be made again
    assert lines(tmp_path) == whole[:2]


def test_a_whole_last_line_without_its_newline_is_kept(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}')
    open_log(tmp_path, step=1).close()
    assert lines(tmp_path) == [{"step": 1}]


@pytest.mark.parametrize(
    "damage",
    [b"7", b"null", b"[]", b"{}", b'{"step": "1"}', b"[" * 100_000, b'{"step": 1, "\xff": 0}'],
)
def test_a_line_that_no_run_wrote_is_dropped_and_its_neighbours_stay(tmp_path, damage):
    good = [{"step": 1}, {"step": 2}]
    rows = [json.dumps(good[0]).encode(), damage, json.dumps(good[1]).encode(), b""]
    (tmp_path / "metrics.jsonl").write_bytes(b"\n".join(rows))
    open_log(tmp_path, step=2).close()
    assert lines(tmp_path) == good


class Clock:
    now = 0.0


class Loss(NamedTuple):
    """A loss that is there when its step has ended; whoever asks for it before has to wait."""

    clock: Clock
    end: float

    def is_ready(self) -> bool:
        return self.clock.now >= self.end

    def __float__(self) -> float:
        self.clock.now = max(self.clock.now, self.end)
        return 4.0


@pytest.mark.parametrize("returns_at_once", [True, False])
def test_a_rate_is_that_of_the_step_itself(tmp_path, monkeypatch, returns_at_once):
    """Whether the device works in the background or the call of a step returns at its end."""
    clock, ends = Clock(), (2.0, 5.0, 11.0)
    monkeypatch.setattr(time, "perf_counter", lambda: clock.now)
    log = open_log(tmp_path)
    for step, end in enumerate(ends, 1):
        if not returns_at_once:
            clock.now = end
        log.push(step, metrics(4.0)._replace(loss=Loss(clock, end)))
    if not returns_at_once:
        clock.now += 1
    log.flush()
    log.close()
    rates = [line["tokens_per_second"] for line in lines(tmp_path)]
    assert rates == pytest.approx([24 / 2, 24 / 3, 24 / 6])


@contextlib.contextmanager
def no_file_may_be_longer_than(size: int):
    """As on a full disk, writing raises OSError."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_is_an_error_that_names_the_file(tmp_path):
    log = open_log(tmp_path)
    with (
        no_file_may_be_longer_than(2000),
        pytest.raises(OSError, match=r"metrics\.jsonl"),
    ):
        for step in range(1, 41):
            log.push(step, metrics(4.0))
    log.close()
    open_log(tmp_path, 5).close()
    assert [line["step"] for line in lines(tmp_path)] == [1, 2, 3, 4, 5]
    log = open_log(tmp_path, 5)
    with no_file_may_be_longer_than(10), pytest.raises(OSError, match="tensorboard"):
        log.flush()
    log.close()


def test_a_step_is_written_when_the_next_one_was_dispatched(tmp_path):
    log = open_log(tmp_path)
    log.push(1, metrics(4.0))
    assert (tmp_path / "metrics.jsonl").read_text() == ""
    log.push(2, metrics(3.0))
    assert [line["loss"] for line in lines(tmp_path)] == [4.0]
    log.flush()
    log.flush()
    assert [line["loss"] for line in lines(tmp_path)] == [4.0, 3.0]
    log.close()


def test_the_learning_rate_is_that_of_the_updates_made(tmp_path):
    log = open_log(tmp_path)
    for step, skipped in ((1, 0), (2, 0), (4, 1), (10, 0)):
        log.push(step, metrics(1.0, skipped))
    log.flush()
    log.close()
    rates = [line["learning_rate"] for line in lines(tmp_path)]
    assert rates == pytest.approx([0.05, 0.10, 0.15, 0.5])


def test_what_is_not_finite_is_null_and_said(tmp_path, capsys):
    log = open_log(tmp_path)
    log.push(7, metrics(math.nan, skipped=1, in_a_row=1))
    log.flush()
    log.close()
    assert lines(tmp_path)[0]["loss"] is None
    assert "step 7: loss or gradient not finite" in capsys.readouterr().err


def test_ten_steps_in_a_row_that_are_not_finite_end_the_run(tmp_path):
    log = open_log(tmp_path)
    log.push(19, metrics(math.inf, skipped=12, in_a_row=9))
    log.push(20, metrics(math.inf, skipped=13, in_a_row=10))
    with pytest.raises(FloatingPointError, match=r"^steps 11 to 20 were .* last batch: 7, 1020$"):
        log.flush()
    log.close()


def test_a_step_that_changes_nothing_has_the_rate_that_its_update_would_have_had(tmp_path):
    log = open_log(tmp_path)
    for step, skipped, in_a_row in ((2, 0, 0), (3, 1, 1), (4, 2, 2), (5, 2, 0)):
        log.push(step, metrics(1.0, skipped, in_a_row))
    log.flush()
    log.close()
    rates = [line["learning_rate"] for line in lines(tmp_path)]
    assert rates == pytest.approx([0.10, 0.15, 0.15, 0.15])


def test_without_a_terminal_the_first_step_is_a_line_and_then_one_when_it_is_time(
    tmp_path, capsys, monkeypatch
):
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", lambda: clock.now)
    log = open_log(tmp_path, step=10)
    for step, seconds in ((11, 0.5), (12, 0.9), (13, 2.1), (14, 2.2), (16, 6.0), (17, 7.0)):
        clock.now = seconds
        log.push(step, metrics(4.0))
        log.flush()
    log.close()
    said = capsys.readouterr().err.splitlines()
    assert [line.split(":")[0] for line in said] == ["step 11/40", "step 13/40", "step 16/40"]
    assert said[0] == "step 11/40: loss 4.000, 48 tokens/s"
    assert said[1] == "step 13/40: loss 4.000, 20 tokens/s, 00:21 left"  # 27 steps at 1.6 / 2 s
