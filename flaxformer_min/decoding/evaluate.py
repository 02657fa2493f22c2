"""Measures the BLEU of a translator on pairs of lines."""

from collections.abc import Sequence
from typing import Any

from flaxformer_min.decoding.bleu import bleu_metric, bleu_record
from flaxformer_min.decoding.options import Options
from flaxformer_min.decoding.translator import DEFAULT, Translator
from flaxformer_min.errors import UserError


def evaluate(
    translator: Translator, pairs: Sequence[tuple[str, str]], options: Options = DEFAULT
) -> dict[str, Any]:
    """Translates the sources of (source, reference) pairs and returns the BLEU record.

    The record is that of `bleu_record`. Raises UserError if there are no pairs, and for the reasons
    of `bleu_metric` and `Translator.translate`.
    """
    if not pairs:
        raise UserError("no lines to evaluate: give --source and --reference, with lines in them")
    metric = bleu_metric(translator.config)
    sources, references = zip(*pairs, strict=True)
    texts = [translation.text for translation in translator.translate(sources, options)]
    decode = options.over(translator.config.decode)
    return bleu_record(metric, texts, references, decode, translator.step)
