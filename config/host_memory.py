"""Default sizes of the daemon's memory, as fractions of the host's memory, for configuration keys that are "auto".

The host's memory is what its kernel has, or what the control groups of this process allow where that is less: a container, or a
service with ``MemoryMax=``.
"""

from __future__ import annotations

import functools
import os

from tensord.config.control_groups import memory_groups

_GIB = 1 << 30


def arena_byte_size() -> int:
    """Returns the default size limit of one arena: a 64th of the host's memory, from 1 to 16 GiB."""
    return min(max(host_byte_size() // 64, _GIB), 16 * _GIB)


def pinned_byte_size() -> int:
    """Returns the most bytes of host memory that one GPU worker page-locks: a 16th of the host's, between 1 and 64 GiB.

    Eight workers then lock at most half of it.
    """
    return min(max(host_byte_size() // 16, _GIB), 64 * _GIB)


@functools.cache
def host_byte_size() -> int:
    """Returns the bytes of the host's memory, or the limit of this process's memory control groups where that is less."""
    allowed = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    allowed += [limit for group in memory_groups() if (limit := group.limit) is not None]
    return min(allowed)
