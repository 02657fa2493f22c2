"""Calls a function for many jobs in several processes, as compiling is slow."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from typing import Any

MEMORY = 3 * 2**30  # bytes that the compiler for TPUs takes for a large program


def room(jobs: int) -> int:
    """Returns how many processes are worth starting: by jobs, cores and free memory."""
    affinity = getattr(os, "sched_getaffinity", None)  # macOS has none
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    pages = "SC_AVPHYS_PAGES" if "SC_AVPHYS_PAGES" in os.sysconf_names else "SC_PHYS_PAGES"
    free = os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE")
    return max(1, min(jobs, cores, free // MEMORY))


def each(
    function: Callable[[Any], Any], jobs: Sequence[Any], processes: int
) -> Iterator[tuple[int, Any]]:
    """Yields the number of each job and function(job), in the order in which they are done.

    One process is this one. Others are started anew and import what they need, because a fork of a
    process that uses JAX hangs. An error of the function is raised here; it ends the others, and so
    does Ctrl-C. Raises MemoryError if the system ends a process.
    """
    if processes == 1:
        yield from enumerate(map(function, jobs))
        return
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(processes, context, _end_with_parent)
    try:
        numbers = {pool.submit(function, job): number for number, job in enumerate(jobs)}
        for future in as_completed(numbers):
            yield numbers[future], future.result()
    except BaseException as error:
        for process in multiprocessing.active_children():
            process.kill()  # it would compile to the end first
        if isinstance(error, BrokenProcessPool):
            raise MemoryError("a process that compiles was killed: is memory short?") from error
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _end_with_parent() -> None:
    """Leaves Ctrl-C to the parent, and ends this process when the parent has ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
