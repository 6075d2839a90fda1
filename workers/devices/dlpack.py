"""Passes device memory that JAX did not allocate to JAX by DLPack: address, shape and datatype, and no copy.

    PyCapsule "dltensor" ─▶ DLManagedTensor ─▶ shape; manager_ctx ─▶ the view, alive until XLA calls the deleter

Written here because the libraries that make such capsules refuse bfloat16. Source: dlpack.h, version 0 of the struct.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

#: DLDeviceType.
CPU, CUDA = 1, 2
_CAPSULE = b"dltensor"
#: DLDataTypeCode by numpy's kind; bfloat16, which numpy does not know, is of kind V.
_CODES = {"i": 0, "u": 1, "f": 2, "V": 4, "c": 5, "b": 6}


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
        # DLManagedTensor goes on:
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    ]


_new = ctypes.pythonapi.PyCapsule_New
_new.restype, _new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
_is_valid = ctypes.pythonapi.PyCapsule_IsValid
_is_valid.argtypes = [ctypes.c_void_p, ctypes.c_char_p]
_pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_of.restype, _pointer_of.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_char_p]
_keep = ctypes.pythonapi.Py_IncRef
_keep.argtypes = [ctypes.py_object]
_drop = ctypes.pythonapi.Py_DecRef
_drop.argtypes = [ctypes.c_void_p]


def _delete(managed: int, at: Callable[[int], Any] = _Tensor.from_address, drop: Callable[[Any], Any] = _drop) -> None:
    """Drops XLA's reference to a ``DeviceView``; any thread may call this, and ctypes takes the GIL.

    Args:
      managed: address of the view's DLManagedTensor.
      at, drop: never given; where arrays live as long as Python, this module's names are gone before them.
    """
    drop(at(managed).manager_ctx)


def _capsule_gone(capsule: int) -> None:
    """Drops the ``DeviceView`` of a capsule that was never consumed: a consumer would have renamed the capsule.

    ``capsule``: address of the PyCapsule.
    """
    if _is_valid(capsule, _CAPSULE):
        _delete(_pointer_of(capsule, _CAPSULE))


_Callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
#: C functions, kept as long as the process: XLA may call them late.
_deleter, _destructor = _Callback(_delete), _Callback(_capsule_gone)


def device_of(device: jax.Device) -> tuple[int, int]:
    """Returns a JAX device as DLPack names it: DLDeviceType and device number."""
    kind, number = jax.device_put(np.zeros(1, np.float32), device).__dlpack_device__()
    return int(kind), int(number)


class DeviceView:
    """A view of device memory for ``jax.dlpack.from_dlpack``. The memory must outlive every array made from the view."""

    __slots__ = ("_shape", "_tensor")

    def __init__(self, pointer: int, dtype: np.dtype[Any], shape: Sequence[int], device: tuple[int, int]) -> None:
        """``pointer``: address on the device. ``device``: DLDeviceType and device number."""
        self._shape = (ctypes.c_int64 * max(len(shape), 1))(*shape)
        self._tensor = _Tensor(
            data=pointer,
            device_type=device[0],
            device_id=device[1],
            ndim=len(shape),
            code=_CODES[dtype.kind],
            bits=8 * dtype.itemsize,
            lanes=1,
            shape=ctypes.addressof(self._shape),
            manager_ctx=id(self),
            deleter=ctypes.cast(_deleter, ctypes.c_void_p).value,
        )

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._tensor.device_type, self._tensor.device_id

    def __dlpack__(self, **wishes: Any) -> Any:
        """Returns a DLPack capsule of this view. The memory's bytes are complete already, so no stream has to wait."""
        _keep(self)
        return _new(ctypes.addressof(self._tensor), _CAPSULE, ctypes.cast(_destructor, ctypes.c_void_p))
