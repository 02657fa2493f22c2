"""What a workdir lets in: its own run, and nothing that would mix two."""

import json
from pathlib import Path

import pytest
from tiny_config import changed

from flaxformer_min.errors import UserError
from flaxformer_min.workdir import claim, prepare_data


def fake_checkpoint(workdir: Path) -> None:
    """Enough of one to count."""
    folder = workdir / "checkpoints" / "10"
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


def test_what_may_change_on_resume_is_let_in_and_written_down(tiny, tmp_path):
    claim(tmp_path, tiny)
    fake_checkpoint(tmp_path)
    more = changed(changed(tiny, "train", steps=300), "decode", beam_size=3)
    claim(tmp_path, more)
    written = json.loads((tmp_path / "config.json").read_text())
    assert (written["train"]["steps"], written["decode"]["beam_size"]) == (300, 3)


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


@pytest.mark.parametrize("name", ["checkpoints", "tokenizer.model"])
def test_a_folder_that_is_no_workdir_is_left_alone(tiny, tmp_path, name):
    (tmp_path / name).mkdir()
    with pytest.raises(UserError, match=f"has {name} but no config.json; use another --workdir"):
        claim(tmp_path, tiny)
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("text", [b'{"model_type": "marian"}', b"\xff", b"{"])
def test_a_config_of_something_else_is_named_and_left_alone(tiny, tmp_path, text):
    (tmp_path / "config.json").write_bytes(text)
    with pytest.raises(UserError, match=r"config\.json: .*; use another --workdir"):
        claim(tmp_path, tiny)
    assert (tmp_path / "config.json").read_bytes() == text


def test_the_corpus_report_says_what_was_read_kept_and_dropped(tiny, tmp_path):
    claim(tmp_path, tiny)
    data = prepare_data(tiny, tmp_path)
    report = json.loads((tmp_path / "corpus.json").read_text())
    (train,), (validation,) = report["train"]["sources"], report["validation"]["sources"]
    assert train["read"] == 200 == train["kept"] + sum(train["dropped"].values())
    assert (train["kept"], validation["kept"]) == (len(data.train), 7)
