"""The memory a training step works in, on a CPU."""

import ctypes
import sys

import jax

# Parameters of mallopt(3), from glibc's malloc.h.
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
NEVER, NONE = -1, 0


def keep_work_space() -> None:
    """Makes this process keep what a step worked in for the next step; call it before JAX starts.

    XLA's CPU client allocates a step's work space when the step begins and frees it when it ends.
    glibc would map so large a block from the kernel and unmap it again, and the kernel clears every
    page when it is touched: a quarter of the time of a small model's step (LOG.md). So large blocks
    shall come from the heap and the heap shall not shrink. Only the main thread allocates from that
    heap, so the main thread itself runs the step instead of handing it to another one.

    Does nothing to other devices, and nothing where the C library is not glibc.
    """
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(M_MMAP_MAX, NONE)
        mallopt(M_TRIM_THRESHOLD, NEVER)
