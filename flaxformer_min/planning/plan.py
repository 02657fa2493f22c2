"""Plans memory and time of a run on devices that this machine lacks, by compiling its programs:

train       the step of training, in every shape of the batches
validation  the loss on the validation split, in the shapes of its batches
search      the search, greedy and with the config's beam, in every width of the sentences
scoring     the log-probability of given targets, in every width of the pairs
init        the draw of the first state, of which each device has its share
restore     reading a checkpoint: the same arrays as init, without a program

Searching and scoring are done by the devices of one host, each with its own sentences, whatever the
mesh of the training is. The widths are those of the validation split.

Nothing is allocated and nothing runs. Memory and collectives are those of the compiled program. The
time of a step is the compiler's own estimate of its work (the cycles of every operation, loops
counted as often as they turn, at the chip's clock) and, after that, the bytes of its collectives at
the speed of all the chip's links, as if exchange never overlapped with work. No chip has confirmed
it.

The time of a search is that of its compiled loops, with these assumptions: every row of the batch
is at work; a sentence takes as many steps as its reference has tokens; every step reads the whole
cache. The bound of a step is the time to read the decoder's weights, the memory's keys and values,
and half of a sentence's past, once each; or that of the products at the full rate, if it is longer.
"""

import dataclasses
import functools
import math
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
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
from flaxformer_min.errors import UserError, first_line
from flaxformer_min.model.build import count_parameters, split_model
from flaxformer_min.planning import hlo, workers
from flaxformer_min.planning.chips import GIB, Chip, topology_devices
from flaxformer_min.planning.flops import search_reads, step_flops
from flaxformer_min.planning.report import MEMORY_KINDS, Plan, ProgramPlan, ShapePlan
from flaxformer_min.training.sharding import abstract_rows, check_mesh, make_mesh, row_shares
from flaxformer_min.training.step import StepProgram
from flaxformer_min.training.validation import loss_sums

# How often the bytes of a collective cross the links: once, unless the table says otherwise. An
# all-reduce on a ring of chips is a reduce-scatter and then an all-gather.
PASSES = {"all-reduce": 2}
KINDS = ("train", "validation", "search", "scoring", "init", "restore")
# A tokenizer that was not trained here may have other ids, at the same cost.
IDS = {"pad_id": PAD_ID, "bos_id": BOS_ID}

Lengths = tuple[np.ndarray, np.ndarray]  # of the pairs [N, 2] of training, and of validation


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


def make_plan(config: Config, topology: str, lengths: Lengths, only: Sequence[str] = KINDS) -> Plan:
    """Compiles a config's programs of the kinds `only` for the devices of a topology.

    Their shapes follow from `lengths`, which `planning.lengths` finds. Several processes share the
    work. Raises UserError for an unknown topology and for sizes that the mesh does not divide, and
    MemoryError if a process that compiles is killed.
    """
    chip, devices = topology_devices(topology)
    mesh = make_mesh(config.mesh, devices)
    check_mesh(config, mesh)
    programs = programs_of(config, lengths, devices, only)
    planned = _plan_all(functools.partial(_timed, config, topology), programs)
    shapes = tuple(each for each in planned if isinstance(each, ShapePlan))
    refused = [shape.bucket for shape in shapes if shape.refusal]
    _, params = split_model(config.model, config.data.vocab_size)
    return Plan(
        topology,
        chip,
        dict(mesh.shape),
        count_parameters(params),
        config.train.steps,
        shapes,
        _advice(config, devices, chip, refused[0]) if refused else "",
        tuple(each for each in planned if isinstance(each, ProgramPlan)),
    )


def _plan_all(
    plan_one: Callable[[Program], tuple[ShapePlan | ProgramPlan, float]], programs: list[Program]
) -> list[ShapePlan | ProgramPlan]:
    """Plans all programs, in their order, and says on standard error how far it is."""
    count = len(programs)
    processes, found = workers.room(count), {}
    print(f"{count} programs to compile, {processes} at a time", file=sys.stderr)
    for number, (found[number], seconds) in workers.each(plan_one, programs, processes):
        name = f"{programs[number].name} {programs[number].shape}".strip()
        print(f"{len(found)} of {count}: {name} ({seconds:.0f} s)", file=sys.stderr)
    return [found[number] for number in range(count)]


def _timed(
    config: Config, topology: str, program: Program
) -> tuple[ShapePlan | ProgramPlan, float]:
    """Returns the plan of one program, and the seconds that it took; runs in any process."""
    start = time.perf_counter()
    chip, devices = topology_devices(topology)
    if program.kind == "train":
        assert program.bucket is not None
        mesh = make_mesh(config.mesh, devices)
        planned = plan_shape(config, mesh, chip, program.bucket, program.share)
    else:
        planned = plan_program(config, devices, chip, program)
    return planned, time.perf_counter() - start


def plan_shape(config: Config, mesh: Mesh, chip: Chip, bucket: Bucket, share: float) -> ShapePlan:
    """Compiles the train step for batches of one shape and takes memory and time from the program.

    `share` is the bucket's share of the steps.
    """
    shape = ShapePlan(bucket, share, step_flops(config.model, config.data.vocab_size, bucket))
    program = StepProgram(config, mesh, **IDS)
    compiled = _compiled(lambda: program.compile(bucket))
    if isinstance(compiled, str):
        return dataclasses.replace(shape, refusal=compiled)
    run = hlo.read(_text(compiled))
    return dataclasses.replace(
        shape,
        memory=_memory(compiled, _bytes(program.shapes.params), _bytes(program.shapes.opt_state)),
        collectives=tuple(run.collectives),
        parts={part: cycles / chip.clock for part, cycles in run.parts.items()}
        if chip.clock
        else None,
        collective_seconds=_exchange(run, chip),
    )


def plan_program(
    config: Config, devices: Sequence[Any], chip: Chip, program: Program
) -> ProgramPlan:
    """Compiles a program that is not the train step and takes memory and time from it."""
    step = StepProgram(config, make_mesh(config.mesh, devices), **IDS)
    own, moments = _bytes(step.shapes.params), _bytes(step.shapes.opt_state)
    beside = {"validation": moments, "search": own + moments}.get(program.kind, 0)
    planned = ProgramPlan(program.name, program.shape, program.share, beside)
    if program.kind == "restore":
        memory = dict.fromkeys(MEMORY_KINDS, 0) | {"parameters": own, "optimizer": moments}
        return _fitting(dataclasses.replace(planned, memory=memory), chip)
    compiled = _compiled(lambda: lower(config, step, devices, program).compile())
    if isinstance(compiled, str):
        return dataclasses.replace(planned, refusal=compiled)
    # Every device that searches or scores has all parameters; init has no arguments.
    whole = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(step.shapes.params))
    given = {"validation": own, "init": 0}.get(program.kind, whole)
    planned = dataclasses.replace(planned, memory=_memory(compiled, given, 0))
    times = _times(config, chip, program, _text(compiled), len(here(devices)))
    return _fitting(dataclasses.replace(planned, **times), chip)


def _fitting(planned: ProgramPlan, chip: Chip) -> ProgramPlan:
    """Notes a refusal if a chip has too little memory for the program and what lies beside it."""
    needed = sum((planned.memory or {}).values()) + planned.beside
    if chip.memory is None or needed <= chip.memory:
        return planned
    text = f"{needed / GIB:.2f}G of {chip.memory / GIB:.2f}G with what lies beside it"
    return dataclasses.replace(planned, refusal=text)


def _times(config: Config, chip: Chip, program: Program, text: str, devices: int) -> dict[str, Any]:
    """Returns the seconds of a program on one chip, by fields of ProgramPlan; none for CPUs."""
    if not chip.clock:
        return {}
    if program.kind != "search":
        run = hlo.read(text)
        seconds = run.cycles / chip.clock + (_exchange(run, chip) or 0.0)
        rows = program.bucket.rows if program.bucket else 0
        return {"seconds": seconds, "sentences_per_second": rows / seconds if seconds else 0.0}
    # Loops in loops: the inmost gives a row its next sentence, the next steps, and the outermost
    # prepares as many sentences as there are rows.
    turns = (0, 0, 0), (0, 0, 1), (0, 1, 1), (1, 0, 1)
    start, prepared, stepped, refilled = (
        hlo.read(text, each).cycles / chip.clock for each in turns
    )
    step, rows = stepped - prepared, program.rows
    group = prepared - start + program.steps * step + rows * (refilled - prepared)
    seconds, bound = start + LINES_PER_ROW * group, _bound(config, chip, program)
    return {
        "seconds": seconds,
        "sentences_per_second": devices * rows * LINES_PER_ROW / seconds,
        "step_seconds": step,
        "bound_seconds": bound,
        "bound_sentences_per_second": devices * rows / (program.steps * bound),
    }


def _bound(config: Config, chip: Chip, program: Program) -> float:
    """Returns the least seconds of a step of a search, as the head of this file defines them."""
    assert program.bucket and chip.bandwidth and chip.peak_flops
    past = program.beam * program.steps / 2
    weights, others = search_reads(
        config.model, config.data.vocab_size, program.rows, program.bucket.source_length, past
    )
    size = 2 if config.model.compute_dtype == "bfloat16" else 4
    flops = 2 * weights * program.rows * program.beam
    return max(size * (weights + others) / chip.bandwidth, flops / chip.peak_flops)


def _exchange(run: hlo.Program, chip: Chip) -> float | None:
    sent = sum(x.trips * x.bytes * PASSES.get(x.kind, 1) for x in run.collectives)
    return sent / chip.interconnect if chip.interconnect else None


def _compiled(compile: Callable[[], jax.stages.Compiled]) -> jax.stages.Compiled | str:
    """Returns the compiled program, or the compiler's reason if it does not fit."""
    try:
        return compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        found = re.search(r"Used .*? of .*? hbm", str(error))
        return found[0] if found else first_line(error)


def _text(compiled: jax.stages.Compiled) -> str:
    text = compiled.as_text()
    assert text is not None, "XLA has a text for every program it compiles"
    return text


def _memory(compiled: jax.stages.Compiled, parameters: int, optimizer: int) -> dict[str, int]:
    """Returns the bytes on one device by kind; their sum is all that the program needs.

    Of its arguments so many bytes are parameters and optimizer state.
    """
    stats: Any = compiled.memory_analysis()
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
    evaluation = evaluation_plan(lengths[1], config.data, shares)
    every = [
        *(Program("train", *each) for each in buckets(BatchPlan(lengths[0], config.data))),
        *(Program("validation", *each) for each in buckets(evaluation)),
        *_searches(config, lengths[1], here(devices)),
        *_scorings(config, lengths[1], here(devices)),
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
        longest = min(width + config.decode.max_length_offset, config.model.max_length)
        for beam in sorted({1, config.decode.beam_size}):
            rows = rows_at_once(width, beam, capacity_of(devices[0].platform))
            bucket = Bucket(rows * LINES_PER_ROW * len(devices), width, longest)
            yield Program("search", bucket, share, beam, rows, target)


def _scorings(config: Config, lengths: np.ndarray, devices: Sequence[Any]) -> Iterator[Program]:
    longer = lengths.max(axis=1)
    for width, share, _ in _widths(longer, longer, config.model.max_length):
        rows = rows_at_once(width, 1, capacity_of(devices[0].platform)) * len(devices)
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
