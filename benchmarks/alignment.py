"""Error rate of the word alignments of `translate --alignment`: python -m benchmarks.alignment DIR.

DIR is a model of the built-in task from English to German. The alignment of its dates is known by
construction: of those whose two sides have the same parts, each a word of its own (weekday, day,
month, year), a part goes with the same part. Layers and heads are compared on dates of the
validation split, the choice of the package is measured on 100 dates of the test split.

Alignment error rate: 1 - 2 |found and right| / (|found| + |right|). A translation that does not
have the parts of its source counts with all its links as errors.
"""

import argparse
import itertools
import re
from collections.abc import Iterator

import numpy as np

from flaxformer_min.data.phrases import phrase
from flaxformer_min.decoding.alignment import links, pharaoh, words_of
from flaxformer_min.decoding.options import Options
from flaxformer_min.decoding.translator import Translation, Translator

Links = set[tuple[int, int]]


def part(word: str) -> str:
    """Which part of a date a word is."""
    bare = word.rstrip(".,")
    if re.fullmatch(r"\d{4}", bare):
        return "year"
    if re.fullmatch(r"\d{1,2}(st|nd|rd|th)?", bare):
        return "day"
    return "weekday" if word.endswith(",") else "month"  # or a quarter


def right_links(source: str, target: str) -> Links | None:
    """The links of a date, or None if its parts are not one word each on both sides."""
    parts, others = ([part(word) for word in text.split()] for text in (source, target))
    if len(parts) < 2 or len(set(parts)) < len(parts) or sorted(parts) != sorted(others):
        return None
    return {(parts.index(each), others.index(each)) for each in parts}


def dates(split: str) -> Iterator[str]:
    """The sources of such dates, as CLDR writes them; every tenth phrase is a date."""
    for index in itertools.count(0, 10):
        source, target, category = phrase(split, index, "en", "de")
        if category == "date" and right_links(source, target):
            yield source


def error_rate(sources: list[str], found: list[Translation], made: list[Links]) -> float:
    right = [right_links(s, each.text) or set() for s, each in zip(sources, found, strict=True)]
    common = sum(len(a & b) for a, b in zip(made, right, strict=True))
    return 1 - 2 * common / (sum(map(len, made)) + sum(map(len, right)))


def choices(translator: Translator, found: Translation) -> dict[str, Links]:
    """The links by each layer and head, or by the mean of a layer's heads, as written or read."""
    assert found.attention is not None
    source, target = (translator.tokenizer.pieces(i)[:-1] for i in (found.source, found.tokens))
    sides, made = (words_of(source), words_of(target)), {}
    for layer, heads in enumerate(found.attention.cross, 1):
        means = {f"head {n}": weights for n, weights in enumerate(heads, 1)}
        for name, weights in (means | {"mean": heads.mean(axis=0)}).items():
            for how, rows in (("written", weights), ("read", np.roll(weights, -1, axis=0))):
                made[f"layer {layer}, {name}, {how}"] = set(links(rows, *sides))
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", help="a workdir, or one checkpoint")
    translator = Translator.load(parser.parse_args().directory)

    def translated(split: str, count: int) -> tuple[list[str], list[Translation]]:
        sources = list(itertools.islice(dates(split), count))
        return sources, translator.translate(sources, Options(attention=True))

    sources, found = translated("validation", 200)
    by_choice = [choices(translator, each) for each in found]
    rates = {n: error_rate(sources, found, [made[n] for made in by_choice]) for n in by_choice[0]}
    for name, rate in sorted(rates.items(), key=lambda item: item[1]):
        print(f"{name:<28}{100 * rate:6.1f} %  (200 dates of validation)")
    sources, found = translated("test", 100)
    texts = [
        pharaoh(translator.tokenizer, each.source, each.tokens, each.attention.cross).split()
        for each in found
    ]
    made = [{(int(a), int(b)) for a, b in (link.split("-") for link in text)} for text in texts]
    print(
        f"translate --alignment: {100 * error_rate(sources, found, made):.1f} %, "
        f"{sum(map(len, made))} links of 100 dates of test"
    )


if __name__ == "__main__":
    main()
