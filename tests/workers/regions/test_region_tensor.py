"""A tensor that is read when it is asked for: then, not before, and into place."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import pytest

from tensord.shm.errors import InvalidArgument
from tensord.shm.snapshot_region import SnapshotRegion
from tensord.workers.regions.region_tensor import RegionTensor


@pytest.fixture
def region() -> Iterator[SnapshotRegion]:
    fd = os.memfd_create("tensord-test")
    os.write(fd, bytes(4096))
    made = SnapshotRegion("r", "", fd, 0, 4096)
    yield made
    made.close()


def test_what_is_there_when_it_is_read(region: SnapshotRegion) -> None:
    values = np.arange(12, dtype=np.float32)
    tensor = RegionTensor(region, 64, np.dtype(np.float32), (3, 4))
    assert (tensor.nbytes, tensor.ndim, tensor.shape, len(tensor)) == (48, 2, (3, 4), 3)
    assert not np.asarray(tensor).any()
    region.write(64, values.data)
    assert np.asarray(tensor).tolist() == values.reshape(3, 4).tolist()
    assert np.asarray(tensor.reshape((12,))).tolist() == values.tolist()
    place = np.zeros((3, 4), np.float32)
    tensor.copy_into(place)
    assert place.tolist() == values.reshape(3, 4).tolist()


def test_truth_values_are_0_or_1(region: SnapshotRegion) -> None:
    region.write(0, memoryview(bytes((0, 1, 2, 255))))
    made = np.asarray(RegionTensor(region, 0, np.dtype(np.uint8), (4,)).view(np.dtype(np.bool_), (2, 2)))
    assert made.view(np.uint8).tolist() == [[0, 1], [1, 1]]


def test_empty_and_gone(region: SnapshotRegion) -> None:
    assert np.asarray(RegionTensor(region, 4095, np.dtype(np.int64), (0, 7))).shape == (0, 7)
    os.ftruncate(region.fd, 10)
    with pytest.raises(InvalidArgument, match="10 of 16 bytes could be read"):
        np.asarray(RegionTensor(region, 0, np.dtype(np.int64), (2,)))
