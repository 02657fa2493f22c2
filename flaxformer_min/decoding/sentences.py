"""Turns lines into the padded token ids that the compiled functions take."""

import logging
import zlib
from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, UInt

from flaxformer_min.data.batch import padded
from flaxformer_min.data.lines import is_blank
from flaxformer_min.data.tokenizer import Tokenizer

NAMED_LONG_LINES = 3  # lines that are cut and have a warning of their own; the rest is counted

_log = logging.getLogger(__name__)


class LongLines:
    """Warns of lines that are too long: the first few are named, then all are counted.

    `longest` is the tokens that the model takes, `trained` those of the longest line that it was
    trained on. One object is for all lines of a run; `end` is called after the last one.
    """

    def __init__(self, longest: int, trained: int) -> None:
        self.longest, self._trained = longest, trained
        self._cut = self._untrained = self._most = 0  # lines, lines and the tokens of one of them

    def see(self, side: str, number: int, tokens: int) -> None:
        """Takes note of a line: its side, such as "prefix", its number there and its tokens."""
        if tokens > self.longest:
            self._cut += 1
            if self._cut <= NAMED_LONG_LINES:
                _log.warning(
                    "%s, line %d: %d tokens are more than the model takes; its first %d are used",
                    *(side, number, tokens, self.longest),
                )
        elif tokens > self._trained:
            self._untrained += 1
            self._most = max(self._most, tokens)

    def end(self) -> None:
        """Warns of the lines that were not named."""
        if self._cut > NAMED_LONG_LINES:
            _log.warning("lines of more tokens than the model takes: %d", self._cut)
        if self._untrained:
            _log.warning(
                "lines of more than %d tokens: %d, the longest of %d; the model was trained on "
                "none that long (data.max_length) and may leave out much of them",
                *(self._trained, self._untrained, self._most),
            )


class Sentence(NamedTuple):
    """A line in token ids, cut to what the model takes."""

    place: int  # of the line among all lines, from 0
    source: list[int]  # ends in EOS
    prefix: list[int]  # the beginning that its translation must have, without EOS; may be empty

    @property
    def length(self) -> int:
        """The positions that it needs: those of its source, or of its prefix and EOS if more."""
        return max(len(self.source), len(self.prefix) + 1)


NO_SENTENCE = Sentence(-1, [], [])  # fills up a batch that has too few sentences


class PaddedSentences(NamedTuple):
    """Sentences to translate, padded; an entry that is all padding has no hypothesis."""

    source: Int[Array, "B S"]
    prefixes: Int[Array, "B P"] | None  # None if no sentence has one
    # For sampling: a checksum of the source ids, and the number of the draw (see pad_sentences).
    draws: UInt[Array, "B 2"]


def encode_sentences(
    tokenizer: Tokenizer,
    lines: Sequence[str],
    prefixes: Sequence[str] | None,
    first_line: int,
    long_lines: LongLines,
) -> list[Sentence]:
    """Encodes the lines that are not blank, each cut as in `encode_lines`, with its prefix, if any.

    `first_line` is the number of lines[0] in warnings.
    """
    places = [place for place, line in enumerate(lines) if not is_blank(line)]
    numbers = [first_line + place for place in places]
    sources = encode_lines(
        tokenizer, [lines[place] for place in places], numbers, "source", long_lines
    )
    if prefixes is None:
        return [Sentence(place, ids, []) for place, ids in zip(places, sources, strict=True)]
    texts = ["" if is_blank(prefixes[place]) else prefixes[place] for place in places]
    encoded = encode_lines(tokenizer, texts, numbers, "prefix", long_lines)
    starts = [ids[:-1] for ids in encoded]
    return [Sentence(*parts) for parts in zip(places, sources, starts, strict=True)]


def encode_lines(
    tokenizer: Tokenizer,
    lines: Sequence[str],
    numbers: Sequence[int],
    side: str,
    long_lines: LongLines,
) -> list[list[int]]:
    """Returns the token ids of each line of this side, EOS last.

    A line of more ids than the model takes is cut; its last id becomes EOS. `long_lines` is told of
    the line, as one of a `side`, by its number in `numbers`.
    """
    encoded = tokenizer.encode_batch(lines, "source" if side == "source" else "target")
    for number, ids in zip(numbers, encoded, strict=True):
        long_lines.see(side, number, len(ids))
        if len(ids) > long_lines.longest:
            ids[long_lines.longest - 1 :] = [tokenizer.eos_id]
    return encoded


def pad_sentences(
    sentences: Sequence[Sentence], width: int, pad_id: int, *, with_prefixes: bool
) -> PaddedSentences:
    """Pads the sources of the sentences, and the prefixes if there are any, to `width` ids.

    A random draw must not depend on the place of a line among other lines. So its key is made from
    the user's seed, the number of the draw, and a checksum (CRC-32) of the line's source ids.
    """
    sources = [sentence.source for sentence in sentences]
    draws = np.zeros((len(sources), 2), np.uint32)
    draws[:, 0] = [zlib.crc32(np.array(ids, "<i4").tobytes()) for ids in sources]
    prefixes = None
    if with_prefixes:
        prefixes = jnp.asarray(padded([each.prefix for each in sentences], width, pad_id))
    source = jnp.asarray(padded(sources, width, pad_id))
    return PaddedSentences(source, prefixes, jnp.asarray(draws))
