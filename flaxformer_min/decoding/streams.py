"""Translates the lines of a stream as they come."""

import io
import itertools
import json
from collections.abc import Iterator
from typing import Literal

from flaxformer_min.data.lines import decode_lines, read_lines
from flaxformer_min.decoding.attention_file import Write
from flaxformer_min.decoding.options import Options
from flaxformer_min.decoding.translator import DEFAULT, Translation, Translator
from flaxformer_min.errors import UserError

READ_BYTES = 1 << 18  # about 4,000 lines at once: sorted by length they fill their batches


def translate_stream(
    translator: Translator,
    source: io.BufferedIOBase,
    options: Options = DEFAULT,
    *,
    errors: Literal["strict", "replace"] = "strict",
    one_by_one: bool = False,
    prefix: str | None = None,
    as_json: bool = False,
    write_attention: Write | None = None,
) -> Iterator[list[str]]:
    """Yields the translations of a stream's lines in order, a list for each group of `ready_lines`.

    If `errors` is "replace", U+FFFD takes the place of bytes that are not UTF-8. `one_by_one`
    answers each line before the next is translated. `prefix` names a file with the beginning of
    each translation, in which a blank line leaves the translation free. `as_json` gives for each
    line a JSON array of its n_best hypotheses. `write_attention` is called with the number, pieces
    and weights of each line that is not blank. Raises UserError if the text is not UTF-8 or the
    prefix file has another number of lines, and for the reasons of `Translator.translate`, even if
    the stream has no line.
    """
    translator.settings(options)
    all_prefixes = None if prefix is None else read_lines(prefix)
    first_line, long_lines = 1, translator.long_lines()
    for group in ready_lines(source, one_by_one=one_by_one):
        lines = list(decode_lines(group, "standard input", first_line=first_line, errors=errors))
        prefixes = None
        if all_prefixes is not None:
            prefixes = list(itertools.islice(all_prefixes, len(lines)))
            if len(prefixes) < len(lines):
                count = first_line - 1 + len(prefixes)
                raise UserError(f"{prefix} has {count} lines but standard input has more")
        found = translator.translate(
            lines, options, prefixes=prefixes, first_line=first_line, long_lines=long_lines
        )
        for number, each in enumerate(found, first_line):
            if write_attention is not None and each.attention is not None:
                source_pieces, pieces = map(translator.tokenizer.pieces, (each.source, each.tokens))
                write_attention(number, source_pieces, pieces, each.attention)
        yield [to_json(each) if as_json else each.text for each in found]
        first_line += len(lines)
    long_lines.end()
    if all_prefixes is not None and any(True for _ in all_prefixes):
        raise UserError(f"{prefix} has more lines than standard input, which has {first_line - 1}")


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
