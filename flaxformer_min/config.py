"""The configuration: one frozen tree of dataclasses decides everything about a run.

A Python file and flags make a config (`config_file.load_config`). Every checkpoint holds it as
JSON, from which later commands read it back. The type of a field says which values the field may
have; `config_rules` says which values contradict each other. The comment beside a field, or above
it, is its help: `train --config FILE --help` prints it.
"""

import dataclasses
import operator
import typing
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal, NamedTuple, TypeVar


class Range(NamedTuple):
    """The values that a field may have: in words, and as a test."""

    rule: str
    holds: Callable[[Any], bool]


T = TypeVar("T")

Free = Annotated[T, "free"]  # a field, or a section, that may change when a run is resumed
# Whole numbers are counted in 32 bits by JAX. Numbers that are divided by are 0 or infinite in
# float32 beyond the bounds of Positive, and what is below 1 must be so in float32.
Count = Annotated[int, Range("at least 1 and below 2^31", lambda n: 1 <= n < 2**31)]
CountOrZero = Annotated[int, Range("at least 0 and below 2^31", lambda n: 0 <= n < 2**31)]
CountOrNone = Annotated[
    int | None, Range("at least 1 and below 2^31, or None", lambda n: n is None or 1 <= n < 2**31)
]
Layers = Annotated[int, Range("at least 1 and at most 1000", lambda n: 1 <= n <= 1000)]
LayersOrNone = Annotated[
    int | None, Range("at least 1 and at most 1000, or None", lambda n: n is None or 1 <= n <= 1000)
]
Length = Annotated[
    int, Range("at least 2 (one piece and EOS) and below 2^31", lambda n: 2 <= n < 2**31)
]
Axis = Annotated[int, Range("at least 1, or -1 for the rest", lambda n: n >= 1 or n == -1)]
Seed = Annotated[int, Range("from 0 to 4294967295", lambda n: 0 <= n < 2**32)]
Rate = Annotated[float, Range("at least 0 and below 1", lambda x: 0 <= x <= 1 - 2**-24)]
Share = Annotated[float, Range("above 0 and at most 1", lambda x: 0 < x <= 1)]
Exponent = Annotated[float, Range("from -10 to 10", lambda x: -10 <= x <= 10)]
Positive = Annotated[float, Range("above 0 (1e-30 to 1e30)", lambda x: 1e-30 <= x <= 1e30)]
PositiveOrNone = Annotated[
    float | None,
    Range("above 0 (1e-30 to 1e30), or None", lambda x: x is None or 1e-30 <= x <= 1e30),
]
Language = Annotated[str, Range("a language such as 'en'", bool)]
Names = Annotated[tuple[str, ...], Range("given", bool)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The network (paper, section 3). The defaults are the paper's base model."""

    num_layers: Layers = 6  # N, in each of the two stacks
    num_decoder_layers: LayersOrNone = None  # in the decoder; None: as many as in the encoder
    d_model: Count = 512  # D, width of what goes from layer to layer
    d_ff: Count = 2048  # F, width inside the feed-forward network
    num_heads: Count = 8  # H, in every attention
    d_k: Count = 64  # K, width of a query and a key per head
    d_v: Count = 64  # U, width of a value per head
    dropout: Rate = 0.1  # P_drop, of every sublayer's output and of embeddings + positions
    attention_dropout: Rate = 0.0  # of attention weights; the paper has none
    ffn_dropout: Rate = 0.0  # of the activations inside the FFN; the paper has none
    positions: Literal["sinusoidal", "learned"] = "sinusoidal"  # the paper's, or Table 3, row E
    # The function inside the FFN, max(0, x), or x * sigmoid(x) as most Marian models have it.
    activation: Literal["relu", "swish"] = "relu"
    # Biases of attention's four projections and of the logits; the paper has none, Marian has all.
    biases: bool = False
    layer_norm_epsilon: Positive = 1e-6  # the paper gives none; this is tensor2tensor's
    max_length: Length = 1024  # the longest sequence the model takes, in tokens with EOS
    # Tables that are one matrix: all three (section 3.4), the target embedding and the output
    # projection, or none.
    share_embeddings: Literal["all", "target", "none"] = "all"
    compute_dtype: Literal["float32", "bfloat16"] = "float32"  # of activations; weights are float32
    # How attention is computed: as the formula says, or by a fused kernel for training on GPUs.
    attention: Free[Literal["exact", "cudnn"]] = "exact"
    # Compute each layer again in the backward pass: less memory, more time. On CPUs XLA drops the
    # barriers that this rests on, and only with scan_layers is memory saved.
    remat: Free[bool] = False
    scan_layers: Free[bool] = False  # compile one layer and loop over it: faster to compile


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where the pairs come from, how they become tokens and how tokens become batches."""

    # Text files, the built-in corpus of phrases, or a dataset of TensorFlow Datasets (TFDS) or of
    # Hugging Face: files, phrases, tfds:NAME/CONFIG, hf:NAME:CONFIG or hf:FOLDER of Parquet files.
    source: str = "files"
    # files: the folder of the files named below. tfds: where datasets are prepared; "." means
    # TFDS_DATA_DIR or TFDS's own folder. hf: the cache; "." means the library's own.
    dir: Free[str] = "."
    # files: source and target file names alternately, two for each pair of files; they may be
    # packed by gzip, xz or bzip2.
    # phrases: one slice such as "train[:60000]".
    # tfds, hf: splits or slices of splits such as "train" and "train[:1%]".
    train: Free[Names]
    validation: Free[Names]  # written as for train
    test: Free[tuple[str, ...]] = ()  # written as for train
    source_language: Language  # such as "en": a locale for phrases, a field of the dataset for tfds
    target_language: Language  # such as "de"
    # What happens to bytes that are not UTF-8: the run ends before its first step, or U+FFFD
    # replaces them.
    errors: Free[Literal["strict", "replace"]] = "strict"
    # A folder in which runs share encoded corpora and trained tokenizers, by their content; when no
    # run is at work it may be deleted. None: ~/.cache/flaxformer_min/corpora, or WORKDIR/corpus for
    # a run of several processes.
    cache: Free[str | None] = None
    tokenizer: Free[str | None] = None  # an existing SentencePiece model; None trains one
    vocab_size: Count  # pieces of the tokenizer to be trained; an existing one must have as many
    character_coverage: Share = 1.0  # share of the characters that get a piece of their own
    byte_fallback: bool = True  # unknown characters survive as bytes
    max_length: Length = 256  # training pairs with a longer side are dropped; tokens with EOS
    tokens_per_batch: Count = 25_000  # rows x max(S, T) of an update, over all devices
    num_buckets: Count = 12  # largest number of static shapes of a batch
    row_multiple: Count = 8  # the rows of every shape are a multiple of it
    seed: Seed = 1  # decides the tokenizer's training and the order of the batches

    @property
    def source_kind(self) -> str:
        """The part of `source` before its colon: files, phrases, tfds or hf."""
        return self.source.partition(":")[0]


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Adam and its learning rate (paper, section 5.3)."""

    peak_learning_rate: PositiveOrNone = None  # None: the paper's, (D * warmup_steps)^-0.5
    warmup_steps: Count = 4000  # the rate rises linearly up to this step, then falls as step^-0.5
    beta2: Rate = 0.98  # decay of the mean of the squared gradients
    epsilon: Positive = 1e-9  # added to the root of that mean
    clip_norm: PositiveOrNone = None  # largest global norm of a gradient; the paper does not clip
    accumulation: int = 1  # micro-batches an update's rows are split into


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The loop: how long it runs, how often it evaluates and saves, what it keeps."""

    steps: Count = 100_000  # updates; a resumed run may have more of them
    label_smoothing: Rate = 0.1  # epsilon of section 5.4
    seed: Seed = 1  # decides the first weights and dropout
    evaluate_every: Free[Count] = 5_000  # steps between two evaluations
    checkpoint_every: Free[Count] = 1_000  # steps between two checkpoints
    keep_last: Free[Count] = 5  # newest checkpoints that are kept
    keep_best: Free[CountOrZero] = 1  # best checkpoints that are kept, by best_metric
    best_metric: Literal["bleu", "loss"] = "bleu"  # what makes one evaluation better
    # Evaluations in a row without a better one that end the run; None trains all steps.
    patience: Free[CountOrNone] = None
    initialize_from: Free[str | None] = None  # a checkpoint whose weights start this run


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeConfig:
    """Search (section 6.1) and the tokens that BLEU counts."""

    beam_size: Count = 4  # 1 is greedy search
    length_penalty_alpha: Exponent = 0.6  # log-probabilities are divided by ((5 + n) / 6)^alpha
    max_length_offset: CountOrZero = 50  # tokens that an output may have more than its source
    # A tokenisation of sacreBLEU; auto is its own for data.target_language, none is for text that
    # is tokenised already.
    bleu_tokenize: Literal["auto", "13a", "intl", "zh", "ja-mecab", "ko-mecab", "char", "none"] = (
        "auto"
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """Devices along each axis of the mesh; -1 means all that are left."""

    # The rows of a batch are split, and between steps weights and optimizer state as far as their
    # sizes allow.
    data: Axis = -1
    fsdp: Axis = 1  # the same, but sizes that cannot be split are refused
    tensor: Axis = 1  # heads, d_ff and the vocabulary are split


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Everything about a run."""

    model: ModelConfig
    data: DataConfig
    optimizer: OptimizerConfig = OptimizerConfig()
    train: TrainConfig = TrainConfig()
    decode: Free[DecodeConfig] = DecodeConfig()
    mesh: Free[MeshConfig] = MeshConfig()


def _fields(section: type, prefix: str = "", marks: tuple = ()) -> Iterator[tuple[str, Any, tuple]]:
    """Yields the dotted name and type of every field below a section, and what Annotated adds."""
    for name, hint in typing.get_type_hints(section, include_extras=True).items():
        marked = typing.get_origin(hint) is Annotated
        kind, *own = typing.get_args(hint) if marked else [hint]
        if dataclasses.is_dataclass(kind):
            yield from _fields(kind, f"{prefix}{name}.", tuple(own))
        else:
            yield prefix + name, kind, (*marks, *own)


FIELD_TYPES = {name: kind for name, kind, _ in _fields(Config)}
RANGES = {name: m for name, _, marks in _fields(Config) for m in marks if isinstance(m, Range)}
FREE_ON_RESUME = {name for name, _, marks in _fields(Config) if "free" in marks}
PATHS = ("data.dir", "data.cache", "data.tokenizer", "train.initialize_from")
FILES = ("data.train", "data.validation", "data.test")  # paths too, if data.source is files


def flat(config: Config) -> dict[str, Any]:
    """Returns the value of every field of the tree by its dotted name."""
    return {name: operator.attrgetter(name)(config) for name in FIELD_TYPES}
