"""Shares work on large memory between threads, slice by slice: copying a push's parameters, or mapping their pages."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

#: Bytes of a slice. A thread asks for Python's lock a few times for each, and what it has just cleared is still in its cache.
SLICE = 1 << 20
#: More threads than these gain nothing: they wait for the kernel's locks, and for the host's memory.
_MOST_THREADS = 8


def threads_for(byte_size: int) -> int:
    """Returns how many threads share work on so many bytes: at most one for each slice, and at most half of the processors.

    Never two: several threads that fill new memory take twice the processor time of a single one, so two are no faster.
    """
    threads = min(-(-byte_size // SLICE), _MOST_THREADS, len(os.sched_getaffinity(0)) // 2)
    return threads if threads > 2 else 1


def in_slices(byte_size: int, work: Callable[[int, int], object]) -> None:
    """Calls ``work(start, end)`` once for each slice of some memory, and returns when all calls have returned.

    The calls are shared by at most half as many threads as there are processors that this thread may run on, because the worker
    computes meanwhile. No thread is left at the end.

    Args:
      byte_size: of the memory.
      work: must be safe to call from several threads at once, and should let go of Python's lock for most of its time.
    Raises whatever ``work`` raises; the other threads have ended by then, too.
    """
    starts = range(0, byte_size, SLICE)
    threads = threads_for(byte_size)

    def share(starts: range) -> None:
        for start in starts:
            work(start, min(start + SLICE, byte_size))

    if threads < 2:
        share(starts)
        return
    with ThreadPoolExecutor(threads, "parameters") as pool:
        # Taken one by one, so that the first error is raised.
        for _ in pool.map(share, [starts[first::threads] for first in range(threads)]):
            pass
