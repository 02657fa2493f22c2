"""Every command of README runs as printed, on a tiny model; what is too dear is parsed and checked.

What a reader puts in place of a name is put there: a folder below runs/ is the tiny run, a word in
capitals is a file of two lines, and what follows a flag for output is a new file.
"""

import argparse
import contextlib
import io
import re
import shlex
import sys
import tomllib
from pathlib import Path

import pytest

from flaxformer_min import cli
from flaxformer_min.config import FIELD_TYPES
from flaxformer_min.config_file import load_config

ROOT = Path(__file__).parent.parent
DOCUMENTS = ["README.md", "RESULTS.md", *sorted(f"docs/{p.name}" for p in ROOT.glob("docs/*.md"))]
PROGRAMS = {"flaxformer-min": [], "python train.py": ["train"]}
OUTPUTS = {"--output", "--alignment", "--attention", "--npz", ">"}
# They train, need libtpu, or read a model of another program.
PARSED = {"train", "plan", "import"}


def text_of(document: str) -> str:
    return (ROOT / document).read_text(encoding="utf-8")


README = text_of("README.md")


def commands(document: str = "README.md") -> list[list[str]]:
    """The words of each command of this program in a document, as a shell would have them."""
    blocks = re.findall(r"(?:^ {4}.*\n)+", text_of(document), re.MULTILINE)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    found = []
    for line in (line.strip().removeprefix(".venv/bin/") for line in lines):
        for start, verb in PROGRAMS.items():
            if line.startswith(f"{start} "):
                found.append([*verb, *shlex.split(line.removeprefix(start), comments=True)])
    return found


def flags_of(parser: argparse.ArgumentParser) -> set[str]:
    """The flags of a parser and of all parsers below it."""
    below = [action.choices for action in parser._actions if isinstance(action.choices, dict)]
    deeper = [flags_of(sub) for choices in below for sub in choices.values()]
    return set(parser._option_string_actions).union(*deeper)


def filled_in(words: list[str], finished: Path, folder: Path) -> list[str]:
    """The command with names of this test in place of those that stand for the reader's own."""
    (folder / "two").write_text("seven dogs\na cat\n")
    filled = []
    for before, word in zip(["", *words], words, strict=False):
        if before in OUTPUTS:
            filled.append(str(folder / f"output{len(filled)}{Path(word).suffix}"))
        elif before == "--last":
            filled.append("3")  # the tiny run has no more
        elif word.startswith("runs/"):
            filled.append(str(finished))
        elif re.fullmatch("[A-Z_]{3,}", word):
            filled.append(str(folder / "two"))
        else:
            filled.append("seven dogs" if " " in word else word)
    return filled


def checked(words: list[str]) -> None:
    """Parses a command that is not run, with the fields of its config; raises if it is wrong."""
    options, rest = cli._make_parser().parse_known_args(words)
    if words[0] in ("train", "plan"):
        load_config(options.config, rest)
    else:
        assert not rest


def without_redirections(words: list[str], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The words before `<` and `>`; standard input is then the file after `<`."""
    if "<" in words:
        data = Path(words[words.index("<") + 1]).read_bytes()
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
    ends = [words.index(sign) for sign in "<>" if sign in words]
    return words[: min(ends, default=len(words))]


def test_the_commands_of_readme_are_found() -> None:
    verbs = {words[0] for words in commands()}
    assert len(commands()) >= 11
    assert {"train", "translate", "evaluate", "score", "average", "page", "trace"} <= verbs


@pytest.mark.run
@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_a_command_of_readme_runs_as_printed(words, finished, tmp_path, monkeypatch, capsysbinary):
    monkeypatch.chdir(ROOT)
    filled = without_redirections(filled_in(words, finished, tmp_path), monkeypatch)
    if words[0] in PARSED:
        checked(filled)
    else:
        assert cli.main(filled) == 0, capsysbinary.readouterr().err


@pytest.mark.run
def test_the_lines_of_python_that_load_a_run_translate(finished) -> None:
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    loading = [code for code in blocks if '"runs/' in code]
    assert loading
    for code in loading:
        code = re.sub(r'"runs/[^"]*"', repr(str(finished)), code)
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(compile(code, "README.md", "exec"), {})
        assert printed.getvalue().strip()


def test_what_readme_makes_is_in_the_makefile() -> None:
    targets = set(re.findall(r"(?:^ {4}|`)make (\w+)", README, re.MULTILINE))
    made = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert targets >= {"demo", "reliability"} and targets <= set(made)


def test_no_line_of_readme_that_starts_a_program_is_left_out() -> None:
    started = re.findall(r"^ {4}(?:\.venv/|\$ |python|pip|flaxformer).*", README, re.MULTILINE)
    assert len(started) == len(commands())


@pytest.mark.parametrize("document", [name for name in DOCUMENTS if commands(name)])
def test_the_commands_of_every_document_are_taken(document: str, tmp_path: Path) -> None:
    for words in commands(document):
        checked(filled_in(words, tmp_path, tmp_path))


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_flag_that_a_document_names_is_one(document: str) -> None:
    named = set(re.findall(r"(?<![\w-])--[a-z][\w.-]*\w", text_of(document)))
    sources = "".join(path.read_text() for path in ROOT.glob("benchmarks/**/*.py"))
    known = flags_of(cli._make_parser()) | {f"--{key}" for key in FIELD_TYPES}
    assert [flag for flag in named - known if f'"{flag}"' not in sources] == []


def test_every_extra_that_a_document_names_is_there() -> None:
    text = "".join(map(text_of, DOCUMENTS))
    project = tomllib.loads(text_of("pyproject.toml"))["project"]
    listed = [names.split(",") for names in re.findall(r"\.\[([a-z,]+)\]", text)]
    named = {*re.findall(r"extra `(\w+)`", text)}.union(*listed)
    assert len(named) >= 5 and named <= set(project["optional-dependencies"])
