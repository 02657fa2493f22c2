"""How good the model is now: loss and perplexity per token, and BLEU of real beam search."""

import math
from typing import Any

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


class Validation:
    """The validation split, encoded for the loss and as raw lines for BLEU."""

    def __init__(
        self, config: Config, tokenizer: Tokenizer, corpus: EncodedCorpus, graphdef: nnx.GraphDef
    ):
        self._config, self._tokenizer, self._corpus = config, tokenizer, corpus
        pairs = list(read_pairs(config.data, config.data.validation))
        self._sources, self._references = map(list, zip(*pairs, strict=True))
        self._translator: Translator | None = None

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

    def __call__(self, params: Params, step: int) -> dict[str, Any]:
        """The evaluation of `params` at `step`, as it goes to metrics.jsonl and the checkpoint.

        Perplexity is exp of the unsmoothed loss per target token, EOS included.
        """
        loss = self.loss(params)
        return {
            "validation_loss": loss,
            "validation_perplexity": math.exp(min(loss, 700)),  # exp(710) overflows
            "bleu": self.bleu(params, step),
        }

    def loss(self, params: Params) -> float:
        """Unsmoothed nats per target token over the whole split."""
        total = tokens = 0.0
        for batch in evaluation_batches(self._corpus, self._config.data, self._tokenizer.pad_id):
            loss, count = self._sums(params, batch)
            total, tokens = total + float(loss), tokens + float(count)
        return total / tokens

    def bleu(self, params: Params, step: int) -> dict[str, Any]:
        """The BLEU record of beam search on the raw lines."""
        if self._translator is None:
            self._translator = Translator(self._config, self._tokenizer, params)
        self._translator.params = params
        texts = [translation.text for translation in self._translator.translate(self._sources)]
        return bleu_record(texts, self._references, self._config.decode, step)
