"""An input in GPU memory, or in a snapshot region, is an array to whoever does not ask, and is read when it is asked for."""

from __future__ import annotations

import base64
import os
from collections.abc import Iterator

import numpy as np
import pytest

from tensord.shm.cuda_regions import CudaRegion, Driver
from tensord.shm.errors import InvalidArgument
from tensord.shm.regions import SnapshotRegion
from tensord.workers.devices.late_tensor import CudaTensor, RegionTensor
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


@pytest.fixture
def snapshot() -> Iterator[SnapshotRegion]:
    fd = os.memfd_create("tensord-test")
    os.write(fd, bytes(4096))
    made = SnapshotRegion("r", fd, 0, 4096)
    yield made
    made.close()


def test_what_is_there_when_it_is_read(snapshot: SnapshotRegion) -> None:
    values = np.arange(12, dtype=np.float32)
    tensor = RegionTensor(snapshot, 64, np.dtype(np.float32), (3, 4))
    assert (tensor.nbytes, tensor.ndim, tensor.shape, len(tensor)) == (48, 2, (3, 4), 3)
    assert not np.asarray(tensor).any()
    snapshot.write(64, values.data)
    assert np.asarray(tensor).tolist() == values.reshape(3, 4).tolist()
    assert np.asarray(tensor.reshape((12,))).tolist() == values.tolist()
    place = np.zeros((3, 4), np.float32)
    tensor.copy_into(place)
    assert place.tolist() == values.reshape(3, 4).tolist()


def test_truth_values_of_a_snapshot_are_0_or_1(snapshot: SnapshotRegion) -> None:
    snapshot.write(0, memoryview(bytes((0, 1, 2, 255))))
    made = np.asarray(RegionTensor(snapshot, 0, np.dtype(np.uint8), (4,)).view(np.dtype(np.bool_), (2, 2)))
    assert made.view(np.uint8).tolist() == [[0, 1], [1, 1]]


def test_empty_and_gone(snapshot: SnapshotRegion) -> None:
    assert np.asarray(RegionTensor(snapshot, 4095, np.dtype(np.int64), (0, 7))).shape == (0, 7)
    os.ftruncate(snapshot.fd, 10)
    with pytest.raises(InvalidArgument, match="10 of 16 bytes could be read"):
        np.asarray(RegionTensor(snapshot, 0, np.dtype(np.int64), (2,)))
