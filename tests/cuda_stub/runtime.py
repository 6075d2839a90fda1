"""Implements CUDA's runtime API over the stand-in for the driver, for bindings whose own needs a real driver.

The bindings of cuda-python 12.8 have the runtime API written over the driver API, so tritonclient's CUDA module and the
benchmarks run over the stand-in as they are. Later bindings bring NVIDIA's runtime inside, which asks a driver for private
tables.

Copied to a folder as ``sitecustomize.py``, which a process imports when it begins. Where that process then imports
``cuda.bindings.runtime``, the functions below take the place of those of the same name; types and constants stay the bindings'.
"""

from __future__ import annotations

import ctypes
import importlib.abc
import importlib.machinery
import sys
import threading
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

_NAME = "cuda.bindings.runtime"
_HANDLE_SIZE = 64
_NON_BLOCKING = 0


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the bindings' module, and replaces its functions when it has run."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != _NAME:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                run(module)
                vars(module).update(_functions(module))

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


class _Devices(threading.local):
    """The device that each thread has chosen."""

    ordinal = 0


def _functions(runtime: Any) -> dict[str, Callable[..., tuple[Any, ...]]]:
    """Returns the functions by name. Each returns what the bindings' function returns: a tuple of the code and the results."""
    from cuda.bindings import driver

    chosen = _Devices()

    def said(answer: tuple[Any, ...]) -> tuple[Any, ...]:
        """Returns the driver's answer with the runtime's code: both number errors alike."""
        code, *results = answer
        try:
            found = runtime.cudaError_t(int(code))
        except ValueError:
            found = runtime.cudaError_t.cudaErrorUnknown
        return (found, *results)

    def enter() -> tuple[Any, ...]:
        """Makes the thread's device current, as the runtime does before each call."""
        answer = driver.cuInit(0)
        if not int(answer[0]):
            answer = driver.cuDeviceGet(chosen.ordinal)
        if not int(answer[0]):
            answer = driver.cuDevicePrimaryCtxRetain(answer[1])
        if not int(answer[0]):
            answer = driver.cuCtxSetCurrent(answer[1])
        return answer

    def entered(function: Callable[..., tuple[Any, ...]], *arguments: Any) -> tuple[Any, ...]:
        failed = enter()
        return said(failed if int(failed[0]) else function(*arguments))

    def address(memory: Any) -> int:
        """A number as it is; bytes and arrays of ctypes by where they lie."""
        if isinstance(memory, bytes):
            return ctypes.cast(memory, ctypes.c_void_p).value or 0
        return ctypes.addressof(memory) if isinstance(memory, ctypes.Array) else int(memory)

    def set_device(ordinal: int) -> tuple[Any, ...]:
        before, chosen.ordinal = chosen.ordinal, ordinal
        answer = said(enter())
        if int(answer[0]):
            chosen.ordinal = before
        return answer

    def handle(pointer: Any) -> tuple[Any, ...]:
        code, *made = entered(driver.cuIpcGetMemHandle, int(pointer))
        copied = runtime.cudaIpcMemHandle_t()
        if made:
            ctypes.memmove(copied.getPtr(), made[0].getPtr(), _HANDLE_SIZE)
        return code, copied

    def allocate(byte_size: int) -> tuple[Any, ...]:
        code, *made = entered(driver.cuMemAlloc, byte_size)
        return code, int(made[0]) if made else 0

    def attribute(number: Any, ordinal: int) -> tuple[Any, ...]:
        return entered(driver.cuDeviceGetAttribute, driver.CUdevice_attribute(int(number)), ordinal)

    def copy(to: Any, start: Any, byte_size: int, kind: Any) -> tuple[Any, ...]:
        return entered(driver.cuMemcpy, address(to), address(start), byte_size)

    def copy_later(to: Any, start: Any, byte_size: int, kind: Any, stream: Any) -> tuple[Any, ...]:
        return entered(driver.cuMemcpyAsync, address(to), address(start), byte_size, stream)

    def text(code: Any) -> tuple[Any, ...]:
        return said(driver.cuGetErrorString(driver.CUresult(int(code))))

    return {
        "cudaDeviceGetAttribute": attribute,
        "cudaDeviceSynchronize": lambda: entered(driver.cuCtxSynchronize),
        "cudaFree": lambda pointer: entered(driver.cuMemFree, int(pointer)),
        "cudaGetDevice": lambda: (*said(enter())[:1], chosen.ordinal),
        "cudaGetErrorString": text,
        "cudaIpcGetMemHandle": handle,
        "cudaMalloc": allocate,
        "cudaMemcpy": copy,
        "cudaMemcpyAsync": copy_later,
        "cudaSetDevice": set_device,
        "cudaStreamCreate": lambda: entered(driver.cuStreamCreate, _NON_BLOCKING),
        "cudaStreamDestroy": lambda stream: entered(driver.cuStreamDestroy, stream),
        "cudaStreamSynchronize": lambda stream: entered(driver.cuStreamSynchronize, stream),
    }


sys.meta_path.insert(0, _Finder())
