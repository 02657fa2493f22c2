"""Reads the lines of text files; what ends a line is decided in this file alone."""

import contextlib
import gzip
import io
import re
import zlib
from collections.abc import Generator, Iterable, Iterator
from pathlib import Path
from typing import Literal

from flaxformer_min.errors import UserError


def read_lines(path: str | Path) -> Iterator[str]:
    """Yields the lines of a UTF-8 text file, plain or .gz, without their ends.

    Raises UserError naming file and line if the text is not UTF-8, and naming the file if it cannot
    be read.
    """
    with opened(path) as file:
        yield from decode_lines(file, str(path))


def decode_lines(
    file: Iterable[bytes],
    name: str,
    *,
    first_line: int = 1,
    errors: Literal["strict", "replace"] = "strict",
) -> Iterator[str]:
    r"""Yields the lines of a binary file (or of standard input's buffer), without their ends.

    A line ends at "\n" alone. One "\r" before it and a byte order mark at the very start of the
    text are dropped; U+2028, U+0085, VT and FF are ordinary characters.

    Args:
        file: an iterable of raw lines.
        name: what messages call the file.
        first_line: the number of its first line, in messages.
        errors: what happens to bytes that are no UTF-8: a UserError names file and line, or
            U+FFFD replaces them.
    """
    for number, raw in enumerate(file, start=first_line):
        try:
            line = raw.decode(errors=errors)
        except UnicodeDecodeError as error:
            raise UserError(f"{name}, line {number}: not UTF-8 ({error.reason})") from None
        if number == 1:
            line = line.removeprefix("\ufeff")
        yield line.removesuffix("\n").removesuffix("\r")


def one_line(text: str) -> str:
    """Returns a text as one line: a line break at its end is dropped, any other becomes a space."""
    return re.sub("\r?\n", " ", text.removesuffix("\n").removesuffix("\r"))


def is_blank(line: str) -> bool:
    """Whether a line has nothing to translate: it is empty, or white space only."""
    return not line or line.isspace()


@contextlib.contextmanager
def opened(path: str | Path) -> Generator[io.BufferedIOBase, None, None]:
    """A context with a file, plain or .gz, open for reading bytes.

    Raises UserError naming the file if it cannot be opened, or if reading within the context fails.
    """
    try:
        with gzip.open(path) if str(path).endswith(".gz") else open(path, "rb") as file:
            yield file
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UserError(f"{path}: damaged gzip file ({error})") from None
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
