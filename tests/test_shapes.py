"""Lines in few static shapes, which follow from their lengths alone."""

import numpy as np
import pytest

from flaxformer_min.shapes import padded, plan_batches, shape_ladder


def test_a_batch_holds_lines_of_one_shape_and_every_line_is_in_one():
    lengths = [1, 16, 17, 40, 41, 2, 24, 25, 41, 33, *[5] * 130]
    batches = list(plan_batches(lengths, 41))
    assert shape_ladder(41) == [16, 24, 32, 41]
    assert sorted(place for *_, places in batches for place in places) == list(range(len(lengths)))
    shapes = {}
    for rows, width, places in batches:
        assert 0 < len(places) <= rows
        assert shapes.setdefault(width, rows) == rows
        for place in places:
            assert width == min(shape for shape in (16, 24, 32, 41) if shape >= lengths[place])


@pytest.mark.parametrize(
    ("longest", "ladder"),
    [(7, [7]), (16, [16]), (17, [16, 17]), (100, [16, 24, 32, 48, 64, 96, 100])],
)
def test_shapes_grow_by_half_or_a_third_up_to_the_longest(longest, ladder):
    assert shape_ladder(longest) == ladder


def test_every_device_has_as_many_rows_as_if_it_were_alone():
    lengths = [*[5] * 70, 17, 41]
    alone = {width: rows for rows, width, _ in plan_batches(lengths, 41)}
    together = list(plan_batches(lengths, 41, devices=3))
    assert {width: rows for rows, width, _ in together} == {w: 3 * r for w, r in alone.items()}
    assert [len(places) for *_, places in together] == [48, 22, 1, 1]


def test_what_a_batch_lacks_is_padding():
    found = padded([[5, 6], [], [7]], 5, 3, 9)
    assert found.tolist() == [[5, 6, 9], [9, 9, 9], [7, 9, 9], [9, 9, 9], [9, 9, 9]]
    assert found.dtype == np.int32
