"""Every command of README runs as printed, on a tiny model; what is too dear is parsed and checked.

What a reader puts in place of a name is put there: a folder below runs/ is the tiny run, a word in
capitals is a file of two lines, and what follows a flag for output is a new file.
"""

import contextlib
import io
import re
import shlex
import sys
from pathlib import Path

import pytest

from flaxformer_min import cli
from flaxformer_min.config_file import load_config

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
PROGRAMS = {".venv/bin/flaxformer-min": [], ".venv/bin/python train.py": ["train"]}
OUTPUTS = {"--output", "--alignment", "--attention", "--npz", ">"}
# They train, need libtpu, or read a model of another program.
PARSED = {"train", "plan", "import"}


def commands() -> list[list[str]]:
    """The words of each command of this program in README, as a shell would have them."""
    blocks = re.findall(r"(?:^ {4}.*\n)+", README, re.MULTILINE)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    found = []
    for line in map(str.strip, lines):
        for start, verb in PROGRAMS.items():
            if line.startswith(f"{start} "):
                found.append([*verb, *shlex.split(line.removeprefix(start), comments=True)])
    return found


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
    targets = set(re.findall(r"^ {4}make (\w+)", README, re.MULTILINE))
    made = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert targets and targets <= set(made)
