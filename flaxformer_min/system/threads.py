"""Work that several threads share."""

import collections
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def in_order(
    function: Callable[[Item], Result], items: Iterable[Item], threads: int
) -> Iterator[Result]:
    """function(item) of each item, in the order of the items, from several threads.

    The threads work ahead of the caller: a result is given out once `threads` later items have
    been handed to them. A caller that stops early waits for the calls that have begun.
    """
    pool = ThreadPoolExecutor(threads)
    pending: collections.deque[Future[Result]] = collections.deque()
    try:
        for item in items:
            pending.append(pool.submit(function, item))
            if len(pending) > threads:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
