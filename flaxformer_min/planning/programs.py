"""The programs of a run: for which shapes it compiles what, and how.

train       the step of training, in every shape of the batches
validation  the loss on the validation split, in the shapes of its batches
search      the search, greedy and with the config's beam, in every width of the sentences
scoring     the log-probability of given targets, in every width of the pairs
init        the draw of the first state, of which each device has its share
restore     reading a checkpoint: the same arrays as init, without a program

Searching and scoring are done by the devices of one host, each with its own sentences, whatever the
mesh of the training is. The widths are those of the validation split.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from flaxformer_min.config import Config
from flaxformer_min.data.batch import Batch, Bucket
from flaxformer_min.data.batching import BatchPlan, evaluation_plan
from flaxformer_min.data.tokenizer import BOS_ID, EOS_ID, PAD_ID, UNK_ID, Tokenizer
from flaxformer_min.decoding.batches import LINES_PER_ROW, capacity_of, rows_at_once, shape_ladder
from flaxformer_min.decoding.options import Options
from flaxformer_min.decoding.programs import on_devices, rows_mesh, score_batch, search_batch
from flaxformer_min.decoding.sentences import PaddedSentences
from flaxformer_min.planning.lengths import Lengths
from flaxformer_min.training.sharding import abstract_rows, make_mesh, row_shares
from flaxformer_min.training.step import StepProgram
from flaxformer_min.training.validation import loss_sums

KINDS = ("train", "validation", "search", "scoring", "init", "restore")
# A tokenizer that was not trained here may have other ids, at the same cost.
IDS = {"pad_id": PAD_ID, "bos_id": BOS_ID}


class Program(NamedTuple):
    """A program of a run, in one shape."""

    kind: str  # one of KINDS
    bucket: Bucket | None = None  # of all devices that work together; init and restore have none
    share: float = 1.0  # of the batches of its kind, or of the sentences
    beam: int = 0  # of a search
    rows: int = 0  # sentences that a device searches at once
    steps: float = 0.0  # that a sentence of a search takes

    @property
    def name(self) -> str:
        """What it is, for a reader."""
        return f"search, beam {self.beam}" if self.beam else self.kind

    @property
    def shape(self) -> str:
        """Its rows, source length and target length, for a reader."""
        return " x ".join(map(str, self.bucket or ()))


class _NoPieces(Tokenizer):
    """The ids of a tokenizer that will be trained: all that a program needs of it."""

    def __init__(self, vocab_size: int) -> None:
        never: tuple[int, ...] = PAD_ID, UNK_ID, BOS_ID
        self.vocab_size, self.never_generated = vocab_size, never
        self.pad_id, self.unk_id, self.bos_id, self.eos_id = PAD_ID, UNK_ID, BOS_ID, EOS_ID


def programs_of(
    config: Config, lengths: Lengths, devices: Sequence[Any], kinds: Sequence[str]
) -> list[Program]:
    """Returns the programs of these kinds, as a run on these devices compiles them."""
    shares = row_shares(make_mesh(config.mesh, devices))
    evaluation = evaluation_plan(lengths.validation, config.data, shares)
    every = [
        *(Program("train", *each) for each in buckets(BatchPlan(lengths.train, config.data))),
        *(Program("validation", *each) for each in buckets(evaluation)),
        *_searches(config, lengths.validation, here(devices)),
        *_scorings(config, lengths.validation, here(devices)),
        *(Program(kind) for kind in ("init", "restore")),
    ]
    return [program for program in every if program.kind in kinds]


def buckets(plan: BatchPlan) -> list[tuple[Bucket, float]]:
    """Returns the shape of every bucket, and its share of the batches."""
    steps = range(plan.batches_per_epoch)
    counts = np.bincount([plan.batch_ids(step)[0] for step in steps])
    return [(bucket, counts[b] / len(steps)) for b, bucket in enumerate(plan.buckets)]


def here(devices: Sequence[Any]) -> list[Any]:
    """Returns the devices of the first host."""
    return [device for device in devices if device.process_index == devices[0].process_index]


def _searches(config: Config, lengths: np.ndarray, devices: Sequence[Any]) -> Iterator[Program]:
    """Yields the searches; a sentence takes as many steps as its reference has tokens."""
    for width, share, target in _widths(lengths[:, 0], lengths[:, 1], config.model.max_length):
        rows = rows_at_once(width, capacity_of(devices[0].platform))
        longest = min(width + config.decode.max_length_offset, config.model.max_length)
        bucket = Bucket(rows * LINES_PER_ROW * len(devices), width, longest)
        for beam in sorted({1, config.decode.beam_size}):
            yield Program("search", bucket, share, beam, rows, target)


def _scorings(config: Config, lengths: np.ndarray, devices: Sequence[Any]) -> Iterator[Program]:
    longer = lengths.max(axis=1)
    for width, share, _ in _widths(longer, longer, config.model.max_length):
        rows = rows_at_once(width, capacity_of(devices[0].platform)) * len(devices)
        yield Program("scoring", Bucket(rows, width, width), share)


def _widths(
    lengths: np.ndarray, targets: np.ndarray, longest: int
) -> Iterator[tuple[int, float, float]]:
    """Yields each width that is used, its share of the lines, and the mean length of `targets`."""
    ladder = shape_ladder(longest)
    rungs = np.searchsorted(ladder, np.minimum(lengths, longest))
    for rung in np.unique(rungs).tolist():
        chosen = rungs == rung
        yield ladder[rung], float(chosen.mean()), float(targets[chosen].mean())


def lower(config: Config, step: StepProgram, devices: Sequence[Any], program: Program) -> Any:
    """Traces a program that is neither train nor restore; nothing is allocated.

    `step` is the train step on all devices. Returns a jax.stages.Lowered.
    """
    if program.kind == "init":
        return step.drawn.lower()
    assert program.bucket is not None
    rows, *widths = program.bucket
    if program.kind == "validation":
        mesh = make_mesh(config.mesh, devices)
        sides: Any = abstract_rows(mesh, rows, *widths)
        return loss_sums(step.graphdef, mesh, **IDS).lower(step.shapes.params, Batch(*sides))
    mesh, longest = rows_mesh(here(devices)), config.model.max_length
    tokenizer = _NoPieces(config.data.vocab_size)
    params = (_whole(mesh, step.shapes.params),)
    if program.kind == "scoring":
        score = functools.partial(score_batch, (step.graphdef,), tokenizer)
        return on_devices(score, mesh).lower(
            params, tuple(_rows(mesh, np.int32, rows, n) for n in widths)
        )
    capacity = capacity_of(devices[0].platform)
    search = functools.partial(
        search_batch, (step.graphdef,), tokenizer, longest, capacity=capacity
    )
    source: Any = _rows(mesh, np.int32, rows, widths[0])
    draws: Any = _rows(mesh, np.uint32, rows, 2)
    options = Options(beam_size=program.beam).with_defaults(config.decode)
    return on_devices(search, mesh).lower(params, PaddedSentences(source, None, draws), options)


def _whole(mesh: Mesh, tree: Any) -> Any:
    """Returns the shapes of a tree of arrays that every device has whole."""
    whole = NamedSharding(mesh, P())
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole), tree)


def _rows(mesh: Mesh, dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
    """Returns the shape of an array [rows, n], split over the devices as for `on_devices`."""
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P("rows")))
