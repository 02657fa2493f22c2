"""Reads a compiled program's collectives and the compiler's estimate of its time from its text.

The summary that XLA gives counts the body of a loop once, however often the loop runs, and knows no
collectives. So the text of the program is parsed instead. It is a list of computations, each a list
of instructions; an instruction can call other computations:

    while                    the body as often as the loop turns, the condition once more
    conditional              the dearest branch: most cycles, then most bytes exchanged
    call, fusion,            the computation, once
    async-start
    reduce, sort, map ...    a small computation, for every element

On TPUs the compiler notes on many instructions how many cycles it expects them to take; 0 stands
for no note. The note of an instruction covers the computations that it calls, so that these count
only where there is no note. Loops, conditionals and calls are the exception: their own note and
those of the computations that they call both count. A small computation that has notes must be
called by an instruction with a note, because nothing says how often it runs.
"""

import collections
import dataclasses
import math
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from flaxformer_min.planning.parts import part_of


@dataclasses.dataclass(frozen=True)
class Collective:
    """An exchange of data between devices, at one place of the program."""

    kind: str  # one of KINDS
    bytes: int  # of the whole arrays on one device that go in, or that come out if these are more
    trips: int  # how often one run of the program executes it
    source: str  # the operation that it comes from, as JAX names it; "" if XLA does not say
    chain: int = 0  # the number of a chain of fusions that it runs beside; 0 if there is none


class Program(NamedTuple):
    """One run of a compiled program, or of a part of it, on one device."""

    collectives: list[Collective]
    parts: dict[str, int]  # cycles by `parts.PARTS`: the compiler's estimate without collectives

    @property
    def cycles(self) -> int:
        """The cycles of all parts; 0 where the compiler estimates none."""
        return sum(self.parts.values())


KINDS = (  # opcodes of collectives
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
)
# CONTROL: opcodes whose note does not cover the computations that they call. RUN_ONCE: opcodes
# whose note does, and which run these once. All other opcodes run them for every element.
CONTROL = ("while", "conditional", "call")
RUN_ONCE = ("fusion", "async")

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) (?:\(.*)?\{$")
_INSTRUCTION = re.compile(r"^ +(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][a-z0-9\-]*)\((.*)$")
_CALLED = re.compile(
    r"\b(?:condition|body|to_apply|calls|select|scatter"
    r"|true_computation|false_computation|branch_computations|called_computations)"
    r"=(\{[^}]*\}|%?[\w.\-]+)"
)
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_ARRAY = re.compile(r"\b(pred|[a-z]+\d+)[a-z0-9]*\[([\d,]*)\]")


class _Instruction(NamedTuple):
    """One line of a computation: NAME = RESULT OPCODE[-start](OPERANDS), ATTRIBUTES."""

    name: str
    result: str  # its type: one array or several
    opcode: str  # without -start
    starts: bool  # it only starts the work; an instruction OPCODE-done waits for its end
    operands: list[str]  # names
    called: list[str]  # names of computations; of a loop the condition, then the body
    cycles: int  # the compiler's note; 0 if there is none
    text: str  # the whole line


def read(text: str, turns: Sequence[int] = ()) -> Program:
    """Returns the program in `text`, which is what `compiled.as_text()` gives.

    A loop whose number of turns XLA does not note turns as often as its condition bounds it. If
    `turns` are given, those among them that are a `lax.while_loop` turn turns[h] times, where h is
    how deep further such loops lie within it; XLA makes the others, of scatters for example.
    Raises AssertionError where a part of the program that has estimates cannot be counted.
    """
    reader = _Reader(text, turns)
    program = reader.run(reader.entry)
    for name, computation in reader.computations.items():
        noted = any(instruction.cycles for instruction in computation)
        assert name in reader.reached or not noted, f"{name} has estimates, but nothing calls it"
    return program


class _Reader:
    """The computations of a text by name, and the names of those that have been counted."""

    def __init__(self, text: str, turns: Sequence[int]) -> None:
        self.computations: dict[str, list[_Instruction]] = {}
        self.entry, self.reached, self.turns = "", set[str](), turns
        instructions: list[_Instruction] = []
        for line in text.splitlines():
            if head := _COMPUTATION.match(line):
                instructions = self.computations[head[2]] = []
                self.entry = head[2] if head[1] else self.entry
            elif line.startswith(" ") or "estimated_cycles" in line:
                instructions.append(_parse(line))

    def run(self, name: str) -> Program:
        """Returns one run of a computation."""
        self.reached.add(name)
        computation = self.computations[name]
        results = {instruction.name: instruction.result for instruction in computation}
        return _sum(self._run_instruction(instruction, results) for instruction in computation)

    def _run_instruction(self, instruction: _Instruction, results: dict[str, str]) -> Program:
        """Returns one run of an instruction in a computation whose instructions give `results`."""
        inside = self._run_called(instruction)
        opcode, cycles = instruction.opcode, instruction.cycles
        if opcode in KINDS:
            return Program([_collective(instruction, results)], {})
        if opcode.removesuffix("-done") in KINDS:
            return Program([], {})
        own = Program([], {part_of(self._opcodes(instruction), _source(instruction)): cycles})
        if opcode in CONTROL:
            return _sum([inside, own])
        assert cycles or opcode in RUN_ONCE or not inside.cycles, (
            f"{instruction.name} has no estimate and repeats {', '.join(instruction.called)}, "
            "which have: nothing says how often"
        )
        if opcode == "fusion":
            inside = _named_reduce_scatter(inside)
        return Program(inside.collectives, own.parts if cycles else inside.parts)

    def _opcodes(self, instruction: _Instruction) -> set[str]:
        """Returns the opcode of an instruction and those of all that its note covers."""
        covered = [] if instruction.opcode in CONTROL else instruction.called
        called = (line for name in covered for line in self.computations[name])
        return {instruction.opcode}.union(*(self._opcodes(line) for line in called))

    def _run_called(self, instruction: _Instruction) -> Program:
        """Returns what one run of an instruction runs in the computations that it calls."""
        programs = [self.run(name) for name in instruction.called]
        if instruction.opcode == "conditional":
            return max(programs, key=_dearness)
        if instruction.opcode == "while":
            condition, body = programs
            trips = self._trip_count(instruction)
            return _sum([_times(condition, trips + 1), _times(body, trips)])
        return _sum(programs)

    def _trip_count(self, loop: _Instruction) -> int:
        """Returns how often a loop turns, as XLA notes it, or else as `read` says."""
        if noted := _TRIPS.search(loop.text):
            return int(noted[1])
        if self.turns and _is_open(loop):
            return self.turns[self._depth(loop.called[1])]
        condition = "\n".join(line.text for line in self.computations[loop.called[0]])
        bounds = re.findall(r" s32\[\]\S* constant\((\d+)\)", condition)
        assert len(bounds) == 1, f"{loop.name} is a loop without a fixed number of turns"
        return int(bounds[0])

    def _depth(self, name: str) -> int:
        """Returns how deep open loops lie in each other in a computation."""
        depths = [
            _is_open(line) + max(map(self._depth, line.called), default=0)
            for line in self.computations[name]
        ]
        return max(depths, default=0)


def _is_open(line: _Instruction) -> bool:
    """Whether it is a `lax.while_loop` of which XLA does not note how often it turns."""
    is_loop = line.opcode == "while" and _source(line).endswith("/while")
    return is_loop and not _TRIPS.search(line.text)


def _parse(line: str) -> _Instruction:
    found = _INSTRUCTION.match(line)
    assert found is not None, f"not an instruction: {line}"
    name, result, opcode, rest = found.groups()
    attributes = re.split(r", (?:metadata|backend_config)=", rest)[0]
    operands = re.findall(r"%([\w.\-]+)", attributes.partition(")")[0])
    called = re.findall(r"[\w.\-]+", " ".join(_CALLED.findall(attributes)))
    if opcode.endswith(("-done", "-update")):  # it can name again what its -start has called
        called = []
    noted = _CYCLES.search(line)
    cycles = int(noted[1]) if noted else 0
    starts, opcode = opcode.endswith("-start"), opcode.removesuffix("-start")
    return _Instruction(name, result, opcode, starts, operands, called, cycles, line)


def _sum(programs: Iterable[Program]) -> Program:
    """Returns the programs of the instructions of a computation as one.

    A collective that goes on beside other work is written again in the fusion that begins it, in
    each one that runs meanwhile and in the one that ends it, always with the number of this chain.
    It counts once.
    """
    programs = list(programs)
    found: dict[int, Collective] = {}
    for one in (one for program in programs for one in program.collectives):
        key = one.chain or -1 - len(found)
        found[key] = max(found.get(key, one), one, key=lambda one: one.bytes * one.trips)
    parts = collections.Counter[str]()
    for program in programs:
        parts.update(program.parts)
    return Program(list(found.values()), dict(parts))


def _times(program: Program, trips: int) -> Program:
    """Returns a program that runs `trips` times, as one program."""
    repeated = [dataclasses.replace(c, trips=c.trips * trips) for c in program.collectives]
    return Program(repeated, {part: cycles * trips for part, cycles in program.parts.items()})


def _dearness(branch: Program) -> tuple[int, int]:
    return branch.cycles, sum(one.bytes * one.trips for one in branch.collectives)


def _named_reduce_scatter(fused: Program) -> Program:
    """Renames all-reduces inside a fusion to reduce-scatter.

    TPUs write a reduce-scatter as an all-reduce that is fused with taking a slice of it.
    """
    renamed = [
        dataclasses.replace(one, kind="reduce-scatter") if one.kind == "all-reduce" else one
        for one in fused.collectives
    ]
    return Program(renamed, fused.parts)


def _collective(instruction: _Instruction, results: dict[str, str]) -> Collective:
    chain = re.search(r'chain_id="(\d+)"', instruction.text)
    return Collective(
        kind=instruction.opcode,
        bytes=_moved(instruction, results),
        trips=1,
        source=_source(instruction),
        chain=int(chain[1]) if chain else 0,
    )


def _source(instruction: _Instruction) -> str:
    found = re.search(r'op_name="([^"]*)"', instruction.text)
    return found[1] if found else ""


def _moved(instruction: _Instruction, results: dict[str, str]) -> int:
    """Returns the bytes that go into a collective or that come out of it, whichever are more."""
    sizes = _sizes(instruction.result)
    if instruction.starts and instruction.opcode != "all-reduce":
        # The result holds the arrays that go in, those that come out, and some for synchronising.
        sizes = [size for size in sizes if size > 4]
        half = len(sizes) // 2
        return max(sum(sizes[:half]), sum(sizes[half:]))
    operands = [_sizes(results.get(name, "")) for name in instruction.operands]
    return max(sum(sizes), sum(map(sum, operands)))


def _sizes(result: str) -> list[int]:
    """Returns the bytes of each array in a type."""
    return [_size(dtype, shape) for dtype, shape in _ARRAY.findall(result)]


def _size(dtype: str, shape: str) -> int:
    bits = 8 if dtype == "pred" else int(re.sub(r"\D", "", dtype))
    return math.prod(int(n) for n in shape.split(",") if n) * bits // 8
