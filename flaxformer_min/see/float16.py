"""Weights as float16, in which the page stores them, and what that changes."""

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np

from flaxformer_min.config import Config
from flaxformer_min.data.tokenizer import Tokenizer
from flaxformer_min.decoding.options import Options
from flaxformer_min.errors import UserError


@runtime_checkable
class AnyTranslator(Protocol):
    """What the page needs of a decoding.translator.Translator, which would be too high a floor."""

    config: Config
    tokenizer: Tokenizer
    step: Any

    @property
    def params(self) -> Any: ...
    @params.setter
    def params(self, params: Any) -> None: ...
    def translate(self, lines: Sequence[str], options: Options = ...) -> list[Any]: ...
    def score_tokens(self, pairs: Sequence[tuple[str, str]]) -> list[Any]: ...


def to_float16(name: str, leaf: np.ndarray) -> np.ndarray:
    """Rounds a weight to little-endian float16; raises UserError if it is too large for that."""
    with np.errstate(over="ignore"):
        rounded = leaf.astype("<f2")
    if not np.isfinite(rounded).all():
        raise UserError(f"{name}: a weight of {np.abs(leaf).max():g} is too large for float16")
    return rounded


def rounding_error(translator: AnyTranslator, lines: Sequence[str]) -> float:
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
