"""Reads how many file descriptors and how much memory each process of a daemon has."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

from bench.server import children


@dataclass(frozen=True, slots=True)
class Footprint:
    """File descriptors and memory of one process at one moment."""

    descriptors: int
    #: Resident and shared with nobody. Arenas are shared: they are in ``shared_bytes``.
    private_bytes: int
    shared_bytes: int

    @classmethod
    def of(cls, pid: int) -> Footprint:
        """Reads a process's footprint from /proc. Raises OSError: the process has ended."""
        kilobytes = {"Private": 0, "Shared": 0}
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            kind = line.partition("_")[0]
            if kind in kilobytes:
                kilobytes[kind] += int(line.split()[1])
        return cls(len(os.listdir(f"/proc/{pid}/fd")), kilobytes["Private"] << 10, kilobytes["Shared"] << 10)


def footprints(supervisor: int) -> dict[str, Footprint]:
    """Reads the footprints of a supervisor and its children: role -> footprint.

    Several processes of one role are numbered in the order in which they were started: "workers", "workers 2", ...
    """
    found: dict[str, Footprint] = {}
    for pid, module in sorted({supervisor: "supervisor", **children(supervisor)}.items()):
        name, number = module, 1
        while name in found:
            number += 1
            name = f"{module} {number}"
        found[name] = Footprint.of(pid)
    return found


def proportional(server: int) -> int:
    """Returns the proportional set size of a process and its children in bytes: memory that they share counts once."""
    kilobytes = 0
    for pid in (server, *children(server)):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    kilobytes += int(line.split()[1])
    return kilobytes << 10
