"""Sentences per second of this program, Hugging Face's Marian and CTranslate2 on the same weights.

    pip install -e '.[train,benchmark]' -c constraints.txt
    python -m benchmarks.decoding --checkpoint DIR [--source FILE] [--json]

All get the same lines of text and give back lines of text, in float32, with the same number of
threads and the same tokenizer. All look for the likeliest translation (alpha 0: their length
penalties are other formulas). A peer takes the batch size with which it is fastest on the first
lines; CTranslate2 runs twice, with one batch at once and with one on each thread. Rates are medians
over repeats in which the programs take turns; what happens once (loading, compiling) is told apart.
Then they are compared: log-probabilities token by token, and translations line by line, each
difference with the log-probability of both.
"""

import argparse
import itertools
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from benchmarks.peers import Ids, Program, ctranslate2, marian, this_program
from flaxformer_min.data.lines import read_lines
from flaxformer_min.data.phrases import phrase
from flaxformer_min.decoding.bleu import bleu_metric
from flaxformer_min.decoding.translator import Translator

BEAMS = (5, 1)
TRIED_LINES = 256  # with which a peer's settings are tried


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoint", required=True, help="a workdir, or one checkpoint")
    parser.add_argument("--source", help="a file of lines; the built-in corpus by default")
    parser.add_argument("--reference", help="its translations, a line for each; adds BLEU")
    parser.add_argument("--sentences", type=int, default=1000, help="lines taken from it")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.threads])

    lines = source_lines(options.source, options.sentences)
    translator = Translator.load(options.checkpoint)
    programs = [this_program(translator), marian(translator, options.threads)]
    for at_once in sorted({1, options.threads}):
        programs.append(ctranslate2(translator, options.threads, at_once))
    record: dict[str, Any] = {"sentences": len(lines), "threads": options.threads, "beams": {}}
    for beam in BEAMS:
        rates, found = race(programs, lines, beam, options.repeats)
        record["beams"][beam] = {
            "rates": rates,
            "differences": differences(programs[0], translator, lines, found),
            "bleu": bleu(translator, found, options.reference) if options.reference else {},
        }
        if beam == BEAMS[0]:
            record["log-probabilities"] = agreement(programs, translator, lines, found)
    print(json.dumps(record) if options.json else report(record))


def source_lines(path: str | None, count: int) -> list[str]:
    """The first `count` lines of the file that are not blank, or built-in phrases."""
    if path is None:
        return [phrase("test", index, "en", "de").source for index in range(count)]
    return list(itertools.islice((line for line in read_lines(path) if line.strip()), count))


# What is measured


def race(
    programs: Sequence[Program], lines: list[str], beam: int, repeats: int
) -> tuple[dict[str, Any], dict[str, list[Ids]]]:
    """Sentences per second of each program, median and extremes; and its translations."""
    setting, first, found = {}, {}, {}
    for name, settings, translate, _ in programs:
        first[name], _ = timed(translate, lines, beam, settings[0])
        few = lines[:TRIED_LINES]
        tried = [min(timed(translate, few, beam, s)[0] for _ in range(2)) for s in settings]
        setting[name] = settings[int(np.argmin(tried))]
    seconds = {program.name: [] for program in programs}
    for _, (name, _, translate, _) in itertools.product(range(repeats), programs):
        taken, found[name] = timed(translate, lines, beam, setting[name])
        seconds[name].append(taken)
    rates = {
        name: {
            "median": len(lines) / statistics.median(taken),
            "slowest": len(lines) / max(taken),
            "fastest": len(lines) / min(taken),
            "setting": setting[name],
            "seconds of the first pass": first[name],
        }
        for name, taken in seconds.items()
    }
    return rates, found


def timed(function: Callable[..., Any], *arguments: Any) -> tuple[float, Any]:
    started = time.perf_counter()
    result = function(*arguments)
    return time.perf_counter() - started, result


def agreement(
    programs: Sequence[Program],
    translator: Translator,
    lines: list[str],
    found: dict[str, list[Ids]],
) -> dict[str, Any]:
    """How far the peers' log-probabilities of our tokens are from ours, at worst."""
    ours, *peers = programs
    eos_id = translator.tokenizer.eos_id
    sources = translator.tokenizer.encode_batch(lines)
    ended = [pair for pair in zip(sources, found[ours.name], strict=True) if pair[1][-1] == eos_id]
    sources, targets = map(list, zip(*ended, strict=True))
    own = np.concatenate(ours.score(sources, targets))
    worst = {
        peer.name: float(np.abs(np.concatenate(peer.score(sources, targets)) - own).max())
        for peer in peers
    }
    return {"tokens": len(own), "worst difference": worst}


def differences(
    ours: Program, translator: Translator, lines: list[str], found: dict[str, list[Ids]]
) -> dict[str, list[dict[str, Any]]]:
    """Every line that a peer translates otherwise, with our log-probability of both."""
    sources = translator.tokenizer.encode_batch(lines)

    def compare(theirs: list[Ids]) -> list[dict[str, Any]]:
        pairs = enumerate(zip(found[ours.name], theirs, strict=True))
        places = [place for place, (own, other) in pairs if own != other]
        chosen = [sources[place] for place in places]
        scores = [
            [float(tokens.sum()) for tokens in ours.score(chosen, [side[p] for p in places])]
            for side in (found[ours.name], theirs)
        ]
        return [
            {"line": place + 1, "ours": own, "theirs": other}
            for place, own, other in zip(places, *scores, strict=True)
        ]

    return {name: compare(theirs) for name, theirs in found.items() if name != ours.name}


def bleu(translator: Translator, found: dict[str, list[Ids]], reference: str) -> dict[str, float]:
    """The BLEU of each program's translations of the first lines, with the config's tokens."""
    metric, decode = bleu_metric(translator.config), translator.tokenizer.decode
    references = list(read_lines(reference))
    return {
        name: metric.corpus_score([*map(decode, ids)], [references[: len(ids)]]).score
        for name, ids in found.items()
    }


def report(record: dict[str, Any]) -> str:
    text = [f"{record['sentences']} sentences, {record['threads']} threads, float32, alpha 0"]
    for beam, result in record["beams"].items():
        text += ["", f"beam {beam}: sentences a second", ""]
        ours = next(iter(result["rates"].values()))["median"]
        for name, rate in result["rates"].items():
            text.append(
                f"  {name:<16}{rate['median']:8.1f}   ({rate['slowest']:.1f} to "
                f"{rate['fastest']:.1f}; ours is {ours / rate['median']:.2f} times this; first "
                f"pass {rate['seconds of the first pass']:.1f} s; setting {rate['setting']})"
            )
        if scores := result.get("bleu"):
            text += ["", "  BLEU: " + ", ".join(f"{name} {x:.2f}" for name, x in scores.items())]
        for name, lines in result["differences"].items():
            lower = sum(line["ours"] < line["theirs"] for line in lines)
            text += ["", f"  {len(lines)} lines differ from {name}'s, ours less likely in {lower}:"]
            text += [f"    {x['line']:5d}  {x['ours']:10.5f} {x['theirs']:10.5f}" for x in lines]
    if scores := record.get("log-probabilities"):
        text += ["", f"log-probabilities of {scores['tokens']} tokens, worst difference from ours:"]
        text += [f"  {name:<16}{worst:.2e}" for name, worst in scores["worst difference"].items()]
    return "\n".join(text)


if __name__ == "__main__":
    main()
