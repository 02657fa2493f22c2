"""What the page of a checkpoint does in a browser, compared with the package.

    python -m benchmarks.page --checkpoint runs/demo/averaged [--lines 200]

It writes the page to a temporary folder and opens it in Chromium. It prints the bytes of the file,
the seconds to the first token, how many texts equal those of greedy search, the largest difference
of a token's log-probability, how many of 2,000 lines have SentencePiece's ids, and tokens a second.
"""

import argparse
import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from flaxformer_min.data.sources import read_pairs
from flaxformer_min.data.tokenizer import Tokenizer
from flaxformer_min.decoding.options import Options
from flaxformer_min.decoding.translator import Translator
from flaxformer_min.see.page import write_page
from tools.browser import Browser

# The worker's code runs beside the page here, so that its functions can be called.
MODEL = """
const read = (id) => document.getElementById(id).textContent;
const checkpoint = JSON.parse(read("checkpoint-data"));
const pieces = new Pieces(checkpoint.tokenizer);
const bytes = Uint8Array.from(atob(read("weights-data")), (c) => c.charCodeAt(0));
const model = makeModel(checkpoint.config, unpack(bytes, checkpoint.table), pieces.model.pad);
const never = new Set(checkpoint.never);
"""
TRANSLATE = """
const since = performance.now();
const found = lines.map((line) => {
  const all = [...translate(model, pieces, checkpoint.offset, never, line)];
  const steps = all.filter((step) => step && step.candidates);
  return [steps.length ? steps[steps.length - 1].text : "", steps.map((s) => s.candidates[0])];
});
return [found, (performance.now() - since) / 1000];
"""
ODD = [
    "",
    " ",
    "  two  blanks ",
    "\u2581",
    "a\u00a0b\u202fc",
    "e\u0301te\u0301",
    "\u4f60\u597d",
    "\U0001f600",
    "\x00",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoint", required=True, help="a workdir, or one checkpoint")
    parser.add_argument("--lines", type=int, default=200, help="lines of the test split")
    options = parser.parse_args()
    translator = Translator.load(options.checkpoint)
    data = translator.config.data
    lines = [source for source, _ in read_pairs(data, data.test)][: options.lines]
    odd = odd_lines(lines, 2_000)
    with tempfile.TemporaryDirectory() as folder, Browser() as browser:
        path = Path(folder) / "page.html"
        record: dict[str, Any] = {"bytes": write_page(translator, str(path))}
        record["seconds to the first token"] = first_token(browser, path)
        found, seconds = call(browser, TRANSLATE, lines=lines)
        encoded = call(browser, "return lines.map((line) => pieces.encode(line));", lines=odd)
        record["console errors"] = len(browser.errors)
    record |= compared(translator, lines, found)
    record["tokens a second"] = round(sum(len(tokens) for _, tokens in found) / seconds)
    record |= {"lines": len(odd), "of equal ids": equal_ids(translator.tokenizer, odd, encoded)}
    print(json.dumps(record, indent=2))


def call(browser: Browser, code: str, **values: Any) -> Any:
    """Runs code on the page, with the model and these values at hand, and returns its value."""
    constants = "".join(f"const {name} = {json.dumps(value)};" for name, value in values.items())
    worker = browser.evaluate('document.getElementById("worker-code").textContent')
    return browser.evaluate(f"(() => {{ {worker} {MODEL} {constants} {code} }})()")


def first_token(browser: Browser, path: Path) -> float:
    since = time.perf_counter()
    browser.open(path)
    seen = 'document.getElementById("target").textContent'
    while not browser.evaluate(seen):
        time.sleep(0.01)
    return round(time.perf_counter() - since, 2)


def compared(translator: Translator, lines: list[str], found: Any) -> dict[str, Any]:
    """Compares with greedy search; log-probabilities are compared where the texts are equal."""
    wanted = translator.translate(lines, Options(beam_size=1))
    same = [n for n in range(len(lines)) if found[n][0] == wanted[n].text]
    scored = translator.score_tokens([(lines[n], wanted[n].text) for n in same])
    errors = [
        float(np.abs(np.subtract(scores.log_probs, [p for _, p in found[n][1]])).max())
        for n, scores in zip(same, scored, strict=True)
        if list(scores.tokens) == [token for token, _ in found[n][1]]
    ]
    return {
        "texts": len(lines),
        "equal to greedy search": len(same),
        "of these compared by token": len(errors),
        "largest difference of a log-probability": max(errors),
    }


def odd_lines(lines: list[str], size: int) -> list[str]:
    """Lines with unknown characters, blanks, combining characters and parts of other lines."""
    rng = random.Random(1)
    odd = [*ODD, *lines]
    blocks = [(0x20, 0x7F), (0xA0, 0x250), (0x300, 0x370), (0x400, 0x460), (0x2000, 0x2070)]
    blocks += [(0x2581, 0x2582), (0x4E00, 0x9FFF), (0xAC00, 0xD7A4), (0x1F600, 0x1F650)]
    while len(odd) < size:
        line = list(rng.choice(lines))
        for _ in range(rng.randrange(1, 9)):
            line.insert(rng.randrange(len(line) + 1), chr(rng.randrange(*rng.choice(blocks))))
        odd.append("".join(line) + " " * rng.randrange(3))
    return odd


def equal_ids(tokenizer: Tokenizer, lines: list[str], encoded: list[list[int]]) -> int:
    pairs = zip(tokenizer.encode_batch(lines), encoded, strict=True)
    return sum(wanted == found for wanted, found in pairs)


if __name__ == "__main__":
    main()
