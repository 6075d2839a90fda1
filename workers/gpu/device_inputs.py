"""Inputs of an executable on a GPU that are gathered in host memory and sent in one transfer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from tensord.shm.arrays import Array
from tensord.workers.devices.device_cuda import CudaDevice, room
from tensord.workers.devices.host_staging import TOGETHER


class DeviceInputs:
    """The inputs of one executable. A thread's executables share the memory: it is filled and sent before the next one's."""

    __slots__ = ("_byte_size", "_device", "_parts")

    def __init__(self, device: CudaDevice, inputs: Sequence[tuple[str, np.dtype[Any], tuple[int, ...]]]) -> None:
        """Lays inputs out: name, dtype, and shape in the program."""
        self._device = device
        self._parts: list[tuple[str, np.dtype[Any], tuple[int, ...], int]] = []
        at = 0
        for name, dtype, shape in inputs:
            self._parts.append((name, dtype, shape, at))
            at += room(dtype, shape)
        self._byte_size = at

    @property
    def fit(self) -> bool:
        """True where the host memory has room for the inputs."""
        return 0 < self._byte_size <= TOGETHER

    @property
    def arrays(self) -> dict[str, Array]:
        """Returns arrays in host memory to gather inputs in. Raises DeviceLost."""
        content = self._device.host.content
        found: dict[str, Array] = {}
        for name, dtype, shape, at in self._parts:
            byte_size = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
            found[name] = content[at : at + byte_size].view(dtype).reshape(shape)
        return found

    def send(self) -> dict[str, jax.Array]:
        """Sends the gathered inputs to the device. Returns arguments. Raises Unavailable: it has no memory.  DeviceLost."""
        return self._device.send(self._parts, self._byte_size)

    def __repr__(self) -> str:
        return f"<DeviceInputs {len(self._parts)} inputs, {self._byte_size} bytes>"
