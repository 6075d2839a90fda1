"""Sizes of the daemon's own memory as parts of the memory that the host has, for keys that are "auto".

The host's memory is what its kernel has, or what the control groups of this process allow where that is less: a container, or a
service with ``MemoryMax=``. Source: the kernel's admin-guide/cgroup-v2.rst.
"""

from __future__ import annotations

import contextlib
import functools
import os
from pathlib import Path

_GIB = 1 << 30
_CGROUPS = Path("/sys/fs/cgroup")


def arena_byte_size() -> int:
    """Returns the most bytes of one arena: a 64th of the host's memory, between 1 and 16 GiB."""
    return min(max(host_byte_size() // 64, _GIB), 16 * _GIB)


def pinned_byte_size() -> int:
    """Returns the most bytes that one GPU worker page-locks: a 16th of the host's memory, between 1 and 64 GiB.

    Eight workers then lock at most half of it.
    """
    return min(max(host_byte_size() // 16, _GIB), 64 * _GIB)


@functools.cache
def host_byte_size() -> int:
    """Returns the bytes of the host's memory, or the limit of this process's memory control groups where that is less."""
    allowed = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for folder in _groups(Path("/proc/self/cgroup"), _CGROUPS):
        # "max": no limit. In version 1 a number beyond all memory.
        with contextlib.suppress(OSError, ValueError):
            allowed.append(int((folder / "memory.max").read_text()))
        with contextlib.suppress(OSError, ValueError):
            allowed.append(int((folder / "memory.limit_in_bytes").read_text()))
    return min(allowed)


def _groups(file: Path, root: Path) -> list[Path]:
    """Returns the folders of a process's memory control groups and of all groups that contain these.

    Args:
      file: the process's ``/proc/PID/cgroup``.
      root: where control groups are mounted. In a container it is the container's own group, whatever ``file`` says.
    """
    found = [root, root / "memory"]
    with contextlib.suppress(OSError):
        for line in file.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "" or "memory" in controllers.split(","):
                top = root if controllers == "" else root / "memory"
                inner = top / path.lstrip("/")
                found += [inner, *(folder for folder in inner.parents if folder.is_relative_to(top))]
    return found
