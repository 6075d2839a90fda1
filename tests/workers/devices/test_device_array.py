"""Outputs that are still on the device: rows, shapes and copies."""

from __future__ import annotations

from collections.abc import Iterator

import jax.numpy as jnp
import numpy as np
import pytest

from tensord.shm.cuda_regions import Driver
from tensord.workers.devices.device_array import GpuArray
from tests.cuda_stub.library import CudaStub


@pytest.fixture
def array(cuda_stub: CudaStub) -> Iterator[GpuArray]:
    driver = Driver()
    made = jnp.arange(12, dtype=jnp.int32).reshape(6, 2).block_until_ready()
    yield GpuArray(driver.context(0), made, made.unsafe_buffer_pointer(), np.dtype(np.int32), (6, 2))
    driver.close()


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
