"""Arrays in GPU memory, such as a model's outputs, and functions that decide whether the GPU's driver may access host memory.

A client can truncate the file of its shared memory at any time. If the GPU's driver then accesses a page that is gone, the GPU
may become unusable for all requests. So the driver may access a client's memory only while the memory is page-locked. The host
copies tensors to and from a client's memory that is not page-locked. If the host accesses a page that is gone, only the request
fails (``shm/guard.py``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from tensord.shm import guard
from tensord.shm.arrays import Array, address_of
from tensord.shm.cuda_regions import Context


class GpuArray:
    """An array in contiguous GPU memory at the address ``pointer``. ``owner`` is the object that keeps the memory allocated."""

    __slots__ = ("_context", "_owner", "dtype", "nbytes", "pointer", "shape")

    def __init__(self, context: Context, owner: Any, pointer: int, dtype: np.dtype[Any], shape: Sequence[int]) -> None:
        self._context = context
        self._owner = owner
        self.pointer = pointer
        self.dtype = dtype
        self.shape = tuple(shape)
        self.nbytes = dtype.itemsize * math.prod(self.shape)

    @property
    def whole(self) -> jax.Array | None:
        """The ``jax.Array`` that owns the memory, or None if the owner is no jax.Array or has another shape or dtype."""
        owner = self._owner
        same = isinstance(owner, jax.Array) and owner.shape == self.shape and owner.dtype == self.dtype
        return owner if same else None

    def __getitem__(self, rows: slice) -> GpuArray:
        """Returns an array of some of the rows, which shares this array's memory."""
        start, stop, step = rows.indices(self.shape[0])
        assert step == 1
        row = self.nbytes // self.shape[0] if self.shape[0] else 0
        shape = (max(stop - start, 0), *self.shape[1:])
        return GpuArray(self._context, self._owner, self.pointer + start * row, self.dtype, shape)

    def reshape(self, shape: Sequence[int]) -> GpuArray:
        """Returns an array of another shape that shares this array's memory."""
        return GpuArray(self._context, self._owner, self.pointer, self.dtype, shape)

    def copy(self) -> GpuArray:
        """Returns a copy of this array in device memory that XLA owns. Raises DeviceLost if the GPU failed."""
        made = jax.block_until_ready(jax.device_put(np.asarray(self)))
        return GpuArray(self._context, made, made.unsafe_buffer_pointer(), self.dtype, self.shape)

    def copy_into(self, memory: memoryview) -> None:
        """Copies this array to host memory of the same size, which may be a client's. Raises DeviceLost if the GPU failed."""
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
        """Returns a copy of the array in host memory, with the datatype ``dtype`` if it is not None.

        Raises ValueError if ``copy`` is False, and DeviceLost if the GPU failed.
        """
        if copy is False:
            raise ValueError("GPU memory cannot be used by the host without a copy")
        array = np.empty(self.shape, self.dtype)
        self._fetch(address_of(array))
        return array if dtype is None else array.astype(dtype, copy=False)

    def tobytes(self) -> bytes:
        return np.asarray(self).tobytes()

    def __repr__(self) -> str:
        return f"<GpuArray {self.dtype}{list(self.shape)}>"


def standing(array: Array) -> Array:
    """Returns an array that the GPU's driver can read safely: contiguous, and a copy if a client could take away its memory."""
    if guard.may_be_missing(address_of(array)):
        return array.copy()
    if array.nbytes:
        _look(array.reshape(-1).view(np.uint8).data)
    return array


def may_be_written(memory: memoryview) -> bool:
    """Returns whether the GPU's driver may write to this memory. It is False if a client could take the memory away."""
    if guard.may_be_missing(address_of(memory)):
        return False
    _look(memory)
    return True


def _look(memory: memoryview) -> None:
    # So shm.guard notices before the driver does that a client has truncated the file.
    memory[-1]
