"""Takes away a process's ability to open more files, while a block runs."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator


@contextlib.contextmanager
def no_descriptors_left(pid: int = 0, whatever_closes: bool = False) -> Iterator[int]:
    """Lets a process (0: this one) open no more files within the block; those that are open stay usable.

    ``whatever_closes``: also not in place of one that it closes meanwhile. Yields the limit on descriptor numbers that holds
    meanwhile.
    """
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    taken = {int(fd) for fd in os.listdir(f"/proc/{pid or 'self'}/fd")}
    if not pid:
        # Of this process's own the listing has its descriptor as well.
        taken = {fd for fd in taken if os.path.exists(f"/proc/self/fd/{fd}")}
    lowest = 3 if whatever_closes else next(number for number in range(len(taken) + 1) if number not in taken)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (lowest, before[1]))
    try:
        yield lowest
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
