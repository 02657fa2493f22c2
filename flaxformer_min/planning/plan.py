"""Plans memory and time of a run on devices that this machine lacks, by compiling its programs.

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
from typing import Any

import jax
from jax.sharding import Mesh

from flaxformer_min.config import Config
from flaxformer_min.data.batch import Bucket
from flaxformer_min.decoding.batches import LINES_PER_ROW
from flaxformer_min.errors import UserError, first_line
from flaxformer_min.model.build import count_parameters, split_model
from flaxformer_min.planning import hlo, workers
from flaxformer_min.planning.chips import GIB, Chip, topology_devices
from flaxformer_min.planning.flops import search_reads, step_flops
from flaxformer_min.planning.lengths import find_lengths
from flaxformer_min.planning.programs import IDS, KINDS, Program, here, lower, programs_of
from flaxformer_min.planning.report import MEMORY_KINDS, Plan, ProgramPlan, ShapePlan
from flaxformer_min.training.sharding import check_mesh, make_mesh
from flaxformer_min.training.step import StepProgram

# How often the bytes of a collective cross the links: once, unless the table says otherwise. An
# all-reduce on a ring of chips is a reduce-scatter and then an all-gather.
PASSES = {"all-reduce": 2}


def make_plan(
    config: Config, topology: str, lengths: str | None = None, only: Sequence[str] = KINDS
) -> Plan:
    """Compiles a config's programs of the kinds `only` for the devices of a topology.

    Their shapes follow from `lengths`, as `find_lengths` says. Several processes share the work.
    Raises UserError for an unknown topology, a path without lengths, and sizes that the mesh does
    not divide, and MemoryError if a process that compiles is killed.
    """
    chip, devices = topology_devices(topology)
    mesh = make_mesh(config.mesh, devices)
    check_mesh(config, mesh)
    programs = programs_of(config, find_lengths(lengths, config.data), devices, only)
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
