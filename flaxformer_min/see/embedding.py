"""What a model knows of words: neighbours in its embedding, and the encoder's vectors in context.

Letters: S source length, D d_model, V vocabulary.
"""

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import numpy as np
from flax import nnx

from flaxformer_min.checkpoints.format import Loaded
from flaxformer_min.data.batch import padded
from flaxformer_min.data.lines import is_blank
from flaxformer_min.data.tokenizer import Tokenizer
from flaxformer_min.decoding.batches import plan_batches
from flaxformer_min.decoding.sentences import LongLines, encode_lines
from flaxformer_min.errors import UserError
from flaxformer_min.model.build import Params, split_model
from flaxformer_min.model.masks import padding_mask
from flaxformer_min.model.transformer import Source

# Training pushes all pieces that it never meets in one direction. A piece counts as never trained
# if the cosine with so many others is above this. In the demo's model this finds 980 of the 981
# pieces that the training text lacks and none of the 519 others.
ALIKE, OTHERS = 0.95, 10
PLACES = 11  # of a word, so that their table fits into 80 columns
SPACE = "\u2581"  # SentencePiece's mark for the blank before a word

Term = tuple[int, str]  # +1 or -1, and a word


class Neighbours(NamedTuple):
    """The pieces nearest to a sum of words, as (piece, cosine), nearest first."""

    title: str
    nearest: list[tuple[str, float]]


def neighbours(loaded: Loaded, words: Sequence[str], count: int = 10) -> list[Neighbours]:
    """Returns the pieces nearest to each word, or to each sum such as `a - b + c`.

    The embedding is the source's if the two sides do not share one. Vectors have length 1 before
    they are added. Pieces that were never trained, control pieces and the words themselves are left
    out. Raises UserError for a word that is no piece, one that was never trained, and a sum that
    lacks a word.
    """
    params, tokenizer = loaded.params, loaded.tokenizer
    table = np.asarray(params.get("source_embedding", params["embedding"]))
    table = table / np.linalg.norm(table, axis=1, keepdims=True)
    places = {piece: i for i, piece in enumerate(tokenizer.pieces(range(len(table))))}
    return [_nearest(table, places, tokenizer, terms, count) for terms in sums(words)]


def sums(words: Sequence[str]) -> list[list[Term]]:
    """Splits words into sums: "+" and "-" join the word before them with the word behind them."""
    found: list[list[Term]] = []
    sign = 0  # of the word that has to follow; 0 if none has to
    for word in [*map(str.strip, words), None]:
        if word == "" or ((sign or not found) and word in ("+", "-", None)):
            raise UserError(f"a word is missing in {' '.join(words)!r}: give WORD, or WORD - WORD")
        if word in ("+", "-"):
            sign = 1 if word == "+" else -1
        elif sign and word:
            found[-1].append((sign, word))
            sign = 0
        elif word:
            found.append([(1, word)])
    return found


def _nearest(
    table: np.ndarray, places: dict[str, int], tokenizer: Tokenizer, terms: list[Term], count: int
) -> Neighbours:
    """Returns the pieces nearest to a sum; `table` [V, D] has rows of length 1."""
    rows = [_place(places, tokenizer, word) for _, word in terms]
    names = tokenizer.pieces(rows)
    for row, name in zip(rows, names, strict=True):
        if not told_apart(table, row):
            raise UserError(f"training never met the piece {name}: ask for another one")
    signs = [sign for sign, _ in terms]
    total = np.array(signs) @ table[rows]
    cosines = table @ (total / max(float(np.linalg.norm(total)), 1e-9))
    left_out = {*rows, *tokenizer.never_generated}
    order = (int(row) for row in np.argsort(-cosines, kind="stable") if row not in left_out)
    best = list(itertools.islice((row for row in order if told_apart(table, row)), count))
    title = " ".join(f"{'+' if s > 0 else '-'} {n}" for s, n in zip(signs, names, strict=True))
    nearest = list(zip(tokenizer.pieces(best), cosines[best].tolist(), strict=True))
    return Neighbours(title.removeprefix("+ "), nearest)


def told_apart(table: np.ndarray, row: int) -> bool:
    """Says whether training has told this row from the others (see ALIKE)."""
    return int((table @ table[row] > ALIKE).sum()) - 1 < OTHERS  # it is like itself


def _place(places: dict[str, int], tokenizer: Tokenizer, word: str) -> int:
    """Returns the id of a word: that of the piece which begins a word, or else of any piece."""
    for piece in (SPACE + word, word):
        if piece in places:
            return places[piece]
    pieces = tokenizer.pieces(i for i in tokenizer.encode(word)[:-1] if i != tokenizer.unk_id)
    parts = " ".join(piece for piece in pieces if piece != SPACE) or "another word"
    raise UserError(f"{word:.40} is no piece of this tokenizer: ask for a part of it, {parts:.80}")


class Encoded(NamedTuple):
    """A line as the encoder sees it; a blank line has S = 0."""

    pieces: list[str]  # EOS last
    ids: list[int]
    embedding: np.ndarray  # [S, D], times sqrt(D), without positions
    states: np.ndarray  # [S, D], the encoder's output


def encode(loaded: Loaded, lines: Sequence[str]) -> list[Encoded]:
    """Returns what the encoder makes of each line, in order.

    A line longer than the model takes is cut, with a warning that names its number.
    """
    tokenizer, model = loaded.tokenizer, loaded.config.model
    graphdef, _ = split_model(model, tokenizer.vocab_size)
    forward = jax.jit(functools.partial(_forward, graphdef, tokenizer.pad_id))
    long_lines = LongLines(model.max_length, loaded.config.data.max_length)
    ids = encode_lines(tokenizer, lines, range(1, len(lines) + 1), "source", long_lines)
    long_lines.end()
    ids = [[] if is_blank(line) else row for line, row in zip(lines, ids, strict=True)]
    nothing = np.zeros((0, model.d_model), np.float32)
    encoded = [Encoded([], [], nothing, nothing)] * len(lines)
    lengths = [len(row) for row in ids]
    for width, members in plan_batches(lengths, model.max_length):
        batch = padded([[] if m is None else ids[m] for m in members], width, tokenizer.pad_id)
        arrays = jax.device_get(forward(loaded.params, batch))
        for m, embedding, states in zip(members, *arrays, strict=True):
            if m is not None and ids[m]:
                size = len(ids[m])
                pieces = tokenizer.pieces(ids[m])
                encoded[m] = Encoded(pieces, ids[m], embedding[:size], states[:size])
    return encoded


def _forward(
    graphdef: nnx.GraphDef, pad_id: int, params: Params, source: Source
) -> tuple[jax.Array, jax.Array]:
    """Returns embedding and encoder output, [B, S, D], in float32."""
    taps = {}
    states = nnx.merge(graphdef, params).encode(source, padding_mask(source, pad_id), taps=taps)
    return taps["embedding"].astype(np.float32), states.astype(np.float32)


def arrays(encoded: Sequence[Encoded], *, pooled: bool) -> dict[str, np.ndarray]:
    """Returns what is written of encoded lines, by name.

    For line n, counted from 1, `n/pieces`, `n/embedding` and `n/states`; or, `pooled`, one matrix
    `states` [lines, D], the mean over the tokens of each line, EOS included; 0 for a blank line.
    """
    if pooled:
        return {"states": np.array([e.states.sum(axis=0) / max(len(e.ids), 1) for e in encoded])}
    return {
        f"{n}/{name}": np.array(getattr(each, name))
        for n, each in enumerate(encoded, 1)
        for name in ("pieces", "embedding", "states")
    }


def compare(loaded: Loaded, word: str, lines: Sequence[str]) -> Iterator[str]:
    """Yields a table of cosines of a word's vectors: alone, and where it first stands in lines.

    It has at most PLACES rows. The vector of a word of several pieces is the mean of theirs. Raises
    UserError if no line has the word.
    """
    wanted = loaded.tokenizer.encode(word)[:-1]
    found: list[tuple[str, Encoded, int]] = []
    for number, each in enumerate(encode(loaded, [word, *lines])):
        for first in range(len(each.ids) - len(wanted) + 1):
            if each.ids[first : first + len(wanted)] == wanted:
                found.append((f"line {number}" if number else "alone", each, first))
    if len(found) < 2 or not wanted:
        raise UserError(f"--word {word:.40}: no line of standard input has it; give lines with it")
    del found[PLACES:]
    for name, title in (("embedding", "of the embedding"), ("states", "of the encoder's output")):
        yield f"{word}: cosines {title}"
        vectors = [
            getattr(e, name)[first : first + len(wanted)].mean(axis=0) for _, e, first in found
        ]
        units = np.array([vector / np.linalg.norm(vector) for vector in vectors])
        for (label, *_), row in zip(found, units @ units.T, strict=True):
            yield f"{label:<9}" + "".join(f"{cosine:6.2f}" for cosine in row)
