"""How good the model is now: loss and perplexity per token, and BLEU of real beam search."""

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import jax
from flax import nnx

from flaxformer_min.batching import Batch, evaluation_batches
from flaxformer_min.config import Config
from flaxformer_min.corpus import EncodedCorpus
from flaxformer_min.evaluate import bleu_record
from flaxformer_min.parallel import read_pairs
from flaxformer_min.state import Params
from flaxformer_min.step import loss_sums
from flaxformer_min.tokenizer import Tokenizer
from flaxformer_min.translate import Translator

T = TypeVar("T")


class GivenUp(Exception):
    """The evaluation was broken off between two batches."""


class Validation:
    """The validation split, encoded for the loss and as raw lines for BLEU.

    Before each batch of either, `stop_requested` is asked whether to give up: then GivenUp is
    raised, and nothing of the evaluation is kept.
    """

    def __init__(
        self,
        config: Config,
        tokenizer: Tokenizer,
        corpus: EncodedCorpus,
        graphdef: nnx.GraphDef,
    ):
        self._config, self._tokenizer, self._corpus = config, tokenizer, corpus
        pairs = list(read_pairs(config.data, config.data.validation))
        self._sources, self._references = map(list, zip(*pairs, strict=True))
        self._translator = Translator(config, tokenizer, {})  # gets its weights when it is used

        def sums(params: Params, batch: Batch):
            return loss_sums(
                graphdef,
                params,
                batch,
                pad_id=tokenizer.pad_id,
                bos_id=tokenizer.bos_id,
                smoothing=0.0,
            )

        self._sums = jax.jit(sums)

    def __call__(
        self, params: Params, step: int, stop_requested: Callable[[], bool]
    ) -> dict[str, Any]:
        """The evaluation of `params` at `step`, as it goes to metrics.jsonl and the checkpoint.

        Perplexity is exp of the unsmoothed loss per target token, EOS included.
        """
        loss = self.loss(params, stop_requested)
        return {
            "validation_loss": loss,
            "validation_perplexity": math.exp(min(loss, 700)),  # exp(710) overflows
            "bleu": self.bleu(params, step, stop_requested),
        }

    def loss(self, params: Params, stop_requested: Callable[[], bool]) -> float:
        """Unsmoothed nats per target token over the whole split."""
        total = tokens = 0.0
        batches = evaluation_batches(self._corpus, self._config.data, self._tokenizer.pad_id)
        for batch in _until(stop_requested, batches):
            loss, count = self._sums(params, batch)
            total, tokens = total + float(loss), tokens + float(count)
        return total / tokens

    def bleu(self, params: Params, step: int, stop_requested: Callable[[], bool]) -> dict[str, Any]:
        """The BLEU record of beam search on the raw lines."""
        texts = [""] * len(self._sources)  # a blank line has a blank translation
        self._translator.params = params
        for batch in _until(stop_requested, self._translator.decode(self._sources)):
            for place, translation in batch:
                texts[place] = translation.text
        return bleu_record(texts, self._references, self._config.decode, step)


def _until(stop_requested: Callable[[], bool], batches: Iterable[T]) -> Iterator[T]:
    for batch in batches:
        if stop_requested():
            raise GivenUp
        yield batch
