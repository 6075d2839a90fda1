"""The inputs of an executable on a GPU as whoever gathers in host memory sees them: gathered there, sent in one transfer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from tensord.shm.arrays import Array
from tensord.workers.devices.device_cuda import CudaDevice, room
from tensord.workers.devices.host_staging import TOGETHER


class DeviceInputs:
    """Of one executable, in the memory that all executables of its thread gather in: filled and sent before another one's."""

    __slots__ = ("_byte_size", "_device", "_parts")

    def __init__(self, device: CudaDevice, inputs: Sequence[tuple[str, np.dtype[Any], tuple[int, ...]]]) -> None:
        """``inputs``: name, dtype, and the shape that the program takes."""
        self._device = device
        self._parts: list[tuple[str, np.dtype[Any], tuple[int, ...], int]] = []
        at = 0
        for name, dtype, shape in inputs:
            self._parts.append((name, dtype, shape, at))
            at += room(dtype, shape)
        self._byte_size = at

    @property
    def fit(self) -> bool:
        """Whether that memory has room for them."""
        return 0 < self._byte_size <= TOGETHER

    @property
    def arrays(self) -> dict[str, Array]:
        """That memory. Raises DeviceLost."""
        content = self._device.host.content
        found: dict[str, Array] = {}
        for name, dtype, shape, at in self._parts:
            byte_size = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
            found[name] = content[at : at + byte_size].view(dtype).reshape(shape)
        return found

    def send(self) -> dict[str, jax.Array]:
        """What was gathered, as arguments. Raises: Unavailable: no memory on the device.  DeviceLost."""
        return self._device.send(self._parts, self._byte_size)

    def __repr__(self) -> str:
        return f"<DeviceInputs {len(self._parts)} inputs, {self._byte_size} bytes>"
