"""Writes one HTML file that runs a checkpoint in a browser: weights, tokenizer, model and view.

The files in see/page/ are joined into it. The model runs in a worker, which is made from text
inside of the file, because a browser starts no worker from another file on a disk.
"""

import base64
import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from flaxformer_min.checkpoints.leaves import named_leaves
from flaxformer_min.data.lines import is_blank, read_lines
from flaxformer_min.data.sources import read_pairs
from flaxformer_min.decoding.options import Options
from flaxformer_min.decoding.translator import Translator
from flaxformer_min.errors import UserError
from flaxformer_min.see.pieces import describe_tokenizer
from flaxformer_min.see.record import writing
from flaxformer_min.system.files import replace_file

PARTS = Path(__file__).parent / "page"
WORKER = ("transformer.js", "pieces.js", "translate.js", "worker.js")
VIEW = ("draw.js", "view.js")
MEASURED = 200  # lines at most, on which the error of float16 is measured


def write_page(translator: Translator, output: str, source: str | None = None) -> int:
    """Writes the page of a translator's model; returns its bytes.

    Its examples are lines of the file `source`, by default of the config's test split. Raises
    UserError for the reasons of `make_page`, and where a file cannot be read or written.
    """
    data = translator.config.data
    lines = list(read_lines(source)) if source else [s for s, _ in read_pairs(data, data.test)]
    content = make_page(translator, lines).encode()
    with writing(output):
        replace_file(Path(output), content)
    return len(content)


def make_page(translator: Translator, lines: Sequence[str]) -> str:
    """Returns the page of a translator's model, with some of the lines as examples.

    Raises UserError if every line is blank, for a weight that is too large for float16, and for a
    tokenizer that the page does not know.
    """
    config, tokenizer = translator.config, translator.tokenizer
    described = describe_tokenizer(tokenizer)
    texts = list(dict.fromkeys(line for line in lines if not is_blank(line)))
    if not texts:
        raise UserError("no line to begin with; give --source FILE with lines to translate")
    leaves = named_leaves(translator.params)
    weights = {name: to_float16(name, np.asarray(leaf)) for name, leaf in leaves.items()}
    checkpoint = {
        "config": dataclasses.asdict(config.model),
        "tokenizer": described,
        "never": tokenizer.never_generated,
        "offset": config.decode.max_length_offset,
        "languages": [config.data.source_language, config.data.target_language],
        "step": translator.step,
        "examples": choose_examples(texts),
        "error": rounding_error(translator, texts[:MEASURED]),
        "measured": len(texts[:MEASURED]),
        "table": [[name, leaf.shape] for name, leaf in weights.items()],
    }
    return join(checkpoint, b"".join(leaf.tobytes() for leaf in weights.values()))


def to_float16(name: str, leaf: np.ndarray) -> np.ndarray:
    """Rounds a weight to little-endian float16; raises UserError if it is too large for that."""
    with np.errstate(over="ignore"):
        rounded = leaf.astype("<f2")
    if not np.isfinite(rounded).all():
        raise UserError(f"{name}: a weight of {np.abs(leaf).max():g} is too large for float16")
    return rounded


def rounding_error(translator: Translator, lines: Sequence[str]) -> float:
    """Returns how far float16 weights move a log-probability at most, in nats.

    The log-probabilities are those of the tokens of greedy translations of the lines.
    """
    texts = [found.text for found in translator.translate(lines, Options(beam_size=1))]
    pairs, params = list(zip(lines, texts, strict=True)), translator.params
    exact = translator.score_tokens(pairs)
    translator.params = jax.tree.map(lambda x: np.float32(np.float16(x)), params)
    both = zip(exact, translator.score_tokens(pairs), strict=True)
    translator.params = params
    return max(float(np.abs(np.subtract(a.log_probs, b.log_probs)).max()) for a, b in both)


def choose_examples(texts: Sequence[str]) -> list[str]:
    """Returns a line of about 32 characters, then up to six shorter ones from all over the file."""
    first = sorted(texts, key=lambda text: abs(len(text) - 32))[:1]
    short = sorted(texts, key=lambda text: abs(len(text) - 10))[: max(7, len(texts) // 10)]
    return first + [text for text in short[:: max(1, len(short) // 7)] if text not in first][:6]


def join(checkpoint: Mapping[str, Any], weights: bytes) -> str:
    """Returns the text of the whole page."""
    inserted = {
        "page.css": read("page.css"),
        "figure1.svg": read("figure1.svg"),
        "worker": script(WORKER),
        "view": script(VIEW),
        "parts": in_script(json.loads(read("parts.json"))),
        "checkpoint": in_script(checkpoint),
        "weights": base64.b64encode(weights).decode(),
    }
    return re.sub(r"<!--\{(.+?)\}-->", lambda found: inserted[found[1]], read("page.html"))


def read(name: str) -> str:
    return (PARTS / name).read_text(encoding="utf-8")


def script(names: Sequence[str]) -> str:
    """Joins modules into one script: without their imports and exports, which it does not need."""
    code = re.sub(r"^import .*\n", "", "\n".join(map(read, names)), flags=re.MULTILINE)
    return re.sub(r"^export ", "", code, flags=re.MULTILINE)


def in_script(value: Any) -> str:
    """Returns JSON that may stand inside of an HTML script element."""
    return json.dumps(value, ensure_ascii=False).replace("<", "\\u003c")
