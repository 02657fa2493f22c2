"""Work that threads do ahead of the one who needs it."""

import collections
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def map_ahead(
    function: Callable[[Item], Result], items: Iterable[Item], *, threads: int, ahead: int
) -> Generator[Result, None, None]:
    """Yields function(item) of each item, in the items' order, `ahead` items before they are due.

    While one result is in use, the next `ahead` items are at work or done, in `threads` threads. An
    error of the function is raised in place of its result. Closing the generator waits for the
    calls at work and ends the threads.
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
