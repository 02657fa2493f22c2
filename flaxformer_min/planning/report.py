"""A plan as a record, as a table and as JSON."""

import collections
import dataclasses
import importlib.metadata
import json
import math
from collections.abc import Iterator, Sequence

from flaxformer_min.data.batch import Bucket
from flaxformer_min.planning.chips import GIB, Chip
from flaxformer_min.planning.hlo import Collective
from flaxformer_min.planning.parts import EXCHANGE, PARTS

MEMORY_KINDS = ("parameters", "optimizer", "other arguments", "results", "temporaries", "code")


@dataclasses.dataclass(frozen=True)
class ShapePlan:
    """The train step for one shape of batches.

    Bytes are those of one device, seconds and FLOPs those of one step. A value is None where the
    compiler does not give it: seconds for CPUs, everything for a program that does not fit.
    """

    bucket: Bucket
    share: float  # of all steps, from 0 to 1
    flops: int  # on all devices, by formula
    refusal: str = ""  # the compiler's reason if the program does not fit
    memory: dict[str, int] | None = None  # bytes by MEMORY_KINDS
    collectives: tuple[Collective, ...] = ()
    parts: dict[str, float] | None = None  # seconds of work by planning.parts.PARTS
    collective_seconds: float | None = None

    @property
    def compute_seconds(self) -> float | None:
        """Seconds of work, exchange left out."""
        return None if self.parts is None else math.fsum(self.parts.values())

    @property
    def seconds(self) -> float | None:
        """Seconds of a step, as if work and exchange never overlapped."""
        if self.compute_seconds is None or self.collective_seconds is None:
            return None
        return self.compute_seconds + self.collective_seconds

    @property
    def tokens_per_second(self) -> float | None:
        """Target positions a second, padding included."""
        if self.seconds is None:
            return None
        return self.bucket.rows * self.bucket.target_length / self.seconds

    @property
    def name(self) -> str:
        """The shape as text for a reader: rows, source length and target length."""
        return " x ".join(map(str, self.bucket))


@dataclasses.dataclass(frozen=True)
class ProgramPlan:
    """A program of a run that is not the train step, in one shape.

    Bytes are those of one device. A value is None where the program has no such thing or the
    compiler does not give it.
    """

    name: str
    shape: str  # rows on all devices, source length and target length
    share: float  # of the batches or sentences that have this shape, from 0 to 1
    beside: int  # bytes of the run's state that lie in memory meanwhile and are no argument
    memory: dict[str, int] | None = None  # bytes by MEMORY_KINDS
    refusal: str = ""  # the reason if it does not fit
    seconds: float | None = None  # of one call
    sentences_per_second: float | None = None  # of the devices that work together
    step_seconds: float | None = None  # of one step of a search
    bound_seconds: float | None = None  # the least that a step could take
    bound_sentences_per_second: float | None = None


@dataclasses.dataclass(frozen=True)
class Plan:
    """What compiling a config's programs for a topology has shown."""

    topology: str
    chip: Chip
    mesh: dict[str, int]  # sizes of its axes by name
    parameters: int  # how many numbers the model learns
    steps: int
    shapes: tuple[ShapePlan, ...]
    advice: str  # the change that would make every shape fit; "" if they fit as they are
    programs: tuple[ProgramPlan, ...] = ()  # beside the train step

    @property
    def devices(self) -> int:
        """The number of devices in the mesh."""
        return math.prod(self.mesh.values())

    @property
    def hours(self) -> float | None:
        """Hours of all steps; evaluations and checkpoints come on top."""
        parts = [shape.seconds * shape.share for shape in self.shapes if shape.seconds is not None]
        if not parts or len(parts) < len(self.shapes):
            return None
        return self.steps / 3600 * math.fsum(parts)

    @property
    def refused(self) -> list[tuple[str, str]]:
        """The name and the reason of everything that does not fit."""
        found = [(shape.name, shape.refusal) for shape in self.shapes]
        found += [(f"{one.name} {one.shape}".strip(), one.refusal) for one in self.programs]
        return [(name, refusal) for name, refusal in found if refusal]

    def utilisation(self, shape: ShapePlan) -> float | None:
        """Returns the share of the chips' peak FLOPs that the model's FLOPs take, from 0 to 1."""
        if shape.seconds is None or self.chip.peak_flops is None:
            return None
        return shape.flops / (shape.seconds * self.devices * self.chip.peak_flops)


def to_json(plan: Plan) -> str:
    """Returns the plan and what follows from it as JSON, in bytes, seconds and FLOPs."""
    tree = dataclasses.asdict(plan)
    for shape, leaf in zip(plan.shapes, tree["shapes"], strict=True):
        leaf |= {"bucket": shape.bucket._asdict(), "seconds": shape.seconds}
        leaf |= {"compute_seconds": shape.compute_seconds}
        leaf |= {"utilisation": plan.utilisation(shape)}
        leaf |= {"tokens_per_second": shape.tokens_per_second}
    chip_hours = None if plan.hours is None else plan.hours * plan.devices
    tree |= {"fits": not plan.refused, "hours": plan.hours, "chip_hours": chip_hours}
    return json.dumps({"versions": versions(), "devices": plan.devices} | tree, indent=2)


def to_text(plan: Plan) -> str:
    """Returns a table with one line a shape, in GiB a device, then collectives and verdict."""
    mesh = " x ".join(map(str, plan.mesh.values()))
    used = " and ".join(f"{name} {version}" for name, version in versions().items())
    lines = [
        f"{plan.topology}: {plan.devices} devices, mesh {mesh}; {plan.parameters:,} parameters; "
        f"compiled by {used}",
        "",
        *_table([_row(plan, shape) for shape in plan.shapes]),
        *(_exchanges(shape) for shape in plan.shapes if not shape.refusal),
        *[""] * bool(plan.shapes),
        *_parts(plan),
        *_programs(plan),
        *_verdict(plan),
    ]
    return "\n".join(lines)


def versions() -> dict[str, str]:
    """Returns the versions of what compiled the plan: jax, and libtpu where it is installed."""
    installed = {package.name for package in importlib.metadata.distributions()}
    names = [name for name in ("jax", "libtpu") if name in installed]
    return {name: importlib.metadata.version(name) for name in names}


def _row(plan: Plan, shape: ShapePlan) -> dict[str, str]:
    """Returns one row of the table: the head of each column and the cell below it."""
    memory = shape.memory or {}
    return {
        "rows x S x T": shape.name,
        "share": f"{shape.share:.0%}",
        **{kind: _cell(memory.get(kind), ".2f", GIB) for kind in MEMORY_KINDS},
        "GiB a device": _cell(sum(memory.values()) or None, ".2f", GIB),
        "TFLOP": _cell(shape.flops, ".2f", 1e12),
        "ms": _cell(shape.seconds, ".1f", 1e-3),
        "of it exchange": _cell(shape.collective_seconds, ".1f", 1e-3),
        "utilisation": _cell(plan.utilisation(shape), ".0%"),
        "target tokens/s": _cell(shape.tokens_per_second, ",.0f"),
    }


def _cell(value: int | float | None, form: str, unit: int | float = 1) -> str:
    return "-" if value is None else format(value / unit, form)


def _exchanges(shape: ShapePlan) -> str:
    """Says how many collectives of each kind a step runs, and their bytes."""
    places, total = collections.Counter[str](), collections.Counter[str]()
    for found in shape.collectives:
        places[found.kind] += found.trips
        total[found.kind] += found.trips * found.bytes
    parts = [f"{places[kind]} {kind} of {total[kind] / GIB:.3f} GiB" for kind in sorted(places)]
    return f"{shape.name} exchanges: {', '.join(parts) or 'nothing'}"


def _parts(plan: Plan) -> list[str]:
    """Returns a table: the ms of a step's parts in every shape that has times, and what would help.

    The parts add up to the column "ms" of the first table.
    """
    timed = [shape for shape in plan.shapes if shape.seconds is not None]
    if not timed or plan.chip.peak_flops is None:
        return []
    peak = plan.devices * plan.chip.peak_flops
    ideal = {shape.name: f"{shape.flops / peak * 1e3:.1f}" for shape in timed}
    rows = [
        {"part": part}
        | {shape.name: _cell(_seconds(shape, part), ".1f", 1e-3) for shape in timed}
        | {"what would help": help}
        for part, help in (PARTS | {"exchange": EXCHANGE}).items()
    ]
    full = {"part": "(products at full rate)"} | ideal | {"what would help": ""}
    whole = {shape.name: _cell(shape.seconds, ".1f", 1e-3) for shape in timed}
    return _table([*rows, {"part": "whole"} | whole | {"what would help": ""}, full])


def _programs(plan: Plan) -> list[str]:
    """Returns a table with one line a program beside the train step, and what decoding comes to."""
    rows = [
        {
            "program": one.name,
            "rows x S x T": one.shape or "-",
            "share": f"{one.share:.0%}",
            "GiB a device": _cell(sum((one.memory or {}).values()) or None, ".2f", GIB),
            "beside it": _cell(one.beside, ".2f", GIB),
            "ms": _cell(one.seconds, ",.1f", 1e-3),
            "ms a step": _cell(one.step_seconds, ".2f", 1e-3),
            "bound": _cell(one.bound_seconds, ".2f", 1e-3),
            "sentences/s": _cell(one.sentences_per_second or None, ",.0f"),
            "at the bound": _cell(one.bound_sentences_per_second, ",.0f"),
        }
        for one in plan.programs
    ]
    return _table(rows)


def _seconds(shape: ShapePlan, part: str) -> float | None:
    """Returns the seconds of one part of a step, exchange among the parts."""
    return shape.collective_seconds if part == "exchange" else (shape.parts or {}).get(part, 0.0)


def _verdict(plan: Plan) -> Iterator[str]:
    for name, refusal in plan.refused:
        yield f"{name} does not fit: {refusal}"
    if plan.advice:
        yield plan.advice
    elif not plan.refused and plan.chip.memory is not None:
        yield f"it fits into the {plan.chip.memory / GIB:.2f} GiB of a chip"
    if (hours := plan.hours) is not None:
        yield f"{plan.steps:,} steps: {hours:,.1f} hours, {hours * plan.devices:,.0f} chip-hours"


def _table(rows: Sequence[dict[str, str]]) -> list[str]:
    """Returns the lines of a Markdown table with aligned columns, and a blank one; [] of no rows.

    The rows' keys are its head.
    """
    if not rows:
        return []
    cells = [list(rows[0]), *(list(row.values()) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        "| " + " | ".join(cell.rjust(w) for cell, w in zip(line, widths, strict=True)) + " |"
        for line in cells
    ]
    line = "|" + "|".join("-" * (width + 1) + ":" for width in widths) + "|"
    return [lines[0], line, *lines[1:], ""]
