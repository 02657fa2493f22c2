"""What a run on the built-in phrases has learnt: python -m benchmarks.demo_report DIR.

Exact match of the checkpoint on 1,000 held-out phrases, by category, beside the exact match
of a look-up of the nearest training phrase; then BLEU, and a few translations to read.
"""

import argparse

from benchmarks.exact_match import exact_match_by_category
from benchmarks.lookup import nearest_neighbours
from flaxformer_min.data.phrases import Phrase, phrase
from flaxformer_min.data.sources import read_pairs
from flaxformer_min.decoding.bleu import bleu_record
from flaxformer_min.decoding.translator import Translator

TESTED, SHOWN = 1000, 12  # phrases


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", help="a workdir, or one checkpoint")
    translator = Translator.load(parser.parse_args().directory)
    data = translator.config.data
    languages = data.source_language, data.target_language
    test = [phrase("test", index, *languages) for index in range(TESTED)]
    texts = [found.text for found in translator.translate([pair.source for pair in test])]

    print_exact_match(test, texts, look_up(list(read_pairs(data, data.train)), test))
    targets = [pair.target for pair in test]
    record = bleu_record(texts, targets, translator.config.decode, translator.step)
    print(f"\nBLEU {record['score']:.2f} {record['signature']}\n")
    for pair, text in list(zip(test, texts, strict=True))[:SHOWN]:
        wanted = "" if text == pair.target else f"   (wanted: {pair.target})"
        print(f"{pair.source}  ->  {text}{wanted}")


def look_up(train: list[tuple[str, str]], test: list[Phrase]) -> list[str]:
    """The translation of the nearest training source of each test phrase."""
    found = nearest_neighbours([source for source, _ in train], [pair.source for pair in test])
    return [train[index][1] for index in found]


def print_exact_match(test: list[Phrase], texts: list[str], looked_up: list[str]) -> None:
    """A table: category, the model's exact match and the look-up's, in percent."""
    everything = [pair._replace(category="all") for pair in test]
    print(f"\nexact match on {len(test)} held-out phrases, in percent")
    print(f"{'category':<20}{'model':>10}{'look-up':>10}")
    for phrases in (test, everything):
        model = exact_match_by_category(texts, phrases)
        memory = exact_match_by_category(looked_up, phrases)
        for category, share in model.items():
            print(f"{category:<20}{100 * share:>10.1f}{100 * memory[category]:>10.1f}")


if __name__ == "__main__":
    main()
