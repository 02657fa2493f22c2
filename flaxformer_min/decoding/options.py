"""The options of decoding, each of them declared once.

A field of `Options` carries its type, its default, its help, the range of its values, and whether
it is compiled in. The flags of the command line are made from the fields (flags.py). A field that
the config's decode section has too takes its default from there. The compiled functions take the
whole record (decoding/programs.py). A new option needs a field here and the code that uses it.

This file imports no JAX, so that --help answers at once.
"""

import dataclasses
import typing
from typing import Any, Literal

from flaxformer_min.config import RANGES, DecodeConfig, Range
from flaxformer_min.config_file import SYNONYMS
from flaxformer_min.config_rules import typed
from flaxformer_min.errors import UserError, nearest

COUNT32 = Range("at least 1 and below 2^31", lambda n: 1 <= n < 2**31)
WHOLE32 = Range("at least 0 and below 2^31", lambda n: 0 <= n < 2**31)
POSITIVE = Range("above 0 (1e-30 to 1e30)", lambda x: 1e-30 <= x <= 1e30)
SHARE = Range("above 0 and at most 1", lambda x: 0 < x <= 1)


def _option(
    default: Any,
    text: str | None,
    allowed: Range | None = None,
    *marks: Literal["static", "sampling", "from zero"],
    metavar: str | None = None,
) -> Any:
    """Declares a field of Options; `text` is the help of its flag, None for a field without a flag.

    The value of a "static" field is a compile-time constant: another value compiles another
    program. A "sampling" field needs `sample`. A flag accepts 0 only if its field is marked "from
    zero"; for other fields 0 is out of range or is the default, which means no limit. A field that
    the config's decode section has too takes its range from there.
    """
    metadata = {"help": text, "range": allowed, "metavar": metavar}
    return dataclasses.field(default=default, metadata=metadata | dict.fromkeys(marks, True))


@typing.no_type_check  # inside a compiled function the values are traced arrays
@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """How to search or sample, what a hypothesis may be, and what comes back.

    None means the config's value, or that there is no such limit. Lengths are in tokens and count
    EOS. All constraints hold together, except that within a prefix only the prefix counts.
    """

    beam_size: int | None = _option(None, "1 is greedy; the config's by default", None, "static")
    # The score is the log-probability divided by ((5 + n) / 6)^alpha.
    length_penalty_alpha: float | None = _option(None, "the config's by default")
    # With `sample` the n best are N independent draws.
    n_best: int = _option(
        1, "JSON: for each line its N best hypotheses", COUNT32, "static", metavar="N"
    )
    min_length: int = _option(0, "tokens of a translation, EOS counted", WHOLE32)
    max_length_offset: int | None = _option(
        None, "tokens more than the source's; the config's", None, "static", "from zero"
    )
    no_repeat_ngram_size: int = _option(
        0, "no N tokens in a row twice", WHOLE32, "static", metavar="N"
    )
    forbid_unknown: bool = _option(
        True, "the default: the unknown piece is never generated", None, "static"
    )
    sample: bool = _option(False, "draw translations instead of searching", None, "static")
    temperature: float = _option(1.0, "of --sample: below 1 is sharper", POSITIVE, "sampling")
    top_k: int | None = _option(
        None, "of --sample: only the K likeliest tokens", COUNT32, "sampling"
    )
    top_p: float | None = _option(
        None, "of --sample: only the likeliest of this probability", SHARE, "sampling"
    )
    # The draws of a line follow from the seed and the line, whatever the other lines are.
    seed: int = _option(0, "of --sample", WHOLE32, "sampling", "from zero")
    # Whether the attention weights of each hypothesis come back too.
    attention: bool = _option(False, None, None, "static")

    def __new__(cls, *values: Any, **named: Any) -> "Options":
        """Raises TypeError for a name that is no field, with the field that was meant."""
        known = [field.name for field in dataclasses.fields(cls)]
        if values:
            raise TypeError("Options takes its values by name: write Options(beam_size=4)")
        for name in named.keys() - set(known):
            synonym = SYNONYMS.get(name, "").rpartition(".")[2]
            meant = synonym if synonym in known else nearest(name, known)
            raise TypeError(f"{name} is no field of Options: did you mean {meant}?")
        return super().__new__(cls)

    def over(self, decode: DecodeConfig) -> DecodeConfig:
        """Returns the config's decode section, with the values that are given in these options."""
        given = {name: value for name in IN_CONFIG if (value := getattr(self, name)) is not None}
        return dataclasses.replace(decode, **given)

    def with_defaults(self, decode: DecodeConfig) -> "Options":
        """Returns complete options for a search, with the config's values in place of None.

        When sampling, the beam size is 1. `attention` becomes False, because attention weights are
        computed by another program than the search. Raises UserError where a value is out of range
        or contradicts another one, or has another type than its field.
        """
        kinds = {field.name: field.type for field in dataclasses.fields(Options)}
        given = {name: typed(kind, getattr(self, name), name) for name, kind in kinds.items()}
        return Options(**given)._completed(decode)

    def _completed(self, decode: DecodeConfig) -> "Options":
        if self.sample and self.beam_size is not None:
            raise UserError(
                "sample draws one token at a time and has no beam_size: give one of the two"
            )
        decode = self.over(decode)
        values = {name: getattr(decode, name) for name in IN_CONFIG}
        options = dataclasses.replace(self, **values, attention=False)
        options = dataclasses.replace(options, **_as_floats(options))
        for field in dataclasses.fields(Options):
            _check(options, field)
        if self.sample:
            return dataclasses.replace(options, beam_size=1)
        if self.n_best > decode.beam_size:
            most = f"at most beam_size, {decode.beam_size}"
            raise UserError(f"n_best is {self.n_best}: it must be {most}")
        return options


IN_CONFIG = tuple(
    field.name for field in dataclasses.fields(Options) if hasattr(DecodeConfig, field.name)
)


def _as_floats(options: Options) -> dict[str, float]:
    """Returns the fields that hold floats, as floats: a whole number would compile a program."""
    return {
        field.name: float(value)
        for field in dataclasses.fields(Options)
        if float in (field.type, *typing.get_args(field.type))
        and (value := getattr(options, field.name)) is not None
    }


def _check(options: Options, field: dataclasses.Field[Any]) -> None:
    """Raises UserError if a field's value is out of range, or needs `sample` and that is off."""
    value = getattr(options, field.name)
    allowed: Range | None = field.metadata["range"] or RANGES.get(f"decode.{field.name}")
    if field.metadata.get("sampling") and not options.sample and value != field.default:
        raise UserError(f"{field.name} is for sampling: give sample too")
    if value is not None and allowed is not None and not allowed.holds(value):
        raise UserError(f"{field.name} is {value}: it must be {allowed.rule}")
