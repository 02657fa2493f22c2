"""What a line of text is, and the lines of a file."""

import contextlib
import gzip
import io
import zlib
from collections.abc import Generator, Iterable, Iterator
from pathlib import Path
from typing import Literal

from flaxformer_min.errors import UserError


def read_lines(path: str | Path) -> Iterator[str]:
    """The lines of a UTF-8 text file, plain or .gz.

    Raises UserError naming file and line where the text is not UTF-8, and the file where it cannot
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
    r"""The lines of a binary file (or of standard input's buffer) called `name` in messages.

    A line ends at "\n" alone. One "\r" before it and a byte order mark at the very start of the
    text are dropped; U+2028, U+0085, VT and FF are ordinary characters. Bytes that are no UTF-8
    become U+FFFD if errors are to be replaced.
    """
    for number, raw in enumerate(file, start=first_line):
        try:
            line = raw.decode(errors=errors)
        except UnicodeDecodeError as error:
            raise UserError(f"{name}, line {number}: not UTF-8 ({error.reason})") from None
        if number == 1:
            line = line.removeprefix("\ufeff")
        yield line.removesuffix("\n").removesuffix("\r")


def is_blank(line: str) -> bool:
    """Whether a line has nothing to translate: empty or only white space."""
    return not line or line.isspace()


@contextlib.contextmanager
def opened(path: str | Path) -> Generator[io.BufferedIOBase, None, None]:
    """A file open for reading bytes; what fails inside, the reading included, is a UserError."""
    try:
        with gzip.open(path) if str(path).endswith(".gz") else open(path, "rb") as file:
            yield file
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UserError(f"{path}: damaged gzip file ({error})") from None
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
