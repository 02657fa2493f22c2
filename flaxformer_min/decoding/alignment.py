"""Which source word each word of a translation comes from, by the weights of cross-attention.

The weights are those of the last decoder layer, the mean of its heads, as the piece is written. On
dates of the built-in task this is better than any other layer, and than the weights where the
decoder reads a piece that it has written (benchmarks/alignment.py). In models of six layers Garg et
al. 2019, "Jointly Learning to Align and Translate with Transformer Models", find the last layer but
one better, so such links are a hint and no more.
"""

import itertools
import re
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from flaxformer_min.data.tokenizer import UNK, Tokenizer

_BYTE = re.compile("<0x([0-9A-F]{2})>")


def pharaoh(
    tokenizer: Tokenizer,
    source: Sequence[int],
    target: Sequence[int],
    weights: Float[np.ndarray, "L H T S"],
) -> str:
    """Returns the links of a translation, such as "0-0 2-1": source word, target word, from 0.

    Words are divided by white space, and each target word has one link. `source` and `target` are
    ids, of which the last may be EOS; `weights` are those of cross-attention.
    """
    sides = []
    for ids in (source, target):
        pieces = tokenizer.pieces(ids)
        sides.append(words_of(pieces[:-1] if ids[-1:] == (tokenizer.eos_id,) else pieces))
    found = links(weights[-1].mean(axis=0), *sides)
    return " ".join(f"{source_word}-{target_word}" for source_word, target_word in found)


def links(
    weights: Float[np.ndarray, "T S"], source: Sequence[set[int]], target: Sequence[set[int]]
) -> list[tuple[int, int]]:
    """Returns (source word, target word) of each target word: the source word of most weight.

    `source` and `target` are the words of each piece, without EOS. A word's weight is the sum of
    its pieces' weights, so that EOS takes part in no link.
    """
    rows, columns = (_indicator(words) for words in (target, source))
    if not columns.shape[1]:
        return []
    by_word = rows.T @ weights[: len(target), : len(source)] @ columns
    return [(int(row.argmax()), word) for word, row in enumerate(by_word)]


def words_of(pieces: Sequence[str]) -> list[set[int]]:
    """Returns the numbers of the words, divided by white space, that each piece is a part of.

    A piece may be one byte of a character; one without a visible character is a part of no word.
    """
    parts = [_bytes_of(piece) for piece in pieces]
    words: list[int | None] = []  # of each byte
    number, before = -1, " "
    for char in b"".join(parts).decode(errors="surrogateescape"):
        number += before.isspace() and not char.isspace()
        size = len(char.encode(errors="surrogateescape"))
        words += [None if char.isspace() else number] * size
        before = char
    ends = [0, *itertools.accumulate(map(len, parts))]
    return [{w for w in words[a:b] if w is not None} for a, b in itertools.pairwise(ends)]


def _bytes_of(piece: str) -> bytes:
    if byte := _BYTE.fullmatch(piece):
        return bytes.fromhex(byte[1])
    # SentencePiece writes U+2047 between spaces for a piece that it does not know.
    return (" \u2047 " if piece == UNK else piece.replace("\u2581", " ")).encode()


def _indicator(words: Sequence[set[int]]) -> Float[np.ndarray, "pieces words"]:
    """Returns 1 where a piece is a part of a word, and 0 elsewhere."""
    found = np.zeros((len(words), max(itertools.chain(*words), default=-1) + 1))
    for piece, members in enumerate(words):
        found[piece, list(members)] = 1
    return found
