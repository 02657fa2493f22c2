"""What a compiled program says about itself: its collectives and the compiler's estimate of time.

Read from XLA's text of the program, because the summary that XLA gives counts the body of a loop
once, however often it runs, and knows no collectives.
"""

import dataclasses
import math
import re
from collections.abc import Iterator
from typing import NamedTuple


@dataclasses.dataclass(frozen=True)
class Collective:
    """Data that devices exchange, in one place of the program."""

    kind: str  # all-reduce, all-gather, reduce-scatter, all-to-all or collective-permute
    bytes: int  # of the whole on one device: the larger of what goes in and what comes out
    trips: int  # how often a step comes by
    source: str  # the operation it comes from, as JAX names it


class Program(NamedTuple):
    """One run of a compiled program on one device."""

    collectives: list[Collective]
    cycles: int  # as the compiler estimates them, collectives left out; 0 where it does not


KINDS = "all-reduce|all-gather|reduce-scatter|all-to-all|ragged-all-to-all|collective-permute"
_COLLECTIVE = re.compile(rf" = (.*?) ({KINDS})(-start)?\((.*?)\)[,\s]")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_CALLED = re.compile(
    r" (?:call|fusion|async-start|conditional)\(.*?(?:to_apply|calls)=%?([\w.\-]+)"
)
_WHILE = re.compile(r" while\(.*condition=%?([\w.\-]+), body=%?([\w.\-]+)")
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_ARRAY = re.compile(r"\b(pred|[a-z]+\d+)[a-z0-9]*\[([\d,]*)\]")


def read(text: str) -> Program:
    """The program in `text`, what `compiled.as_text()` gives; loops count as often as they run."""
    computations, entry = _computations(text)
    collectives, cycles = [], 0
    for line, trips, fused in _lines(computations, entry, 1, fused=False):
        if found := _COLLECTIVE.search(line):
            source = re.search(r'op_name="([^"]*)"', line)
            size = _moved(found[1], found[2], bool(found[3]))
            # TPUs write a reduce-scatter as an all-reduce fused with taking a slice of it.
            kind = "reduce-scatter" if fused and found[2] == "all-reduce" else found[2]
            collectives.append(Collective(kind, size, trips, source[1] if source else ""))
        elif not fused and (estimate := _CYCLES.search(line)):
            cycles += int(estimate[1]) * trips
    return Program(collectives, cycles)


def _computations(text: str) -> tuple[dict[str, list[str]], str]:
    """The lines of every computation by its name, and the name of the one that runs."""
    computations: dict[str, list[str]] = {}
    entry, lines = "", []
    for line in text.splitlines():
        if head := _COMPUTATION.match(line):
            lines = computations[head[2]] = []
            entry = head[2] if head[1] else entry
        elif line.startswith(" "):
            lines.append(line)
    return computations, entry


def _lines(
    computations: dict[str, list[str]], name: str, trips: int, *, fused: bool
) -> Iterator[tuple[str, int, bool]]:
    """Every instruction that runs, how often, and whether as a part of another one."""
    for line in computations[name]:
        yield line, trips, fused
        if loop := _WHILE.search(line):
            condition, body = loop[1], loop[2]
            often = trips * _trip_count(line, computations[condition])
            yield from _lines(computations, body, often, fused=fused)
        elif called := _CALLED.search(line):
            inside = fused or " call(" not in line
            yield from _lines(computations, called[1], trips, fused=inside)


def _trip_count(line: str, condition: list[str]) -> int:
    """How often a loop runs: what XLA notes, or the bound that its counter is compared with."""
    if noted := re.search(r'"known_trip_count":\{"n":"(\d+)"', line):
        return int(noted[1])
    bounds = re.findall(r" s32\[\]\S* constant\((\d+)\)", "\n".join(condition))
    assert len(bounds) == 1, "a loop without a fixed number of turns"
    return int(bounds[0])


def _moved(result: str, kind: str, starts: bool) -> int:
    """Bytes of a collective from the type of its result.

    One that only starts gives what goes in and then what comes out, an all-reduce apart.
    """
    sizes = [_size(*array) for array in _ARRAY.findall(result)]
    if starts and kind != "all-reduce":
        sizes = [size for size in sizes if size > 4]  # without what synchronises
        return max(sum(sizes[: len(sizes) // 2]), sum(sizes[len(sizes) // 2 :]))
    return sum(sizes)


def _size(dtype: str, shape: str) -> int:
    bits = 8 if dtype == "pred" else int(re.sub(r"\D", "", dtype))
    return math.prod(int(n) for n in shape.split(",") if n) * max(bits, 8) // 8
