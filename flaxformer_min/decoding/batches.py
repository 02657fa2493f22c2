"""Lines in few static shapes: which line is decoded in which batch.

The shape depends on a line's own length alone, so what surrounds it cannot change how it is
computed.
"""

import bisect
import itertools
from collections.abc import Iterable, Iterator, Sequence

from tqdm import tqdm

# A device decodes at most this many lines at once, and at most this many source positions, padding
# counted. More lines share more of each step's fixed cost, which on a CPU gains nothing beyond 16.
MOST_ROWS, BATCH_TOKENS = 16, 1024
# The lines in a search's batch for each row. Rows stand idle only at the end of a batch, so more
# lines waste less; but a caller waits for a whole batch.
LINES_PER_ROW = 8
SHORTEST_SHAPE = 16  # shorter shapes would save little and have to be compiled

Planned = tuple[int, list[int | None]]  # the width of a batch, and the line in each of its places


def plan_batches(
    lengths: Sequence[int], longest: int, devices: int = 1, lines_per_row: int = 1, at_once: int = 1
) -> Iterator[Planned]:
    """(width, members) of each batch: indices of lengths of at most `width`, None in empty places.

    Every index occurs once, those of longer lengths first. The width follows from the length alone.
    Batches of one width are about equally full, and there are `at_once` or more of them if that
    leaves no row empty. Each device has the same share of a batch, as many places as if it were
    alone, and the members are dealt to the devices in turn.
    """
    shapes = shape_ladder(longest)

    def rung_of(member: int) -> int:
        return bisect.bisect_left(shapes, lengths[member])

    by_length = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
    for rung, group in itertools.groupby(by_length, rung_of):
        members, width = list(group), shapes[rung]
        rows = rows_at_once(width) * devices
        size = rows * lines_per_row
        batches = max(-(-len(members) // size), min(at_once, -(-len(members) // rows)))
        for n in range(batches):
            part = members[len(members) * n // batches : len(members) * (n + 1) // batches]
            places = [*part, *[None] * (size - len(part))]
            yield width, [member for device in range(devices) for member in places[device::devices]]


def rows_at_once(width: int) -> int:
    """The number of lines of this width that a device decodes at once."""
    return max(1, min(MOST_ROWS, BATCH_TOKENS // width))


def shape_ladder(longest: int) -> list[int]:
    """The widths that batches have: 16, 24, 32, 48, 64, 96 ... below `longest`, and `longest`."""
    powers = (SHORTEST_SHAPE << k for k in itertools.count())
    widths = (width for power in powers for width in (power, power + power // 2))
    return [*itertools.takewhile(lambda width: width < longest, widths), longest]


def show_progress(batches: Iterable[Planned], lines: int) -> Iterator[Planned]:
    """The batches, with a progress bar over all `lines` if standard error is a terminal."""
    with tqdm(total=lines, unit=" lines", leave=False, disable=None) as bar:  # None: no terminal
        for width, members in batches:
            yield width, members
            bar.update(sum(member is not None for member in members))
