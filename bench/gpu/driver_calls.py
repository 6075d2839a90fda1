"""The CUDA driver as the checks use it, without anything of tensord's between; and another process that owns memory on the GPU.

Run as a module it is that process: a line of standard input is a wish, a line of standard output the answer, in JSON.
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
    """What a call returned. Raises RuntimeError with the driver's name for what went wrong."""
    code, *values = result
    if code != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(name_of(result))
    return values[0] if len(values) == 1 else tuple(values)


def name_of(result: Any) -> str:
    """CUDA_SUCCESS, CUDA_ERROR_..."""
    return getattr(result[0], "name", str(result[0]))


def open_context() -> Any:
    """The first device, whose primary context is this thread's then."""
    good(driver.cuInit(0))
    device = good(driver.cuDeviceGet(0))
    good(driver.cuCtxSetCurrent(good(driver.cuDevicePrimaryCtxRetain(device))))
    return device


def make_stream() -> Any:
    """One that waits for no other."""
    return good(driver.cuStreamCreate(driver.CUstream_flags.CU_STREAM_NON_BLOCKING))


def address_of(view: Any) -> int:
    found: int = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
    return found


def memory(byte_size: int, locked: bool) -> mmap.mmap:
    """Host memory like an arena's, every page of it there, page-locked or not."""
    fd = os.memfd_create("bench-gpu")
    os.ftruncate(fd, byte_size)
    view = mmap.mmap(fd, byte_size)
    os.close(fd)
    view[:: mmap.PAGESIZE] = bytes(len(range(0, byte_size, mmap.PAGESIZE)))
    if locked:
        good(driver.cuMemHostRegister(address_of(view), byte_size, PORTABLE))
    return view


def open_handle(handle: str) -> int:
    """The address here of another process's allocation."""
    made = driver.CUipcMemHandle()
    ctypes.memmove(made.getPtr(), base64.b64decode(handle), _HANDLE_SIZE)
    return int(good(driver.cuIpcOpenMemHandle(made, driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS.value)))


def handle_of(pointer: int) -> str:
    """What another process opens it by."""
    made = good(driver.cuIpcGetMemHandle(pointer))
    return base64.b64encode(ctypes.string_at(made.getPtr(), _HANDLE_SIZE)).decode()


class Owner:
    """The other process. Use as a context manager."""

    def __enter__(self) -> Owner:
        command = [sys.executable, "-m", __spec__.name]
        self.process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()

    def make(self, byte_size: int, offset: int = 0) -> dict[str, Any]:
        """Allocates; holds 0, 1, 2, ... of FP32. ``offset``: of what the handle is for, from the allocation's start."""
        return self._ask("make", byte_size, offset)

    def free(self, number: int) -> None:
        """Frees the allocation that was made as that one, counted from 0, and allocates as much again, full of ones."""
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
