"""A plan to read: a table, and JSON."""

import collections
import dataclasses
import importlib.metadata
import json
from collections.abc import Iterator
from typing import Any

from flaxformer_min.planning.plan import Plan, ShapePlan

GIB = 2**30
COLUMNS = (
    "rows x S x T",
    "share",
    "parameters",
    "optimizer",
    "other arguments",
    "results",
    "temporaries",
    "code",
    "GiB a device",
    "TFLOP",
    "ms",
    "of it exchange",
    "utilisation",
    "target tokens/s",
)


def to_json(plan: Plan) -> str:
    """Everything that a plan knows and what follows from it; bytes, seconds and FLOPs."""
    tree = dataclasses.asdict(plan)
    for shape, leaf in zip(plan.shapes, tree["shapes"], strict=True):
        leaf |= {"bucket": shape.bucket._asdict(), "seconds": shape.seconds}
        leaf |= {"utilisation": plan.utilisation(shape), "tokens_per_second": _speed(shape)}
    chip_hours = None if plan.hours is None else plan.hours * plan.devices
    tree |= {"fits": not plan.advice, "hours": plan.hours, "chip_hours": chip_hours}
    return json.dumps({"versions": versions(), "devices": plan.devices} | tree, indent=2)


def to_text(plan: Plan) -> str:
    """A table with one line a shape, in GiB a device, then the collectives and the verdict."""
    mesh = " x ".join(map(str, plan.mesh.values()))
    used = " and ".join(f"{name} {version}" for name, version in versions().items())
    lines = [
        f"{plan.topology}: {plan.devices} devices, mesh {mesh}; {plan.parameters:,} parameters; "
        f"compiled by {used}",
        "",
        *_markdown([COLUMNS, *(_cells(plan, shape) for shape in plan.shapes)]),
        "",
        *(line for shape in plan.shapes for line in _exchanges(shape)),
        "",
        *_verdict(plan),
    ]
    return "\n".join(lines)


def versions() -> dict[str, str]:
    """Of what compiled: jax, and libtpu where it is installed."""
    installed = {package.name for package in importlib.metadata.distributions()}
    names = [name for name in ("jax", "libtpu") if name in installed]
    return {name: importlib.metadata.version(name) for name in names}


def _cells(plan: Plan, shape: ShapePlan) -> list[str]:
    memory = shape.memory or {}
    sizes = [memory.get(kind) for kind in COLUMNS[2:8]] + [sum(memory.values()) or None]
    utilisation, speed, seconds = plan.utilisation(shape), _speed(shape), shape.seconds
    return [
        _name(shape),
        f"{shape.share:.0%}",
        *("-" if size is None else f"{size / GIB:.2f}" for size in sizes),
        f"{shape.flops / 1e12:.2f}",
        "-" if seconds is None else f"{seconds * 1e3:.1f}",
        "-" if shape.collective_seconds is None else f"{shape.collective_seconds * 1e3:.1f}",
        "-" if utilisation is None else f"{utilisation:.0%}",
        "-" if speed is None else f"{speed:,.0f}",
    ]


def _speed(shape: ShapePlan) -> float | None:
    """Target positions a second, padding included."""
    if shape.seconds is None:
        return None
    return shape.bucket.rows * shape.bucket.target_length / shape.seconds


def _exchanges(shape: ShapePlan) -> Iterator[str]:
    """What the devices exchange in a step, by kind."""
    places, total = collections.Counter[str](), collections.Counter[str]()
    for found in shape.collectives:
        places[found.kind] += found.trips
        total[found.kind] += found.trips * found.bytes
    parts = [f"{places[kind]} {kind} of {total[kind] / GIB:.3f} GiB" for kind in sorted(places)]
    if not shape.refusal:
        yield f"{_name(shape)} exchanges: {', '.join(parts) or 'nothing'}"


def _verdict(plan: Plan) -> Iterator[str]:
    for shape in plan.shapes:
        if shape.refusal:
            yield f"{_name(shape)} does not fit: {shape.refusal}"
    if plan.advice:
        yield plan.advice
    elif plan.chip.memory is not None:
        yield f"it fits into the {plan.chip.memory / GIB:.2f} GiB of a chip"
    if (hours := plan.hours) is not None:
        yield f"{plan.steps:,} steps: {hours:,.1f} hours, {hours * plan.devices:,.0f} chip-hours"


def _name(shape: ShapePlan) -> str:
    return " x ".join(map(str, shape.bucket))


def _markdown(rows: list[Any]) -> list[str]:
    """Cells as a Markdown table with aligned columns, the first row being the head."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "| " + " | ".join(cell.rjust(w) for cell, w in zip(row, widths, strict=True)) + " |"
        for row in rows
    ]
    return [lines[0], "|" + "|".join("-" * (width + 1) + ":" for width in widths) + "|", *lines[1:]]
