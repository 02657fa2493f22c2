"""The configuration: one frozen tree of dataclasses decides everything about a run.

A Python file and flags make one (`config_file.load_config`); it is written inside every checkpoint
as JSON, from which later commands read it back.
"""

import dataclasses
import difflib
import json
import math
import operator
import re
import types
import typing
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

from flaxformer_min.errors import UserError


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The network (paper, section 3). The defaults are the paper's base model."""

    num_layers: int = 6  # N, in each of the two stacks
    d_model: int = 512  # D
    d_ff: int = 2048  # F
    num_heads: int = 8  # H
    d_k: int = 64  # K, width of a query and a key per head
    d_v: int = 64  # U, width of a value per head
    dropout: float = 0.1  # P_drop: on every sublayer's output and on embeddings + positions
    attention_dropout: float = 0.0  # on attention weights; not in the paper
    ffn_dropout: float = 0.0  # on the activations inside the FFN; not in the paper
    positions: Literal["sinusoidal", "learned"] = "sinusoidal"  # learned: Table 3, row E
    max_length: int = 1024  # the longest sequence the model takes, in tokens with EOS
    share_embeddings: Literal["all", "target", "none"] = "all"  # all: section 3.4
    compute_dtype: Literal["float32", "bfloat16"] = "float32"  # of activations; weights are float32
    attention: Literal["exact", "cudnn"] = "exact"  # cudnn: the fused kernel, training on GPUs
    # Compute each layer again in the backward pass: less memory, more time. On CPUs XLA drops the
    # barriers that this rests on, and only with scan_layers is memory saved.
    remat: bool = False
    scan_layers: bool = False  # compile one layer and loop over it: faster to compile


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where the pairs come from, how they become tokens and how tokens become batches."""

    source: str = "files"  # "files", "phrases" (the built-in corpus) or "tfds:NAME/CONFIG"
    # files: the names below are relative to it. tfds: where datasets are prepared; "." means
    # TFDS_DATA_DIR or TFDS's own folder.
    dir: str = "."
    # files: source and target file names alternately, two for each pair of files, .gz accepted.
    # phrases: one slice such as "train[:60000]".
    # tfds: splits or slices of splits such as "train" and "train[:1%]".
    train: tuple[str, ...]
    validation: tuple[str, ...]
    test: tuple[str, ...] = ()
    source_language: str  # such as "en"; chooses the locale of phrases and the direction of tfds
    target_language: str  # such as "de"
    tokenizer: str | None = None  # an existing SentencePiece model; None trains one
    vocab_size: int  # asked of the tokenizer's training; must agree with an existing model
    character_coverage: float = 1.0  # share of the characters that get a piece of their own
    byte_fallback: bool = True  # unknown characters survive as bytes
    tokenizer_max_lines: int = 2_000_000  # lines sampled for the tokenizer's training
    max_length: int = 256  # training pairs with a longer side are dropped; tokens with EOS
    tokens_per_batch: int = 25_000  # rows x max(S, T) of an update, over all devices
    num_buckets: int = 12  # static shapes of a batch, at most
    row_multiple: int = 8  # every shape's rows are a multiple of it
    seed: int = 1  # of the tokenizer's training and the order of the batches


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Adam and its learning rate (paper, section 5.3)."""

    peak_learning_rate: float | None = None  # None: the paper's, (D * warmup_steps)^-0.5
    warmup_steps: int = 4000  # the rate rises linearly, then falls as step^-0.5
    beta1: float = 0.9
    beta2: float = 0.98
    epsilon: float = 1e-9
    clip_norm: float | None = None  # the paper does not clip
    accumulation: int = 1  # micro-batches an update's rows are split into


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The loop: how long, how often to look, what to keep."""

    steps: int = 100_000
    label_smoothing: float = 0.1  # section 5.4
    seed: int = 1  # of the weights and dropout
    evaluate_every: int = 5_000  # steps
    checkpoint_every: int = 1_000  # steps
    keep_last: int = 5  # checkpoints
    keep_best: int = 1  # checkpoints, by best_metric
    best_metric: Literal["bleu", "loss"] = "bleu"  # of an evaluation; ranks checkpoints too
    patience: int | None = None  # evaluations in a row without a better one that end the run
    initialize_from: str | None = None  # a checkpoint whose weights start this run


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeConfig:
    """Search (section 6.1) and how BLEU tokenises."""

    beam_size: int = 4
    length_penalty_alpha: float = 0.6
    max_length_offset: int = 50  # output is at most source length + offset tokens, EOS counted
    # sacreBLEU's that need nothing more installed; "none" for text that is tokenised already
    bleu_tokenize: Literal["13a", "intl", "zh", "char", "none"] = "13a"


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """Devices along each axis of the mesh; -1 means the rest."""

    data: int = -1
    fsdp: int = 1
    tensor: int = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Everything about a run."""

    model: ModelConfig
    data: DataConfig
    optimizer: OptimizerConfig = OptimizerConfig()
    train: TrainConfig = TrainConfig()
    decode: DecodeConfig = DecodeConfig()
    mesh: MeshConfig = MeshConfig()


FREE_ON_RESUME = (
    "model.attention",
    "model.remat",
    "model.scan_layers",
    "data.dir",
    "data.train",
    "data.validation",
    "data.test",
    "data.tokenizer",
    "train.evaluate_every",
    "train.checkpoint_every",
    "train.keep_last",
    "train.keep_best",
    "train.patience",
    "train.initialize_from",
)  # and everything under mesh and decode


def config_to_json(config: Config) -> str:
    """The whole tree as JSON, one field a line, in the order of the classes above."""
    return json.dumps(dataclasses.asdict(config), indent=2) + "\n"


def config_from_json(text: str) -> Config:
    """The inverse of `config_to_json`; a missing field takes its default, so old files stay good.

    Raises:
        UserError: not JSON, an unknown or wrongly typed field, or values that `validate` refuses.
    """
    try:
        tree = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"the config is not JSON: {str(error).splitlines()[0]}") from error
    config = typed(Config, tree, "")
    validate(config)
    return config


def check_resume(old: Config, new: Config) -> None:
    """Refuses a config under which going on would make the run another one.

    Free to change are mesh, decode, how the model is compiled, what is evaluated and kept and
    when, more `train.steps`, and paths, whose content is compared elsewhere.

    Raises:
        UserError: names the field and both values.
    """
    before, after = flat(old), flat(new)
    for key, value in before.items():
        free = key in FREE_ON_RESUME or key.startswith(("mesh.", "decode."))
        grows = key == "train.steps" and after[key] >= value
        if after[key] != value and not free and not grows:
            rule = (
                "it can only grow" if key == "train.steps" else "set it back or use a new workdir"
            )
            raise UserError(
                f"{key} was {value!r} in this workdir and is {after[key]!r} now: {rule}"
            )


def validate(config: Config) -> None:
    """Refuses values out of range and values that contradict each other.

    Raises:
        UserError: names the first such field, its value and what is allowed.
    """
    for section in (_model_rules, _data_rules, _optimizer_rules, _loop_rules, _mesh_rules):
        for key, holds, rule in section(config):
            if not holds:
                raise UserError(f"{key} is {flat(config)[key]!r}: it must be {rule}")


Rules = Iterator[tuple[str, bool, str]]  # field, whether it is in order, what it must be


def _model_rules(config: Config) -> Rules:
    model = config.model
    for name in ("num_layers", "d_model", "d_ff", "num_heads", "d_k", "d_v"):
        yield f"model.{name}", getattr(model, name) >= 1, "at least 1"
    for name in ("dropout", "attention_dropout", "ffn_dropout"):
        yield f"model.{name}", 0 <= getattr(model, name) < 1, "at least 0 and below 1"
    paired = model.positions == "learned" or model.d_model % 2 == 0
    yield "model.d_model", paired, "even for sinusoidal positions (sines and cosines alternate)"
    longest = config.data.max_length
    yield "model.max_length", model.max_length >= longest, f"at least data.max_length ({longest})"


def _data_rules(config: Config) -> Rules:
    data = config.data
    kind = "tfds" if re.match("tfds:.", data.source) else data.source
    kinds = "'files', 'phrases' or a dataset such as 'tfds:wmt14_translate/de-en'"
    yield "data.source", kind in ("files", "phrases", "tfds"), kinds
    for name in ("train", "validation", "test"):
        names = getattr(data, name)
        yield f"data.{name}", bool(names) or name == "test", "given"
        if kind == "files":
            yield f"data.{name}", len(names) % 2 == 0, "two file names, source and target, a pair"
        elif kind == "phrases":
            yield f"data.{name}", len(names) <= 1, "one slice, such as 'train[:60000]'"
    for name in ("source_language", "target_language"):
        yield f"data.{name}", bool(getattr(data, name)), "a language such as 'en'"
    least = 261 if data.byte_fallback and data.tokenizer is None else 5
    contents = "4 control pieces, 256 bytes" if least == 261 else "4 control pieces"
    yield "data.vocab_size", data.vocab_size >= least, f"at least {least} ({contents} and one more)"
    yield "data.character_coverage", 0 < data.character_coverage <= 1, "above 0 and at most 1"
    for name in ("tokenizer_max_lines", "tokens_per_batch", "num_buckets", "row_multiple"):
        yield f"data.{name}", getattr(data, name) >= 1, "at least 1"
    yield "data.max_length", data.max_length >= 2, "at least 2: one piece and EOS"
    yield "data.seed", 0 <= data.seed < 2**32, "from 0 to 4294967295"


def _optimizer_rules(config: Config) -> Rules:
    adam = config.optimizer
    for name in ("peak_learning_rate", "clip_norm"):
        value = getattr(adam, name)
        yield f"optimizer.{name}", value is None or 0 < value < math.inf, "above 0, or None"
    yield "optimizer.warmup_steps", adam.warmup_steps >= 1, "at least 1"
    for name in ("beta1", "beta2"):
        yield f"optimizer.{name}", 0 <= getattr(adam, name) < 1, "at least 0 and below 1"
    yield "optimizer.epsilon", 0 < adam.epsilon < math.inf, "above 0"
    rows = config.data.row_multiple
    splits = adam.accumulation >= 1 and rows % adam.accumulation == 0
    yield "optimizer.accumulation", splits, f"a divisor of data.row_multiple ({rows})"


def _loop_rules(config: Config) -> Rules:
    train, decode = config.train, config.decode
    for name in ("steps", "evaluate_every", "checkpoint_every", "keep_last"):
        yield f"train.{name}", getattr(train, name) >= 1, "at least 1"
    every = train.checkpoint_every
    saved = train.evaluate_every % max(every, 1) == 0
    yield "train.evaluate_every", saved, f"a multiple of train.checkpoint_every ({every})"
    yield "train.keep_best", train.keep_best >= 0, "at least 0"
    patient = train.patience is None or train.patience >= 1
    yield "train.patience", patient, "at least 1, or None to train all steps"
    yield "train.label_smoothing", 0 <= train.label_smoothing < 1, "at least 0 and below 1"
    yield "train.seed", 0 <= train.seed < 2**32, "from 0 to 4294967295"
    for name in ("beam_size", "length_penalty_alpha", "max_length_offset"):
        allowed = RANGES[f"decode.{name}"]
        yield f"decode.{name}", allowed.holds(getattr(decode, name)), allowed.rule


class Range(NamedTuple):
    """The values that a field may have: in words, and as a test."""

    rule: str
    holds: Callable[[Any], bool]


RANGES = {
    "decode.beam_size": Range("at least 1", lambda n: n >= 1),
    "decode.length_penalty_alpha": Range("finite", math.isfinite),
    "decode.max_length_offset": Range("at least 0", lambda n: n >= 0),
}


def _mesh_rules(config: Config) -> Rules:
    sizes = dataclasses.asdict(config.mesh)
    for name, size in sizes.items():
        yield f"mesh.{name}", size >= 1 or size == -1, "at least 1, or -1 for the rest"
        alone = size != -1 or list(sizes.values()).count(-1) == 1
        yield f"mesh.{name}", alone, "at least 1: only one axis can be -1"


def _field_types(kind: type, prefix: str = "") -> dict[str, Any]:
    """Dotted name -> type of every leaf of the tree."""
    leaves = {}
    for name, hint in typing.get_type_hints(kind).items():
        if dataclasses.is_dataclass(hint):
            leaves |= _field_types(hint, f"{prefix}{name}.")
        else:
            leaves[prefix + name] = hint
    return leaves


FIELD_TYPES = _field_types(Config)


def flat(config: Config) -> dict[str, Any]:
    """Dotted name -> value of every leaf of the tree."""
    return {key: operator.attrgetter(key)(config) for key in FIELD_TYPES}


def typed(kind: Any, value: Any, key: str) -> Any:
    """A value from JSON as the type of its field; lists become tuples, whole numbers floats."""
    choices = typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        return _typed_tree(kind, value, key)
    if isinstance(kind, types.UnionType):  # X | None
        return None if value is None else typed(choices[0], value, key)
    if typing.get_origin(kind) is tuple and isinstance(value, list | tuple):
        return tuple(typed(choices[0], item, key) for item in value)
    if kind is float and type(value) is int and abs(value) < 2**53:
        return float(value)
    if type(value) is kind or (isinstance(value, str) and value in choices):
        return value
    raise UserError(f"{key} is {value!r:.80}: it must be {described(kind)}")


def _typed_tree(kind: Any, tree: Any, key: str) -> Any:
    """A JSON object as the dataclass of that section of the config."""
    name, prefix = (f"section {key}", f"{key}.") if key else ("the config", "")
    if not isinstance(tree, dict):
        raise UserError(f"{name} is {tree!r:.80}: it must be a JSON object")
    hints = typing.get_type_hints(kind)
    for field in [field for field in tree if field not in hints]:
        raise UserError(f"{prefix}{field} is no field of the config: {meant(prefix + field)}")
    for field in dataclasses.fields(kind):
        if field.default is dataclasses.MISSING and field.name not in tree:
            raise UserError(f"{prefix}{field.name} is missing from the config")
    return kind(**{field: typed(hints[field], tree[field], prefix + field) for field in tree})


def described(kind: Any) -> str:
    """What a value of that type is, in words."""
    words = {int: "a whole number", float: "a number", bool: "True or False", str: "a string"}
    choices = typing.get_args(kind)
    if typing.get_origin(kind) is Literal:
        return "one of " + ", ".join(choices)
    if typing.get_origin(kind) is tuple:
        return "a list of strings"
    return f"{words[choices[0]]} or None" if choices else words[kind]


def meant(key: str) -> str:
    """The field whose name is nearest to a misspelt one, by the whole name and its last part."""

    def likeness(name: str) -> float:
        pairs = (key, name), (key.split(".")[-1], name.split(".")[-1])
        return sum(difflib.SequenceMatcher(None, *pair).ratio() for pair in pairs)

    return f"did you mean {max(FIELD_TYPES, key=likeness)}?"
