"""The calls of the CUDA driver that may last, made without Python's lock.

A process has several threads on its GPU: the worker's loop, the loader with its samples, instances, page-locking. Some versions
of cuda-python's bindings (12.8) keep the lock while the driver waits or copies, so that each of them would hold up all others.
For everything that is brief, and for every constant, the bindings are used.

Each function returns what the bindings' own returns: a tuple of the code and the results.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import byref, c_size_t, c_ubyte, c_uint, c_uint64, c_void_p
from typing import Any

_SONAME = "libcuda.so.1"


class LastingCalls:
    """One per context. The driver is loaded already: this is the same library."""

    def __init__(self, code: Callable[[int], Any]) -> None:
        """``code`` makes the bindings' code of a number; it raises ValueError for one that they do not know."""
        self._code = code
        library = ctypes.CDLL(_SONAME)
        self.synchronize_stream = self._function(library.cuStreamSynchronize, c_void_p)
        self.synchronize_context = self._function(library.cuCtxSynchronize)
        self.host_to_device = self._function(library.cuMemcpyHtoDAsync_v2, c_uint64, c_void_p, c_size_t, c_void_p)
        self.device_to_host = self._function(library.cuMemcpyDtoHAsync_v2, c_void_p, c_uint64, c_size_t, c_void_p)
        self.within_device = self._function(library.cuMemcpyDtoDAsync_v2, c_uint64, c_uint64, c_size_t, c_void_p)
        self.clear = self._function(library.cuMemsetD8Async, c_uint64, c_ubyte, c_size_t, c_void_p)
        self.free = self._function(library.cuMemFree_v2, c_uint64)
        self.register_host = self._function(library.cuMemHostRegister_v2, c_void_p, c_size_t, c_uint)
        self.unregister_host = self._function(library.cuMemHostUnregister, c_void_p)
        self._allocate = self._function(library.cuMemAlloc_v2, c_void_p, c_size_t)

    def allocate(self, byte_size: int) -> tuple[Any, int]:
        """Device memory, and where it is."""
        pointer = c_uint64(0)
        (code,) = self._allocate(byref(pointer), byte_size)
        return code, pointer.value

    def _function(self, function: Any, *types: Any) -> Callable[..., tuple[Any]]:
        function.argtypes, function.restype = types, ctypes.c_int

        def call(*arguments: Any) -> tuple[Any]:
            found = function(*arguments)
            try:
                return (self._code(found),)
            except ValueError:
                return (found,)

        return call
