"""BLEU (section 6.1), as sacreBLEU computes it, with everything needed to compute it again."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import sacrebleu

from flaxformer_min.config import DecodeConfig
from flaxformer_min.errors import UserError
from flaxformer_min.parallel import read_pairs
from flaxformer_min.translate import Translator


def bleu_record(
    translations: Sequence[str],
    references: Sequence[str],
    decode: DecodeConfig,
    step: int | None,
) -> dict[str, Any]:
    """Corpus BLEU of the translations of checkpoint `step` against raw reference lines, as JSON.

    Nothing is lower-cased, and the text is tokenised by `decode.bleu_tokenize` alone.
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


def evaluate_files(
    directory: str | Path,
    step: int | Literal["best"] | None,
    pairs: Sequence[tuple[str, str]] | None = None,
) -> dict[str, Any]:
    """Translates the sources of (source, reference) pairs with a checkpoint: its BLEU record.

    No pairs means the test split of the checkpoint's config.
    Raises UserError where there is nothing to evaluate, and as `Translator.load`.
    """
    translator = Translator.load(directory, step)
    if pairs is None:
        data = translator.config.data
        pairs = list(read_pairs(data, data.test))
    if not pairs:
        raise UserError("no lines to evaluate: give --source and --reference, with lines in them")
    sources, references = map(list, zip(*pairs, strict=True))
    texts = [translation.text for translation in translator.translate(sources)]
    return bleu_record(texts, references, translator.config.decode, translator.step)
