"""An input in GPU memory is an array to whoever does not ask."""

from __future__ import annotations

import base64
from collections.abc import Iterator

import numpy as np
import pytest

from tensord.shm.cuda_regions import CudaRegion, Driver
from tensord.shm.errors import InvalidArgument
from tensord.workers.devices.cuda_tensor import CudaTensor
from tests.cuda_owner import CudaOwner
from tests.cuda_stub.library import CudaStub

FP32 = np.dtype(np.float32)


@pytest.fixture
def region(cuda_stub: CudaStub, cuda_owner: CudaOwner) -> Iterator[CudaRegion]:
    driver = Driver()
    made = CudaRegion("g", driver.context(0), base64.b64decode(cuda_owner.create("g", 4096)), 4096)
    yield made
    made.close()
    driver.close()


def test_it_becomes_an_array(region: CudaRegion, cuda_owner: CudaOwner) -> None:
    values = np.arange(12, dtype=np.float32)
    cuda_owner.put("g", values)
    tensor = CudaTensor(region, 8, FP32, (2, 4))
    assert (tensor.shape, tensor.dtype, tensor.nbytes) == ((2, 4), FP32, 32)
    assert tensor.pointer == region.pointer(8, 32)
    for array in (np.asarray(tensor), np.concatenate([np.asarray(tensor)]), np.asarray(tensor, np.float64)):
        assert array.tolist() == values[2:10].reshape(2, 4).tolist()
    assert np.asarray(tensor.reshape((8,))).tolist() == values[2:10].tolist()
    with pytest.raises(ValueError, match="without a copy"):
        tensor.__array__(copy=False)
    # What the owner writes later is seen later: nothing is remembered.
    cuda_owner.put("g", -values)
    assert np.asarray(tensor)[0, 0] == -2


def test_any_byte_but_zero_is_true(region: CudaRegion, cuda_owner: CudaOwner) -> None:
    cuda_owner.put("g", np.array([0, 1, 2, 255], np.uint8))
    array = np.asarray(CudaTensor(region, 0, np.dtype(np.bool_), (4,)))
    assert array.view(np.uint8).tolist() == [0, 1, 1, 1]


def test_empty_ones_lie_anywhere(region: CudaRegion) -> None:
    assert np.asarray(CudaTensor(region, 4096, FP32, (0, 4))).shape == (0, 4)


@pytest.mark.parametrize(("offset", "shape"), [(4093, (1,)), (0, (1025,)), (-4, (1,))])
def test_the_range_is_checked(region: CudaRegion, offset: int, shape: tuple[int, ...]) -> None:
    with pytest.raises(InvalidArgument, match="'g'"):
        CudaTensor(region, offset, FP32, shape)
