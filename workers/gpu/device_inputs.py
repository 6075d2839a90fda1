"""Inputs of an executable on a GPU that are gathered in host memory and sent to the GPU in one transfer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from tensord.shm.arrays import Array
from tensord.workers.devices.device_cuda import CudaDevice, room
from tensord.workers.devices.host_staging import TOGETHER


class DeviceInputs:
    """The inputs of one executable on a GPU, laid out in host memory.

    All executables of a thread share this memory: inputs are gathered and sent before those of the next executable are gathered.
    """

    __slots__ = ("_byte_size", "_device", "_parts")

    def __init__(self, device: CudaDevice, inputs: Sequence[tuple[str, np.dtype[Any], tuple[int, ...]]]) -> None:
        """Lays the inputs out. ``inputs``: name, dtype, and shape in the program of each input."""
        self._device = device
        self._parts: list[tuple[str, np.dtype[Any], tuple[int, ...], int]] = []
        at = 0
        for name, dtype, shape in inputs:
            self._parts.append((name, dtype, shape, at))
            at += room(dtype, shape)
        self._byte_size = at

    @property
    def fit(self) -> bool:
        """True if the host memory has room for all inputs."""
        return 0 < self._byte_size <= TOGETHER

    @property
    def arrays(self) -> dict[str, Array]:
        """The arrays in host memory to gather the inputs in, by name. Raises DeviceLost if the GPU failed."""
        content = self._device.host.content
        found: dict[str, Array] = {}
        for name, dtype, shape, at in self._parts:
            byte_size = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
            found[name] = content[at : at + byte_size].view(dtype).reshape(shape)
        return found

    def send(self) -> dict[str, jax.Array]:
        """Sends the gathered inputs to the GPU. Returns them as arguments of the program.

        Raises: Unavailable: the GPU has no memory left.  DeviceLost: the GPU failed.
        """
        return self._device.send(self._parts, self._byte_size)

    def __repr__(self) -> str:
        return f"<DeviceInputs {len(self._parts)} inputs, {self._byte_size} bytes>"
