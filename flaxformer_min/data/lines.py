"""Reads the lines of text files; what ends a line is decided in this file alone."""

import bz2
import contextlib
import gzip
import io
import lzma
import re
import stat
import unicodedata
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

from flaxformer_min.errors import UserError

Errors = Literal["strict", "replace"]

NAMED_BAD_LINES = 3  # of all lines that are not UTF-8
# By a file's first bytes: how it is unpacked, or the command that makes lines of UTF-8 of it.
_KINDS: dict[bytes, Callable[[Any], Any] | str] = {
    rb"\x1f\x8b": gzip.open,
    rb"\xfd7zXZ\0": lzma.open,
    rb"BZh[1-9](1AY&SY|\x17rE8P\x90)": bz2.open,
    rb"\x28\xb5\x2f\xfd": "packed by Zstandard: unpack it by `zstd -d`",
    rb"\x04\x22\x4d\x18": "packed by LZ4: unpack it by `lz4 -d`",
    rb"7z\xbc\xaf\x27\x1c": "a 7z archive: unpack it by `7z x`",
    rb"PK\x03\x04": "a zip archive: unpack it by `unzip`",
    rb"\xff\xfe\0\0|\0\0\xfe\xff": "UTF-32 text: convert it by `iconv -f UTF-32 -t UTF-8`",
    rb"\xff\xfe|\xfe\xff|(\0[^\0]){2}|([^\0]\0){2}": (
        "UTF-16 text: convert it by `iconv -f UTF-16 -t UTF-8`"
    ),
    rb"[^\r\n]*\r[^\n]+\Z": "text whose lines end in CR: convert it by `tr '\\r' '\\n'`",
}


def read_lines(path: str | Path, errors: Errors = "strict") -> Iterator[str]:
    """Yields the lines of a UTF-8 text file, as it is or packed by gzip, xz or bzip2.

    The ends of the lines are left out. `errors` is that of `decode_lines`. Raises UserError naming
    file and lines if the text is not UTF-8, and naming the file if it cannot be read.
    """
    with opened(path) as file:
        yield from decode_lines(file, str(path), errors=errors)


def decode_lines(
    file: Iterable[bytes], name: str, *, first_line: int = 1, errors: Errors = "strict"
) -> Iterator[str]:
    r"""Yields the lines of a binary file (or of standard input's buffer), without their ends.

    A line ends at "\n" alone. One "\r" before it and a byte order mark at the very start of the
    text are dropped; U+2028, U+0085, VT and FF are ordinary characters.

    Args:
        file: an iterable of raw lines.
        name: what messages call the file.
        first_line: the number of its first line, in messages.
        errors: what happens to bytes that are no UTF-8: a UserError counts all lines that have
            some and names the first ones, or U+FFFD replaces the bytes.
    """
    numbered = enumerate(file, start=first_line)
    for number, raw in numbered:
        try:
            line = raw.decode(errors=errors)
        except UnicodeDecodeError as error:
            rest = (later for later, text in numbered if not _is_utf8(text))
            raise UserError(_not_utf8(name, [number, *rest], error.reason)) from None
        if number == 1:
            line = line.removeprefix("\ufeff")
        yield line.removesuffix("\n").removesuffix("\r")


def _is_utf8(raw: bytes) -> bool:
    try:
        raw.decode()
        return True
    except UnicodeDecodeError:
        return False


def _not_utf8(name: str, lines: list[int], reason: str) -> str:
    several = "s" if len(lines) > 1 else ""
    more = len(lines) - NAMED_BAD_LINES
    named = ", ".join(map(str, lines[:NAMED_BAD_LINES])) + (f" and {more} more" if more > 0 else "")
    return (
        f"{name}, line{several} {named}: not UTF-8 ({reason}); convert it, as by "
        "`iconv -f LATIN1 -t UTF-8`, or replace the bytes: --errors replace of translate, "
        "--data.errors replace of train"
    )


def is_blank(line: str) -> bool:
    """Whether a line has nothing to translate: it is empty, or nothing in it can be seen."""
    if line.isascii():
        return not line or line.isspace()
    return all(c.isspace() or unicodedata.category(c) == "Cf" for c in line)


def require_regular(path: str | Path) -> None:
    """Raises UserError if a file that is read more than once is there, but can be read once only.

    Such are pipes, also those of a shell's <(...), sockets, terminals and devices; so are folders.
    """
    with contextlib.suppress(OSError):  # opening the file says what is wrong
        if not stat.S_ISREG(Path(path).stat().st_mode):
            raise UserError(f"{path}: no regular file; a pipe or a folder cannot be read twice")


@contextlib.contextmanager
def opened(path: str | Path) -> Generator[io.BufferedIOBase, None, None]:
    """A context with a file open for reading bytes; its first bytes say how it is packed.

    Raises UserError naming the file if it cannot be opened, if reading within the context fails, or
    if it is of a kind that is not read: then the error says what it is.
    """
    try:
        with open(path, "rb") as file, _unpacked(file, str(path)) as text:
            _kind(text, str(path))
            yield text
    except (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile) as error:
        raise UserError(f"{path}: damaged, it cannot be unpacked ({error})") from None
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or f'damaged ({error})'}") from None


def _unpacked(file: io.BufferedReader, name: str) -> contextlib.AbstractContextManager[Any]:
    unpack = _kind(file, name)
    return unpack(file) if unpack else contextlib.nullcontext(file)


def _kind(file: Any, name: str) -> Callable[[Any], Any] | None:
    """Returns how a file is unpacked, None for plain text, from the bytes that it starts with."""
    start = file.peek(1)
    for pattern, kind in _KINDS.items():
        if re.match(pattern, start, re.DOTALL):
            if isinstance(kind, str):
                raise UserError(f"{name}: {kind}")
            return kind
    return None
