"""Plans which line is decoded in which batch, so that batches have few static shapes.

The width of a line's batch depends on the line's own length alone, so the lines around it cannot
change how it is computed.
"""

import bisect
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple


class Capacity(NamedTuple):
    """How much a device of one kind decodes at once."""

    lines: int  # at most so many lines,
    hypotheses: int  # at most so many hypotheses of theirs,
    positions: int  # and at most so many source positions, padding counted
    first_block: int | None  # positions of the cache's first block; None: model.cached.FIRST_BLOCK


# More lines share more of each step's fixed cost, which on a CPU gains nothing beyond 16, and a
# product with 80 rows takes longer for each than one with 50. A TPU is planned, not measured.
CPU = Capacity(16, 50, 1024, None)
TPU = Capacity(256, 1024, 32_768, 2**31)
# A search's batch has this many lines for each row that is decoded at once (decoding/rows.py). Rows
# are idle only at its end, so more lines waste less; but a caller waits for a whole batch.
LINES_PER_ROW = 16
SHORTEST_SHAPE = 16  # shorter shapes would save little and have to be compiled

Planned = tuple[int, list[int | None]]  # the width of a batch, and the line in each place


def plan_batches(
    lengths: Sequence[int],
    longest: int,
    devices: int = 1,
    lines_per_row: int = 1,
    at_once: int = 1,
    beam_size: int = 1,
    capacity: Capacity = CPU,
) -> Iterator[Planned]:
    """Yields the width and the members of each batch: a line's index for each place, None if empty.

    `lengths` are those of the lines, and `longest` is the largest width. A line's width follows
    from its length alone and is at least that length. Every line is in one batch; longer lines come
    first. Batches of one width are about equally full. None holds more than 1 / `at_once` of all
    lines, so that so many batches can be computed at once, unless that would leave a row empty.
    Each device has the same share of a batch, as many places as if it were alone, and the members
    are dealt to the devices in turn.
    """
    shapes = shape_ladder(longest)

    def rung_of(member: int) -> int:
        return bisect.bisect_left(shapes, lengths[member])

    by_length = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
    for rung, group in itertools.groupby(by_length, rung_of):
        members, width = list(group), shapes[rung]
        rows, count = rows_at_once(width, beam_size, capacity) * devices, len(members)
        size = rows * lines_per_row
        shares = min(-(-count * at_once // len(lengths)), -(-count // rows))
        batches = max(-(-count // size), shares)
        for n in range(batches):
            part = members[count * n // batches : count * (n + 1) // batches]
            places = [*part, *[None] * (size - len(part))]
            yield width, [member for device in range(devices) for member in places[device::devices]]


def capacity_of(platform: str) -> Capacity:
    """Returns what a device decodes at once, by the platform that JAX names: cpu, gpu or tpu."""
    return TPU if platform == "tpu" else CPU


def rows_at_once(width: int, beam_size: int = 1, capacity: Capacity = CPU) -> int:
    """Returns how many lines of this width a device decodes at once."""
    rows = capacity.lines, capacity.hypotheses // beam_size, capacity.positions // width
    return max(1, min(rows))


def shape_ladder(longest: int) -> list[int]:
    """Returns the widths of batches: 16, 24, 32, 48, 64, 96 ... below `longest`, and `longest`."""
    powers = (SHORTEST_SHAPE << k for k in itertools.count())
    widths = (width for power in powers for width in (power, power + power // 2))
    return [*itertools.takewhile(lambda width: width < longest, widths), longest]
