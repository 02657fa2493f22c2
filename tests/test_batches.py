"""Lines in few static shapes, which follow from their lengths alone."""

import numpy as np
import pytest

from flaxformer_min.data.batch import padded
from flaxformer_min.decoding.batches import plan_batches, rows_at_once, shape_ladder


def test_a_batch_holds_lines_of_one_shape_and_every_line_is_in_one():
    lengths = [1, 16, 17, 40, 41, 2, 24, 25, 41, 33, *[5] * 130]
    batches = list(plan_batches(lengths, 41, lines_per_row=3))
    assert shape_ladder(41) == [16, 24, 32, 41]
    there = [(width, place) for width, places in batches for place in places if place is not None]
    assert sorted(place for _, place in there) == list(range(len(lengths)))
    assert all(len(places) == 3 * rows_at_once(width) for width, places in batches)
    for width, place in there:
        assert width == min(shape for shape in (16, 24, 32, 41) if shape >= lengths[place])
    assert [width for width, _ in batches] == [41, 32, 24, 16, 16, 16]


def test_batches_of_one_width_are_equally_full():
    sizes = [sum(p is not None for p in places) for _, places in plan_batches([9] * 50, 41)]
    assert sizes == [12, 13, 12, 13]


@pytest.mark.parametrize(
    ("longest", "ladder"),
    [(7, [7]), (16, [16]), (17, [16, 17]), (100, [16, 24, 32, 48, 64, 96, 100])],
)
def test_shapes_grow_by_half_or_a_third_up_to_the_longest(longest, ladder):
    assert shape_ladder(longest) == ladder


def test_every_device_has_as_many_rows_as_if_it_were_alone_and_an_equal_share_of_the_lines():
    lengths = [*[5] * 70, 17, 41]
    alone = {width: len(places) for width, places in plan_batches(lengths, 41)}
    together = list(plan_batches(lengths, 41, devices=3))
    assert {width: len(places) for width, places in together} == {
        w: 3 * n for w, n in alone.items()
    }
    assert [sum(place is not None for place in places) for _, places in together] == [1, 1, 35, 35]


def test_lines_are_dealt_to_the_devices_in_turn_the_longest_first():
    [(width, places)] = plan_batches([3, 9, 1, 8, 2, 11, 7], 16, devices=3)
    rows = rows_at_once(width)
    assert [places[n * rows : n * rows + 4] for n in range(3)] == [
        [5, 6, 2, None],
        [1, 0, None, None],
        [3, 4, None, None],
    ]


def test_there_are_batches_for_all_that_work_at_once_unless_rows_would_be_empty():
    def sizes(count):
        planned = plan_batches([9] * count, 41, lines_per_row=8, at_once=4)
        return [sum(place is not None for place in places) for _, places in planned]

    assert sizes(16) == [16]
    assert sizes(17) == [8, 9]
    assert sizes(60) == [15, 15, 15, 15]
    assert sizes(600) == [120, 120, 120, 120, 120]


def test_a_few_lines_of_one_width_stay_together_where_other_widths_are_work_enough():
    lengths = [*[41] * 23, *[9] * 301]
    planned = plan_batches(lengths, 41, lines_per_row=64, at_once=3)
    sizes = [(width, sum(place is not None for place in places)) for width, places in planned]
    assert sizes == [(41, 23), (16, 100), (16, 100), (16, 101)]


def test_a_beam_leaves_fewer_lines_at_once_and_no_fewer_than_one():
    assert [rows_at_once(16, beam) for beam in (1, 3, 4, 5, 51)] == [16, 16, 12, 10, 1]
    assert rows_at_once(257, 5) == 3  # so many as positions allow
    (_, places), *_ = plan_batches([9] * 50, 41, lines_per_row=2, beam_size=5)
    assert len(places) == 2 * 10


def test_ids_are_padded_to_the_width():
    found = padded([[5, 6], [], [7]], 3, 9)
    assert found.tolist() == [[5, 6, 9], [9, 9, 9], [7, 9, 9]]
    assert found.dtype == np.int32


@pytest.mark.parametrize(
    ("width", "rows"), [(16, 16), (64, 16), (65, 15), (96, 10), (1024, 1), (1025, 1)]
)
def test_a_device_decodes_16_lines_at_once_or_as_many_as_1024_positions_hold(width, rows):
    assert rows_at_once(width) == rows
