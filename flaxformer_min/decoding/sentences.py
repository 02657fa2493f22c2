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
from flaxformer_min.data.tokenizer import Side, Tokenizer

TOO_LONG = "line %d: %d tokens are more than the model takes; its first %d are used"

_log = logging.getLogger(__name__)


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
    longest: int,
    first_line: int,
) -> list[Sentence]:
    """Encodes the lines that are not blank, each cut to `longest` ids and with its prefix, if any.

    `first_line` is the number of lines[0] in warnings.
    """
    places = [place for place, line in enumerate(lines) if not is_blank(line)]
    numbers = [first_line + place for place in places]
    sources = encode_lines(tokenizer, [lines[place] for place in places], numbers, longest)
    if prefixes is None:
        return [Sentence(place, ids, []) for place, ids in zip(places, sources, strict=True)]
    texts = ["" if is_blank(prefixes[place]) else prefixes[place] for place in places]
    starts = [ids[:-1] for ids in encode_lines(tokenizer, texts, numbers, longest, "target")]
    return [Sentence(*parts) for parts in zip(places, sources, starts, strict=True)]


def encode_lines(
    tokenizer: Tokenizer,
    lines: Sequence[str],
    numbers: Sequence[int],
    longest: int,
    side: Side = "source",
) -> list[list[int]]:
    """Returns the token ids of each line of this side, EOS last.

    A line of more than `longest` ids is cut, with a warning that names its number in `numbers`; its
    last id becomes EOS.
    """
    encoded = tokenizer.encode_batch(lines, side)
    for number, ids in zip(numbers, encoded, strict=True):
        if len(ids) > longest:
            _log.warning(TOO_LONG, number, len(ids), longest)
            ids[longest - 1 :] = [tokenizer.eos_id]
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
