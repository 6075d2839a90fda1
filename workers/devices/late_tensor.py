"""Input tensors in a client's GPU memory, or in a region that the worker reads by system calls.

While a request waits, the worker has no copy of such a tensor. ``numpy.asarray`` copies the tensor to host memory. Code that
can use a tensor in GPU memory uses the ``pointer`` of the ``CudaTensor`` instead.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Self

import numpy as np

from tensord.shm.arrays import Array
from tensord.shm.cuda_regions import CudaRegion
from tensord.shm.regions import SnapshotRegion


class LateTensor:
    """A tensor in a region. Its bytes are read only when they are needed. Its datatype has elements of a fixed size."""

    __slots__ = ("dtype", "nbytes", "offset", "region", "shape")

    def __init__(self, region: Any, offset: int, dtype: np.dtype[Any], shape: Sequence[int]) -> None:
        self.region = region
        self.offset = offset
        self.dtype = dtype
        self.shape = tuple(shape)
        self.nbytes = dtype.itemsize * math.prod(self.shape)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def __len__(self) -> int:
        return self.shape[0]

    def view(self, dtype: np.dtype[Any], shape: Sequence[int]) -> Self:
        """Returns a tensor of another dtype and shape at the same place in the region."""
        return type(self)(self.region, self.offset, dtype, shape)

    def reshape(self, shape: Sequence[int]) -> Self:
        """Returns a tensor of another shape at the same place in the region."""
        return type(self)(self.region, self.offset, self.dtype, shape)

    def copy_into(self, array: Array) -> None:
        """Reads this tensor into ``array``, a contiguous host array. Raises InvalidArgument if the region cannot be read."""
        if self.nbytes:
            self._read(array)
            if self.dtype == np.bool_:
                # Any byte but 0 is true on the wire; in memory a truth value may only be 0 or 1.
                np.not_equal(array.view(np.uint8), 0, out=array)

    def _read(self, array: Array) -> None:
        raise NotImplementedError

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        """Returns a copy in host memory, with the tensor's own dtype if ``dtype`` is None.

        Raises InvalidArgument if the region cannot be read, or ValueError if ``copy`` is False.
        """
        if copy is False:
            raise ValueError("a region's memory cannot be used by the host without a copy")
        array = np.empty(self.shape, self.dtype)
        self.copy_into(array)
        return array if dtype is None else array.astype(dtype, copy=False)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.dtype}{list(self.shape)} at {self.offset} of {self.region.name!r}>"


class CudaTensor(LateTensor):
    """A tensor in a client's GPU memory."""

    __slots__ = ("pointer",)
    region: CudaRegion

    def __init__(self, region: CudaRegion, offset: int, dtype: np.dtype[Any], shape: Sequence[int]) -> None:
        """Makes a tensor at ``offset`` bytes in a region. Raises InvalidArgument if it is not wholly inside the region."""
        super().__init__(region, offset, dtype, shape)
        #: Its device address. An empty tensor has none, and may lie at the region's end.
        self.pointer = region.pointer(offset, self.nbytes) if self.nbytes else 0

    def _read(self, array: Array) -> None:
        self.region.read(array.__array_interface__["data"][0], self.offset, self.nbytes)


class RegionTensor(LateTensor):
    """A tensor in a region that is not mapped. It is read by system calls. The caller has checked that it is in the region."""

    __slots__ = ()
    region: SnapshotRegion

    def _read(self, array: Array) -> None:
        self.region.read_into(self.offset, array.reshape(-1).view(np.uint8).data)
