"""Lines in few static shapes: which line is decoded in which batch.

The shape depends on a line's own length alone, so what surrounds it cannot change how it is
computed.
"""

import bisect
import itertools
from collections.abc import Iterator, Sequence

import numpy as np

# What a device decodes at once: so many lines, and no more source positions than this, padding
# counted. More lines would share more of each step's fixed cost, but a batch waits for its longest
# translation: on a CPU 8 to 16 lines are best.
MOST_ROWS, BATCH_TOKENS = 16, 1024
SHORTEST_SHAPE = 16  # shorter shapes would save little and have to be compiled


def plan_batches(
    lengths: Sequence[int], longest: int, devices: int = 1
) -> Iterator[tuple[int, int, list[int]]]:
    """(rows, width, places) of each batch: places of at most `rows` lengths, none above `width`.

    Every place occurs once, shorter ones first. The shape of a place follows from its own length.
    Each device has the same share of the rows, as many as if it were alone.
    """
    shapes = shape_ladder(longest)

    def shape(place: int) -> int:
        return bisect.bisect_left(shapes, lengths[place])

    by_length = sorted(range(len(lengths)), key=lengths.__getitem__)
    for rung, group in itertools.groupby(by_length, shape):
        members, width = list(group), shapes[rung]
        rows = rows_of(width) * devices
        for first in range(0, len(members), rows):
            yield rows, width, members[first : first + rows]


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


def padded(batch: Sequence[Sequence[int]], rows: int, width: int, pad_id: int) -> np.ndarray:
    """Token ids [rows, width], padded; rows beyond the batch are all padding."""
    array = np.full((rows, width), pad_id, np.int32)
    for row, ids in enumerate(batch):
        array[row, : len(ids)] = ids
    return array
