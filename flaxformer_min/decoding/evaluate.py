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
    translator: Translator,
    pairs: Sequence[tuple[str, str]],
    options: Options = DEFAULT,
    *,
    against: Translator | Sequence[str] | None = None,
) -> dict[str, Any]:
    """Translates the sources of (source, reference) pairs, tells how far it is, and measures.

    Returns the BLEU record of `bleu_record`, which has "chrf" and "ter" too, each with score and
    signature. `against` is a baseline, another translator or its translations; the record then has
    "against", what `paired_bootstrap` finds.

    Raises UserError if there are no pairs, and for the reasons of `bleu_metric` and
    `Translator.translate`; ValueError for more or fewer translations of the baseline than pairs.
    """
    if not pairs:
        raise UserError("no lines to evaluate: give --source and --reference, with lines in them")
    bleu = bleu_metric(translator.config)  # a package that it lacks is told before translating
    sources, references = checked_pairs(pairs)
    if not isinstance(against, Translator | None) and len(against) != len(pairs):
        raise ValueError(f"against has {len(against)} lines for {len(pairs)} pairs")
    texts, decode = _translated(translator, sources, options), translator.config.decode
    record = bleu_record(bleu, texts, references, options.over(decode), translator.step)
    for name, metric in (("chrf", sacrebleu.CHRF()), ("ter", sacrebleu.TER())):
        score = metric.corpus_score(list(map(nfc, texts)), [list(map(nfc, references))]).score
        record[name] = {"score": score, "signature": metric.get_signature().format()}
    if isinstance(against, Translator):
        against = _translated(against, sources, options)
    if against is not None:
        record["against"] = paired_bootstrap(translator.config, texts, against, references)
    return record


def _translated(translator: Translator, sources: Sequence[str], options: Options) -> list[str]:
    count = sum(not is_blank(source) for source in sources)
    with Meter("translating", count, "lines") as meter:
        return [found.text for found in translator.translate(sources, options, tell=meter.update)]


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
