"""An output on the GPU, which stays there until it is known where it goes: to a region on the device, or to the host.

It has an array's shape, dtype and size, can be cut into rows and reshaped, and turns into an array of the host on demand.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from tensord.shm.arrays import Array, address_of
from tensord.shm.cuda_regions import Context
from tensord.workers.devices.client_memory import may_be_written


class DeviceArray:
    """An array in contiguous device memory, which ``owner`` keeps alive."""

    __slots__ = ("_context", "_owner", "dtype", "nbytes", "pointer", "shape")

    def __init__(self, context: Context, owner: Any, pointer: int, dtype: np.dtype[Any], shape: Sequence[int]) -> None:
        self._context = context
        self._owner = owner
        self.pointer = pointer
        self.dtype = dtype
        self.shape = tuple(shape)
        self.nbytes = dtype.itemsize
        for size in self.shape:
            self.nbytes *= size

    @property
    def whole(self) -> jax.Array | None:
        """XLA's array, if this is all of it in its shape, so that it can be an argument as it is; else None."""
        owner = self._owner
        same = isinstance(owner, jax.Array) and owner.shape == self.shape and owner.dtype == self.dtype
        return owner if same else None

    def __getitem__(self, rows: slice) -> DeviceArray:
        """Returns a range of rows, without a copy."""
        start, stop, step = rows.indices(self.shape[0])
        assert step == 1
        row = self.nbytes // self.shape[0] if self.shape[0] else 0
        shape = (max(stop - start, 0), *self.shape[1:])
        return DeviceArray(self._context, self._owner, self.pointer + start * row, self.dtype, shape)

    def reshape(self, shape: Sequence[int]) -> DeviceArray:
        """Returns these bytes in another shape."""
        return DeviceArray(self._context, self._owner, self.pointer, self.dtype, shape)

    def copy(self) -> DeviceArray:
        """Returns a copy in memory that XLA owns. Raises DeviceLost."""
        made = jax.block_until_ready(jax.device_put(np.asarray(self)))
        return DeviceArray(self._context, made, made.unsafe_buffer_pointer(), self.dtype, self.shape)

    def copy_into(self, memory: memoryview) -> None:
        """Copies to as many bytes of host memory, also a client's, and waits for it. Raises DeviceLost."""
        if not self.nbytes:
            return
        if may_be_written(memory):
            self._fetch(address_of(memory))
        else:
            memory[:] = np.asarray(self).reshape(-1).view(np.uint8).data

    def _fetch(self, address: int) -> None:
        if self.nbytes:
            self._context.enter()
            self._context.to_host(address, self.pointer, self.nbytes)
            self._context.synchronize()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        """Returns a copy in host memory. Raises as ``copy_into``."""
        if copy is False:
            raise ValueError("GPU memory cannot be used by the host without a copy")
        array = np.empty(self.shape, self.dtype)
        self._fetch(address_of(array))
        return array if dtype is None else array.astype(dtype, copy=False)

    def tobytes(self) -> bytes:
        """Returns the content as bytes in host memory."""
        return np.asarray(self).tobytes()

    def __repr__(self) -> str:
        return f"<DeviceArray {self.dtype}{list(self.shape)}>"
