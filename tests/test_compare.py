"""A comparison of runs says what differs, and all that it says is in their workdirs."""

import json
import shutil
from pathlib import Path

import pytest

from flaxformer_min import cli
from flaxformer_min.config_rules import config_to_json
from flaxformer_min.errors import UserError
from flaxformer_min.see.compare import compare
from flaxformer_min.see.runs import read_metrics, read_run, series
from tools.tiny_config import changed


@pytest.fixture
def made(tiny, tmp_path):
    """Makes a workdir with this config, hashes of its text and lines of its log."""

    def make(name: str, rows: list[dict], text: str = "t", dropout: float = 0.1) -> str:
        folder = tmp_path / name
        folder.mkdir()
        config = changed(tiny, "model", dropout=dropout)
        (folder / "config.json").write_text(config_to_json(config))
        split = {"digest": "d", "sources": [{"digest": text}]}
        report = {"tokenizer": "a" * 64, "train": split, "validation": split}
        (folder / "corpus.json").write_text(json.dumps(report))
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(folder)

    return make


def step(number: int) -> dict:
    return {"step": number, "kind": "train", "loss": 5.0, "tokens": 30.0, "tokens_per_second": 0.5}


def evaluation(number: int, loss: float | None, bleu: float) -> dict:
    row = {"step": number, "kind": "validation", "validation_loss": loss}
    return row | {"bleu": {"score": bleu}}


def table(lines: list[str]) -> dict[str, list[str]]:
    """The cells of each line by its label; of several blocks one after another."""
    found: dict[str, list[str]] = {}
    for line in lines:
        cells = [line[at : at + 17].strip() for at in range(29, len(line), 17)]
        found.setdefault(line[:29].strip(), []).extend(cells)
    return found


def test_only_what_differs_is_shown_with_the_best_and_the_last_of_each_measure(made):
    one = made("one", [step(1), step(2), evaluation(2, 3.5, 7.0), evaluation(4, 2.25, 6.5)])
    other = made("other", [step(1), evaluation(1, None, 0.125)], "x", dropout=0.25)
    found = table(compare([read_run(one), read_run(other)]))
    assert found.pop("") == ["[1] one", "[2] other"]
    train, validation = found.pop("train text"), found.pop("validation text")
    assert train == validation and len(set(train)) == 2
    assert found == {
        "model.dropout": ["0.1", "0.25"],
        "steps": ["2", "1"],
        "time of the steps": ["02:00", "01:00"],
        "validation loss, best": ["2.2500 at 4", "-"],
        "validation loss, last": ["2.2500 at 4", "-"],
        "BLEU, best": ["7.00 at 2", "0.12 at 1"],
        "BLEU, last": ["6.50 at 4", "0.12 at 1"],
    }


@pytest.mark.parametrize("count", [2, 3, 4, 7])
def test_no_line_is_longer_than_80_characters_whatever_the_runs_are_called(made, count):
    names = [f"run-{n}-" + "long " * 5 + str(n) for n in range(count)]
    runs = [read_run(made(name, [], dropout=n / 10)) for n, name in enumerate(names)]
    lines = compare(runs)
    assert max(map(len, lines)) <= 80
    found = table(lines)
    assert [cell[-1] for cell in found[""] if cell] == [str(n) for n in range(count)]
    assert found["model.dropout"] == [str(n / 10) for n in range(count)]
    assert found["BLEU, last"] == ["-"] * count


def test_equal_runs_and_a_single_one_are_told(made):
    first, second = (read_run(made(name, [step(1)])) for name in ("a", "b"))
    assert "configs and text are the same" in compare([first, second])
    with pytest.raises(UserError, match="two workdirs or more"):
        compare([first])


def test_the_log_of_an_older_version_is_read_too(tmp_path):
    rows = [{"step": 1, "loss": 5.0}, {"step": 1, "validation_loss": 3.0, "bleu": {"score": 2.0}}]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    read = read_metrics(tmp_path)
    assert [row["kind"] for row in read] == ["train", "validation"]
    assert series(read, "train", "loss") == ([1], [5.0])
    assert series(read, "validation", "bleu") == ([1], [2.0])


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", None, "config.json: No such file or directory; give the workdir of a run"),
        ("corpus.json", "{}", "not the workdir of a run"),
        ("corpus.json", "[", "not the workdir of a run"),
        ("metrics.jsonl", "7", "not a log of this program"),
        ("metrics.jsonl", None, "no such file; give the workdir"),
    ],
)
def test_what_is_no_run_is_one_line_that_names_it(made, capsys, name, content, message):
    one, other = made("one", []), made("other", [])
    if content is None:
        (Path(other) / name).unlink()
    else:
        (Path(other) / name).write_text(content)
    assert cli.main(["compare", one, other]) == 2
    errors = capsys.readouterr().err
    assert message in errors and "other" in errors and errors.count("\n") == 1


def test_the_verb_compares_runs_and_draws_their_curves(finished, tmp_path, capsys):
    shutil.copytree(finished, tmp_path / "copy")
    picture = tmp_path / "curves.svg"
    runs = [str(finished), str(tmp_path / "copy")]
    assert cli.main(["compare", *runs, "--output", str(picture)]) == 0
    found = table(capsys.readouterr().out.splitlines())
    assert found["steps"] == ["200", "200"] and picture.stat().st_size > 5000
