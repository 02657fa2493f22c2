"""Computes results in threads before they are needed."""

import collections
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def map_ahead(
    function: Callable[[Item], Result], items: Iterable[Item], *, threads: int, ahead: int
) -> Generator[Result, None, None]:
    """Yields function(item) for each item, in the items' order, computed ahead in threads.

    While the caller uses one result, `threads` threads compute the next `ahead` results; no more
    items than these are taken. An error of the function is raised in place of its result. Closing
    the generator, or dropping it, waits for the calls that are running and ends the threads.
    """
    pool = ThreadPoolExecutor(threads)
    results: collections.deque[Future[Result]] = collections.deque()
    try:
        for item in items:
            results.append(pool.submit(function, item))
            if len(results) > ahead:
                yield results.popleft().result()
        while results:
            yield results.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
