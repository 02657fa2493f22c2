"""What a workdir lets in: its own run, and nothing that would mix two."""

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from flaxformer_min.config import Config
from flaxformer_min.config_rules import config_to_json
from flaxformer_min.data import corpus
from flaxformer_min.data.tokenizer_training import prepare_tokenizer
from flaxformer_min.errors import UserError
from flaxformer_min.training import loop, prepared_data
from flaxformer_min.training.prepared_data import prepare_data
from flaxformer_min.training.workdir import claim, hold, write_config
from tools.tiny_config import changed

ROOT = Path(__file__).parent.parent


@pytest.fixture
def alone(tiny, tmp_path) -> Config:
    """The config of a run whose cache no other test fills."""
    return changed(tiny, "data", cache=str(tmp_path / "cache"))


def fake_checkpoint(folder: Path) -> None:
    """Enough of one to count."""
    folder = folder / "checkpoints" / "10"
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text("{}")


@pytest.mark.parametrize(
    ("section", "before", "after", "message"),
    [
        ("model", {"dropout": 0.1}, {"dropout": 0.2}, "model.dropout was 0.1 .* and is 0.2 now"),
        ("data", {"seed": 1}, {"seed": 2}, "data.seed was 1 in this workdir and is 2 now"),
        (
            "train",
            {"steps": 9},
            {"steps": 8},
            "train.steps was 9 .* is 8 now: it can only grow",
        ),
    ],
)
def test_a_workdir_with_checkpoints_of_another_config_is_refused(
    tiny, tmp_path, section, before, after, message
):
    claim(tmp_path, changed(tiny, section, **before))
    fake_checkpoint(tmp_path)
    with pytest.raises(UserError, match=message):
        claim(tmp_path, changed(tiny, section, **after))
    claim(tmp_path, changed(tiny, section, **before))


def test_what_may_change_on_resume_is_let_in_and_written_down_when_all_is_well(tiny, tmp_path):
    def written():
        config = json.loads((tmp_path / "config.json").read_text())
        return config["train"]["steps"], config["decode"]["beam_size"]

    claim(tmp_path, tiny)
    fake_checkpoint(tmp_path)
    more = changed(changed(tiny, "train", steps=300), "decode", beam_size=3)
    claim(tmp_path, more)
    assert written() == (200, 2)  # what comes next may still be refused
    write_config(tmp_path, more)
    assert written() == (300, 3)


HOLD = """
import pathlib, sys
from flaxformer_min.config_rules import config_from_json
from flaxformer_min.training.workdir import hold
with hold(pathlib.Path(sys.argv[1]), config_from_json(sys.argv[2])):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.mark.run
def test_a_second_run_is_refused_while_the_first_lives(tiny, tmp_path):
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path), config_to_json(tiny)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == b"held\n"
        with pytest.raises(UserError, match="another run is at work in it"):
            loop.run(tiny, tmp_path)
        process.kill()
    with hold(tmp_path, tiny):
        assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "lock"]


def test_a_start_that_came_to_nothing_does_not_bind_the_next(tiny, tmp_path):
    too_large = changed(tiny, "data", vocab_size=5000)
    claim(tmp_path, too_large)
    with pytest.raises(UserError, match=r"data.vocab_size: 5000 is more than .* at most \d+"):
        prepare_data(too_large, tmp_path)
    for size in (290, 285):  # the second finds a tokenizer and a corpus that it must not use
        config = changed(tiny, "data", vocab_size=size)
        claim(tmp_path, config)
        assert prepare_data(config, tmp_path).tokenizer.vocab_size == size


def test_a_resumed_run_keeps_its_tokenizer(tiny, tmp_path):
    claim(tmp_path, tiny)
    first = prepare_data(tiny, tmp_path).tokenizer
    fake_checkpoint(tmp_path)
    for name in ("train.en", "train.de"):
        (tmp_path / name).write_text("x\n")
    claim(tmp_path, tiny)
    elsewhere = changed(tiny, "data", dir=str(tmp_path), validation=("train.en", "train.de"))
    with pytest.raises(UserError, match=r"data\.train: .* was trained on other text"):
        prepare_data(elsewhere, tmp_path)
    assert prepare_data(tiny, tmp_path).tokenizer.sha256 == first.sha256


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.model", b"x", r"tokenizer\.model: not this run's any more"),
        ("tokenizer.model", None, r"tokenizer\.model: not this run's any more"),
        ("corpus.json", b"{", r"corpus\.json: cannot be read"),
        ("corpus.json", b"[" * 100_000, r"corpus\.json: cannot be read"),
        ("corpus.json", b"[]", r"corpus\.json: cannot be read"),
        ("corpus.json", None, r"corpus\.json: cannot be read"),
    ],
)
def test_a_resumed_run_misses_what_it_was_trained_with(tiny, tmp_path, name, content, message):
    claim(tmp_path, tiny)
    prepare_data(tiny, tmp_path)
    fake_checkpoint(tmp_path)
    (tmp_path / name).unlink()
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        prepare_data(tiny, tmp_path)


@pytest.mark.parametrize("seen", [[], ["tokenizer.model"]])
def test_a_process_that_does_not_see_what_process_0_prepared_says_so(
    tiny, tmp_path, monkeypatch, seen
):
    here, there = tmp_path / "here", tmp_path / "there"
    there.mkdir()
    claim(there, tiny)
    prepare_data(tiny, there)
    report = json.loads((there / "corpus.json").read_text())
    digests = {split: report[split]["digest"] for split in ("train", "validation")}
    digests |= {"tokenizer": report["tokenizer"], "cache": str(here / "corpus")}
    here.mkdir()
    for name in seen:
        shutil.copy(there / name, here)
    monkeypatch.setattr(prepared_data, "broadcast", lambda work: digests)
    monkeypatch.setattr(prepared_data, "is_first", lambda: False)
    with pytest.raises(UserError, match=f"--workdir {here}: must be on a disk that all processes"):
        prepare_data(tiny, here)
    digests["cache"] = tiny.data.cache
    assert prepare_data(tiny, there).tokenizer.sha256 == digests["tokenizer"]


def test_a_start_killed_before_its_tokenizer_was_written_does_not_bind_the_next(
    alone, tmp_path, monkeypatch
):
    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, hold(tmp_path, alone):
        patch.setattr(prepared_data, "prepare_tokenizer", killed)
        with pytest.raises(KeyboardInterrupt):
            prepare_data(alone, tmp_path)
    smaller = changed(alone, "data", vocab_size=285)
    with hold(tmp_path, smaller):
        assert prepare_data(smaller, tmp_path).tokenizer.vocab_size == 285


def test_a_tokenizer_is_trained_once_for_a_text_and_what_decides_it(alone, tmp_path, monkeypatch):
    trained = []

    def counted(config, lines):
        trained.append(config.vocab_size)
        return prepare_tokenizer(config, lines)

    def start(**data):
        config = changed(alone, "data", **data)
        with hold(run, config):
            return prepare_data(config, run).tokenizer.sha256

    monkeypatch.setattr(prepared_data, "prepare_tokenizer", counted)
    run = tmp_path / "run"
    first = start()
    assert start(max_length=12, tokens_per_batch=192) == first and trained == [290]
    (kept,) = (tmp_path / "cache").glob("*.tokenizer")
    for damaged in (kept.read_bytes()[:-1], b"X" + kept.read_bytes()[1:], b""):
        kept.write_bytes(damaged)
        assert start() == first
    assert trained == [290] * 4
    other = start(vocab_size=285)
    assert other != first and trained == [290] * 4 + [285]
    for name in ("train.en", "train.de"):  # other text in files of other names
        text = (Path(alone.data.dir) / name).read_bytes()
        (tmp_path / name).write_bytes(text + b"x\n")
    assert start(train=(str(tmp_path / "train.en"), str(tmp_path / "train.de"))) != first
    assert start() == first and len(trained) == 6


@pytest.mark.run
def test_a_sweep_encodes_its_text_once_even_if_its_runs_start_at_once(
    alone, tmp_path, monkeypatch, capfd
):
    begun, write = threading.Barrier(2), corpus._Writer.write
    first = [True]

    def slow(writer, source):
        if first.pop() if first else False:
            with contextlib.suppress(threading.BrokenBarrierError):
                begun.wait(0.5)  # the other run has all the time to do the same
        return write(writer, source)

    monkeypatch.setattr(corpus._Writer, "write", slow)
    configs = [changed(alone, "model", dropout=rate) for rate in (0.0, 0.1, 0.2, 0.3)]
    for n in range(4):
        (tmp_path / str(n)).mkdir()
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda n: prepare_data(configs[n], tmp_path / str(n)), range(4)))
    told = capfd.readouterr().err
    assert len(re.findall(r"^encoding .*: \d+ pairs$", told, re.MULTILINE)) == 2
    assert told.count("training the tokenizer") == 1
    assert told.count(f"{tmp_path}/cache: encoded text, shared by all runs (data.cache)") == 4
    assert len([path for path in (tmp_path / "cache").iterdir() if path.is_dir()]) == 2
    shutil.rmtree(tmp_path / "cache")  # a workdir is whole without it
    fake_checkpoint(tmp_path / "3")
    again = prepare_data(configs[3], tmp_path / "3")
    for data in (*found, again):
        assert data.tokenizer.sha256 == found[0].tokenizer.sha256
        np.testing.assert_array_equal(data.train.lengths, found[0].train.lengths)


@pytest.mark.parametrize("processes", [1, 2])
def test_without_a_folder_named_the_cache_is_the_users_or_on_the_disk_that_processes_share(
    alone, tmp_path, monkeypatch, processes
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(jax, "process_count", lambda: processes)
    folder = tmp_path / "flaxformer_min" / "corpora"
    where, config = prepared_data.cache_of, changed(alone, "data", cache=None)
    if processes == 2:
        assert where(config, tmp_path / "w") == tmp_path / "w" / "corpus"
        return
    assert where(config, tmp_path / "w") == folder and folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o777)
    assert where(config, tmp_path / "w") == tmp_path / "w" / "corpus"
    assert where(alone, tmp_path / "w") == tmp_path / "cache"


@pytest.mark.parametrize("name", ["checkpoints", "tokenizer.model"])
def test_a_folder_that_is_no_workdir_is_left_alone(tiny, tmp_path, name):
    (tmp_path / name).mkdir()
    with pytest.raises(UserError, match=f"has {name} but no config.json; use another --workdir"):
        hold(tmp_path, tiny).__enter__()
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("text", [b'{"model_type": "marian"}', b"\xff", b"{"])
def test_a_config_of_something_else_is_named_and_left_alone(tiny, tmp_path, text):
    (tmp_path / "config.json").write_bytes(text)
    with pytest.raises(UserError, match=r"config\.json: .*; use another --workdir"):
        hold(tmp_path, tiny).__enter__()
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [text]


def test_validation_on_the_training_text_gets_a_warning(tiny, tmp_path, caplog):
    same = changed(tiny, "data", validation=tiny.data.train)
    for config, warned in ((tiny, False), (same, True)):
        caplog.clear()
        workdir = tmp_path / str(warned)
        workdir.mkdir()
        prepare_data(config, workdir)
        assert ("is in data.train too" in caplog.text) == warned


def test_the_corpus_report_says_what_was_read_kept_and_dropped(tiny, tmp_path):
    claim(tmp_path, tiny)
    data = prepare_data(tiny, tmp_path)
    report = json.loads((tmp_path / "corpus.json").read_text())
    (train,), (validation,) = report["train"]["sources"], report["validation"]["sources"]
    assert train["read"] == 200 == train["kept"] + sum(train["dropped"].values())
    assert (train["kept"], validation["kept"]) == (len(data.train), 41)


# ---- What a failed start leaves


def tree(folder: Path) -> dict[str, bytes | None]:
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
    }


FAILURES = {
    "a missing file": ("data", {"train": ("train.en", "missing.de")}, "missing.de"),
    "a missing validation file": ("data", {"validation": ("no.en", "no.de")}, "no.en"),
    "too many pieces": ("data", {"vocab_size": 5000}, "vocab_size: 5000 is more than"),
    "a missing tokenizer": ("data", {"tokenizer": "none.model"}, "none.model"),
    "no weights to begin with": ("train", {"initialize_from": "nowhere"}, "nowhere: no such dir"),
    "no space": ("train", {}, "are free and .* needed"),
}


@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("before", ["nothing", "a folder", "a file of the user"])
def test_a_start_that_fails_leaves_what_it_found(tiny, tmp_path, monkeypatch, failure, before):
    section, values, message = FAILURES[failure]
    if failure == "no space":
        full = SimpleNamespace(free=0)
        monkeypatch.setattr("flaxformer_min.checkpoints.store.shutil.disk_usage", lambda _: full)
    workdir = tmp_path / "new" / "run"
    if before != "nothing":
        workdir.mkdir(parents=True)
    if before == "a file of the user":
        (workdir / "notes").write_text("mine")
        (workdir / "tensorboard").mkdir()
    found = tree(tmp_path)
    with pytest.raises(UserError, match=message):
        loop.run(changed(tiny, section, **values), workdir)
    assert tree(tmp_path) == found


def test_a_disk_that_fails_leaves_nothing_and_a_stop_or_a_step_leaves_all(tiny, tmp_path):
    def end(error: BaseException, log: str = "") -> list[str]:
        with pytest.raises(type(error)), hold(tmp_path / "run", tiny):
            (tmp_path / "run" / "metrics.jsonl").write_text(log)
            (tmp_path / "run" / "corpus").mkdir(exist_ok=True)
            raise error
        return sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*"))

    everything = [f"run/{name}" for name in ("config.json", "corpus", "lock", "metrics.jsonl")]
    assert end(OSError(28, "No space left on device")) == []
    assert end(KeyboardInterrupt()) == ["run", *everything]  # what was encoded is not lost
    shutil.rmtree(tmp_path / "run")
    assert end(OSError(28, "No space left on device"), "{}\n") == ["run", *everything]
    shutil.rmtree(tmp_path / "run")
    (tmp_path / "run").mkdir()
    fake_checkpoint(tmp_path / "run")
    shutil.move(tmp_path / "run" / "checkpoints", tmp_path / "checkpoints")
    with pytest.raises(UserError), hold(tmp_path / "run", tiny):
        shutil.move(tmp_path / "checkpoints", tmp_path / "run" / "checkpoints")
        raise UserError("after the first checkpoint")
    assert (tmp_path / "run" / "config.json").exists()


def test_what_a_start_puts_where_others_put_a_file_meanwhile_stays(tiny, tmp_path):
    with pytest.raises(UserError), hold(tmp_path / "run", tiny):
        (tmp_path / "run" / "notes").write_text("mine")
        raise UserError("failed")
    assert tree(tmp_path) == {"run": None, "run/notes": b"mine"}


# ---- Links and names


@pytest.mark.parametrize("name", ["", "checkpoints", "corpus"])
def test_a_link_to_what_is_not_there_is_refused_and_nothing_changed(tiny, tmp_path, name):
    run = tmp_path / "run"
    if name:
        claim_in(run, tiny)
    (run / name).symlink_to(tmp_path / "unmounted")
    found = sorted(tmp_path.rglob("*"))
    with pytest.raises(UserError, match=f"^{run / name}: is a link to {tmp_path}/unmounted, which"):
        loop.run(tiny, run)
    assert sorted(tmp_path.rglob("*")) == found


def claim_in(run: Path, tiny) -> None:
    run.mkdir()
    claim(run, tiny)
    (run / "tokenizer.model").write_text("of the run")


@pytest.mark.run
def test_a_linked_workdir_and_a_linked_corpus_are_used_and_their_targets_stay(tiny, tmp_path):
    """A workdir that has a folder for them keeps its token ids in it."""
    (tmp_path / "disk" / "run" / "corpus").mkdir(parents=True)
    own = changed(tiny, "data", cache=None)
    run = tmp_path / "run"
    run.symlink_to(tmp_path / "disk" / "run")
    with hold(run, own):
        data = prepare_data(own, run)
    digest = json.loads((run / "corpus.json").read_text())["train"]["digest"]
    linked, target = run / "corpus" / digest, tmp_path / "disk" / "corpus"
    linked.rename(target)
    linked.symlink_to(target)
    lengths = data.train.lengths.tolist()
    with hold(run, own):
        assert prepare_data(own, run).train.lengths.tolist() == lengths
    assert linked.is_symlink()
    (target / "ids").write_bytes(b"damaged")
    (run / "corpus" / "1.partial").symlink_to(target)
    with hold(run, own):
        assert prepare_data(own, run).train.lengths.tolist() == lengths
    assert not linked.is_symlink() and (target / "ids").read_bytes() == b"damaged"
    shutil.rmtree(linked)
    linked.symlink_to(tmp_path / "nothing")
    with hold(run, own):
        assert prepare_data(own, run).train.lengths.tolist() == lengths


@pytest.mark.parametrize("name", [b"\xff", b"x" * 245 + b"/" + b"x/" * 1_900])
def test_a_workdir_whose_name_cannot_be_kept_is_refused_before_anything_is_made(
    tiny, tmp_path, name
):
    with pytest.raises(UserError, match=r"^[^\n]*(is not UTF-8|bytes, at most 3900)[^\n]*$"):
        loop.run(tiny, tmp_path / os.fsdecode(name))
    assert list(tmp_path.iterdir()) == []


def test_what_process_0_cannot_read_itself_is_not_laid_to_a_shared_disk(
    tiny, tmp_path, monkeypatch
):
    def failing(*_):
        raise OSError(24, "Too many open files", "ids")

    claim(tmp_path, tiny)
    monkeypatch.setattr(prepared_data, "open_split", failing)
    with pytest.raises(OSError, match="Too many open files: 'ids'"):
        prepare_data(tiny, tmp_path)


def test_without_a_checkpoint_what_an_earlier_start_made_of_its_text_goes(tiny, tmp_path):
    claim(tmp_path, tiny)
    for name in ("tokenizer.model", "corpus.json", "notes"):
        (tmp_path / name).write_text("{}")
    claim(tmp_path, changed(tiny, "data", vocab_size=291))
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", "notes"}
