"""The evaluation of a model during training: loss and perplexity per token, and BLEU."""

import dataclasses
import hashlib
import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import jax
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from flaxformer_min.config import Config
from flaxformer_min.data.batch import Batch
from flaxformer_min.data.batching import Data, evaluation_batches
from flaxformer_min.data.sources import read_pairs
from flaxformer_min.decoding.bleu import bleu_metric, bleu_record
from flaxformer_min.model.build import Params
from flaxformer_min.system.processes import broadcast, compiled_together, exchange
from flaxformer_min.system.signals import AgreedStop
from flaxformer_min.training.loss import Sums, make_loss
from flaxformer_min.training.sharding import fetch_whole, place_rows, row_shares, rows_here

# (params, lines, first_line) -> batches of (place, text), as Validation describes it
Translate = Callable[[Params, Sequence[str], int], Iterator[list[tuple[int, str]]]]

Item = TypeVar("Item")
SAMPLES = 3  # translations that the record of an evaluation shows


def measure_of(config: Config, digest: str) -> str:
    """Returns what a run's scores are measured of and how; scores compare if it is the same.

    `digest` is that of the encoded validation split, in corpus.json.
    """
    search = dataclasses.asdict(config.decode) if config.train.best_metric == "bleu" else None
    return hashlib.sha256(json.dumps([digest, search]).encode()).hexdigest()


def loss_sums(graphdef: nnx.GraphDef, mesh: Mesh, *, pad_id: int, bos_id: int) -> Any:
    """Returns the jitted function (params, batch) -> (sum of unsmoothed losses, target tokens)."""
    ids = {"pad_id": pad_id, "bos_id": bos_id}
    unsmoothed = make_loss(graphdef, **ids, smoothing=0.0, mesh=mesh)

    def sums(params: Params, batch: Batch) -> Sums:
        return unsmoothed(params, batch, None)

    return jax.jit(sums, out_shardings=NamedSharding(mesh, P()))


class GivenUp(Exception):
    """An evaluation was ended between two batches because the run was asked to stop."""


class Validation:
    """Evaluates a model on the validation split: its loss on encoded pairs, its BLEU on raw lines.

    All devices of all processes share each batch of the loss. For BLEU each process translates its
    share of the lines. Before each batch of either, `stop` is asked whether to give up: if so,
    GivenUp is raised in all processes, and nothing of the evaluation is kept.
    """

    def __init__(
        self, config: Config, data: Data, graphdef: nnx.GraphDef, mesh: Mesh, translate: Translate
    ):
        """`translate(params, lines, first_line)` translates source lines with the given parameters.

        Its `params` are whole on one device of this process. Its `lines` are this process's share
        of the split; lines[0] has the number `first_line` in messages. It yields lists of (place,
        text), batch by batch in any order, for every lines[place]; it may leave out blank lines,
        whose translation is then blank. It is asked for no further batch once an evaluation is
        given up.
        """
        self._mesh, self._translate = mesh, translate
        self._config, self._data, self._metric = config, data, bleu_metric(config)
        pairs = list(read_pairs(config.data, config.data.validation))
        self._sources, self._references = map(list, zip(*pairs, strict=True))

        tokenizer = data.tokenizer
        sums = loss_sums(graphdef, mesh, pad_id=tokenizer.pad_id, bos_id=tokenizer.bos_id)
        self._sums = compiled_together(sums)

    def __call__(self, params: Params, step: int, stop: AgreedStop) -> dict[str, Any]:
        """Evaluates `params` at `step`; the record is for metrics.jsonl and the checkpoint.

        The validation loss is in nats per target token, EOS included, without label smoothing;
        perplexity is its exp. SAMPLES lines, always the same, are shown with their translations.
        Raises GivenUp.
        """
        loss, texts = self.loss(params, stop), self.translations(params, stop)
        metric, decode = self._metric, self._config.decode
        return {
            "validation_loss": loss,
            "validation_perplexity": math.exp(min(loss, 700)),  # exp(710) overflows
            "bleu": broadcast(lambda: bleu_record(metric, texts, self._references, decode, step)),
            "samples": self._samples(texts),
        }

    def loss(self, params: Params, stop: Callable[[], bool]) -> float:
        """Returns the unsmoothed loss over the whole split, in nats per target token.

        Raises GivenUp.
        """
        total = tokens = 0.0
        batches = evaluation_batches(
            self._data.validation,
            self._config.data,
            self._data.tokenizer.pad_id,
            row_shares(self._mesh),
            lambda rows: rows_here(self._mesh, rows),
        )
        for batch in _until(stop, batches):
            loss, count = self._sums(params, place_rows(self._mesh, batch))
            total, tokens = total + float(loss), tokens + float(count)
        return total / tokens

    def _samples(self, translations: Sequence[str]) -> list[dict[str, str]]:
        """Returns lines that are evenly spread over the split, each with its two translations."""
        lines = list(zip(self._sources, self._references, translations, strict=True))
        chosen = (lines[len(lines) * (2 * n + 1) // (2 * SAMPLES)] for n in range(SAMPLES))
        names = ("source", "reference", "translation")
        return [dict(zip(names, texts, strict=True)) for texts in dict.fromkeys(chosen)]

    def translations(self, params: Params, stop: AgreedStop) -> list[str]:
        """Translates the raw lines, in order. Raises GivenUp.

        The batch shape of a line follows from the line's own length, so it does not matter which
        process translates it.
        """
        whole = fetch_whole(self._mesh, params)
        shares = exchange(json.dumps(self._translate_share(whole, stop))).values()
        found = [json.loads(share) for share in shares]
        if None in found:
            raise GivenUp
        texts = [""] * len(self._sources)
        for place, text in itertools.chain(*found):
            texts[place] = text
        return texts

    def _translate_share(self, params: Params, stop: AgreedStop) -> list[tuple[int, str]] | None:
        """Returns (place, translation) of this process's lines, or None if it gave up."""
        lines, process, processes = len(self._sources), jax.process_index(), jax.process_count()
        start, end = lines * process // processes, lines * (process + 1) // processes
        batches = self._translate(params, self._sources[start:end], start + 1)
        try:
            return [
                (start + place, text)
                for batch in _until(stop.in_sight, batches)
                for place, text in batch
            ]
        except GivenUp:
            return None


def _until(stop: Callable[[], bool], batches: Iterable[Item]) -> Iterator[Item]:
    """Yields the batches; raises GivenUp before the first batch at which `stop()` is true."""
    for batch in batches:
        if stop():
            raise GivenUp
        yield batch
