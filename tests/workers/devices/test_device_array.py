"""Outputs that are still on the device, and the memory of ours and of clients that the driver is handed."""

from __future__ import annotations

import mmap
import os

import jax.numpy as jnp
import numpy as np
import pytest

from tensord.shm import guard
from tensord.shm.cuda_regions import Context
from tensord.shm.regions import Region
from tensord.workers.devices.device_array import GpuArray, may_be_written, standing


@pytest.fixture
def array(context: Context) -> GpuArray:
    made = jnp.arange(12, dtype=jnp.int32).reshape(6, 2).block_until_ready()
    return GpuArray(context, made, made.unsafe_buffer_pointer(), np.dtype(np.int32), (6, 2))


def test_rows_and_shapes(array: GpuArray) -> None:
    whole = np.arange(12).reshape(6, 2)
    assert np.asarray(array).tolist() == whole.tolist()
    for rows in (slice(0, 2), slice(2, 5), slice(6, 9), slice(3, 3)):
        part = array[rows]
        assert (part.shape, part.nbytes) == (whole[rows].shape, 8 * len(whole[rows]))
        assert np.asarray(part).tolist() == whole[rows].tolist()
        assert part.tobytes() == whole[rows].astype(np.int32).tobytes()
    assert np.asarray(array[2:4].reshape((4,)), np.float64).tolist() == [4, 5, 6, 7]
    with pytest.raises(ValueError, match="without a copy"):
        array.__array__(copy=False)


def test_a_copy_is_memory_of_its_own(array: GpuArray) -> None:
    copied = array[1:3].copy()
    assert not array.pointer <= copied.pointer < array.pointer + array.nbytes
    assert np.asarray(copied).tolist() == [[2, 3], [4, 5]]


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
