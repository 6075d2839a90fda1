"""Tells whether the kernel has killed a process of this daemon's control group for want of memory.

The control group has a counter of such kills: ``oom_kill`` of ``memory.events`` (cgroup v2), or of ``memory.oom_control`` (v1).
It counts kills for the group's own limit and, in v2, for the host's memory as well. Source: the kernel's
admin-guide/cgroup-v2.rst.
"""

from __future__ import annotations

from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")


class MemoryKills:
    """Reads one control group's counter of processes killed for want of memory.

    ``file``: the counter's file; None: there is none.
    """

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self._last = self._count()

    @classmethod
    def own(cls) -> MemoryKills:
        """Creates the object for the control group that this process is in."""
        return cls(_own_file(_read(Path("/proc/self/cgroup")), _CGROUPS))

    def grew(self) -> bool:
        """Returns whether a process of the control group was killed for want of memory since the last call."""
        before, self._last = self._last, self._count()
        return self._last > before

    def _count(self) -> int:
        for line in ("" if self._file is None else _read(self._file)).splitlines():
            name, _, count = line.partition(" ")
            if name == "oom_kill" and count.isdecimal():
                return int(count)
        return 0

    def __repr__(self) -> str:
        return f"<MemoryKills {self._last} in {self._file}>"


def _own_file(groups: str, root: Path) -> Path | None:
    """Returns the file with the counter of the control group that ``groups`` (/proc/PID/cgroup) names; None if there is none.

    ``root``: where control groups are mounted.
    """
    for line in groups.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            folders = root / path.lstrip("/"), root
            name = "memory.events"
        elif "memory" in controllers.split(","):
            # Within a container the path is often that of the host.
            folders = root / "memory" / path.lstrip("/"), root / "memory"
            name = "memory.oom_control"
        else:
            continue
        for folder in folders:
            if (folder / name).is_file():
                return folder / name
    return None


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
