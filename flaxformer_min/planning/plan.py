"""What a run needs and takes on devices that are not here: its train step, compiled ahead of time.

Nothing is allocated and nothing runs. Memory and collectives are those of the compiled program;
the time is the compiler's own estimate of its work (cycles of every operation, loops counted as
often as they turn, at the chip's clock), and then the bytes of its collectives at the speed of all
the chip's links, as if nothing of it overlapped with work. No chip was asked.
"""

import collections
import dataclasses
import math
import operator
import re
import sys
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from flaxformer_min.config import Config, DataConfig, ModelConfig
from flaxformer_min.data.batch import Batch, Bucket
from flaxformer_min.data.batching import BatchPlan
from flaxformer_min.errors import UserError
from flaxformer_min.model.build import count_parameters, split_model
from flaxformer_min.planning import chips, hlo
from flaxformer_min.training.loss import make_loss
from flaxformer_min.training.optimizer import make_optimizer
from flaxformer_min.training.sharding import abstract, abstract_rows, check_mesh, make_mesh
from flaxformer_min.training.state import TrainState, state_shapes
from flaxformer_min.training.step import make_train_step

PAD_ID, BOS_ID = 0, 2  # of tokenizers trained here; which ones they are costs nothing
PASSES = {"all-reduce": 2}  # how often its bytes cross the links: a ring scatters, then gathers
SHORTEST = 16  # tokens, of the lengths that are assumed where nobody gives any


@dataclasses.dataclass(frozen=True)
class ShapePlan:
    """One bucket's train step. Bytes are those of one device, seconds and FLOPs of one step.

    What the compiler does not say (of CPUs no time, of what does not fit nothing) is None.
    """

    bucket: Bucket
    share: float  # of all steps
    flops: int  # on all devices, by formula
    refusal: str = ""  # why the program does not fit, if it does not
    memory: dict[str, int] | None = None  # by kind
    collectives: tuple[hlo.Collective, ...] = ()
    compute_seconds: float | None = None
    collective_seconds: float | None = None

    @property
    def seconds(self) -> float | None:
        """Of a step, if nothing overlaps."""
        if self.compute_seconds is None or self.collective_seconds is None:
            return None
        return self.compute_seconds + self.collective_seconds


@dataclasses.dataclass(frozen=True)
class Plan:
    """A config on a topology."""

    topology: str
    chip: chips.Chip
    mesh: dict[str, int]
    parameters: int
    steps: int
    shapes: tuple[ShapePlan, ...]
    advice: str  # what would make it fit; "" if it does

    @property
    def devices(self) -> int:
        """How many there are."""
        return math.prod(self.mesh.values())

    @property
    def hours(self) -> float | None:
        """Of all the steps, evaluation and checkpoints left out."""
        seconds = [shape.seconds for shape in self.shapes if shape.seconds is not None]
        if len(seconds) < len(self.shapes):
            return None
        shares = [shape.share for shape in self.shapes]
        return self.steps / 3600 * math.fsum(map(operator.mul, seconds, shares))

    def utilisation(self, shape: ShapePlan) -> float | None:
        """Model FLOPs over what the chips could do in the time."""
        if shape.seconds is None or self.chip.peak_flops is None:
            return None
        return shape.flops / (shape.seconds * self.devices * self.chip.peak_flops)


def make_plan(config: Config, topology: str, lengths_file: str | None = None) -> Plan:
    """Compiles the config's train step in every shape of its batches for the devices of a topology.

    Raises UserError for a topology that is none, and for what does not fit the mesh.
    """
    chip, devices = chips.find(topology)
    mesh = make_mesh(config.mesh, devices)
    check_mesh(config, mesh)
    data = config.data
    lengths = assumed_lengths(data) if lengths_file is None else read_lengths(lengths_file, data)
    shapes = tuple(
        plan_shape(config, mesh, chip, bucket, share) for bucket, share in _buckets(lengths, data)
    )
    refused = [shape.bucket for shape in shapes if shape.refusal]
    _, params = split_model(config.model, data.vocab_size)
    return Plan(
        topology,
        chip,
        dict(mesh.shape),
        count_parameters(params),
        config.train.steps,
        shapes,
        _advice(config, devices, chip, refused[0]) if refused else "",
    )


def assumed_lengths(config: DataConfig) -> np.ndarray:
    """Lengths [N, 2] that give one full batch each of 16, 32, 64 ... data.max_length tokens.

    So every length gets the same share of the steps. Real corpora differ.
    """
    edges = [SHORTEST]
    while edges[-1] * 2 < config.max_length:
        edges.append(edges[-1] * 2)
    edges = [edge for edge in edges if edge < config.max_length][-config.num_buckets + 1 :]
    edges.append(config.max_length)
    multiple = config.row_multiple
    rows = [config.tokens_per_batch // edge // multiple * multiple or 1 for edge in edges]
    return np.repeat(edges, rows)[:, None].repeat(2, axis=1)


def read_lengths(path: str, config: DataConfig) -> np.ndarray:
    """Lengths [N, 2] in tokens with EOS, from two numbers a line; too long pairs are left out."""
    try:
        with open(path, encoding="utf-8") as lines:
            lengths = np.array([line.split() for line in lines], dtype=np.int64)
    except (OSError, ValueError) as error:
        raise UserError(f"--lengths {path}: {str(error).splitlines()[0]}") from error
    if lengths.shape[1:] != (2,) or lengths.size == 0 or lengths.min() < 1:
        raise UserError(f"--lengths {path}: every line must hold two numbers above 0")
    return lengths[lengths.max(axis=1) <= config.max_length]


def _buckets(lengths: np.ndarray, config: DataConfig) -> list[tuple[Bucket, float]]:
    """The shapes of the batches and each one's share of the steps."""
    plan = BatchPlan(lengths, config)
    steps = range(plan.batches_per_epoch)
    counts = collections.Counter(plan.batch_ids(step)[0] for step in steps)
    return [(bucket, counts[b] / len(steps)) for b, bucket in enumerate(plan.buckets)]


def plan_shape(
    config: Config, mesh: Mesh, chip: chips.Chip, bucket: Bucket, share: float
) -> ShapePlan:
    """Compiles one bucket's train step and reads what the program says of itself."""
    print(f"compiling {' x '.join(map(str, bucket))} ...", file=sys.stderr)
    state = _abstract_state(config, mesh)
    flops = step_flops(config.model, config.data.vocab_size, bucket)
    try:
        compiled = compile_step(config, mesh, bucket, state)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        found = re.search(r"Used .*? of .*? hbm", str(error))
        refusal = found[0] if found else str(error).splitlines()[0]
        return ShapePlan(bucket, share, flops, refusal)
    text = compiled.as_text()
    assert text is not None, "XLA has a text for every program it compiles"
    program = hlo.read(text)
    sent = sum(x.trips * x.bytes * PASSES.get(x.kind, 1) for x in program.collectives)
    return ShapePlan(
        bucket,
        share,
        flops,
        memory=_memory(compiled, state),
        collectives=tuple(program.collectives),
        compute_seconds=program.cycles / chip.clock if chip.clock else None,
        collective_seconds=sent / chip.interconnect if chip.interconnect else None,
    )


def _abstract_state(config: Config, mesh: Mesh) -> TrainState:
    optimizer = make_optimizer(config.optimizer, config.model.d_model)
    return abstract(mesh, state_shapes(config.model, config.data.vocab_size, optimizer))


def compile_step(
    config: Config, mesh: Mesh, bucket: Bucket, state: TrainState
) -> jax.stages.Compiled:
    """The train step that training would run on that mesh for batches of that shape."""
    loss = make_loss(
        split_model(config.model, config.data.vocab_size)[0],
        pad_id=PAD_ID,
        bos_id=BOS_ID,
        smoothing=config.train.label_smoothing,
        mesh=mesh,
    )
    optimizer = make_optimizer(config.optimizer, config.model.d_model)
    train_step = make_train_step(loss, optimizer, config.optimizer.accumulation)
    sides: Any = abstract_rows(mesh, *bucket)
    key = jax.eval_shape(lambda: jax.random.key(0))
    return jax.jit(train_step, donate_argnums=0).lower(state, Batch(*sides), key).compile()


def _memory(compiled: jax.stages.Compiled, state: TrainState) -> dict[str, int]:
    """Bytes on one device by kind; together all that the program needs."""
    stats: Any = compiled.memory_analysis()
    kept = {"parameters": _bytes(state.params), "optimizer": _bytes(state.opt_state)}
    return kept | {
        # Batch, key and counters, and what the chip's layout of the arrays adds.
        "other arguments": stats.argument_size_in_bytes - sum(kept.values()),
        # Results take the place of what was given away; these are those that have none.
        "results": stats.output_size_in_bytes - stats.alias_size_in_bytes,
        "temporaries": stats.temp_size_in_bytes,
        "code": stats.generated_code_size_in_bytes,
    }


def _bytes(tree: Any) -> int:
    """Of one device's share of a tree of abstract arrays."""
    shares = ((leaf.sharding.shard_shape(leaf.shape), leaf.dtype) for leaf in jax.tree.leaves(tree))
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype in shares)


def step_flops(model: ModelConfig, vocab_size: int, bucket: Bucket) -> int:
    """FLOPs of the matrix products of one step, padding and masked scores included.

    Backward costs twice forward. What rematerialisation repeats does not count.
    """
    rows, source, target = bucket
    d, heads = model.d_model, model.num_heads

    def attention(queries: int, keys: int) -> int:
        projections = queries * d * heads * (model.d_k + model.d_v)  # of queries and of outputs
        projections += keys * d * heads * (model.d_k + model.d_v)  # of keys and of values
        return projections + queries * keys * heads * (model.d_k + model.d_v)

    def feed_forward(positions: int) -> int:
        return 2 * positions * d * model.d_ff

    encoder = attention(source, source) + feed_forward(source)
    decoder = attention(target, target) + attention(target, source) + feed_forward(target)
    products = model.num_layers * (encoder + decoder) + target * d * vocab_size
    return 3 * 2 * rows * products


def _advice(config: Config, devices: Any, chip: chips.Chip, bucket: Bucket) -> str:
    """The first change of mesh or rematerialisation with which a bucket fits, tried out."""
    for flags, changed in _changes(config, len(devices)):
        mesh = make_mesh(changed.mesh, devices)
        try:
            check_mesh(changed, mesh)
        except UserError:
            continue
        if not plan_shape(changed, mesh, chip, bucket, 0.0).refusal:
            return f"with {flags} it would fit"
    return "neither model.remat nor mesh.fsdp makes it fit; lower data.tokens_per_batch"


def _changes(config: Config, devices: int) -> Iterator[tuple[str, Config]]:
    """Flags that save memory, and the config with them, the cheapest first."""
    model = dataclasses.replace(config.model, remat=True)
    mesh = dataclasses.replace(config.mesh, data=1, fsdp=devices // max(config.mesh.tensor, 1))
    remat, fsdp = "--model.remat True", f"--mesh.data 1 --mesh.fsdp {mesh.fsdp}"
    if not config.model.remat:
        yield remat, dataclasses.replace(config, model=model)
    yield fsdp, dataclasses.replace(config, mesh=mesh)
    yield f"{remat} {fsdp}", dataclasses.replace(config, model=model, mesh=mesh)
