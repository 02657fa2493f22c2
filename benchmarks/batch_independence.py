"""Does a line's translation depend on its batch? python -m benchmarks.batch_independence DIR.

Translates the same lines in batches of 1, 2, 7 and 64 rows, in three orders, on one device and on
all, and compares each run with the first: one device, the program's own batches, lines as they are.
Bits must agree among runs with equal rows; texts may differ only where the scores of the two by
forced decoding are within 1e-5. Exit status 1 if not. For 8 devices on a CPU:

    XLA_FLAGS=--xla_force_host_platform_device_count=8 python -m benchmarks.batch_independence DIR
"""

import argparse
import itertools
import random
import sys

import jax

from flaxformer_min.checkpoints.load import load_for_inference
from flaxformer_min.data.lines import read_lines
from flaxformer_min.data.sources import read_pairs
from flaxformer_min.decoding import batches as shapes
from flaxformer_min.decoding import programs as decoding
from flaxformer_min.decoding.search import length_penalty
from flaxformer_min.decoding.translator import Translation, Translator

ROWS, TOLERANCE = (1, 2, 7, 64), 1e-5


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", help="a workdir, or one checkpoint")
    parser.add_argument("--source", help="a file of lines; the config's test split by default")
    parser.add_argument("--lines", type=int, default=1000)
    options = parser.parse_args()
    one, everywhere = translators(options.directory)
    data = one.config.data
    test = (source for source, _ in read_pairs(data, data.test))
    found = read_lines(options.source) if options.source else test
    lines = list(itertools.islice(found, options.lines))

    expected = one.translate(lines)
    print(f"{len(lines)} lines, {jax.device_count()} devices", flush=True)
    wrong = 0
    for rows in ROWS:
        for module in (shapes, decoding):
            module.rows_at_once = lambda *_, rows=rows: rows
        runs = [in_order(one, lines, seed) for seed in range(3)]
        if everywhere is not one:
            runs += [in_order(everywhere, lines, seed) for seed in range(3)]
        same_bits = sum(run == runs[0] for run in runs)
        print(f"{rows} rows: {same_bits} of {len(runs)} runs have the same bits", flush=True)
        wrong += len(runs) - same_bits
        wrong += differences(one, lines, expected, runs[0])
    return 1 if wrong else 0


def translators(directory: str) -> tuple[Translator, Translator]:
    """On one device, and on all (the same one if there is but one)."""
    loaded = load_for_inference(directory)
    parts = loaded.config, loaded.tokenizer, loaded.params, loaded.step
    one = Translator(*parts, devices=jax.devices()[:1])
    return one, Translator(*parts) if jax.device_count() > 1 else one


def in_order(translator: Translator, lines: list[str], seed: int) -> list[Translation]:
    """Translations of the lines, translated in another order for each seed; 0 is as they are."""
    order = list(range(len(lines)))
    if seed:
        random.Random(seed).shuffle(order)
    found = translator.translate([lines[place] for place in order])
    by_place = dict(zip(order, found, strict=True))
    return [by_place[place] for place in range(len(lines))]


def differences(
    translator: Translator, lines: list[str], expected: list[Translation], found: list[Translation]
) -> int:
    """Lists the texts that differ; the number of those whose scores do, too."""
    places = [n for n, (a, b) in enumerate(zip(expected, found, strict=True)) if a.text != b.text]
    largest = max(abs(a.score - b.score) for a, b in zip(expected, found, strict=True))
    print(f"  {len(places)} texts differ from the first run; scores by at most {largest:.1e}")
    alpha, wrong = translator.config.decode.length_penalty_alpha, 0
    for place in places:
        pair = expected[place], found[place]
        forced = translator.score([(lines[place], translation.text) for translation in pair])
        first, second = (
            log_prob / float(length_penalty(len(translation.tokens), alpha))
            for log_prob, translation in zip(forced, pair, strict=True)
        )
        wrong += abs(first - second) > TOLERANCE
        print(f"  line {place + 1}: {first:.6f} {pair[0].text}")
        print(f"  line {place + 1}: {second:.6f} {pair[1].text}")
    return wrong


if __name__ == "__main__":
    sys.exit(main())
