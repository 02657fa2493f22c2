"""What a config may say: types and ranges of its fields, its JSON, what may change on resume.

`typed` is the one reader of JSON into records: it reads configs, the flags that override them and
the records inside checkpoints.
"""

import dataclasses
import inspect
import json
import math
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

from flaxformer_min.config import FREE_ON_RESUME, Config, flat
from flaxformer_min.errors import UserError, first_line, nearest

# Fields that configs once had, and the value that is now a constant of the program.
RETIRED: dict[str, Any] = {"data.tokenizer_max_lines": 2_000_000, "optimizer.beta1": 0.9}


def config_to_json(config: Config) -> str:
    """The whole tree as JSON, one field a line, in the order of the classes in `config`."""
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
    """Refuses a config under which going on would make the run another one.

    Free to change are the fields and sections that `config` marks as Free, and `train.steps`
    upward. The content of files whose paths changed is compared elsewhere.

    Raises:
        UserError: names the field and both values.
    """
    before, after = flat(old), flat(new)
    for key, value in before.items():
        grows = key == "train.steps" and after[key] >= value
        if after[key] != value and key not in FREE_ON_RESUME and not grows:
            can_grow = key == "train.steps"
            rule = "it can only grow" if can_grow else "set it back or use a new workdir"
            raise UserError(
                f"{key} was {value!r} in this workdir and is {after[key]!r} now: {rule}"
            )


# What a value must be, the test of it, and the fields that it holds for.
RANGES: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    (
        "at least 1",
        lambda value: value >= 1,
        "model.num_layers model.d_model model.d_ff model.num_heads model.d_k model.d_v "
        "data.tokens_per_batch data.num_buckets data.row_multiple optimizer.warmup_steps "
        "train.steps train.evaluate_every train.checkpoint_every train.keep_last decode.beam_size",
    ),
    (
        "at least 0 and below 1",
        lambda value: 0 <= value < 1,
        "model.dropout model.attention_dropout model.ffn_dropout optimizer.beta2 "
        "train.label_smoothing",
    ),
    ("at least 0", lambda value: value >= 0, "train.keep_best decode.max_length_offset"),
    ("at least 2: one piece and EOS", lambda value: value >= 2, "data.max_length"),
    ("from 0 to 4294967295", lambda value: 0 <= value < 2**32, "data.seed train.seed"),
    ("above 0", lambda value: 0 < value < math.inf, "optimizer.epsilon"),
    ("above 0 and at most 1", lambda value: 0 < value <= 1, "data.character_coverage"),
    (
        "above 0, or None",
        lambda value: value is None or 0 < value < math.inf,
        "optimizer.peak_learning_rate optimizer.clip_norm",
    ),
    (
        "at least 1, or None to train all steps",
        lambda value: value is None or value >= 1,
        "train.patience",
    ),
    ("finite", math.isfinite, "decode.length_penalty_alpha"),
    ("given", bool, "data.train data.validation"),
    ("a language such as 'en'", bool, "data.source_language data.target_language"),
    (
        "at least 1, or -1 for the rest",
        lambda value: value >= 1 or value == -1,
        "mesh.data mesh.fsdp mesh.tensor",
    ),
)


def validate(config: Config) -> None:
    """Refuses values out of range and values that contradict each other.

    Raises:
        UserError: names the first such field, its value and what is allowed.
    """
    values = flat(config)
    for rules in (_ranges, _model_and_optimizer, _splits, _vocabulary, _loop_and_mesh):
        for key, holds, rule in rules(config):
            if not holds:
                raise UserError(f"{key} is {values[key]!r}: it must be {rule}")


Rules = Iterator[tuple[str, bool, str]]  # field, whether it is in order, what it must be


def _ranges(config: Config) -> Rules:
    """Each field by itself."""
    values = flat(config)
    for rule, holds, keys in RANGES:
        for key in keys.split():
            yield key, holds(values[key]), rule


def _model_and_optimizer(config: Config) -> Rules:
    model, adam = config.model, config.optimizer
    paired = model.positions == "learned" or model.d_model % 2 == 0
    yield "model.d_model", paired, "even for sinusoidal positions (sines and cosines alternate)"
    longest, rows = config.data.max_length, config.data.row_multiple
    yield "model.max_length", model.max_length >= longest, f"at least data.max_length ({longest})"
    divides = adam.accumulation >= 1 and rows % adam.accumulation == 0
    yield "optimizer.accumulation", divides, f"a divisor of data.row_multiple ({rows})"


def _splits(config: Config) -> Rules:
    """How many names a split has, by the kind of its source."""
    data = config.data
    known = re.fullmatch("files|phrases|tfds:.+", data.source) is not None
    kinds = "'files', 'phrases' or a dataset such as 'tfds:wmt14_translate/de-en'"
    yield "data.source", known, kinds
    for split in ("train", "validation", "test"):
        key, names = f"data.{split}", getattr(data, split)
        if data.source_kind == "files":
            yield key, len(names) % 2 == 0, "two file names, source and target, a pair"
        elif data.source_kind == "phrases":
            yield key, len(names) <= 1, "one slice, such as 'train[:60000]'"


def _vocabulary(config: Config) -> Rules:
    data = config.data
    least = 261 if data.byte_fallback and data.tokenizer is None else 5
    contents = "4 control pieces, 256 bytes" if least == 261 else "4 control pieces"
    yield "data.vocab_size", data.vocab_size >= least, f"at least {least} ({contents} and one more)"


def _loop_and_mesh(config: Config) -> Rules:
    train, mesh = config.train, dataclasses.asdict(config.mesh)
    every = train.checkpoint_every
    saved = train.evaluate_every % every == 0
    yield "train.evaluate_every", saved, f"a multiple of train.checkpoint_every ({every})"
    for axis, size in mesh.items():
        alone = size != -1 or list(mesh.values()).count(-1) == 1
        yield f"mesh.{axis}", alone, "at least 1: only one axis can be -1"


def typed(kind: Any, value: Any, key: str = "", whole: str = "the config") -> Any:
    """A value from JSON as the type that is wanted; the one reader of JSON into records.

    Args:
        kind: int, float, str, bool, Any, `X | None`, a Literal of strings, `tuple[X, ...]`,
            `list[X]`, `dict[str, X]`, `Mapping[str, X]`, or a dataclass or NamedTuple whose
            fields have such types.
        value: made of what `json.loads` makes. A list can become a tuple, a whole number a float;
            a record's missing field takes its default.
        key: where the value stands in the whole, such as "model.dropout"; it names the value in
            errors.
        whole: what the outermost record is called in errors.

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
    """A JSON object as a dataclass or NamedTuple."""
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
    """The values that a type allows, in words."""
    words = {int: "a whole number", float: "a number", bool: "True or False", str: "a string"}
    origin, choices = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        return "one of " + ", ".join(choices)
    if origin in (tuple, list):
        return "a list of strings" if choices[0] is str else f"a list, each {described(choices[0])}"
    if origin in (dict, Mapping):
        return "a JSON object"
    return f"{described(choices[0])} or None" if choices else words[kind]
