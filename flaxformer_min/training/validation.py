"""How good the model is now: loss and perplexity per token, and BLEU of real beam search."""

import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import jax
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from flaxformer_min.config import Config
from flaxformer_min.data.batch import Batch
from flaxformer_min.data.batching import evaluation_batches
from flaxformer_min.data.corpus import EncodedCorpus
from flaxformer_min.data.sources import read_pairs
from flaxformer_min.data.tokenizer import Tokenizer
from flaxformer_min.decoding.bleu import bleu_record
from flaxformer_min.decoding.translator import Translator
from flaxformer_min.model.build import Params
from flaxformer_min.system.processes import broadcast, compiled_together, exchange
from flaxformer_min.system.signals import AgreedStop
from flaxformer_min.training.loss import Sums, make_loss
from flaxformer_min.training.sharding import fetch_whole, place_rows, row_shares, rows_here

T = TypeVar("T")


class GivenUp(Exception):
    """The evaluation was broken off between two batches."""


class Validation:
    """The validation split, encoded for the loss and as raw lines for BLEU.

    All devices of all processes share each batch of the loss; for BLEU each process decodes its
    share of the lines. Before each batch of either, `stop` is asked whether to give up: then
    GivenUp is raised, in all processes, and nothing of the evaluation is kept.
    """

    def __init__(
        self,
        config: Config,
        tokenizer: Tokenizer,
        corpus: EncodedCorpus,
        graphdef: nnx.GraphDef,
        mesh: Mesh,
    ):
        self._mesh = mesh
        self._config, self._tokenizer, self._corpus = config, tokenizer, corpus
        pairs = list(read_pairs(config.data, config.data.validation))
        self._sources, self._references = map(list, zip(*pairs, strict=True))
        self._translator = Translator(config, tokenizer, {})  # gets its weights when it is used

        ids = {"pad_id": tokenizer.pad_id, "bos_id": tokenizer.bos_id}
        unsmoothed = make_loss(graphdef, **ids, smoothing=0.0)

        def sums(params: Params, batch: Batch) -> Sums:
            return unsmoothed(params, batch, None)

        whole = NamedSharding(mesh, P())
        self._sums = compiled_together(jax.jit(sums, out_shardings=whole))

    def __call__(self, params: Params, step: int, stop: AgreedStop) -> dict[str, Any]:
        """The evaluation of `params` at `step`, as it goes to metrics.jsonl and the checkpoint.

        Perplexity is exp of the unsmoothed loss per target token, EOS included.
        """
        loss = self.loss(params, stop)
        return {
            "validation_loss": loss,
            "validation_perplexity": math.exp(min(loss, 700)),  # exp(710) overflows
            "bleu": self.bleu(params, step, stop),
        }

    def loss(self, params: Params, stop: Callable[[], bool]) -> float:
        """Unsmoothed nats per target token over the whole split."""
        total = tokens = 0.0
        batches = evaluation_batches(
            self._corpus,
            self._config.data,
            self._tokenizer.pad_id,
            row_shares(self._mesh),
            lambda rows: rows_here(self._mesh, rows),
        )
        for batch in _until(stop, batches):
            loss, count = self._sums(params, place_rows(self._mesh, batch))
            total, tokens = total + float(loss), tokens + float(count)
        return total / tokens

    def bleu(self, params: Params, step: int, stop: AgreedStop) -> dict[str, Any]:
        """The BLEU record of beam search on the raw lines.

        A line's batch shape follows from its own length, so it does not matter who decodes it.
        """
        self._translator.params = fetch_whole(self._mesh, params)
        shares = exchange(json.dumps(self._share(stop))).values()
        found = [json.loads(share) for share in shares]
        if None in found:
            raise GivenUp
        texts = [""] * len(self._sources)  # a blank line has a blank translation
        for place, text in itertools.chain(*found):
            texts[place] = text
        decode = self._config.decode
        return broadcast(lambda: bleu_record(texts, self._references, decode, step))

    def _share(self, stop: AgreedStop) -> list[tuple[int, str]] | None:
        """(place, translation) of this process's lines; None if it gave up."""
        lines, processes = len(self._sources), jax.process_count()
        start, end = (
            lines * p // processes for p in (jax.process_index(), jax.process_index() + 1)
        )
        batches = self._translator.decode(self._sources[start:end], first_line=start + 1)
        try:
            return [
                (start + place, translation.text)
                for batch in _until(stop.in_sight, batches)
                for place, translation in batch
            ]
        except GivenUp:
            return None


def _until(stop: Callable[[], bool], batches: Iterable[T]) -> Iterator[T]:
    for batch in batches:
        if stop():
            raise GivenUp
        yield batch
