"""Writes one HTML file that runs a checkpoint in a browser: weights, tokenizer, model and view.

The files in see/page/ are joined into it. The model runs in a worker, which is made from text
inside the file, because a browser starts no worker from another file on a disk.
"""

import base64
import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
from sentencepiece.sentencepiece_model_pb2 import ModelProto

from flaxformer_min.checkpoints.leaves import named_leaves
from flaxformer_min.checkpoints.load import load_for_inference
from flaxformer_min.data.lines import is_blank, read_lines
from flaxformer_min.data.sources import read_pairs
from flaxformer_min.data.tokenizer import Tokenizer
from flaxformer_min.decoding.options import Options
from flaxformer_min.decoding.translator import Translator
from flaxformer_min.errors import UserError
from flaxformer_min.system.files import replace_file

PARTS = Path(__file__).parent / "page"
WORKER = ("transformer.js", "pieces.js", "translate.js", "worker.js")
VIEW = ("transformer.js", "draw.js", "view.js")
EXAMPLES = 7
NORMAL, CONTROL, USER_DEFINED, UNUSED, BPE = 1, 3, 4, 5, 2  # numbers in SentencePiece's format


def write_page(
    directory: str | Path,
    output: str | Path,
    *,
    step: int | Literal["best"] | None = None,
    source: str | None = None,
) -> int:
    """Writes the page of a workdir's checkpoint, or of one checkpoint; returns its bytes.

    Its examples are lines of the file `source`, by default of the config's test split. Raises
    UserError where the page could not do what the package does, for a source without a line, and
    for the reasons of `load_for_inference`.
    """
    loaded = load_for_inference(directory, step)
    tokenizer = describe_tokenizer(loaded.tokenizer)
    data = loaded.config.data
    lines = list(read_lines(source)) if source else [s for s, _ in read_pairs(data, data.test)]
    examples = choose_examples(lines)
    if not examples:
        raise UserError("no line to begin with; give --source FILE with some lines to translate")
    rounded = {name: to_float16(name, leaf) for name, leaf in named_leaves(loaded.params).items()}
    translator = Translator(loaded.config, loaded.tokenizer, loaded.params, loaded.step)
    checkpoint = {
        "config": dataclasses.asdict(loaded.config.model),
        "tokenizer": tokenizer,
        "never": loaded.tokenizer.never_generated,
        "offset": loaded.config.decode.max_length_offset,
        "languages": [data.source_language, data.target_language],
        "step": loaded.step,
        "examples": examples,
        "error": rounding_error(translator, examples),
        "table": [[name, leaf.shape] for name, leaf in rounded.items()],
    }
    content = join(checkpoint, b"".join(leaf.tobytes() for leaf in rounded.values())).encode()
    replace_file(Path(output), content)
    return len(content)


def describe_tokenizer(tokenizer: Tokenizer) -> dict[str, Any]:
    """Returns what see/page/pieces.js needs. Raises UserError for a model that it does not know."""
    if type(tokenizer) is not Tokenizer:
        raise UserError("its tokenizer is Marian's; the page knows one SentencePiece model alone")
    proto = ModelProto.FromString(tokenizer.model_bytes)
    rules, trained = proto.normalizer_spec, proto.trainer_spec
    types = [piece.type for piece in proto.pieces]
    reasons = {
        "is no BPE model": trained.model_type != BPE,
        "changes text by rules": rules.precompiled_charsmap or rules.remove_extra_whitespaces,
        "marks words by what follows": trained.treat_whitespace_as_suffix,
        "leaves spaces as they are": not rules.escape_whitespaces,
        "has pieces of a user": USER_DEFINED in types or UNUSED in types,
    }
    for reason, holds in reasons.items():
        if holds:
            raise UserError(f"its tokenizer {reason}, which the page cannot do")
    added = tokenizer.vocab_size - len(types)
    return {
        "pieces": tokenizer.pieces(range(tokenizer.vocab_size)),
        "scores": [piece.score for piece in proto.pieces] + [0] * added,
        "types": types + [CONTROL] * added,
        "dummyPrefix": rules.add_dummy_prefix,
        "byteFallback": trained.byte_fallback,
        "nfc": rules.name == "nfc",
        **{name: getattr(tokenizer, f"{name}_id") for name in ("pad", "unk", "bos", "eos")},
    }


def choose_examples(lines: Sequence[str]) -> list[str]:
    """Returns a few lines that are neither short nor long: about 32 characters."""
    texts = dict.fromkeys(line for line in lines if not is_blank(line))
    close = sorted(texts, key=lambda text: abs(len(text) - 32))[: max(EXAMPLES, len(texts) // 10)]
    return close[:: max(1, len(close) // EXAMPLES)][:EXAMPLES]


def to_float16(name: str, leaf: np.ndarray) -> np.ndarray:
    """Rounds a weight to little-endian float16; raises UserError if it is too large for that."""
    with np.errstate(over="ignore"):
        rounded = leaf.astype("<f2")
    if not np.isfinite(rounded).all():
        raise UserError(f"{name}: a weight of {np.abs(leaf).max():g} is too large for float16")
    return rounded


def rounding_error(translator: Translator, lines: Sequence[str]) -> float:
    """Returns how far float16 weights move a token's log-probability at most, in nats.

    The tokens are those of the greedy translations. The translator is left with the rounded weights.
    """
    texts = [found.text for found in translator.translate(lines, Options(beam_size=1))]
    pairs = list(zip(lines, texts, strict=True))
    exact = translator.score_tokens(pairs)
    translator.params = jax.tree.map(lambda x: np.float32(np.float16(x)), translator.params)
    both = zip(exact, translator.score_tokens(pairs), strict=True)
    return max(float(np.abs(np.subtract(a.log_probs, b.log_probs)).max()) for a, b in both)


def join(checkpoint: Mapping[str, Any], weights: bytes) -> str:
    """Returns the text of the whole page."""
    text = (PARTS / "page.html").read_text(encoding="utf-8")
    ledger = json.loads((PARTS / "parts.json").read_text(encoding="utf-8"))
    inserted = {
        "page.css": (PARTS / "page.css").read_text(encoding="utf-8"),
        "figure1.svg": (PARTS / "figure1.svg").read_text(encoding="utf-8"),
        "worker": script(WORKER),
        "view": script(VIEW),
        "parts": in_script(ledger),
        "checkpoint": in_script(checkpoint),
        "weights": base64.b64encode(weights).decode(),
    }
    return re.sub(r"<!--\{(.+?)\}-->", lambda found: inserted[found[1]], text)


def script(names: Sequence[str]) -> str:
    """Joins modules into one script: without their imports and exports, which it does not need."""
    code = "\n".join((PARTS / name).read_text(encoding="utf-8") for name in names)
    return re.sub(r"^export ", "", re.sub(r"^import .*\n", "", code, flags=re.M), flags=re.M)


def in_script(value: Any) -> str:
    """Returns JSON that may stand inside of an HTML script element."""
    return json.dumps(value, ensure_ascii=False).replace("<", "\\u003c")
