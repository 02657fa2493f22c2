"""The files of `translate`: what it reads, and what it writes for each line.

Translations and word alignments are written aside: their files are there only once they are whole.
"""

import contextlib
import io
import json
import os
import sys
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np

from flaxformer_min.data.lines import opened, require_regular
from flaxformer_min.data.tokenizer import Tokenizer
from flaxformer_min.decoding.alignment import pharaoh
from flaxformer_min.decoding.attention_file import Write, attention_file
from flaxformer_min.decoding.translator import Translation
from flaxformer_min.errors import UserError
from flaxformer_min.system.files import written_aside
from flaxformer_min.system.meter import Meter


class Paths(NamedTuple):
    """Where the files of one command are; without `input` or `output`, a standard stream is."""

    input: str | None = None
    output: str | None = None
    prefix: str | None = None
    alignment: str | None = None  # of words, in Pharaoh format
    attention: str | None = None


class Input(NamedTuple):
    """The lines to translate. `tell` is called with the number of lines that are done."""

    file: io.BufferedIOBase
    name: str  # in messages
    tell: Callable[[int], object] | None = None


class Outputs:
    """Writes translations, their alignments and their attention weights, line by line."""

    def __init__(self, text: Any, links: Any | None, attention: Write | None):
        """`text` and `links` are binary files, of any class."""
        self._text, self._links, self._attention = text, links, attention
        self._line = 0

    def write(self, tokenizer: Tokenizer, found: Sequence[Translation], *, as_json: bool) -> None:
        """Writes the translations of the next lines; `as_json` as by `to_json`."""
        lines = [to_json(each) if as_json else each.text for each in found]
        self._text.write("".join(line + "\n" for line in lines).encode())
        self._text.flush()
        for each in found:
            self._line += 1
            links, weights = "", each.attention
            if self._links is not None and weights is not None:
                cross = np.asarray(weights.cross)
                links = pharaoh(tokenizer, each.source, each.tokens, cross)
            if self._attention is not None and weights is not None:
                source, target = map(tokenizer.pieces, (each.source, each.tokens))
                self._attention(self._line, source, target, weights)
            if self._links is not None:
                self._links.write(links.encode() + b"\n")


@contextlib.contextmanager
def open_files(
    paths: Paths, *, average_heads: bool = False
) -> Generator[tuple[Input, Outputs], None, None]:
    """A context with the files of a command, open.

    Raises UserError if two of them are one file, if one to be read cannot be read, or if one to be
    written lies in no folder or is there and is no regular file.
    """
    _refuse_one_file_twice(paths)
    with contextlib.ExitStack() as stack:
        source = Input(cast(io.BufferedIOBase, sys.stdin.buffer), "standard input")
        if paths.input is not None:
            source = stack.enter_context(_input(paths.input))
        attention = None
        if paths.attention is not None:
            file = attention_file(paths.attention, average_heads=average_heads)
            attention = stack.enter_context(file)
        text, links = (
            None if path is None else stack.enter_context(_output(path))
            for path in (paths.output, paths.alignment)
        )
        yield source, Outputs(text or sys.stdout.buffer, links, attention)


def _refuse_one_file_twice(paths: Paths) -> None:
    seen: dict[str, str] = {}
    for name, path in paths._asdict().items():
        if path is not None and (other := seen.setdefault(os.path.realpath(path), name)) != name:
            raise UserError(f"--{other} and --{name} are one file, {path}; give each its own")


@contextlib.contextmanager
def _input(path: str) -> Generator[Input, None, None]:
    require_regular(path)  # it is read twice
    with opened(path) as file:
        count = sum(not raw.isspace() for raw in file)
    with Meter("translating", count, "lines") as meter, opened(path) as file:
        yield Input(file, path, meter.update)


@contextlib.contextmanager
def _output(path: str) -> Generator[io.BufferedWriter, None, None]:
    whole = Path(os.path.realpath(path))  # a link to a file stays a link
    if not whole.parent.is_dir():
        raise UserError(f"{path}: its folder is not there; make it first")
    if whole.exists() and not whole.is_file():
        raise UserError(f"{path}: is no file; without the flag, standard output is written to")
    with written_aside(whole) as file:
        yield file


def to_json(translation: Translation) -> str:
    """Returns the n_best hypotheses of a line, best first, as a JSON array."""
    hypotheses = [
        {
            "text": each.text,
            "score": each.score,
            "log_prob": each.log_prob,
            "token_count": len(each.tokens),
            "finished": each.finished,
        }
        for each in (translation, *translation.others)
    ]
    return json.dumps(hypotheses, ensure_ascii=False)
