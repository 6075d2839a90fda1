"""A tensor in a snapshot region, which is read only when its batch is gathered.

So a request in a queue holds no copy, and the tensor is copied once, straight into the buffer of the executable. Code that needs
an array gets one in memory of its own.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tensord.shm.arrays import Array
from tensord.shm.snapshot_region import SnapshotRegion
from tensord.workers.devices.cuda_tensor import CudaTensor


class RegionTensor:
    """Stands for an array among a request's inputs, whose bytes are read when the batch is gathered.

    They are in a snapshot region, which is not mapped but read through its descriptor.
    """

    __slots__ = ("_offset", "_region", "dtype", "nbytes", "shape")

    def __init__(self, region: SnapshotRegion, offset: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
        """Makes a tensor at ``offset`` of a region; the caller has checked that the tensor is inside the region."""
        self._region = region
        self._offset = offset
        self.dtype = dtype
        self.shape = shape
        count = 1
        for size in shape:
            count *= size
        self.nbytes = count * dtype.itemsize

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def __len__(self) -> int:
        return self.shape[0]

    def view(self, dtype: np.dtype[Any], shape: tuple[int, ...]) -> RegionTensor:
        """Returns a tensor of another dtype and shape at the same place in the region."""
        return RegionTensor(self._region, self._offset, dtype, shape)

    def reshape(self, shape: tuple[int, ...]) -> RegionTensor:
        """Returns a tensor of another shape at the same place in the region."""
        return RegionTensor(self._region, self._offset, self.dtype, shape)

    def copy_into(self, array: Array) -> None:
        """Reads the tensor into a contiguous array of the same shape and dtype.

        Raises InvalidArgument if its bytes no longer exist.
        """
        if self.nbytes:
            self._region.read_into(self._offset, array.reshape(-1).view(np.uint8).data)
            if self.dtype == np.bool_:
                # Any byte but 0 is true on the wire; in memory a truth value may only be 0 or 1.
                np.not_equal(array.view(np.uint8), 0, out=array)

    def __array__(self, dtype: np.dtype[Any] | None = None, copy: bool | None = None) -> Array:
        """Reads the tensor into a new array. Raises InvalidArgument if its bytes no longer exist."""
        made = np.empty(self.shape, self.dtype)
        self.copy_into(made)
        return made if dtype is None else made.astype(dtype, copy=False)

    def __repr__(self) -> str:
        return f"<RegionTensor {self.dtype}{list(self.shape)} of {self._region!r}>"


#: Tensors whose bytes are read when their batch is gathered.
LateTensor = RegionTensor | CudaTensor
