"""Reads the memory control groups of this process: their limits, the memory left, and the processes killed for want of memory.

Both versions of control groups are read. The processes of a group must keep the limits of all groups around it, too.
Source: the kernel's admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst.
"""

from __future__ import annotations

import contextlib
import functools
import os
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

_GIB = 1 << 30
#: Where the kernel says which groups hold this process, and where groups are mounted.
_OWN = Path("/proc/self/cgroup")
_ROOT = Path("/sys/fs/cgroup")


class _FileNames(NamedTuple):
    limit: str
    used: str
    events: str
    cache: str
    shared: str


_NAMES = {
    1: _FileNames("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.oom_control", "total_cache", "total_shmem"),
    2: _FileNames("memory.max", "memory.current", "memory.events", "file", "shmem"),
}


@dataclass(frozen=True, slots=True)
class MemoryGroup:
    """A memory control group of Linux. ``version`` is 1 or 2, and ``folder`` has the group's files."""

    folder: Path
    version: int = 2

    @property
    def limit(self) -> int | None:
        """Returns how many bytes of memory the control group's processes may use together, or None if there is no limit.

        In version 1 of Linux control groups, the kernel reports "no limit" as a very large number, which is returned.
        """
        return self._number(_NAMES[self.version].limit)

    @property
    def left(self) -> int | None:
        """Returns how many more bytes of memory the group's processes may use, or None if there is no limit.

        Page cache counts as free, because the kernel frees it when memory gets short. Shared memory does not count as free.
        """
        names = _NAMES[self.version]
        limit, used = self.limit, self._number(names.used)
        if limit is None or used is None:
            return None
        said = self._lines("memory.stat")
        return limit - used + max(0, said.get(names.cache, 0) - said.get(names.shared, 0))

    @property
    def kills(self) -> int | None:
        """Returns how many processes of this control group the kernel has killed because memory ran out.

        The result is None if the kernel reports no count for this group. A count of version 2 of control groups includes
        processes that were killed because the host had no memory left.
        """
        return self._lines(_NAMES[self.version].events).get("oom_kill")

    def _number(self, name: str) -> int | None:
        with contextlib.suppress(OSError, ValueError):
            return int((self.folder / name).read_text())
        return None

    def _lines(self, name: str) -> dict[str, int]:
        found: dict[str, int] = {}
        with contextlib.suppress(OSError):
            for line in (self.folder / name).read_text().splitlines():
                key, _, number = line.partition(" ")
                if number.isdecimal():
                    found[key] = int(number)
        return found


def memory_groups() -> list[MemoryGroup]:
    """Returns the control groups that may limit the memory of this process. An inner group comes before the groups around it.

    The root groups of versions 1 and 2 are always in the result. If a group does not exist, the group's ``limit`` is None.
    """
    found: list[MemoryGroup] = []
    with contextlib.suppress(OSError):
        for line in _OWN.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "" or "memory" in controllers.split(","):
                version, root = (2, _ROOT) if controllers == "" else (1, _ROOT / "memory")
                inner = root / path.lstrip("/")
                # A path with ".." leads out of what is mounted here.
                folders = [] if ".." in inner.parts else [inner, *inner.parents]
                found += [MemoryGroup(folder, version) for folder in folders if folder.is_relative_to(root)]
    # In a container the kernel may give a path of the host, and the root is then the container's own group.
    roots = [MemoryGroup(_ROOT, 2), MemoryGroup(_ROOT / "memory", 1)]
    return [*found, *(root for root in roots if root not in found)]


def arena_byte_size() -> int:
    """Returns the default limit of an arena's bytes: a 64th of the host's memory, at least 1 GiB and at most 16 GiB."""
    return min(max(host_byte_size() // 64, _GIB), 16 * _GIB)


def pinned_byte_size() -> int:
    """Returns the default limit of the bytes that a GPU worker page-locks: a 16th of the host's memory, from 1 GiB to 64 GiB."""
    return min(max(host_byte_size() // 16, _GIB), 64 * _GIB)


@functools.cache
def host_byte_size() -> int:
    """Returns the size of the host's memory in bytes, or the limit of this process's control groups if that is smaller."""
    allowed = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    allowed += [limit for group in memory_groups() if (limit := group.limit) is not None]
    return min(allowed)
