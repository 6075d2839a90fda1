"""The driver is handed memory of ours, and of a client's what it has locked."""

from __future__ import annotations

import mmap
import os

import numpy as np
import pytest

from tensord.shm import guard
from tensord.shm.regions import Region
from tensord.workers.devices.device_array import may_be_written, standing

SIZE = 4 * mmap.PAGESIZE

pytestmark = pytest.mark.skipif(not guard.available, reason="the C extension was not built")


def region_of_ones() -> Region:
    fd = os.memfd_create("a client's")
    os.pwrite(fd, b"\x01" * SIZE, 0)
    return Region("r", fd, 0, SIZE)


@pytest.mark.parametrize("held", [False, True])
def test_a_region(held: bool) -> None:
    region = region_of_ones()
    region.hold(held)
    view = region.view(mmap.PAGESIZE, 2 * mmap.PAGESIZE)
    array = np.frombuffer(view, np.float32)
    assert (standing(array) is array, may_be_written(view)) == (held, held)
    assert np.array_equal(standing(array), array)
    assert not region.faults
    os.ftruncate(region.fd, 0)
    standing(array)
    assert region.faults == 1
    del array
    view.release()
    region.close()


@pytest.mark.parametrize("dtype", [np.float32, np.bool_, np.uint16])
@pytest.mark.parametrize("shape", [(), (0,), (2, 3)])
def test_memory_of_ours(dtype: type, shape: tuple[int, ...]) -> None:
    array = np.zeros(shape, dtype)
    assert standing(array) is array


def test_where_nothing_may_be_written_any_more() -> None:
    """It is noticed before the driver writes, which sees pages that nobody else does."""
    region = region_of_ones()
    region.hold(True)
    os.ftruncate(region.fd, SIZE - 1)
    assert may_be_written(region.view(0, SIZE))
    assert not region.faults
    os.ftruncate(region.fd, SIZE - mmap.PAGESIZE)
    assert may_be_written(region.view(0, SIZE))
    assert region.faults == 1
    region.close()
