"""Resident memory of the daemon's processes when nobody asks for anything."""

from __future__ import annotations

from pathlib import Path

from bench.server import children


def resident(pid: int) -> int:
    """Resident bytes."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise LookupError(f"process {pid} has no resident memory")


def report(supervisor: int) -> None:
    """Prints one line a process."""
    for pid, role in {supervisor: "supervisor", **children(supervisor)}.items():
        print(f"idle memory  {role:12} {resident(pid) / 1e6:7.1f} MB")
