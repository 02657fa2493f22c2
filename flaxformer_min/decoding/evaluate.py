"""Measures a translator on pairs of lines: BLEU, chrF and TER, alone or against another system."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import sacrebleu
from sacrebleu.significance import PairedTest

from flaxformer_min.config import Config
from flaxformer_min.data.lines import is_blank
from flaxformer_min.data.tokenizer import nfc
from flaxformer_min.decoding.bleu import bleu_metric, bleu_record
from flaxformer_min.decoding.options import IN_CONFIG, Options
from flaxformer_min.decoding.texts import checked_pairs
from flaxformer_min.decoding.translator import DEFAULT, Translator
from flaxformer_min.errors import UserError
from flaxformer_min.system.meter import Meter

FIGURES = ("score", "mean", "interval")
SHARES = ("brevity_penalty", "p_value")  # figures between 0 and 1; all others are percentages


def evaluate(
    translator: Translator, pairs: Sequence[tuple[str, str]], options: Options = DEFAULT
) -> dict[str, Any]:
    """Translates the sources of (source, reference) pairs and returns the record of `measure`.

    Raises UserError if there are no pairs, and for the reasons of `bleu_metric` and
    `Translator.translate`.
    """
    texts = translations(translator, pairs, options)
    return measure(translator, texts, [reference for _, reference in pairs], options)


def translations(
    translator: Translator, pairs: Sequence[tuple[str, str]], options: Options = DEFAULT
) -> list[str]:
    """Returns the translations of the pairs' sources, in order, and tells how far it is.

    Raises UserError if there are no pairs, and for the reasons of `evaluate`.
    """
    if not pairs:
        raise UserError("no lines to evaluate: give --source and --reference, with lines in them")
    bleu_metric(translator.config)  # a package that it lacks is told before anything is translated
    sources, _ = checked_pairs(pairs)
    count = sum(not is_blank(source) for source in sources)
    with Meter("translating", count, "lines") as meter:
        return [found.text for found in translator.translate(sources, options, tell=meter.update)]


def measure(
    translator: Translator,
    texts: Sequence[str],
    references: Sequence[str],
    options: Options = DEFAULT,
) -> dict[str, Any]:
    """Returns the BLEU record of translations that the translator made by these options.

    It is that of `bleu_record`, and has "chrf" and "ter" too, each with score and signature.
    """
    decode = options.over(translator.config.decode)
    bleu = bleu_metric(translator.config)
    record = bleu_record(bleu, texts, references, decode, translator.step)
    for name, metric in (("chrf", sacrebleu.CHRF()), ("ter", sacrebleu.TER())):
        score = metric.corpus_score(list(map(nfc, texts)), [list(map(nfc, references))]).score
        record[name] = {"score": score, "signature": metric.get_signature().format()}
    return record


def paired_bootstrap(
    config: Config, texts: Sequence[str], baseline: Sequence[str], references: Sequence[str]
) -> dict[str, dict[str, Any]]:
    """Compares translations with those of a baseline, line by line the same text, by each metric.

    sacreBLEU draws 1,000 samples of the lines (Koehn 2004). `p_value` is how often, if there were
    no difference, one would come out that is as large. `mean` and `interval` are over the samples:
    95 % of the scores lie in mean +- interval.
    """
    metrics = {"bleu": bleu_metric(config), "chrf": sacrebleu.CHRF(), "ter": sacrebleu.TER()}
    systems: list[Any] = [
        (str(n), list(map(nfc, side))) for n, side in enumerate([baseline, texts])
    ]
    signatures, results = PairedTest(systems, metrics, [list(map(nfc, references))], "bs")()
    record, found = {}, cast(dict[str, Any], results)
    for key, (name, signature) in zip(metrics, signatures.items(), strict=True):
        before, after = (
            dict(zip(FIGURES, map(float, (side.score, side.mean, side.ci)), strict=True))
            for side in found[name]
        )
        shown = {"p_value": float(found[name][1].p_value), "signature": signature.format()}
        record[key] = {**after, "baseline": before, **shown}
    return record


def rounded(record: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a record with scores to two decimals and shares to four; settings stay."""

    def short(name: str, value: Any) -> Any:
        if isinstance(value, dict):
            return rounded(value)
        if isinstance(value, list):
            return [short(name, item) for item in value]
        return round(value, 4 if name in SHARES else 2) if isinstance(value, float) else value

    return {
        name: value if name in IN_CONFIG else short(name, value) for name, value in record.items()
    }
