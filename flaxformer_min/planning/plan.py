"""Plans memory and time of a run on devices that this machine lacks, by compiling its train step.

Nothing is allocated and nothing runs. Memory and collectives are those of the compiled program. The
time of a step is the compiler's own estimate of its work (the cycles of every operation, loops
counted as often as they turn, at the chip's clock) and, after that, the bytes of its collectives at
the speed of all the chip's links, as if exchange never overlapped with work. No chip has confirmed
it.
"""

import collections
import dataclasses
import math
import re
import sys
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from flaxformer_min.config import Config, DataConfig
from flaxformer_min.data.batch import Bucket
from flaxformer_min.data.batching import BatchPlan
from flaxformer_min.data.tokenizer import BOS_ID, PAD_ID
from flaxformer_min.errors import UserError, first_line
from flaxformer_min.model.build import count_parameters, split_model
from flaxformer_min.planning import hlo
from flaxformer_min.planning.chips import Chip, topology_devices
from flaxformer_min.planning.flops import step_flops
from flaxformer_min.planning.report import MEMORY_KINDS, Plan, ShapePlan
from flaxformer_min.training.sharding import check_mesh, make_mesh
from flaxformer_min.training.state import TrainState
from flaxformer_min.training.step import StepProgram

# How often the bytes of a collective cross the links: once, unless the table says otherwise. An
# all-reduce on a ring of chips is a reduce-scatter and then an all-gather.
PASSES = {"all-reduce": 2}
SHORTEST = 16  # tokens: the shortest of the lengths that are assumed where no file gives any


def make_plan(config: Config, topology: str, lengths_file: str | None = None) -> Plan:
    """Compiles a config's train step for the devices of a topology, in every shape of its batches.

    The shapes follow from the lengths in `lengths_file`, or else from `assumed_lengths`.
    Raises UserError for an unknown topology, a file without lengths, and sizes that the mesh does
    not divide.
    """
    chip, devices = topology_devices(topology)
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
    """Returns lengths [N, 2] of N pairs: a batch each of 16, 32, 64 ... data.max_length tokens.

    So every one of these lengths takes the same share of the steps. Real corpora differ.
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
    """Reads lengths [N, 2] of N pairs in tokens, EOS counted, from a file with one pair a line.

    Pairs over data.max_length are left out, as in training. Raises UserError for a file that cannot
    be read, for a line that is not two numbers above 0, and if all pairs are too long.
    """
    try:
        with open(path, encoding="utf-8") as lines:
            lengths = np.array([line.split() for line in lines], dtype=np.int64)
    except (OSError, ValueError) as error:
        raise UserError(f"--lengths {path}: {first_line(error)}") from error
    if lengths.shape[1:] != (2,) or lengths.size == 0 or lengths.min() < 1:
        raise UserError(f"--lengths {path}: every line must hold two numbers above 0")
    if lengths.max(axis=1).min() > config.max_length:
        raise UserError(
            f"--lengths {path}: all pairs are over data.max_length, {config.max_length}"
        )
    return lengths[lengths.max(axis=1) <= config.max_length]


def _buckets(lengths: np.ndarray, config: DataConfig) -> list[tuple[Bucket, float]]:
    """Returns the shape of every bucket, and its share of the steps."""
    plan = BatchPlan(lengths, config)
    steps = range(plan.batches_per_epoch)
    counts = collections.Counter(plan.batch_ids(step)[0] for step in steps)
    return [(bucket, counts[b] / len(steps)) for b, bucket in enumerate(plan.buckets)]


def plan_shape(config: Config, mesh: Mesh, chip: Chip, bucket: Bucket, share: float) -> ShapePlan:
    """Compiles the train step for batches of one shape and takes memory and time from the program.

    `share` is the bucket's share of the steps.
    """
    shape = ShapePlan(bucket, share, step_flops(config.model, config.data.vocab_size, bucket))
    print(f"compiling {shape.name} ...", file=sys.stderr)
    # A tokenizer that was not trained here may have other ids, at the same cost.
    program = StepProgram(config, mesh, pad_id=PAD_ID, bos_id=BOS_ID)
    try:
        compiled = program.compile(bucket)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        found = re.search(r"Used .*? of .*? hbm", str(error))
        refusal = found[0] if found else first_line(error)
        return dataclasses.replace(shape, refusal=refusal)
    text = compiled.as_text()
    assert text is not None, "XLA has a text for every program it compiles"
    run = hlo.read(text)
    sent = sum(x.trips * x.bytes * PASSES.get(x.kind, 1) for x in run.collectives)
    return dataclasses.replace(
        shape,
        memory=_memory(compiled, program.shapes),
        collectives=tuple(run.collectives),
        parts={part: cycles / chip.clock for part, cycles in run.parts.items()}
        if chip.clock
        else None,
        collective_seconds=sent / chip.interconnect if chip.interconnect else None,
    )


def _memory(compiled: jax.stages.Compiled, state: TrainState) -> dict[str, int]:
    """Returns the bytes on one device by kind; their sum is all that the program needs."""
    stats: Any = compiled.memory_analysis()
    parameters, optimizer = _bytes(state.params), _bytes(state.opt_state)
    sizes = (
        parameters,
        optimizer,
        # Other arguments: batch, key and counters, and what the chip's layout adds to all arrays.
        stats.argument_size_in_bytes - parameters - optimizer,
        # Results: only those that do not take the place of a donated argument.
        stats.output_size_in_bytes - stats.alias_size_in_bytes,
        stats.temp_size_in_bytes,
        stats.generated_code_size_in_bytes,
    )
    return dict(zip(MEMORY_KINDS, sizes, strict=True))


def _bytes(tree: Any) -> int:
    """Returns the bytes of one device's share of a tree of abstract arrays with shardings."""
    shares = ((leaf.sharding.shard_shape(leaf.shape), leaf.dtype) for leaf in jax.tree.leaves(tree))
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype in shares)


def _advice(config: Config, devices: Any, chip: Chip, bucket: Bucket) -> str:
    """Says which change makes a bucket fit, found by compiling one change after the other."""
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
    """Yields flags that save memory, and the config with them, in order of the time they cost."""
    model = dataclasses.replace(config.model, remat=True)
    mesh = dataclasses.replace(config.mesh, data=1, fsdp=devices // max(config.mesh.tensor, 1))
    remat, fsdp = "--model.remat True", f"--mesh.data 1 --mesh.fsdp {mesh.fsdp}"
    if not config.model.remat:
        yield remat, dataclasses.replace(config, model=model)
    yield fsdp, dataclasses.replace(config, mesh=mesh)
    yield f"{remat} {fsdp}", dataclasses.replace(config, model=model, mesh=mesh)
