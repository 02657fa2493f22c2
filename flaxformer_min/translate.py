"""From a checkpoint to translations: lines in, the same number of lines out, in order.

Lines are sorted by length and decoded in batches of few static shapes. The shape depends on a
line's own length alone, and rows do not mix, so neighbours cannot change a bit of a translation.
"""

import bisect
import dataclasses
import functools
import itertools
import logging
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Float, Int
from tqdm import tqdm

from flaxformer_min.checkpoint import load_for_inference
from flaxformer_min.config import Config
from flaxformer_min.corpus import is_blank
from flaxformer_min.masks import padding_mask
from flaxformer_min.search import Hypotheses, beam_search
from flaxformer_min.state import Params, split_model
from flaxformer_min.step import forced_states
from flaxformer_min.tokenizer import Tokenizer

# Source positions decoded at once, padding counted. On a CPU a sentence costs the same with 8 rows
# and with 85, so few rows: a batch waits for its longest translation and pays for filler rows.
BATCH_TOKENS = 512
SHORTEST_SHAPE = 16  # shorter shapes would save little and have to be compiled

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Translation:
    """What a line became.

    score is the log-probability over the length penalty; tokens end in EOS unless the length limit
    came first (then finished is False). A blank line has no tokens and score 0.
    """

    text: str
    score: float
    tokens: tuple[int, ...]
    finished: bool


class Translator:
    """A model with its tokenizer. Functions are compiled once for each shape and beam size.

    `params` may be replaced by others of the same shapes at any time, without recompiling.
    """

    def __init__(
        self, config: Config, tokenizer: Tokenizer, params: Params, step: int | None = None
    ) -> None:
        self.config, self.tokenizer, self.step = config, tokenizer, step
        self.params = jax.device_put(params)
        graphdef, _ = split_model(config.model, tokenizer.vocab_size)
        self._search = jax.jit(
            functools.partial(search_batch, graphdef, tokenizer),
            static_argnames=("length", "beam_size"),
        )
        self._score = jax.jit(functools.partial(score_batch, graphdef, tokenizer))

    @classmethod
    def load(cls, directory: str | Path, step: int | Literal["best"] | None = None) -> "Translator":
        """From a workdir's newest good checkpoint (or `step`), or from one checkpoint directory.

        Raises UserError and CheckpointError as `checkpoint.load_for_inference`.
        """
        loaded = load_for_inference(directory, step)
        return cls(loaded.config, loaded.tokenizer, loaded.params, loaded.step)

    def translate(
        self,
        lines: Sequence[str],
        *,
        beam_size: int | None = None,
        length_penalty_alpha: float | None = None,
        first_line: int = 1,
    ) -> list[Translation]:
        """One Translation for each line, in order; None means the config's value.

        A blank line gives an empty one without calling the model. A line longer than the model
        takes is translated from its first tokens, with a warning; `first_line` is the number of
        lines[0] there.
        """
        translations = [Translation("", 0.0, (), True)] * len(lines)
        decoded = self.decode(
            lines,
            beam_size=beam_size,
            length_penalty_alpha=length_penalty_alpha,
            first_line=first_line,
        )
        for batch in decoded:
            for place, translation in batch:
                translations[place] = translation
        return translations

    def decode(
        self,
        lines: Sequence[str],
        *,
        beam_size: int | None = None,
        length_penalty_alpha: float | None = None,
        first_line: int = 1,
    ) -> Iterator[list[tuple[int, Translation]]]:
        """The (place, Translation) of every line that is not blank, batch by batch.

        Between two batches the caller may stop. Otherwise as `translate`.
        """
        decode = self.config.decode
        beam_size = decode.beam_size if beam_size is None else beam_size
        alpha = (
            decode.length_penalty_alpha if length_penalty_alpha is None else length_penalty_alpha
        )
        places = [place for place, line in enumerate(lines) if not is_blank(line)]
        sources = self._encode([lines[place] for place in places], places, first_line)
        for rows, width, members in self._batches([len(source) for source in sources]):
            batch = [sources[member] for member in members]
            found = self._search(
                self.params,
                self._padded(batch, rows, width),
                self._max_lengths(batch, rows),
                np.float32(alpha),
                length=self._max_length(width),
                beam_size=beam_size,
            )
            found_places = [places[member] for member in members]
            yield list(zip(found_places, self._translations(found), strict=False))

    def score(self, pairs: Sequence[tuple[str, str]], *, first_line: int = 1) -> list[float]:
        """The log-probability of each pair's target given its source, EOS included, in order.

        A side longer than the model takes counts by its first tokens, with a warning.
        """
        places = range(len(pairs))
        sources = self._encode([source for source, _ in pairs], places, first_line)
        targets = self._encode([target for _, target in pairs], places, first_line)
        lengths = [max(map(len, pair)) for pair in zip(sources, targets, strict=True)]
        scores = [0.0] * len(pairs)
        for rows, width, members in self._batches(lengths):
            batch = (
                self._padded([side[member] for member in members], rows, width)
                for side in (sources, targets)
            )
            found = np.asarray(self._score(self.params, *batch))
            for member, score in zip(members, found, strict=False):
                scores[member] = float(score)
        return scores

    def _batches(self, lengths: Sequence[int]) -> Iterator[tuple[int, int, list[int]]]:
        """`plan_batches`, with a progress bar on a terminal."""
        hidden = not sys.stderr.isatty()
        with tqdm(total=len(lengths), unit=" lines", leave=False, disable=hidden) as bar:
            for batch in plan_batches(lengths, self._longest):
                yield batch
                bar.update(len(batch[2]))

    @property
    def _longest(self) -> int:
        return self.config.model.max_length

    def _max_length(self, source_length: int) -> int:
        """Tokens that a translation of so many source tokens may have; both count EOS."""
        return min(source_length + self.config.decode.max_length_offset, self._longest)

    def _encode(
        self, lines: Sequence[str], places: Sequence[int], first_line: int
    ) -> list[list[int]]:
        """Token ids of the lines, cut to what the model takes; EOS stays the last."""
        encoded = self.tokenizer.encode_batch(lines)
        for place, ids in zip(places, encoded, strict=True):
            if len(ids) > self._longest:
                _log.warning(
                    "line %d: %d tokens are more than the model takes; its first %d are used",
                    first_line + place,
                    len(ids),
                    self._longest,
                )
                ids[self._longest - 1 :] = [self.tokenizer.eos_id]
        return encoded

    def _padded(self, batch: Sequence[Sequence[int]], rows: int, width: int) -> np.ndarray:
        """Token ids [rows, width], padded; rows beyond the batch are all padding."""
        padded = np.full((rows, width), self.tokenizer.pad_id, np.int32)
        for row, ids in enumerate(batch):
            padded[row, : len(ids)] = ids
        return padded

    def _max_lengths(self, batch: Sequence[Sequence[int]], rows: int) -> np.ndarray:
        """The length limit of each row [rows]; filler rows have 0 and are done at once."""
        limits = np.zeros(rows, np.int32)
        limits[: len(batch)] = [self._max_length(len(ids)) for ids in batch]
        return limits

    def _translations(self, found: Hypotheses) -> Iterator[Translation]:
        """The best hypothesis of each row."""
        best = jax.tree.map(lambda leaf: leaf[:, 0], jax.device_get(found))
        for tokens, score, length, _, finished in zip(*best, strict=True):
            ids = tuple(tokens[:length].tolist())
            yield Translation(self.tokenizer.decode(ids), float(score), ids, bool(finished))


def search_batch(
    graphdef: nnx.GraphDef,
    tokenizer: Tokenizer,
    params: Params,
    source: Int[Array, "B S"],
    max_lengths: Int[Array, " B"],
    length_penalty_alpha: Float[Array, ""],
    *,
    length: int,
    beam_size: int,
) -> Hypotheses:
    """The best hypothesis of each source row, N = 1, of at most max_lengths[b] <= length tokens.

    The encoder and the decoder's keys and values of its memory are computed once per sentence.
    """
    model = nnx.merge(graphdef, params)
    source_mask = padding_mask(source, tokenizer.pad_id)
    memories = model.memory_keys_values(model.encode(source, source_mask))

    def step_fn(tokens, cache, index):
        logits, cache = model.decode_step(tokens, index, cache, memories, source_mask)
        return jax.nn.log_softmax(logits), cache

    return beam_search(
        step_fn,
        model.init_cache(source.shape[0], beam_size, length),
        bos_id=tokenizer.bos_id,
        eos_id=tokenizer.eos_id,
        pad_id=tokenizer.pad_id,
        max_lengths=max_lengths,
        length=length,
        beam_size=beam_size,
        length_penalty_alpha=length_penalty_alpha,
        never_generated=tokenizer.never_generated,
    )


def score_batch(
    graphdef: nnx.GraphDef,
    tokenizer: Tokenizer,
    params: Params,
    source: Int[Array, "B S"],
    target: Int[Array, "B T"],
) -> Float[Array, " B"]:
    """Forced decoding: the log-probability of each target row given its source row.

    Every token counts but padding, so EOS does.
    """
    model = nnx.merge(graphdef, params)
    pad_id, bos_id = tokenizer.pad_id, tokenizer.bos_id
    states = forced_states(model, source, target, pad_id=pad_id, bos_id=bos_id)
    losses = optax.softmax_cross_entropy_with_integer_labels(model.project(states), target)
    return -jnp.sum(losses, axis=1, where=target != pad_id)


def plan_batches(lengths: Sequence[int], longest: int) -> Iterator[tuple[int, int, list[int]]]:
    """(rows, width, places) of each batch: places of at most `rows` lengths, none above `width`.

    Every place occurs once, shorter ones first. The shape of a place follows from its own length.
    """
    shapes = shape_ladder(longest)

    def shape(place: int) -> int:
        return bisect.bisect_left(shapes, lengths[place])

    by_length = sorted(range(len(lengths)), key=lengths.__getitem__)
    for rung, group in itertools.groupby(by_length, shape):
        members, width = list(group), shapes[rung]
        rows = max(1, BATCH_TOKENS // width)
        for first in range(0, len(members), rows):
            yield rows, width, members[first : first + rows]


def shape_ladder(longest: int) -> list[int]:
    """The widths batches have: 16, 24, 32, 48, 64, 96 ... below `longest`, and `longest`."""
    powers = itertools.takewhile(
        lambda power: power < longest, (SHORTEST_SHAPE << k for k in itertools.count())
    )
    steps = (width for power in powers for width in (power, power + power // 2))
    return [*(width for width in steps if width < longest), longest]
