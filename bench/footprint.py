"""Reads how many file descriptors and how much memory each process of a daemon has."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from bench.server import children


@dataclass(frozen=True, slots=True)
class Footprint:
    """File descriptors and memory of one process at one moment."""

    descriptors: int
    #: Resident and shared with nobody. Arenas are in ``shared_bytes``, but for what no other process has mapped now.
    private_bytes: int
    shared_bytes: int
    #: The part of ``private_bytes`` that is arenas; ``arenas.keep_byte_size`` of it may be kept for the next large tensors.
    arena_bytes: int = 0
    #: Kind of descriptor, such as "socket" or "memfd:tensord" -> how many of it there are.
    kinds: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, pid: int) -> Footprint:
        """Reads a process's footprint from /proc. Raises OSError: the process has ended."""
        kilobytes = {"Private": 0, "Shared": 0}
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            kind = line.partition("_")[0]
            if kind in kilobytes:
                kilobytes[kind] += int(line.split()[1])
        kinds = Counter(_kinds(pid))
        private, shared, arenas = kilobytes["Private"] << 10, kilobytes["Shared"] << 10, _arena_kilobytes(pid) << 10
        return cls(kinds.total(), private, shared, arenas, kinds)


def _kinds(pid: int) -> Iterator[str]:
    for entry in os.scandir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):
            yield os.readlink(entry.path).removesuffix(" (deleted)").partition(":[")[0].strip("/")


def _arena_kilobytes(pid: int) -> int:
    """Counts resident memory of arenas' segments that no other process has mapped."""
    found, inside = 0, False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        name = line.split(maxsplit=1)[0]
        if not name.endswith(":"):  # the first line of a mapping
            inside = "/memfd:tensord " in line
        elif inside and name.startswith("Private_"):
            found += int(line.split()[1])
    return found


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
