"""Plans which line is decoded in which batch, so that batches have few static shapes.

The width of a line's batch depends on the line's own length alone, so the lines around it cannot
change how it is computed.
"""

import bisect
import itertools
from collections.abc import Iterator, Sequence

# A device decodes at most this many lines at once, this many hypotheses of theirs, and this many
# source positions, padding counted. More lines share more of each step's fixed cost, which on a CPU
# gains nothing beyond 16, and a product with 80 rows takes longer for each than one with 50.
MOST_ROWS, MOST_HYPOTHESES, BATCH_TOKENS = 16, 50, 1024
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
        rows, count = rows_at_once(width, beam_size) * devices, len(members)
        size = rows * lines_per_row
        shares = min(-(-count * at_once // len(lengths)), -(-count // rows))
        batches = max(-(-count // size), shares)
        for n in range(batches):
            part = members[count * n // batches : count * (n + 1) // batches]
            places = [*part, *[None] * (size - len(part))]
            yield width, [member for device in range(devices) for member in places[device::devices]]


def rows_at_once(width: int, beam_size: int = 1) -> int:
    """Returns how many lines of this width a device decodes at once."""
    return max(1, min(MOST_ROWS, MOST_HYPOTHESES // beam_size, BATCH_TOKENS // width))


def shape_ladder(longest: int) -> list[int]:
    """Returns the widths of batches: 16, 24, 32, 48, 64, 96 ... below `longest`, and `longest`."""
    powers = (SHORTEST_SHAPE << k for k in itertools.count())
    widths = (width for power in powers for width in (power, power + power // 2))
    return [*itertools.takewhile(lambda width: width < longest, widths), longest]
