"""Work done ahead comes in order, stops with whoever asked for it, and hides no error."""

import itertools
import threading
import time

import pytest

from flaxformer_min.system.threads import map_ahead


def test_results_come_in_the_order_of_the_items():
    def slow_if_even(n: int) -> int:
        time.sleep(0.002 * (n % 2 == 0))
        return n * n

    for threads in (1, 3):
        squares = map_ahead(slow_if_even, range(23), threads=threads, ahead=5)
        assert list(squares) == [n * n for n in range(23)]


def test_no_more_items_are_taken_than_are_to_be_ahead():
    taken = itertools.count()
    results = map_ahead(lambda n: n, taken, threads=1, ahead=3)
    assert [next(results), next(results)] == [0, 1]
    results.close()
    assert next(taken) == 2 + 3


def test_an_error_comes_in_place_of_the_result_and_ends_the_threads():
    before = set(threading.enumerate())
    results = map_ahead(lambda n: 1 // (2 - n), range(9), threads=2, ahead=2)
    assert [next(results), next(results)] == [0, 1]
    with pytest.raises(ZeroDivisionError):
        next(results)
    assert not set(threading.enumerate()) - before


def test_a_consumer_that_stops_leaves_no_thread():
    before = set(threading.enumerate())
    for _ in map_ahead(abs, itertools.count(), threads=2, ahead=4):
        break
    assert not set(threading.enumerate()) - before
