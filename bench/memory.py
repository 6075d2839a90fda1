"""Resident memory of the daemon's processes when nobody asks for anything."""

from __future__ import annotations

from pathlib import Path


def children(pid: int) -> list[int]:
    """The direct children of a process."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def resident(pid: int) -> int:
    """Resident bytes."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise LookupError(f"process {pid} has no resident memory")


def report(supervisor: int) -> None:
    """Prints one line a process."""
    for pid in (supervisor, *children(supervisor)):
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
        role = next((m for m in ("daemon.http", "workers") if f"-m {m}" in command), "supervisor")
        print(f"idle memory  {role:12} {resident(pid) / 1e6:7.1f} MB")
