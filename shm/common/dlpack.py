"""Passes tensors to other Python libraries, and takes tensors from them, by DLPack and without a copy.

A tensor is passed as a PyCapsule with the name "dltensor" and the struct DLManagedTensor of dlpack.h. The datatype bfloat16 is
supported.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

#: DLDeviceType.
CPU, CUDA = 1, 2
_CAPSULE = b"dltensor"
#: DLDataTypeCode by numpy's kind.
_CODES = {"i": 0, "u": 1, "f": 2, "b": 6}
_CODE_BFLOAT = 4


class ManagedTensor(ctypes.Structure):
    """DLPack's struct DLManagedTensor. A library that uses the tensor calls ``deleter`` when it no longer needs the tensor."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
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


def _delete(
    managed: int, at: Callable[[int], Any] = ManagedTensor.from_address, drop: Callable[[Any], Any] = _drop
) -> None:
    # The defaults are never replaced: where arrays live as long as Python, this module's names are gone before them.
    drop(at(managed).manager_ctx)  # DLPack calls this in any thread


def _capsule_gone(capsule: int) -> None:
    if _is_valid(capsule, _CAPSULE):  # else a consumer has taken the view over, and renamed the capsule
        _delete(_pointer_of(capsule, _CAPSULE))


_Callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
#: C functions, kept as long as the process: consumers may call them late.
_deleter, _destructor = _Callback(_delete), _Callback(_capsule_gone)


def code_of(dtype: np.dtype[Any]) -> int | None:
    """Returns DLPack's DLDataTypeCode for a dtype, or None if DLPack has no such type."""
    return _CODE_BFLOAT if dtype.name == "bfloat16" else _CODES.get(dtype.kind)


def content(capsule: Any) -> ManagedTensor:
    """Returns the tensor in a DLPack capsule. The capsule must live as long as the tensor is used."""
    return ManagedTensor.from_address(_pointer_of(id(capsule), _CAPSULE) or 0)


class DeviceView:
    """A view of device memory for other libraries by DLPack, without a copy.

    ``owner`` stays alive as long as a library uses the view.
    """

    __slots__ = ("_owner", "_shape", "_tensor")

    def __init__(
        self, pointer: int, dtype: np.dtype[Any], shape: Sequence[int], device: tuple[int, int], owner: object = None
    ) -> None:
        """Makes a view of existing memory, as an array of ``dtype`` and ``shape``.

        ``pointer`` is the memory's address on the device. ``device`` is its DLDeviceType and number. ``owner`` is the object
        that owns the memory, or None.
        """
        self._owner = owner
        self._shape = (ctypes.c_int64 * max(len(shape), 1))(*shape)
        self._tensor = ManagedTensor(
            data=pointer,
            device_type=device[0],
            device_id=device[1],
            ndim=len(shape),
            code=code_of(dtype),
            bits=8 * dtype.itemsize,
            lanes=1,
            shape=self._shape,
            manager_ctx=id(self),
            deleter=ctypes.cast(_deleter, ctypes.c_void_p).value,
        )

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._tensor.device_type, self._tensor.device_id

    def __dlpack__(self, **wishes: Any) -> Any:
        """Returns the view as a DLPack capsule. ``wishes``, such as a stream, are ignored."""
        _keep(self)
        return _new(ctypes.addressof(self._tensor), _CAPSULE, ctypes.cast(_destructor, ctypes.c_void_p))
