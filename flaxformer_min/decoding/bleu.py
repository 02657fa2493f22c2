"""BLEU (section 6.1), as sacreBLEU computes it, with everything needed to compute it again."""

from collections.abc import Sequence
from typing import Any

import sacrebleu

from flaxformer_min.config import DecodeConfig
from flaxformer_min.decoding.options import Options
from flaxformer_min.decoding.translator import DEFAULT, Translator
from flaxformer_min.errors import UserError


def bleu_record(
    translations: Sequence[str],
    references: Sequence[str],
    decode: DecodeConfig,
    step: int | Sequence[int] | None,
) -> dict[str, Any]:
    """Corpus BLEU of the translations of checkpoint `step` against raw reference lines, as JSON.

    Nothing is lower-cased, and the text is tokenised by `decode.bleu_tokenize` alone. An ensemble
    has several steps.
    """
    assert len(translations) == len(references) > 0
    tokenised = decode.bleu_tokenize == "none"  # and sacreBLEU need not warn of it
    metric = sacrebleu.BLEU(tokenize=decode.bleu_tokenize, force=tokenised)
    result = metric.corpus_score(translations, [references])
    return {
        "score": result.score,
        "signature": metric.get_signature().format(),
        "precisions": result.precisions,
        "brevity_penalty": result.bp,
        "lines": len(references),
        "step": step,
        "beam_size": decode.beam_size,
        "length_penalty_alpha": decode.length_penalty_alpha,
        "max_length_offset": decode.max_length_offset,
    }


def evaluate(
    translator: Translator, pairs: Sequence[tuple[str, str]], options: Options = DEFAULT
) -> dict[str, Any]:
    """Translates the sources of (source, reference) pairs: the BLEU record of that.

    Raises UserError where there is no pair, and as `Translator.translate`.
    """
    if not pairs:
        raise UserError("no lines to evaluate: give --source and --reference, with lines in them")
    sources, references = zip(*pairs, strict=True)
    texts = [translation.text for translation in translator.translate(sources, options)]
    decode = options.over(translator.config.decode)
    return bleu_record(texts, references, decode, translator.step)
