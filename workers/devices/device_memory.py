"""Checks that a device has enough memory left for a model. If memory runs out later, XLA or the kernel may end the process.

A GPU has as much memory left as XLA's allocator may still allocate. The CPU devices of a process share the
memory that the kernel can give without swapping, within the limits of the process's control groups.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

import jax

from tensord.config.control_groups import memory_groups
from tensord.shm.errors import Internal


def check(model: str, what: str, byte_size: int, devices: Sequence[jax.Device]) -> None:
    """Raises Internal if not every one of ``devices`` has ``byte_size`` bytes of memory left.

    ``what`` is the beginning of the error's sentence, such as "its parameters need".
    """
    shared = len(devices) if devices[0].platform == "cpu" else 1
    left = min((free for device in devices if (free := _left(device)) is not None), default=None)
    if left is not None and byte_size * shared > left:
        on = f"on each of {len(devices)} devices" if len(devices) > 1 else f"on {devices[0]}"
        raise Internal(f"model '{model}': {what} {byte_size} bytes {on}, {left // shared} are left")


def _left(device: jax.Device) -> int | None:
    """Returns how many bytes of memory the device has left, or None if that is not known."""
    if device.platform == "cpu":
        return _host_left()
    figures = device.memory_stats() or {}
    if "bytes_limit" not in figures:
        return None
    return int(figures["bytes_limit"] - figures.get("bytes_in_use", 0))


def _host_left() -> int | None:
    found: list[int] = []
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        found.append(int(next(line for line in lines if line.startswith("MemAvailable:")).split()[1]) * 1024)
    found += [left for group in memory_groups() if (left := group.left) is not None]
    return min(found, default=None)
