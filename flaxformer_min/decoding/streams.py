"""Lines from a stream, translated in blocks as they come."""

import io
import itertools
import json
from collections.abc import Iterable, Iterator
from typing import Any, Literal

from flaxformer_min.data.lines import decode_lines, read_lines
from flaxformer_min.decoding.attention_file import Write
from flaxformer_min.decoding.options import Options
from flaxformer_min.decoding.translator import DEFAULT, Translation, Translator
from flaxformer_min.errors import UserError

READ_BYTES = 1 << 18  # at once, about 4,000 lines: sorted by length they fill their batches


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
    """A line for each line of the source, in order; those of each block as soon as it is done.

    `one_by_one` answers each line before the next is translated. `prefix` is a file with the
    beginning of each translation, blank for a free one. `as_json` gives for each line an array of
    its n_best hypotheses.
    Raises UserError where the text is not UTF-8 (unless errors are to be replaced) or where the
    prefix file has another number of lines, and as `Translator.translate`.
    """
    options.settled(translator.config.decode)  # also where no line comes
    beginnings = None if prefix is None else read_lines(prefix)
    first_line = 1
    for block in ready_lines(source, one_by_one=one_by_one):
        lines = list(decode_lines(block, "standard input", first_line=first_line, errors=errors))
        prefixes = None if beginnings is None else list(itertools.islice(beginnings, len(lines)))
        if prefixes is not None and len(prefixes) < len(lines):
            lines_there = first_line - 1 + len(prefixes)
            raise UserError(f"{prefix} has {lines_there} lines but standard input has more")
        found = translator.translate(lines, options, prefixes=prefixes, first_line=first_line)
        if write_attention is not None:
            _pass_on_attention(translator, lines, found, first_line, write_attention)
        yield [_line(translation, as_json) for translation in found]
        first_line += len(lines)
    if beginnings is not None and any(True for _ in beginnings):
        raise UserError(f"{prefix} has more lines than standard input, which has {first_line - 1}")


def ready_lines(source: io.BufferedIOBase, *, one_by_one: bool = False) -> Iterator[list[bytes]]:
    """The lines of a stream in blocks: those that have come by now, READ_BYTES of them at most.

    A line waits for its end, nothing waits for more lines.
    """
    rest = b""
    while chunk := source.read1(READ_BYTES):
        *lines, rest = (rest + chunk).split(b"\n")
        if one_by_one:
            yield from ([line] for line in lines)
        elif lines:
            yield lines
    if rest:
        yield [rest]


def hypotheses(translation: Translation) -> list[dict[str, Any]]:
    """The n best of a line, best first, as JSON."""
    return [
        {
            "text": each.text,
            "score": each.score,
            "log_prob": each.log_prob,
            "token_count": len(each.tokens),
            "finished": each.finished,
        }
        for each in (translation, *translation.others)
    ]


def _line(translation: Translation, as_json: bool) -> str:
    if not as_json:
        return translation.text
    return json.dumps(hypotheses(translation), ensure_ascii=False)


def _pass_on_attention(
    translator: Translator,
    lines: Iterable[str],
    found: Iterable[Translation],
    first_line: int,
    write: Write,
) -> None:
    """The weights of the best translation of each line that is not blank."""
    tokenizer = translator.tokenizer
    for number, (line, translation) in enumerate(zip(lines, found, strict=True), first_line):
        if (weights := translation.attention) is not None:
            used = weights.encoder.shape[-1] - 1  # and EOS
            source = [*tokenizer.encode(line)[:used], tokenizer.eos_id]
            pieces = tokenizer.pieces(source), tokenizer.pieces(translation.tokens)
            write(number, *pieces, weights)
