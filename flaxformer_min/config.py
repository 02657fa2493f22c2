"""The configuration: one frozen tree of dataclasses decides everything about a run.

A Python file and flags make one (`config_file.load_config`); it is written inside every checkpoint
as JSON, from which later commands read it back. Which values are allowed stands in `config_rules`.
The comment beside a field, or above it, is its help: `train --config FILE --help` prints it.
"""

import dataclasses
import operator
import typing
from collections.abc import Iterator
from typing import Annotated, Any, Literal, TypeVar

T = TypeVar("T")

Free = Annotated[T, "free"]  # a field, or a section, that may change when a run is resumed


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The network (paper, section 3). The defaults are the paper's base model."""

    num_layers: int = 6  # N, in each of the two stacks
    d_model: int = 512  # D, width of what goes from layer to layer
    d_ff: int = 2048  # F, width inside the feed-forward network
    num_heads: int = 8  # H, in every attention
    d_k: int = 64  # K, width of a query and a key per head
    d_v: int = 64  # U, width of a value per head
    dropout: float = 0.1  # P_drop, of every sublayer's output and of embeddings + positions
    attention_dropout: float = 0.0  # of attention weights; the paper has none
    ffn_dropout: float = 0.0  # of the activations inside the FFN; the paper has none
    positions: Literal["sinusoidal", "learned"] = "sinusoidal"  # the paper's, or Table 3, row E
    max_length: int = 1024  # the longest sequence the model takes, in tokens with EOS
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

    # Text files, the built-in corpus of phrases, or a dataset of TensorFlow Datasets (TFDS): files,
    # phrases or tfds:NAME/CONFIG.
    source: str = "files"
    # files: the folder of the files named below. tfds: where datasets are prepared; "." means
    # TFDS_DATA_DIR or TFDS's own folder.
    dir: Free[str] = "."
    # files: source and target file names alternately, two for each pair of files, .gz accepted.
    # phrases: one slice such as "train[:60000]".
    # tfds: splits or slices of splits such as "train" and "train[:1%]".
    train: Free[tuple[str, ...]]
    validation: Free[tuple[str, ...]]  # written as for train
    test: Free[tuple[str, ...]] = ()  # written as for train
    source_language: str  # such as "en": a locale for phrases, a field of the dataset for tfds
    target_language: str  # such as "de"
    tokenizer: Free[str | None] = None  # an existing SentencePiece model; None trains one
    vocab_size: int  # pieces of the tokenizer to be trained; an existing one must have as many
    character_coverage: float = 1.0  # share of the characters that get a piece of their own
    byte_fallback: bool = True  # unknown characters survive as bytes
    max_length: int = 256  # training pairs with a longer side are dropped; tokens with EOS
    tokens_per_batch: int = 25_000  # rows x max(S, T) of an update, over all devices
    num_buckets: int = 12  # largest number of static shapes of a batch
    row_multiple: int = 8  # the rows of every shape are a multiple of it
    seed: int = 1  # decides the tokenizer's training and the order of the batches

    @property
    def source_kind(self) -> str:
        """The part of `source` before its colon: files, phrases or tfds."""
        return self.source.partition(":")[0]


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Adam and its learning rate (paper, section 5.3)."""

    peak_learning_rate: float | None = None  # None: the paper's, (D * warmup_steps)^-0.5
    warmup_steps: int = 4000  # the rate rises linearly up to this step, then falls as step^-0.5
    beta2: float = 0.98  # decay of the mean of the squared gradients
    epsilon: float = 1e-9  # added to the root of that mean
    clip_norm: float | None = None  # largest global norm of a gradient; the paper does not clip
    accumulation: int = 1  # micro-batches an update's rows are split into


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The loop: how long it runs, how often it evaluates and saves, what it keeps."""

    steps: int = 100_000  # updates; a resumed run may have more of them
    label_smoothing: float = 0.1  # epsilon of section 5.4
    seed: int = 1  # decides the first weights and dropout
    evaluate_every: Free[int] = 5_000  # steps between two evaluations
    checkpoint_every: Free[int] = 1_000  # steps between two checkpoints
    keep_last: Free[int] = 5  # newest checkpoints that are kept
    keep_best: Free[int] = 1  # best checkpoints that are kept, by best_metric
    best_metric: Literal["bleu", "loss"] = "bleu"  # what makes one evaluation better
    # Evaluations in a row without a better one that end the run; None trains all steps.
    patience: Free[int | None] = None
    initialize_from: Free[str | None] = None  # a checkpoint whose weights start this run


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeConfig:
    """Search (section 6.1) and the tokens that BLEU counts."""

    beam_size: int = 4  # 1 is greedy search
    length_penalty_alpha: float = 0.6  # log-probabilities are divided by ((5 + n) / 6)^alpha
    max_length_offset: int = 50  # an output has at most source length + offset tokens, EOS counted
    # The tokenisations of sacreBLEU that need nothing more installed; none is for text that is
    # tokenised already.
    bleu_tokenize: Literal["13a", "intl", "zh", "char", "none"] = "13a"


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """Devices along each axis of the mesh; -1 means all that are left."""

    data: int = -1  # the rows of a batch are split
    fsdp: int = 1  # the rows are split, and so are weights and optimizer state
    tensor: int = 1  # heads, d_ff and the vocabulary are split


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Everything about a run."""

    model: ModelConfig
    data: DataConfig
    optimizer: OptimizerConfig = OptimizerConfig()
    train: TrainConfig = TrainConfig()
    decode: Free[DecodeConfig] = DecodeConfig()
    mesh: Free[MeshConfig] = MeshConfig()


def _fields(section: type, prefix: str = "", free: bool = False) -> Iterator[tuple[str, Any, bool]]:
    """Dotted name and type of every field below a section, and whether it is free on resume."""
    for name, hint in typing.get_type_hints(section, include_extras=True).items():
        marked = typing.get_origin(hint) is Annotated
        kind = typing.get_args(hint)[0] if marked else hint
        if dataclasses.is_dataclass(kind):
            yield from _fields(kind, f"{prefix}{name}.", free or marked)
        else:
            yield prefix + name, kind, free or marked


FIELD_TYPES = {name: kind for name, kind, _ in _fields(Config)}
FREE_ON_RESUME = {name for name, _, free in _fields(Config) if free}


def flat(config: Config) -> dict[str, Any]:
    """Dotted name -> value of every field of the tree."""
    return {name: operator.attrgetter(name)(config) for name in FIELD_TYPES}
