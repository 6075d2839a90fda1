"""Views of foreign memory as arrays: no copy, every datatype, nothing kept longer than it is used."""

from __future__ import annotations

import gc
import weakref

import jax
import ml_dtypes
import numpy as np
import pytest

from tensord.shm.common.dlpack import CPU, DeviceView
from tensord.workers.programs.gather_buffer import aligned


@pytest.mark.parametrize("dtype", [np.bool_, np.int8, np.uint16, np.int32, np.float16, np.float32, ml_dtypes.bfloat16])
def test_the_memory_itself_is_the_array(dtype: type) -> None:
    memory = aligned((2, 3), np.dtype(dtype))
    memory[...] = np.array([[0, 1, 0], [1, 1, 0]], dtype)
    pointer = memory.__array_interface__["data"][0]
    array = jax.dlpack.from_dlpack(DeviceView(pointer, memory.dtype, memory.shape, (CPU, 0)))
    assert array.unsafe_buffer_pointer() == pointer
    assert (array.shape, array.dtype) == ((2, 3), memory.dtype)
    assert np.asarray(array).tolist() == memory.tolist()


def test_a_scalar() -> None:
    memory = aligned((), np.dtype(np.float32))
    memory[...] = 7
    assert float(jax.dlpack.from_dlpack(DeviceView(memory.ctypes.data, memory.dtype, (), (CPU, 0)))) == 7


class Watched(DeviceView):
    """A view to which weak references can be made."""

    __slots__ = ("__weakref__",)


def test_a_view_lives_as_long_as_its_array() -> None:
    memory = aligned((4,), np.dtype(np.float32))
    view = Watched(memory.ctypes.data, memory.dtype, memory.shape, (CPU, 0))
    alive = weakref.ref(view)
    array = jax.dlpack.from_dlpack(view)
    del view
    gc.collect()
    assert alive() is not None
    del array
    gc.collect()
    assert alive() is None


def test_a_capsule_nobody_wanted() -> None:
    memory = aligned((4,), np.dtype(np.float32))
    view = Watched(memory.ctypes.data, memory.dtype, memory.shape, (CPU, 0))
    alive = weakref.ref(view)
    capsule = view.__dlpack__()
    del view
    assert alive() is not None
    del capsule
    assert alive() is None
