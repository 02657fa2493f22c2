"""The nearest-neighbour yardstick."""

from benchmarks.lookup import nearest_neighbours


def test_the_nearest_source_shares_the_most_trigrams_for_its_length() -> None:
    # "abcd" has five trigrams: "  a", " ab", "abc", "bcd" and "cd ". "abce" shares three of its
    # five, 2 * 3 / (5 + 5) = 0.6; "abcdefghi" four of its ten, 2 * 4 / (5 + 10) = 0.53.
    assert nearest_neighbours(["xyz", "abcdefghi", "abce"], ["abcd"]) == [2]


def test_ends_of_a_text_count() -> None:
    assert nearest_neighbours(["abc", "xabcx"], ["abc"]) == [0]
    assert nearest_neighbours(["xabcx", "abc"], ["abc"]) == [1]


def test_the_first_of_equally_near_sources_is_taken() -> None:
    assert nearest_neighbours(["in 3 days", "in 4 days", "in 3 days"], ["in 3 days"]) == [0]
    assert nearest_neighbours(["abc", "def"], ["uvw", "def"]) == [0, 1]
