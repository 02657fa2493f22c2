"""How to decode: what a caller asks for, and what the compiled functions take."""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import jax
from jaxtyping import Array, Float, Int

from flaxformer_min.config import DecodeConfig
from flaxformer_min.errors import UserError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """How to search or draw, what a hypothesis may be, and what comes back.

    None means the config's value, or that there is no such limit. Lengths are in tokens and count
    EOS. All constraints hold together; a forced beginning is obeyed before any of them.
    """

    beam_size: int | None = None  # 1 is greedy search
    length_penalty_alpha: float | None = None  # score = log-probability / ((5 + n) / 6)^alpha
    max_length_offset: int | None = None  # at most source length + offset tokens
    min_length: int = 0  # no EOS before
    no_repeat_ngram_size: int = 0  # no so many tokens in a row twice; 0 allows all
    forbid_unknown: bool = True  # the unknown piece is never generated
    sample: bool = False  # draw every token instead of searching for the likeliest
    temperature: float = 1.0  # log-probabilities are divided by it before a draw
    top_k: int | None = None  # draw among the likeliest k tokens
    top_p: float | None = None  # draw among the fewest likeliest tokens of this probability
    seed: int = 0  # a line's draws follow from it and the line, whatever the other lines
    n_best: int = 1  # hypotheses for each line; with sample, as many independent draws
    attention: bool = False  # also the attention weights of each hypothesis

    def over(self, decode: DecodeConfig) -> DecodeConfig:
        """The config's section with what is given here instead."""
        names = ("beam_size", "length_penalty_alpha", "max_length_offset")
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        return dataclasses.replace(decode, **given)

    def settled(self, decode: DecodeConfig) -> "Settled":
        """With the config's values for None. Raises UserError for values that make no sense."""
        decode = self.over(decode)
        for complaint in (*_contradictions(self), *_out_of_range(self, decode)):
            raise UserError(complaint)
        return Settled(
            beam_size=1 if self.sample else decode.beam_size,
            length_penalty_alpha=decode.length_penalty_alpha,
            max_length_offset=decode.max_length_offset,
            min_length=self.min_length,
            no_repeat_ngram_size=self.no_repeat_ngram_size,
            forbid_unknown=self.forbid_unknown,
            sample=self.sample,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            seed=self.seed,
            n_best=self.n_best,
        )


def _compiled_in() -> Any:
    return dataclasses.field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Settled:
    """Options for compiled functions: another value of what is compiled in is another program."""

    beam_size: int = _compiled_in()
    length_penalty_alpha: float | Float[Array, ""]
    max_length_offset: int = _compiled_in()
    min_length: int | Int[Array, ""]
    no_repeat_ngram_size: int = _compiled_in()
    forbid_unknown: bool = _compiled_in()
    sample: bool = _compiled_in()
    temperature: float | Float[Array, ""]
    top_k: int | Int[Array, ""] | None
    top_p: float | Float[Array, ""] | None
    seed: int | Int[Array, ""]
    n_best: int = _compiled_in()


def _contradictions(options: Options) -> Iterator[str]:
    if options.sample and options.beam_size is not None:
        yield "sample draws one token at a time and has no beam_size: give one of the two"
    for name in ("temperature", "top_k", "top_p", "seed"):
        if not options.sample and getattr(options, name) != getattr(Options, name):
            yield f"{name} is for sampling: give sample too"


def _out_of_range(options: Options, decode: DecodeConfig) -> Iterator[str]:
    """A line for each value that is impossible."""
    o, most = options, "at least 0 and below 2^31"
    rules = (
        ("beam_size", decode.beam_size >= 1, "at least 1"),
        ("length_penalty_alpha", math.isfinite(decode.length_penalty_alpha), "finite"),
        ("max_length_offset", decode.max_length_offset >= 0, "at least 0"),
        ("min_length", 0 <= o.min_length < 2**31, most),
        ("no_repeat_ngram_size", o.no_repeat_ngram_size >= 0, "at least 0"),
        ("temperature", 0 < o.temperature < math.inf, "above 0 and finite"),
        ("top_k", o.top_k is None or 1 <= o.top_k < 2**31, "at least 1 and below 2^31"),
        ("top_p", o.top_p is None or 0 < o.top_p <= 1, "above 0 and at most 1"),
        ("seed", 0 <= o.seed < 2**31, most),
        ("n_best", o.n_best >= 1, "at least 1"),
        (
            "n_best",
            o.sample or o.n_best <= decode.beam_size,
            f"at most beam_size, {decode.beam_size}",
        ),
    )
    for name, fits, what in rules:
        if not fits:
            yield f"{name} is {getattr(o, name)}: it must be {what}"
