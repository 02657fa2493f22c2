"""What a run on the built-in phrases has learnt: python -m benchmarks.demo_report DIR.

Exact match of the checkpoint on 1,000 held-out phrases, by category: as CLDR writes the source and
as it is typed (`spellings`), beside the exact match of a look-up of the nearest training phrase.
Then BLEU, whether decomposed text gives the same answers, and a few translations to read.
"""

import argparse
import unicodedata

from benchmarks.exact_match import exact_match_by_category
from benchmarks.lookup import nearest_neighbours
from flaxformer_min.data.cldr import spellings
from flaxformer_min.data.phrases import Phrase, phrase
from flaxformer_min.data.sources import read_pairs
from flaxformer_min.decoding.bleu import bleu_metric, bleu_record
from flaxformer_min.decoding.translator import Translator

TESTED, SHOWN = 1000, 12  # phrases
TO_TRY = "March - October 2031"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", help="a workdir, or one checkpoint")
    directory = parser.parse_args().directory
    translator = Translator.load(directory)
    data = translator.config.data
    languages = data.source_language, data.target_language
    test = [phrase("test", index, *languages) for index in range(TESTED)]
    typed = [pair._replace(source=text) for pair in test for text in typed_spellings(pair.source)]
    texts, typed_texts = translate(translator, test), translate(translator, typed)
    looked_up = look_up(list(read_pairs(data, data.train)), test)
    print_exact_match(
        {"as CLDR": (texts, test), "typed": (typed_texts, typed), "look-up": (looked_up, test)}
    )

    targets = [pair.target for pair in test]
    metric = bleu_metric(translator.config)
    record = bleu_record(metric, texts, targets, translator.config.decode, translator.step)
    print(f"\nBLEU {record['score']:.2f} {record['signature']}")
    print(f"{same_in_nfd(translator, test, texts)} of {TESTED} answers are the same in NFD\n")
    examples = {pair.target: pair.source for pair in typed[: 2 * SHOWN]}  # one way to type each
    found = dict(zip([pair.source for pair in typed], typed_texts, strict=True))
    for target, source in list(examples.items())[:SHOWN]:
        wanted = "" if found[source] == target else f"   (wanted: {target})"
        print(f"{source}  ->  {found[source]}{wanted}")
    print(f'\nTry it: echo "{TO_TRY}" | .venv/bin/flaxformer-min translate {directory}')


def typed_spellings(source: str) -> tuple[str, ...]:
    """The ways to type a source: those that are not CLDR's, or else the only one there is."""
    return spellings(source)[1:] or (source,)


def translate(translator: Translator, pairs: list[Phrase]) -> list[str]:
    """The translation of each source."""
    return [found.text for found in translator.translate([pair.source for pair in pairs])]


def same_in_nfd(translator: Translator, test: list[Phrase], texts: list[str]) -> int:
    """How many sources have the same translation when their letters and accents are apart."""
    apart = [pair._replace(source=unicodedata.normalize("NFD", pair.source)) for pair in test]
    return sum(map(str.__eq__, translate(translator, apart), texts))


def look_up(train: list[tuple[str, str]], test: list[Phrase]) -> list[str]:
    """The translation of the nearest training source of each test phrase."""
    found = nearest_neighbours([source for source, _ in train], [pair.source for pair in test])
    return [train[index][1] for index in found]


def print_exact_match(columns: dict[str, tuple[list[str], list[Phrase]]]) -> None:
    """A table: category, and the exact match in each column in percent.

    A column is translations and the phrases that they are translations of.
    """
    print(f"\nexact match on {TESTED} held-out phrases, in percent")
    print(f"{'category':<20}" + "".join(f"{name:>10}" for name in columns))
    shares = [
        exact_match_by_category(texts, phrases)
        | exact_match_by_category(texts, [pair._replace(category="all") for pair in phrases])
        for texts, phrases in columns.values()
    ]
    for category in shares[0]:
        print(f"{category:<20}" + "".join(f"{100 * share[category]:>10.1f}" for share in shares))


if __name__ == "__main__":
    main()
