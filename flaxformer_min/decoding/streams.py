"""Translates the lines of a stream as they come."""

import io
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Literal

from flaxformer_min.data.lines import decode_lines, read_lines
from flaxformer_min.decoding.options import Options
from flaxformer_min.decoding.translator import DEFAULT, Translation, Translator
from flaxformer_min.errors import UserError

READ_BYTES = 1 << 18  # about 4,000 lines at once: sorted by length they fill their batches


def translate_stream(
    translator: Translator,
    groups: Iterable[list[str]],
    options: Options = DEFAULT,
    *,
    prefix: str | None = None,
    tell: Callable[[int], object] | None = None,
) -> Iterator[list[Translation]]:
    """Yields the translations of a stream's lines in order, a list for each group of lines.

    `groups` are those of `line_groups`. `prefix` names a file with the beginning of each
    translation, in which a blank line leaves the translation free. `tell` is called as by
    `Translator.translate`. Raises UserError if the prefix file has another number of lines, and for
    the reasons of `Translator.translate`, even if the stream has no line.
    """
    translator.settings(options)
    all_prefixes = None if prefix is None else read_lines(prefix)
    first_line, long_lines = 1, translator.long_lines()
    for lines in groups:
        prefixes = None
        if all_prefixes is not None:
            prefixes = list(itertools.islice(all_prefixes, len(lines)))
            if len(prefixes) < len(lines):
                count = first_line - 1 + len(prefixes)
                raise UserError(f"{prefix} has {count} lines but the text has more")
        yield translator.translate(
            lines,
            options,
            prefixes=prefixes,
            first_line=first_line,
            long_lines=long_lines,
            tell=tell,
        )
        first_line += len(lines)
    long_lines.end()
    if all_prefixes is not None and any(True for _ in all_prefixes):
        raise UserError(f"{prefix} has more lines than the text, which has {first_line - 1}")


def line_groups(
    source: io.BufferedIOBase,
    name: str,
    *,
    errors: Literal["strict", "replace"] = "strict",
    one_by_one: bool = False,
) -> Iterator[list[str]]:
    """Yields the lines of a stream in the groups of `ready_lines`; messages call it `name`.

    If `errors` is "replace", U+FFFD takes the place of bytes that are not UTF-8; otherwise they are
    a UserError.
    """
    first_line = 1
    for group in ready_lines(source, one_by_one=one_by_one):
        yield list(decode_lines(group, name, first_line=first_line, errors=errors))
        first_line += len(group)


def ready_lines(source: io.BufferedIOBase, *, one_by_one: bool = False) -> Iterator[list[bytes]]:
    """Yields the lines of a stream in groups: the lines that have arrived, at most READ_BYTES.

    A line that has arrived in part waits for its end; whole lines wait for nothing. `one_by_one`
    makes every line a group of its own.
    """
    rest = b""
    while data := source.read1(READ_BYTES):
        *lines, rest = (rest + data).split(b"\n")
        if one_by_one:
            yield from ([line] for line in lines)
        elif lines:
            yield lines
    if rest:
        yield [rest]
