"""Tests what the stand-in refuses, as a driver does: each a process of its own, in which nothing has been loaded yet."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.cuda_stub.library import CudaStub

ROOT = Path(__file__).parent.parent.parent
_BEFORE = """
    import base64, ctypes, mmap, os, sys
    import numpy as np
    from cuda.bindings import driver as d

    def code(result):
        return result[0].name.removeprefix("CUDA_")

    def good(result):
        assert code(result) == "SUCCESS", code(result)
        return result[1] if len(result) == 2 else result[1:]

    def current(number):
        device = good(d.cuDeviceGet(number))
        good(d.cuCtxSetCurrent(good(d.cuDevicePrimaryCtxRetain(device))))
        return device

    def address(view):
        return np.frombuffer(view, np.uint8).__array_interface__["data"][0]

    good(d.cuInit(0))
    device = current(0)
    stream = good(d.cuStreamCreate(1))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "cuda"
    made.mkdir()
    return made


def said(stub: CudaStub, source: str, **more: str) -> list[str]:
    """Runs ``source`` in a process on the stub; returns the lines that it prints."""
    program = textwrap.dedent(_BEFORE) + textwrap.dedent(source)
    environment = os.environ | stub.environment | more
    return subprocess.check_output([sys.executable, "-c", program], cwd=ROOT, env=environment, text=True).splitlines()


_REGISTERING = """
    size = 1 << 20
    written, read = mmap.mmap(-1, size), mmap.mmap(-1, size, prot=mmap.PROT_READ)
    print(good(d.cuDeviceGetAttribute(d.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED, device)))
    for view, flags in ((read, 1), (read, 9), (written, 64), (written, 1), (written, 1)):
        print(code(d.cuMemHostRegister(address(view), size, flags)))
    pointer, start = good(d.cuMemAlloc(size)), address(written)
    # The last bytes of it, and one behind it.
    print(code(d.cuMemcpyHtoDAsync(pointer, start + size - 64, 64, stream)))
    print(code(d.cuMemcpyHtoDAsync(pointer, start + size - 64, 65, stream)))
    beyond = mmap.mmap(-1, 2 * size)
    print(code(d.cuMemHostRegister(address(beyond), 2 * size, 1)))
"""


def test_what_is_registered_as_what(folder: Path) -> None:
    many = ["INVALID_VALUE", "SUCCESS", "HOST_MEMORY_ALREADY_REGISTERED", "SUCCESS", "INVALID_VALUE"]
    names = [line.removeprefix("ERROR_") for line in said(CudaStub(folder, lockable=3 << 20), _REGISTERING)]
    assert names == ["0", "INVALID_VALUE", "NOT_SUPPORTED", *many, "SUCCESS"]
    # Read-only memory counts as well: there is no room for the last one.
    (folder / "read").mkdir()
    stub = CudaStub(folder / "read", read_only=True, lockable=3 << 20)
    names = [line.removeprefix("ERROR_") for line in said(stub, _REGISTERING)]
    assert names == ["1", "INVALID_VALUE", "SUCCESS", *many, "OUT_OF_MEMORY"]


def test_an_error_stays_in_its_context_and_addresses_lie_in_blocks(folder: Path) -> None:
    """Small allocations begin within a block; what fails on one device leaves the other one; a lost one is not seen again."""
    stub = CudaStub(folder, devices=3, delay_us=100)
    source = f"""
        first, large = int(good(d.cuMemAlloc(4096))), int(good(d.cuMemAlloc(3 << 20)))
        base, size = good(d.cuMemGetAddressRange(first + 100))
        print(first % (2 << 20) > 0, first % 256, large % (2 << 20), int(base) == first, size)
        open({str(folder / "devices" / "fail")!r}, "w").write("cuMemcpyHtoDAsync_v2 700 0 0")
        content = bytes(64)
        for call in (
            lambda: d.cuMemcpyHtoDAsync(first, content, 64, stream), lambda: d.cuStreamSynchronize(stream),
            lambda: d.cuMemAlloc(64), d.cuCtxSynchronize, lambda: d.cuStreamDestroy(stream),
        ):
            assert code(call()) == "ERROR_ILLEGAL_ADDRESS", code(call())
        current(1)
        good(d.cuMemAlloc(64))
        open({str(folder / "devices" / "gone")!r}, "w").write("1")
        print(code(d.cuMemAlloc(64)), good(d.cuDeviceGetCount()))
        print(good(d.cuDeviceGetPCIBusId(13, 2)).rstrip(b"\\0").decode())
    """
    assert said(stub, source) == ["True 0 0 True 4096", "ERROR_UNKNOWN 3", "0000:1A:00.0"]
    found = "print(good(d.cuDeviceGetCount()), good(d.cuDeviceGetUuid(0)).bytes[-1])"
    assert said(stub, found) == ["2 0"]
    assert said(stub, found, CUDA_VISIBLE_DEVICES=f"{stub.uuid(2)},{stub.uuid(1)},0") == ["1 2"]
