"""Wraps the CUDA driver's functions for the checks, without tensord's code; and runs a process that owns memory on the GPU.

Run as a module it is that process: a line of standard input is a command, a line of standard output the answer, in JSON.
"""

from __future__ import annotations

import base64
import ctypes
import json
import mmap
import os
import subprocess
import sys
from typing import Any

import numpy as np
from cuda.bindings import driver

from bench.server import ROOT

PORTABLE = int(driver.CU_MEMHOSTREGISTER_PORTABLE)
READ_ONLY = int(driver.CU_MEMHOSTREGISTER_READ_ONLY)
_HANDLE_SIZE = 64


def good(result: Any) -> Any:
    """Returns the values of a driver call's result. Raises RuntimeError with the driver's name for the error: the call failed."""
    code, *values = result
    if code != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(name_of(result))
    return values[0] if len(values) == 1 else tuple(values)


def name_of(result: Any) -> str:
    """Returns the driver's name for the result of a call: CUDA_SUCCESS, CUDA_ERROR_..."""
    return getattr(result[0], "name", str(result[0]))


def open_context() -> Any:
    """Makes the first device's primary context current in this thread; returns the device."""
    good(driver.cuInit(0))
    device = good(driver.cuDeviceGet(0))
    good(driver.cuCtxSetCurrent(good(driver.cuDevicePrimaryCtxRetain(device))))
    return device


def make_stream() -> Any:
    """Creates a stream that does not wait for the default stream."""
    return good(driver.cuStreamCreate(driver.CUstream_flags.CU_STREAM_NON_BLOCKING))


def address_of(view: Any) -> int:
    found: int = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
    return found


def memory(byte_size: int, locked: bool) -> mmap.mmap:
    """Allocates host memory as an arena has it (a memfd with all pages present), page-locked or not."""
    fd = os.memfd_create("bench-gpu")
    os.ftruncate(fd, byte_size)
    view = mmap.mmap(fd, byte_size)
    os.close(fd)
    view[:: mmap.PAGESIZE] = bytes(len(range(0, byte_size, mmap.PAGESIZE)))
    if locked:
        good(driver.cuMemHostRegister(address_of(view), byte_size, PORTABLE))
    return view


def open_handle(handle: str) -> int:
    """Opens another process's allocation by its handle; returns its address in this process."""
    made = driver.CUipcMemHandle()
    ctypes.memmove(made.getPtr(), base64.b64decode(handle), _HANDLE_SIZE)
    return int(good(driver.cuIpcOpenMemHandle(made, driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS.value)))


def handle_of(pointer: int) -> str:
    """Returns the handle by which another process can open the allocation, in base64."""
    made = good(driver.cuIpcGetMemHandle(pointer))
    return base64.b64encode(ctypes.string_at(made.getPtr(), _HANDLE_SIZE)).decode()


class Owner:
    """Another process that owns memory on the GPU. Use as a context manager."""

    def __enter__(self) -> Owner:
        command = [sys.executable, "-m", __spec__.name]
        self.process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()

    def make(self, byte_size: int, offset: int = 0) -> dict[str, Any]:
        """Has the process allocate memory filled with 0, 1, 2, ... as FP32; returns its ``pointer`` and ``handle``.

        ``offset``: bytes from the allocation's start to the address that the handle is made for.
        """
        return self._ask("make", byte_size, offset)

    def free(self, number: int) -> None:
        """Has the process free its allocation ``number``, counted from 0, and allocate as much again, full of ones."""
        self._ask("free", number)

    def _ask(self, *words: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(words) + "\n")
        self.process.stdin.flush()
        answer: dict[str, Any] = json.loads(self.process.stdout.readline())
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer


def _own() -> None:
    open_context()
    made: list[tuple[int, int]] = []
    for line in sys.stdin:
        verb, *numbers = json.loads(line)
        answer: dict[str, Any] = {}
        try:
            if verb == "make":
                byte_size, offset = numbers
                pointer = int(good(driver.cuMemAlloc(byte_size)))
                values = np.arange(byte_size // 4, dtype=np.float32)
                good(driver.cuMemcpyHtoD(pointer, values.ctypes.data, values.nbytes))
                made.append((pointer, byte_size))
                answer = {"handle": handle_of(pointer + offset), "pointer": pointer}
            else:
                pointer, byte_size = made[numbers[0]]
                good(driver.cuMemFree(pointer))
                again, ones = int(good(driver.cuMemAlloc(byte_size))), np.ones(byte_size // 4, np.float32)
                good(driver.cuMemcpyHtoD(again, ones.ctypes.data, ones.nbytes))
        except RuntimeError as error:
            answer = {"error": str(error)}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    _own()
