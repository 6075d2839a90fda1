"""Measures the resident memory of the daemon's processes while nobody sends requests."""

from __future__ import annotations

from pathlib import Path

from bench.server import children


def resident(pid: int) -> int:
    """Returns a process's resident memory in bytes. Raises LookupError: it has none."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise LookupError(f"process {pid} has no resident memory")


def report(supervisor: int) -> None:
    """Prints a line for each process of the daemon."""
    for pid, role in {supervisor: "supervisor", **children(supervisor)}.items():
        print(f"idle memory  {role:12} {resident(pid) / 1e6:7.1f} MB")
