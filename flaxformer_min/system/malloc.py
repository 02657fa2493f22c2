"""How a CPU allocates the memory that a training step works in."""

import ctypes
import sys

import jax

# Parameters of mallopt(3), from glibc's malloc.h.
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
NEVER, NONE = -1, 0


def keep_work_space() -> None:
    """Makes this process keep the work space of a step for the next one; call it before using JAX.

    XLA's CPU client allocates a step's work space when the step begins and frees it when it ends.
    By default glibc maps so large a block from the kernel and unmaps it again, and the kernel
    clears every page when it is touched: a quarter of the time of a small model's step (LOG.md).
    Here glibc is told to take large blocks from the heap and never to shrink the heap. Only the
    main thread allocates from that heap, so that asynchronous dispatch is turned off too: the main
    thread runs the step itself, instead of handing it to another one.

    Other devices are not affected. If the C library is not glibc, only dispatch is changed.
    """
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(M_MMAP_MAX, NONE)
        mallopt(M_TRIM_THRESHOLD, NEVER)
