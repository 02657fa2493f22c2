"""Lines in few static shapes: which line is decoded in which batch.

The shape depends on a line's own length alone, so what surrounds it cannot change how it is
computed.
"""

import bisect
import itertools
from collections.abc import Iterator, Sequence

# What a device decodes at once: so many lines, and no more source positions than this, padding
# counted. More lines share more of each step's fixed cost, which on a CPU gains nothing beyond 16.
MOST_ROWS, BATCH_TOKENS = 16, 1024
# The lines in a search's batch for each row. Rows stand idle only at the end of a batch, so more of
# them waste less; but a caller waits for a whole batch.
LINES_PER_ROW = 8
SHORTEST_SHAPE = 16  # shorter shapes would save little and have to be compiled


def plan_batches(
    lengths: Sequence[int],
    longest: int,
    devices: int = 1,
    lines_per_row: int = 1,
    at_once: int = 1,
) -> Iterator[tuple[int, list[int | None]]]:
    """(width, places) of each batch: places of lengths of at most `width`, None where none is left.

    Every place occurs once, longer ones first. The shape of a place follows from its own length.
    Batches of one width are about equally full, and `at_once` or more if that leaves no row empty.
    Each device has the same share of a batch, as many as if it were alone, and the places are dealt
    to them in turn.
    """
    shapes = shape_ladder(longest)

    def shape(place: int) -> int:
        return bisect.bisect_left(shapes, lengths[place])

    by_length = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
    for rung, group in itertools.groupby(by_length, shape):
        members, width = list(group), shapes[rung]
        rows = rows_of(width) * devices
        size = rows * lines_per_row
        batches = max(-(-len(members) // size), min(at_once, -(-len(members) // rows)))
        for n in range(batches):
            part = members[len(members) * n // batches : len(members) * (n + 1) // batches]
            places = [*part, *[None] * (size - len(part))]
            yield width, [place for device in range(devices) for place in places[device::devices]]


def rows_of(width: int) -> int:
    """The lines of this width that a device decodes at once."""
    return max(1, min(MOST_ROWS, BATCH_TOKENS // width))


def shape_ladder(longest: int) -> list[int]:
    """The widths batches have: 16, 24, 32, 48, 64, 96 ... below `longest`, and `longest`."""
    powers = itertools.takewhile(
        lambda power: power < longest, (SHORTEST_SHAPE << k for k in itertools.count())
    )
    steps = (width for power in powers for width in (power, power + power // 2))
    return [*(width for width in steps if width < longest), longest]
