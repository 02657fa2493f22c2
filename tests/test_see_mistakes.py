"""What a reader gets wrong is one line that says what to do, whichever verb shows the model."""

import io
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from flaxformer_min import cli

LONG = "a cat and " * 30
LOOKS = ["trace", "plot attention", "plot alignment"]  # at a sentence
READS = [*LOOKS, "neighbours", "encode", "page", "summary", "plot curves"]  # a directory


def command(verb: str, folder: Path, output: Path, sentence: str = "a cat") -> list[str]:
    """A whole command line of a verb, which writes a file of its own kind into `output`."""
    writes = {
        "trace": ["--npz", str(output / "trace.npz")],
        "encode": ["--output", str(output / "states.npz")],
        "page": ["--output", str(output / "page.html")],
        "neighbours": [],
        "summary": [],
    }
    words = [*verb.split(), str(folder)]
    words += [sentence] if verb in [*LOOKS, "neighbours"] else []
    return words + writes.get(verb, ["--output", str(output / "figure.svg")])


@pytest.fixture
def said(capsys, monkeypatch):
    """`said(command, text)`: the one line that a command ends with, having read a text."""

    def run(words: list[str], text: str = "a cat\n") -> str:
        standard_input = SimpleNamespace(buffer=io.BytesIO(text.encode()))
        monkeypatch.setattr(sys, "stdin", standard_input)
        assert cli.main(words) == 2
        line = capsys.readouterr().err
        assert line.startswith("error: ") and line.count("\n") == 1 and len(line) < 350
        return line

    return run


@pytest.mark.parametrize("verb", READS)
def test_a_directory_without_a_checkpoint_is_named_with_what_to_give(verb, said, tmp_path):
    empty = said(command(verb, tmp_path, tmp_path))
    missing = said(command(verb, tmp_path / "gone", tmp_path))
    for line in (empty, missing):
        assert str(tmp_path) in line
        assert "; give " in line or "there is no such config file" in line
    assert list(tmp_path.iterdir()) == []


@pytest.mark.run
@pytest.mark.parametrize("verb", LOOKS)
def test_a_sentence_that_is_empty_or_too_long_is_refused(verb, said, finished, tmp_path):
    for target in ([], ["--target", LONG], ["--target", ""]):
        sentence = "a cat" if target else LONG
        line = said([*command(verb, finished, tmp_path, sentence), *target])
        assert "give at least one word" in line if target[1:] == [""] else "shorten it" in line
    for blank in ("", " \t"):
        line = said(command(verb, finished, tmp_path, blank))
        assert "give at least one word" in line
    assert list(tmp_path.iterdir()) == []


@pytest.mark.run
def test_a_word_that_is_empty_or_too_long_is_refused(said, finished, tmp_path):
    for words in ([""], [" "], ["a", ""], ["a", "-"], ["+"]):
        assert "a word is missing" in said(["neighbours", str(finished), *words])
    assert "ask for a part of it" in said(["neighbours", str(finished), LONG])
    for word in ("", " ", LONG):
        line = said(["encode", str(finished), "--word", word])
        assert "no line of standard input has it" in line


@pytest.mark.run
@pytest.mark.parametrize("verb", ["trace", "encode", "page", "plot attention", "plot masks"])
def test_a_file_that_cannot_be_written_is_named(verb, said, finished, tmp_path):
    words = command(verb, finished, tmp_path / "gone")
    if verb == "plot masks":
        words.remove(str(finished))
    if verb == "page":
        (tmp_path / "lines").write_text("a cat\n")
        words += ["--source", str(tmp_path / "lines")]
    line = said(words)
    assert str(tmp_path / "gone") in line and "make that folder first" in line


@pytest.mark.run
def test_a_page_of_nothing_is_refused(said, finished, tmp_path):
    (tmp_path / "lines").write_text("\n \n")
    words = [*command("page", finished, tmp_path), "--source", str(tmp_path / "lines")]
    assert "no line to begin with; give --source FILE" in said(words)


@pytest.mark.run
def test_encode_gives_a_blank_line_no_states_and_cuts_a_long_one(finished, tmp_path, monkeypatch):
    standard_input = SimpleNamespace(buffer=io.BytesIO(f"\n{LONG}\n".encode()))
    monkeypatch.setattr(sys, "stdin", standard_input)
    assert cli.main(command("encode", finished, tmp_path)) == 0
    with np.load(tmp_path / "states.npz") as file:
        assert file["1/states"].shape == (0, 16) and 0 < len(file["2/states"]) <= 48
