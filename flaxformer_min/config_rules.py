"""What a config may hold: types and ranges of its fields, its JSON, and what may change on resume.

`typed` is the one function that makes records of JSON: it reads configs, the flags that override
them and the records inside checkpoints.
"""

import dataclasses
import inspect
import json
import re
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from flaxformer_min.config import FREE_ON_RESUME, RANGES, Config, DataConfig, flat
from flaxformer_min.errors import UserError, first_line, nearest

# Fields that configs once had, and the value that is now a constant of the program.
RETIRED: dict[str, Any] = {"data.tokenizer_max_lines": 2_000_000, "optimizer.beta1": 0.9}


def config_to_json(config: Config) -> str:
    """Returns the whole tree as JSON, one field a line, in the order of the classes in `config`."""
    return json.dumps(dataclasses.asdict(config), indent=2) + "\n"


def config_from_json(text: str) -> Config:
    """Reads what `config_to_json` wrote, also by an older version of this program.

    A missing field takes its default; a retired one is left out if it has the value that is now
    the program's constant.

    Raises:
        UserError: not JSON, an unknown or wrongly typed field, or values that `validate` refuses.
    """
    try:
        tree = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"the config is not JSON: {first_line(error)}") from error
    _leave_out_retired(tree)
    config = typed(Config, tree)
    validate(config)
    return config


def _leave_out_retired(tree: Any) -> None:
    """Removes the retired fields from a config's JSON; raises UserError for another value."""
    for key, constant in RETIRED.items():
        section, field = key.split(".")
        fields = tree.get(section) if isinstance(tree, dict) else None
        if isinstance(fields, dict) and field in fields:
            value = fields.pop(field)
            if value != constant:
                raise UserError(f"{key} is {value!r:.80}: this version always uses {constant!r}")


def check_resume(old: Config, new: Config) -> None:
    """Refuses a config with which a resumed run would become another run.

    The fields and sections that `config` marks as Free may change, and `train.steps` may grow. If
    the paths of files change, their content is compared elsewhere (training/prepared_data.py).

    Raises:
        UserError: names the field and both values.
    """
    before, after = flat(old), flat(new)
    for key, value in before.items():
        is_steps = key == "train.steps"
        differs = after[key] < value if is_steps else after[key] != value
        if differs and key not in FREE_ON_RESUME:
            rule = "it can only grow" if is_steps else "set it back or use a new workdir"
            now = f"is {after[key]!r} now"
            raise UserError(f"{key} was {value!r} in this workdir and {now}: {rule}")


def validate(config: Config) -> None:
    """Refuses values out of range and values that contradict each other.

    Raises:
        UserError: names the first such field, its value and what is allowed.
    """
    values = flat(config)
    ranges = ((key, allowed.holds(values[key]), allowed.rule) for key, allowed in RANGES.items())
    for rules in (ranges, _relations(config), _splits(config.data)):
        for key, holds, rule in rules:
            if not holds:
                raise UserError(f"{key} is {values[key]!r}: it must be {rule}")


Rules = Iterator[tuple[str, bool, str]]  # field, whether its value is allowed, what it must be


def _relations(config: Config) -> Rules:
    """Yields the rules for fields that depend on other fields; each field is in its own range."""
    model, data, train = config.model, config.data, config.train
    even = model.positions == "learned" or model.d_model % 2 == 0
    yield "model.d_model", even, "even for sinusoidal positions (sines and cosines alternate)"
    fits = model.max_length >= data.max_length
    yield "model.max_length", fits, f"at least data.max_length ({data.max_length})"
    least = 261 if data.byte_fallback and data.tokenizer is None else 5
    contents = "4 control pieces, 256 bytes" if least == 261 else "4 control pieces"
    yield "data.vocab_size", data.vocab_size >= least, f"at least {least} ({contents} and one more)"
    rows, parts = data.row_multiple, config.optimizer.accumulation
    divides = parts >= 1 and rows % parts == 0
    yield "optimizer.accumulation", divides, f"a divisor of data.row_multiple ({rows})"
    every = train.checkpoint_every
    saved = train.evaluate_every % every == 0
    yield "train.evaluate_every", saved, f"a multiple of train.checkpoint_every ({every})"
    sizes = dataclasses.asdict(config.mesh)
    for axis, size in sizes.items():
        alone = size != -1 or list(sizes.values()).count(-1) == 1
        yield f"mesh.{axis}", alone, "at least 1: only one axis can be -1"


def _splits(data: DataConfig) -> Rules:
    """Yields the rules for the number of names of a split, by the kind of its source."""
    known = re.fullmatch("files|phrases|(tfds|hf):.+", data.source) is not None
    kinds = "'files', 'phrases', 'tfds:wmt14_translate/de-en' or 'hf:wmt/wmt14:de-en'"
    yield "data.source", known, kinds
    for split in ("train", "validation", "test"):
        key, names = f"data.{split}", getattr(data, split)
        if data.source_kind == "files":
            yield key, len(names) % 2 == 0, "two file names, source and target, a pair"
        elif data.source_kind == "phrases":
            yield key, len(names) <= 1, "one slice, such as 'train[:60000]'"


def typed(kind: Any, value: Any, key: str = "", whole: str = "the config") -> Any:
    """Returns a value from JSON as the type that is wanted.

    Args:
        kind: int, float, str, bool, Any, `X | None`, a Literal of strings, `tuple[X, ...]`,
            `list[X]`, `dict[str, X]`, `Mapping[str, X]`, or a dataclass or NamedTuple whose
            fields have such types.
        value: is what `json.loads` makes. A list can become a tuple, a whole number a float;
            a record's missing field takes its default.
        key: says where the value stands in the whole, such as "model.dropout"; errors name it.
        whole: is the name of the outermost record in errors.

    Raises:
        UserError: names the first value of another type, unknown field or missing field.
    """
    origin, choices = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):  # X | None
        return None if value is None else typed(choices[0], value, key, whole)
    if isinstance(kind, type) and (dataclasses.is_dataclass(kind) or hasattr(kind, "_fields")):
        return _record(kind, value, key, whole)
    if origin in (tuple, list) and isinstance(value, list | tuple):
        return origin(typed(choices[0], item, key, whole) for item in value)
    if origin in (dict, Mapping) and isinstance(value, dict):
        inner = choices[1]
        return {name: typed(inner, item, f"{key}.{name}", whole) for name, item in value.items()}
    if kind is float and type(value) is int and abs(value) < 2**53:
        return float(value)
    if kind is Any or type(value) is kind or (isinstance(value, str) and value in choices):
        return value
    raise UserError(f"{key} is {value!r:.80}: it must be {described(kind)}")


def _record(kind: Any, tree: Any, key: str, whole: str) -> Any:
    """Makes a dataclass or NamedTuple of a JSON object."""
    name, prefix = (f"section {key}", f"{key}.") if key else (whole, "")
    if not isinstance(tree, dict):
        raise UserError(f"{name} is {tree!r:.80}: it must be a JSON object")
    hints = typing.get_type_hints(kind)
    for field in [field for field in tree if field not in hints]:
        close = nearest(field, hints)
        raise UserError(f"{prefix}{field} is no field of {whole}: did you mean {prefix}{close}?")
    for field, parameter in inspect.signature(kind).parameters.items():
        if parameter.default is parameter.empty and field not in tree:
            raise UserError(f"{prefix}{field} is missing from {whole}")
    return kind(
        **{field: typed(hints[field], tree[field], prefix + field, whole) for field in tree}
    )


def described(kind: Any) -> str:
    """Returns the values that a type allows, in words."""
    words = {int: "a whole number", float: "a number", bool: "True or False", str: "a string"}
    origin, choices = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        return "one of " + ", ".join(choices)
    if origin in (tuple, list):
        return "a list of strings" if choices[0] is str else f"a list, each {described(choices[0])}"
    if origin in (dict, Mapping):
        return "a JSON object"
    return f"{described(choices[0])} or None" if choices else words[kind]
