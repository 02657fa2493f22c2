"""From a checkpoint to translations: lines in, the same number of lines out, in order.

Lines are sorted by length and decoded in batches of few static shapes (shapes.py). A line's shape
depends on its own length alone, and rows do not mix, so neighbours cannot change a bit of a
translation.
"""

import collections
import dataclasses
import functools
import logging
import math
import os
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Literal, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from tqdm import tqdm

from flaxformer_min.checkpoints.load import load_for_inference
from flaxformer_min.config import Config, ModelConfig
from flaxformer_min.data.batch import padded
from flaxformer_min.data.lines import is_blank
from flaxformer_min.data.tokenizer import Tokenizer
from flaxformer_min.decoding.batches import LINES_PER_ROW, plan_batches
from flaxformer_min.decoding.options import Options
from flaxformer_min.decoding.programs import (
    Rows,
    on_devices,
    score_batch,
    search_batch,
    weigh_batch,
)
from flaxformer_min.decoding.search import Hypotheses
from flaxformer_min.errors import UserError
from flaxformer_min.model.attention_weights import AttentionWeights
from flaxformer_min.model.build import Params, split_model

# A batch is too small to keep the cores of a CPU busy, so there is one for each.
BATCHES_AT_ONCE = min(os.cpu_count() or 1, 8)

Item = TypeVar("Item")
Result = TypeVar("Result")

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Translation:
    """What a line became.

    score is log_prob over the length penalty; tokens end in EOS unless the length limit came first
    (then finished is False). A blank line has no tokens and score 0. `others` are the next best,
    n_best - 1 of them or as many as there are. Of `attention`, if asked for, each leaf is
    [L, H, queries, keys], without padding.
    """

    text: str
    score: float
    log_prob: float
    tokens: tuple[int, ...]
    finished: bool
    others: tuple["Translation", ...] = ()
    attention: AttentionWeights | None = dataclasses.field(default=None, compare=False, repr=False)


DEFAULT = Options()
EMPTY = Translation("", 0.0, 0.0, (), True)


class TokenScores(NamedTuple):
    """The log-probability of each token of a target, EOS included, in nats."""

    tokens: tuple[int, ...]
    log_probs: tuple[float, ...]


class Translator:
    """One model, or several as an ensemble, with their tokenizer; safe to use from many threads.

    Functions are compiled once for each shape and kind of search, and their batches are shared by
    the devices. `others` are further models by config and parameters; probabilities are the mean.
    `params` (of the first model) may be replaced by others of the same shapes at any time, without
    recompiling.
    """

    def __init__(
        self,
        config: Config,
        tokenizer: Tokenizer,
        params: Params,
        step: int | Sequence[int] | None = None,
        *,
        others: Sequence[tuple[ModelConfig, Params]] = (),
        devices: Sequence[jax.Device] | None = None,
    ) -> None:
        """`devices` are all of this process by default."""
        self.config, self.tokenizer, self.step = config, tokenizer, step
        devices = devices or jax.local_devices()
        self._devices = len(devices)
        mesh = jax.make_mesh(
            (self._devices,), ("rows",), axis_types=(AxisType.Auto,), devices=devices
        )
        self._everywhere = NamedSharding(mesh, P())
        models = [config.model, *(model for model, _ in others)]
        self._longest = min(model.max_length for model in models)
        self._others = tuple(jax.device_put(other, self._everywhere) for _, other in others)
        self.params = params
        graphdefs = tuple(split_model(model, tokenizer.vocab_size)[0] for model in models)
        search = functools.partial(search_batch, graphdefs, tokenizer, self._longest)
        self._search = on_devices(search, mesh)
        self._score = on_devices(functools.partial(score_batch, graphdefs, tokenizer), mesh)
        self._weigh = on_devices(functools.partial(weigh_batch, graphdefs[0], tokenizer), mesh)

    @classmethod
    def load(
        cls, directory: str | Path, *others: str | Path, step: int | Literal["best"] | None = None
    ) -> "Translator":
        """From a workdir's newest good checkpoint (or `step`), or from one checkpoint directory.

        Further directories make an ensemble. Raises UserError where their tokenizers differ, and
        UserError and CheckpointError as `checkpoint.load_for_inference`.
        """
        first, *rest = (load_for_inference(path, step) for path in (directory, *others))
        for path, loaded in zip(others, rest, strict=True):
            if loaded.tokenizer.sha256 != first.tokenizer.sha256:
                raise UserError(
                    f"{path}: its tokenizer is not that of {directory}; an ensemble shares one"
                )
        return cls(
            first.config,
            first.tokenizer,
            first.params,
            [first.step, *(loaded.step for loaded in rest)] if rest else first.step,
            others=[(loaded.config.model, loaded.params) for loaded in rest],
        )

    @property
    def params(self) -> Params:
        return self._params

    @params.setter
    def params(self, params: Params) -> None:
        self._params = jax.device_put(params, self._everywhere)

    def translate(
        self,
        lines: Sequence[str],
        options: Options = DEFAULT,
        *,
        prefixes: Sequence[str] | None = None,
        first_line: int = 1,
    ) -> list[Translation]:
        """One Translation for each line, in order.

        A blank line gives an empty one without calling the model. A line longer than the model
        takes is translated from its first tokens, with a warning; `first_line` is the number of
        lines[0] there. The translation of lines[n] begins with prefixes[n], if that is not blank;
        it counts in the score and towards the length.
        Raises UserError for options that contradict each other.
        """
        translations = [EMPTY] * len(lines)
        for batch in self.decode(lines, options, prefixes=prefixes, first_line=first_line):
            for place, translation in batch:
                translations[place] = translation
        return translations

    def decode(
        self,
        lines: Sequence[str],
        options: Options = DEFAULT,
        *,
        prefixes: Sequence[str] | None = None,
        first_line: int = 1,
    ) -> Iterator[list[tuple[int, Translation]]]:
        """The (place, Translation) of every line that is not blank, batch by batch.

        Between two batches the caller may stop. Otherwise as `translate`.
        """
        settled = options.settled(self.config.decode)
        if options.attention and self._others:
            raise UserError("attention is that of one model, and this is an ensemble")
        places = [place for place, line in enumerate(lines) if not is_blank(line)]
        sources = self._encode([lines[place] for place in places], places, first_line)
        begun = [[] for _ in places]
        if prefixes is not None:
            texts = ["" if is_blank(prefixes[place]) else prefixes[place] for place in places]
            begun = [ids[:-1] for ids in self._encode(texts, places, first_line)]
        lengths = [max(len(s), len(b) + 1) for s, b in zip(sources, begun, strict=True)]

        def search(batch: tuple[int, list[int | None]]) -> list[tuple[int, Translation]]:
            width, members = batch
            texts = _of(sources, members)
            filled = self._rows(texts, None if prefixes is None else _of(begun, members), width)
            found = self._search((self._params, *self._others), filled, settled)
            weights = self._weights(filled, found) if options.attention else None
            there = [places[member] for member in members if member is not None]
            return list(zip(there, self._translations(texts, found, weights), strict=True))

        # Attention weights are large: those of fewer lines at a time.
        lines_per_row = 1 if options.attention else LINES_PER_ROW
        yield from in_order(search, self._batches(lengths, lines_per_row))

    def score(self, pairs: Sequence[tuple[str, str]], *, first_line: int = 1) -> list[float]:
        """The log-probability of each pair's target given its source, EOS included, in order.

        A side longer than the model takes counts by its first tokens, with a warning.
        """
        scored = self.score_tokens(pairs, first_line=first_line)
        return [math.fsum(each.log_probs) for each in scored]

    def score_tokens(
        self, pairs: Sequence[tuple[str, str]], *, first_line: int = 1
    ) -> list[TokenScores]:
        """As `score`, token by token."""
        sources, targets = (
            self._encode([pair[side] for pair in pairs], range(len(pairs)), first_line)
            for side in (0, 1)
        )
        lengths = [max(map(len, pair)) for pair in zip(sources, targets, strict=True)]
        scored = [TokenScores((), ())] * len(pairs)
        pad_id = self.tokenizer.pad_id
        for width, members in self._batches(lengths):
            batch = tuple(padded(_of(side, members), width, pad_id) for side in (sources, targets))
            found = np.asarray(self._score((self._params, *self._others), batch))
            for member, log_probs in zip(members, found.tolist(), strict=True):
                if member is not None:
                    target = targets[member]
                    scored[member] = TokenScores(tuple(target), tuple(log_probs[: len(target)]))
        return scored

    def _batches(
        self, lengths: Sequence[int], lines_per_row: int = 1
    ) -> Iterator[tuple[int, list[int | None]]]:
        """`plan_batches`, with a progress bar on a terminal."""
        hidden = not sys.stderr.isatty()
        with tqdm(total=len(lengths), unit=" lines", leave=False, disable=hidden) as bar:
            batches = plan_batches(
                lengths, self._longest, self._devices, lines_per_row, BATCHES_AT_ONCE
            )
            for batch in batches:
                yield batch
                bar.update(sum(place is not None for place in batch[1]))

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

    def _rows(
        self,
        sources: Sequence[Sequence[int]],
        prefixes: Sequence[Sequence[int]] | None,
        width: int,
    ) -> Rows:
        pad_id, draws = self.tokenizer.pad_id, np.zeros((len(sources), 2), np.uint32)
        draws[:, 0] = [zlib.crc32(np.array(ids, "<i4").tobytes()) for ids in sources]
        forced = None if prefixes is None else jnp.asarray(padded(prefixes, width, pad_id))
        return Rows(jnp.asarray(padded(sources, width, pad_id)), forced, jnp.asarray(draws))

    def _weights(self, rows: Rows, found: Hypotheses) -> list[AttentionWeights]:
        """Those of the best hypotheses, of the second best, and so on."""
        ranks = range(found.tokens.shape[1])
        batches = [(rows.source, found.tokens[:, rank]) for rank in ranks]
        return [jax.device_get(self._weigh(self._params, batch)) for batch in batches]

    def _translations(
        self,
        sources: Sequence[Sequence[int]],
        found: Hypotheses,
        weights: Sequence[AttentionWeights] | None,
    ) -> Iterator[Translation]:
        """The hypotheses of each row with a source, the best first with the others in it."""
        host = jax.device_get(found)

        def hypothesis(row: int, rank: int) -> Translation:
            tokens, score, length, log_prob, finished = (leaf[row, rank] for leaf in host)
            ids = tuple(tokens[:length].tolist())
            attention = (
                None if weights is None else _cut(weights[rank], row, len(sources[row]), len(ids))
            )
            text = self.tokenizer.decode(ids)
            return Translation(
                text, float(score), float(log_prob), ids, bool(finished), attention=attention
            )

        for row in (row for row, source in enumerate(sources) if source):
            count = max(1, int(np.sum(host.lengths[row] > 0)))
            best, *others = (hypothesis(row, rank) for rank in range(count))
            yield dataclasses.replace(best, others=tuple(others))


def in_order(function: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
    """function(item) of each item, in order, with BATCHES_AT_ONCE of them at work.

    A caller that stops waits for those at work.
    """
    pool = ThreadPoolExecutor(BATCHES_AT_ONCE)
    waiting: collections.deque[Future[Result]] = collections.deque()
    try:
        for item in items:
            waiting.append(pool.submit(function, item))
            if len(waiting) > BATCHES_AT_ONCE:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def _of(ids: Sequence[list[int]], members: Sequence[int | None]) -> list[list[int]]:
    """The ids of each member; no ids where there is none."""
    return [[] if member is None else ids[member] for member in members]


def _cut(weights: AttentionWeights, row: int, source: int, target: int) -> AttentionWeights:
    """The weights of one row, [L, H, queries, keys], without padding."""
    return AttentionWeights(
        weights.encoder[row, :, :, :source, :source].copy(),
        weights.decoder[row, :, :, :target, :target].copy(),
        weights.cross[row, :, :, :target, :source].copy(),
    )
