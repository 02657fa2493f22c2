"""BLEU (section 6.1), as sacreBLEU computes it, with everything needed to compute it again."""

import re
from collections.abc import Sequence
from typing import Any

import sacrebleu

from flaxformer_min.config import Config, DecodeConfig
from flaxformer_min.data.tokenizer import nfc
from flaxformer_min.decoding.options import IN_CONFIG
from flaxformer_min.errors import UserError


def bleu_metric(config: Config) -> sacrebleu.BLEU:
    """Returns the BLEU of a config: its tokenisation is the config's, or the target language's.

    Raises UserError if the tokenisation needs a package that is not installed.
    """
    name = config.decode.bleu_tokenize
    language = re.split("[-_]", config.data.target_language.lower())[0]
    try:
        if name == "auto":
            return sacrebleu.BLEU(trg_lang=language)
        # "none" is for tokenised text: sacreBLEU need not warn that it looks so.
        return sacrebleu.BLEU(tokenize=name, force=name == "none")
    except RuntimeError:
        extra = language if name == "auto" else name[:2]
        raise UserError(
            f"decode.bleu_tokenize is {name!r}, and BLEU of data.target_language "
            f"{config.data.target_language!r} needs `pip install 'sacrebleu[{extra}]'`; "
            "or set it to 'char', which counts characters"
        ) from None


def bleu_record(
    metric: sacrebleu.BLEU,
    translations: Sequence[str],
    references: Sequence[str],
    decode: DecodeConfig,
    step: int | Sequence[int] | None,
) -> dict[str, Any]:
    """Returns corpus BLEU of translations against raw reference lines, as a dict of JSON types.

    `metric` is that of `bleu_metric`. `step` is that of the checkpoint that made the translations,
    or a list of steps for an ensemble. Both texts are brought to NFC, nothing is lower-cased, and
    the metric alone tokenises.
    """
    assert len(translations) == len(references) > 0
    result = metric.corpus_score(list(map(nfc, translations)), [list(map(nfc, references))])
    return {
        "score": result.score,
        "signature": metric.get_signature().format(),
        "precisions": result.precisions,
        "brevity_penalty": result.bp,
        "lines": len(references),
        "step": step,
        **{name: getattr(decode, name) for name in IN_CONFIG},
    }
