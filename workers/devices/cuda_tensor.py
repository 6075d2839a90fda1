"""An input tensor in a client's GPU memory, which is copied only when and where it is needed.

It has the shape, dtype and size of an array and turns into an array on demand, so queues, buckets and models that run on the host
treat it as an array; code that can use the tensor on the device uses ``pointer`` instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tensord.shm.arrays import Array
from tensord.shm.cuda_regions import CudaRegion


class CudaTensor:
    """A tensor of fixed-size elements at an offset of a CUDA region; its range is checked when the object is made."""

    __slots__ = ("dtype", "nbytes", "offset", "pointer", "region", "shape")

    def __init__(self, region: CudaRegion, offset: int, dtype: np.dtype[Any], shape: Sequence[int]) -> None:
        """Makes a tensor in a region. Raises InvalidArgument if the tensor is not wholly inside the region."""
        self.region = region
        self.offset = offset
        self.dtype = dtype
        self.shape = tuple(shape)
        self.nbytes = dtype.itemsize
        for size in self.shape:
            self.nbytes *= size
        #: Its device address. An empty tensor has none, and may lie at the region's end.
        self.pointer = region.pointer(offset, self.nbytes) if self.nbytes else 0

    def __len__(self) -> int:
        return self.shape[0]

    def view(self, dtype: np.dtype[Any], shape: Sequence[int]) -> CudaTensor:
        """Returns a tensor of another dtype and shape at the same place in the region."""
        return CudaTensor(self.region, self.offset, dtype, shape)

    def reshape(self, shape: Sequence[int]) -> CudaTensor:
        """Returns a tensor of another shape at the same place in the region."""
        return CudaTensor(self.region, self.offset, self.dtype, shape)

    def copy_into(self, array: Array) -> None:
        """Copies this tensor to a contiguous host array of the same size; blocks.

        Raises: InvalidArgument: the region's memory cannot be read any more.
        """
        if self.nbytes:
            self.region.read(array.__array_interface__["data"][0], self.offset, self.nbytes)
            if self.dtype == np.bool_:
                # Any byte but 0 is true on the wire; in memory a truth value may only be 0 or 1.
                np.not_equal(array.view(np.uint8), 0, out=array)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        """Returns a copy in host memory. Raises InvalidArgument if the region's memory cannot be read any more."""
        if copy is False:
            raise ValueError("GPU memory cannot be used by the host without a copy")
        array = np.empty(self.shape, self.dtype)
        self.copy_into(array)
        return array if dtype is None else array.astype(dtype, copy=False)

    def __repr__(self) -> str:
        return f"<CudaTensor {self.dtype}{list(self.shape)} at {self.offset} of {self.region.name!r}>"
