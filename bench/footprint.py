"""Reads how many file descriptors and how much memory each process of a daemon has."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import psutil

from bench.server import children

#: The path of an arena's mappings.
_ARENA = "/memfd:tensord"


@dataclass(frozen=True, slots=True)
class Footprint:
    """File descriptors and memory of one process at one moment."""

    descriptors: int
    #: Resident and shared with nobody: of arenas what no other process has mapped now.
    private_bytes: int
    #: The part of ``private_bytes`` that is arenas; ``arenas.keep_byte_size`` of it may be kept for the next large tensors.
    arena_bytes: int = 0
    #: Kind of descriptor, such as "socket" or "memfd:tensord" -> how many of it there are.
    kinds: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, pid: int) -> Footprint:
        """Reads a process's footprint. Raises psutil.NoSuchProcess, OSError: the process has ended."""
        kinds, memory = Counter(_kinds(pid)), psutil.Process(pid)
        arenas = sum(one.private_clean + one.private_dirty for one in memory.memory_maps() if one.path == _ARENA)
        return cls(kinds.total(), memory.memory_full_info().uss, arenas, kinds)


def _kinds(pid: int) -> Iterator[str]:
    for entry in os.scandir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):
            yield os.readlink(entry.path).removesuffix(" (deleted)").partition(":[")[0].strip("/")


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
    found = 0
    for pid in (server, *children(server)):
        with contextlib.suppress(psutil.NoSuchProcess):
            found += psutil.Process(pid).memory_full_info().pss
    return int(found)
