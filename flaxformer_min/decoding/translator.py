"""The Translator: it loads a checkpoint and translates lines, one translation for each, in order.

Lines are sorted by length and decoded in batches of few static shapes (decoding/batches.py). The
shape for a line depends on the line's own length alone, and no row of a batch depends on another,
so the other lines cannot change a bit of a translation.
"""

import bisect
import functools
import math
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Literal, overload

import jax
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from flaxformer_min.checkpoints.leaves import fitting
from flaxformer_min.checkpoints.load import load_for_inference
from flaxformer_min.config import Config, ModelConfig
from flaxformer_min.data.batch import padded
from flaxformer_min.data.tokenizer import Tokenizer
from flaxformer_min.decoding.batches import (
    LINES_PER_ROW,
    Planned,
    capacity_of,
    plan_batches,
    shape_ladder,
)
from flaxformer_min.decoding.options import Options
from flaxformer_min.decoding.programs import (
    Pairs,
    on_devices,
    rows_mesh,
    score_batch,
    search_batch,
)
from flaxformer_min.decoding.search import Hypotheses
from flaxformer_min.decoding.sentences import (
    NO_SENTENCE,
    LongLines,
    PaddedSentences,
    Sentence,
    encode_lines,
    encode_sentences,
    pad_sentences,
)
from flaxformer_min.decoding.texts import (
    checked_pairs,
    checked_path,
    checked_prefixes,
    checked_texts,
    shown,
)
from flaxformer_min.decoding.translation import EMPTY, TokenScores, Translation, translations
from flaxformer_min.errors import UserError
from flaxformer_min.model.attention import AttentionWeights
from flaxformer_min.model.attention_weights import attention_weights
from flaxformer_min.model.build import Params, split_model
from flaxformer_min.model.transformer import Transformer
from flaxformer_min.system.devices import refuse_forked
from flaxformer_min.system.devices import start as start_devices
from flaxformer_min.system.meter import Meter
from flaxformer_min.system.threads import map_ahead

# One batch is too small to keep the cores of a CPU busy, so several are computed at once.
BATCHES_AT_ONCE = min(os.cpu_count() or 1, 8)


DEFAULT = Options()


class Translator:
    """One model, or several as an ensemble, with their tokenizer; safe to use from many threads.

    Functions are compiled once for each shape and kind of search, and the devices share each batch.
    `others` are the config and parameters of each further model; the probabilities of all models
    are averaged. `params` (of the first model) may be replaced by others of the same shapes at any
    time, without recompiling.

    >>> translator = Translator.load("runs/demo")
    >>> found = translator.translate("a cat", Options(beam_size=4))  # found.text is in German
    >>> found.score <= 0
    True
    >>> len(translator.translate(["now", "dogs"]))
    2
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
        """`step` is the checkpoint's; `devices` are by default all devices of this process."""
        start_devices()
        self.config, self.tokenizer, self.step = config, tokenizer, step
        devices = devices or jax.local_devices()
        self._devices, self._capacity = len(devices), capacity_of(devices[0].platform)
        mesh = rows_mesh(devices)
        self._everywhere = NamedSharding(mesh, P())
        models = [config.model, *(model for model, _ in others)]
        self._longest = min(model.max_length for model in models)
        graphdefs, self._shapes = zip(
            *(split_model(model, tokenizer.vocab_size) for model in models), strict=True
        )
        self._graphdef = graphdefs[0]
        self.params = params
        self._others = tuple(
            jax.device_put(fitting(other, shapes), self._everywhere)
            for (_, other), shapes in zip(others, self._shapes[1:], strict=True)
        )
        search = functools.partial(
            search_batch, graphdefs, tokenizer, self._longest, capacity=self._capacity
        )
        self._search = on_devices(search, mesh)
        self._score = on_devices(functools.partial(score_batch, graphdefs, tokenizer), mesh)
        self._weigh = on_devices(functools.partial(_weigh, graphdefs[0], tokenizer), mesh)

    @classmethod
    def load(
        cls, directory: str | Path, *others: str | Path, step: int | Literal["best"] | None = None
    ) -> "Translator":
        """Loads a workdir's newest good checkpoint (or `step`), or one checkpoint directory.

        Further directories make an ensemble. JAX keeps compiled programs as
        `system.devices.keep_programs` says. Raises UserError if their tokenizers differ, and
        UserError and CheckpointError for the reasons of `load_for_inference`, ValueError for
        an empty path or a URL, and TypeError for what is no path or no step.
        """
        if step not in (None, "best") and type(step) is not int:
            raise TypeError(f"step is {shown(step)}: it must be a whole number, 'best' or None")
        paths = [checked_path(path, "directory") for path in (directory, *others)]
        first, *rest = (load_for_inference(path, step) for path in paths)
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
        self._params = jax.device_put(fitting(params, self._shapes[0]), self._everywhere)

    @property
    def model(self) -> Transformer:
        """The (first) model with its weights, as the paper's functions call it.

        >>> translator = Translator.load("runs/demo")
        >>> model, tokenizer = translator.model, translator.tokenizer
        >>> source = np.array([tokenizer.encode("a cat")])  # [B, S]
        >>> memory = model.encode(source, padding_mask(source))  # [B, S, D]
        >>> memory.shape == (*source.shape, model.config.d_model)
        True
        """
        return nnx.merge(self._graphdef, self._params)

    def warm_up(
        self,
        options: Options = DEFAULT,
        *,
        longest: int | None = None,
        with_prefixes: bool = False,
    ) -> list[int]:
        """Compiles what translating lines of at most `longest` tokens needs, EOS counted.

        No later call of `translate` with these options compiles anything for such lines. By default
        that are all lines, because the model takes no more tokens than its `max_length`. Later
        options may have other numbers in fields that are not static (decoding/options.py). Lines
        with prefixes need programs of their own. Returns the lengths to which lines are padded.
        Raises UserError as `translate` does, and ValueError if `longest` is below 1.

        >>> translator = Translator.load("runs/demo")
        >>> translator.warm_up(Options(beam_size=1), longest=12)
        [16]
        """
        refuse_forked()
        settings, longest = self.settings(options), self._longest if longest is None else longest
        if longest < 1:
            raise ValueError(f"longest is {longest}: it must be at least 1")
        ladder = shape_ladder(self._longest)
        widths = ladder[: bisect.bisect_left(ladder, min(longest, self._longest)) + 1]

        def compile_for(planned: Planned) -> None:
            width, members = planned  # a search of places without a sentence ends at once
            empty = [NO_SENTENCE] * len(members)
            self._searched(empty, width, settings, options.attention, with_prefixes)

        batches = self._batches(widths, _lines_per_row(options), settings.beam_size)
        for _ in map_ahead(compile_for, batches, threads=BATCHES_AT_ONCE, ahead=BATCHES_AT_ONCE):
            pass
        return widths

    @overload
    def translate(
        self,
        lines: str,
        options: Options = ...,
        *,
        prefixes: Sequence[str] | None = ...,
        first_line: int = ...,
        long_lines: LongLines | None = ...,
        tell: Callable[[int], object] | None = ...,
        should_stop: Callable[[], bool] | None = ...,
    ) -> Translation: ...

    @overload
    def translate(
        self,
        lines: Sequence[str],
        options: Options = ...,
        *,
        prefixes: Sequence[str] | None = ...,
        first_line: int = ...,
        long_lines: LongLines | None = ...,
        tell: Callable[[int], object] | None = ...,
        should_stop: Callable[[], bool] | None = ...,
    ) -> list[Translation]: ...

    def translate(
        self,
        lines: str | Sequence[str],
        options: Options = DEFAULT,
        *,
        prefixes: Sequence[str] | None = None,
        first_line: int = 1,
        long_lines: LongLines | None = None,
        tell: Callable[[int], object] | None = None,
        should_stop: Callable[[], bool] | None = None,
    ) -> Translation | list[Translation]:
        """Returns one Translation for each line, in order; a string is one line and gives one.

        A blank line gives an empty Translation without calling the model. A line longer than the
        model takes is translated from its first tokens. The first such lines have a warning each,
        where lines[0] has number `first_line`; all of them are counted, and so are lines that are
        longer than those that the model was trained on. A caller that translates in several calls
        may count over all of them by `long_lines`. The translation of lines[n] begins with
        prefixes[n], if that is not blank; the prefix counts in the score and towards the length.
        `tell` is called with the number of lines of each batch that is done; without it a terminal
        shows a bar.

        Once `should_stop()` is true no further batch begins: those that have begun are finished,
        and then a CancelledError is raised, unless every line has its translation. It is called
        from several threads. A deadline is `should_stop=lambda: time.monotonic() > end`.

        Raises UserError for options that are out of range or contradict each other, and for
        attention weights of an ensemble; TypeError for what is no string; ValueError for more or
        fewer prefixes than lines.
        """
        texts = [lines] if isinstance(lines, str) else lines
        batches = self.decode(
            texts,
            options,
            prefixes=prefixes,
            first_line=first_line,
            long_lines=long_lines,
            should_stop=should_stop,
        )
        translations = [EMPTY] * len(texts)
        with Meter("translating", len(texts), "lines", plain=False, bar=tell is None) as meter:
            for batch in batches:
                for place, translation in batch:
                    translations[place] = translation
                (tell or meter.update)(len(batch))
        return translations[0] if isinstance(lines, str) else translations

    def settings(self, options: Options) -> Options:
        """Returns complete options; raises UserError if this model cannot follow them.

        What is no Options is a TypeError.
        """
        if not isinstance(options, Options):
            raise TypeError(f"options is {shown(options)}: it must be Options(beam_size=4), say")
        settings = options.with_defaults(self.config.decode)
        if options.attention and self._others:
            raise UserError("attention is that of one model, and this is an ensemble")
        if settings.min_length > self._longest:
            most = f"at most {self._longest}, the tokens of the model's longest sequence"
            raise UserError(f"min_length is {settings.min_length}: it must be {most}")
        return settings

    def decode(
        self,
        lines: Sequence[str],
        options: Options = DEFAULT,
        *,
        prefixes: Sequence[str] | None = None,
        first_line: int = 1,
        long_lines: LongLines | None = None,
        should_stop: Callable[[], bool] | None = None,
    ) -> Iterator[list[tuple[int, Translation]]]:
        """Iterates over the (place, Translation) of every line that is not blank, by batches.

        `place` is the line's index in `lines`. The caller may stop between two batches. The
        arguments and errors are those of `translate`, but a bare string is a TypeError; errors come
        at once, and that of `should_stop` in place of a batch.
        """
        refuse_forked()
        lines = checked_texts(lines, "lines", "[text]")
        prefixes = checked_prefixes(prefixes, len(lines))
        settings = self.settings(options)
        how = settings, options.attention, prefixes is not None
        noted = long_lines or self.long_lines()
        sentences = encode_sentences(self.tokenizer, lines, prefixes, first_line, noted)
        if long_lines is None:
            noted.end()

        def search(planned: Planned) -> list[tuple[int, Translation]]:
            if should_stop is not None and should_stop():
                raise CancelledError("should_stop() was true before every line was done")
            width, members = planned
            chosen = [NO_SENTENCE if m is None else sentences[m] for m in members]
            found, weights = self._searched(chosen, width, *how)
            return list(translations(self.tokenizer, chosen, found, weights))

        lengths = [sentence.length for sentence in sentences]
        batches = self._batches(lengths, _lines_per_row(options), settings.beam_size)
        return map_ahead(search, batches, threads=BATCHES_AT_ONCE, ahead=BATCHES_AT_ONCE)

    def _searched(
        self,
        sentences: list[Sentence],
        width: int,
        settings: Options,
        attention: bool,
        with_prefixes: bool,
    ) -> tuple[Hypotheses, list[AttentionWeights] | None]:
        """Searches a batch of this width; returns what was found, and weights if asked for."""
        batch = pad_sentences(sentences, width, self.tokenizer.pad_id, with_prefixes=with_prefixes)
        found = self._search((self._params, *self._others), batch, settings)
        weights = self._attention(batch, found) if attention else None
        return jax.device_get(found), weights

    def score(self, pairs: Sequence[tuple[str, str]], *, first_line: int = 1) -> list[float]:
        """Returns the log-probability of each pair's target given its source, in nats, in order.

        EOS is included. A side that is longer than the model takes is cut to its first tokens, with
        warnings as those of `translate`.
        """
        scored = self.score_tokens(pairs, first_line=first_line)
        return [math.fsum(each.log_probs) for each in scored]

    def score_tokens(
        self, pairs: Sequence[tuple[str, str]], *, first_line: int = 1
    ) -> list[TokenScores]:
        """Returns the log-probability of each token of each pair's target, in nats, in order.

        `score` returns their sums. What is no pair of strings is a TypeError.
        """
        refuse_forked()
        sides = checked_pairs(pairs)
        count = len(sides[0])
        numbers, pad_id = range(first_line, first_line + count), self.tokenizer.pad_id
        noted = self.long_lines()
        sources, targets = (
            encode_lines(self.tokenizer, lines, numbers, name, noted)
            for name, lines in zip(("source", "target"), sides, strict=True)
        )
        noted.end()
        scored = [TokenScores((), ())] * count
        lengths = [max(map(len, pair)) for pair in zip(sources, targets, strict=True)]
        for width, members in self._batches(lengths):
            batch = tuple(
                padded([[] if m is None else ids[m] for m in members], width, pad_id)
                for ids in (sources, targets)
            )
            found = np.asarray(self._score((self._params, *self._others), batch))
            for member, log_probs in zip(members, found.tolist(), strict=True):
                if member is not None:
                    target = targets[member]
                    scored[member] = TokenScores(tuple(target), tuple(log_probs[: len(target)]))
        return scored

    def long_lines(self) -> LongLines:
        """Returns what takes note of lines that are too long for this model."""
        return LongLines(self._longest, self.config.data.max_length)

    def _batches(
        self, lengths: Sequence[int], lines_per_row: int = 1, beam_size: int | None = 1
    ) -> Iterator[Planned]:
        assert beam_size is not None
        most = self._devices, lines_per_row, BATCHES_AT_ONCE, beam_size, self._capacity
        return plan_batches(lengths, self._longest, *most)

    def _attention(self, batch: PaddedSentences, found: Hypotheses) -> list[AttentionWeights]:
        """Returns the weights by rank: those of every sentence's best hypothesis come first."""
        pairs = [(batch.source, found.tokens[:, rank]) for rank in range(found.tokens.shape[1])]
        return [jax.device_get(self._weigh(self._params, pair)) for pair in pairs]


def _lines_per_row(options: Options) -> int:
    """Attention weights are large, so that fewer lines are in a batch that has them."""
    return 1 if options.attention else LINES_PER_ROW


def _weigh(
    graphdef: nnx.GraphDef, tokenizer: Tokenizer, params: Params, pairs: Pairs
) -> AttentionWeights:
    """Returns the attention weights of a model on pairs of source and target ids."""
    model = nnx.merge(graphdef, params)
    return attention_weights(model, *pairs, pad_id=tokenizer.pad_id, bos_id=tokenizer.bos_id)
