"""BLEU (section 6.1), as sacreBLEU computes it, with everything needed to compute it again."""

from collections.abc import Sequence
from typing import Any

import sacrebleu

from flaxformer_min.config import DecodeConfig
from flaxformer_min.decoding.options import IN_CONFIG


def bleu_record(
    translations: Sequence[str],
    references: Sequence[str],
    decode: DecodeConfig,
    step: int | Sequence[int] | None,
) -> dict[str, Any]:
    """Returns corpus BLEU of translations against raw reference lines, as a dict of JSON types.

    `step` is that of the checkpoint that made the translations, or a list of steps for an ensemble.
    Nothing is lower-cased, and the text is tokenised by `decode.bleu_tokenize` alone.
    """
    assert len(translations) == len(references) > 0
    tokenised = decode.bleu_tokenize == "none"  # sacreBLEU need not warn that it looks tokenised
    metric = sacrebleu.BLEU(tokenize=decode.bleu_tokenize, force=tokenised)
    result = metric.corpus_score(translations, [references])
    return {
        "score": result.score,
        "signature": metric.get_signature().format(),
        "precisions": result.precisions,
        "brevity_penalty": result.bp,
        "lines": len(references),
        "step": step,
        **{name: getattr(decode, name) for name in IN_CONFIG},
    }
