"""A client's GPU memory, over the tests' stand-in for the driver: what opens, what is refused, what is there when."""

from __future__ import annotations

import base64
import ctypes
import mmap
import subprocess
import sys
import threading

import numpy as np
import pytest

from tensord.shm.cuda_regions import Context, CudaError, CudaRegion, DeviceLost, Driver, NoCuda
from tensord.shm.errors import InvalidArgument, Unavailable
from tests.cuda_owner import CudaOwner
from tests.cuda_stub.library import CudaStub
from tests.fakes import until

OUT_OF_MEMORY = 2


def handle(owner: CudaOwner, name: str = "g", byte_size: int = 4096, device: int = 0) -> bytes:
    return base64.b64decode(owner.create(name, byte_size, device))


def address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


def test_bytes_go_in_and_out(context: Context, cuda_owner: CudaOwner) -> None:
    region = CudaRegion("g", context, handle(cuda_owner), 4096)
    values = np.arange(16, dtype=np.float32)
    cuda_owner.put("g", values)
    got = np.zeros(16, np.float32)
    region.read(address(got), 0, 64)
    assert got.tolist() == values.tolist()
    doubled = 2 * values
    region.write(4032, address(doubled), 64)
    region.settle()
    assert cuda_owner.get("g", np.float32, (16,), 4032).tolist() == doubled.tolist()
    region.close()
    region.close()


def test_nothing_has_happened_before_it_is_waited_for(context: Context) -> None:
    """The stand-in takes its time over copies: what this proves is that it can catch a wait that is missing."""
    pointer = context.allocate(1 << 20)
    values, got = np.full(1 << 18, 7, np.int32), np.zeros(1 << 18, np.int32)

    def caught() -> bool:
        got[:] = 0
        context.to_device(pointer, address(values), values.nbytes)
        context.to_host(address(got), pointer, values.nbytes)
        early = got.any()
        context.synchronize()
        assert (got == 7).all()
        return not early

    until(caught)  # a test that was not given the processor in between looked too late
    context.clear(pointer, 1 << 19)
    context.within_device(pointer + (1 << 19), pointer, 1 << 10)
    context.to_host(address(got), pointer, values.nbytes)
    context.synchronize()
    assert np.flatnonzero(got)[0] == (1 << 17) + (1 << 8)
    context.free(pointer)


@pytest.mark.parametrize(("offset", "byte_size"), [(4096, 1), (4090, 7), (-1, 4), (0, 4097), (2**63, 1), (1, -1)])
def test_ranges(context: Context, cuda_owner: CudaOwner, offset: int, byte_size: int) -> None:
    region = CudaRegion("g", context, handle(cuda_owner), 4096)
    with pytest.raises(InvalidArgument, match="'g'"):
        region.pointer(offset, byte_size)
    region.close()
    with pytest.raises(InvalidArgument, match="not registered any more"):
        region.pointer(0, 1)


def test_what_does_not_open(driver: Driver, context: Context, cuda_owner: CudaOwner) -> None:
    good = handle(cuda_owner)
    for raw, size, where, error in [
        (bytes(64), 64, context, "cannot be opened"),
        (good, 4097, context, "4097 bytes, the allocation has 4096"),
        (good, 0, context, "0 bytes, the allocation has 4096"),
        (good, 4096, driver.context(1), "cannot be opened"),
    ]:
        with pytest.raises(InvalidArgument, match=error):
            CudaRegion("g", where, raw, size)
    # One refused for its size is closed again, and opens all the same.
    CudaRegion("g", context, good, 4096).close()
    cuda_owner.destroy("g")
    with pytest.raises(InvalidArgument, match="cannot be opened"):
        CudaRegion("g", context, good, 4096)


def test_memory_of_our_own_cannot_be_opened(context: Context) -> None:
    """A process cannot open its own memory, as on a real driver: tests need an owner in another process."""
    pointer = context.allocate(4096)
    made = context.call(context.driver.cuIpcGetMemHandle, pointer)
    with pytest.raises(CudaError, match="CUDA_ERROR_INVALID_CONTEXT"):
        context.open(ctypes.string_at(made.getPtr(), 64))
    context.free(pointer)


def test_a_handle_may_be_opened_twice(context: Context, cuda_owner: CudaOwner) -> None:
    raw = handle(cuda_owner)
    first, second = CudaRegion("a", context, raw, 4096), CudaRegion("b", context, raw, 64)
    first.close()
    got = np.ones(16, np.int32)
    second.read(address(got), 0, 64)
    assert not got.any()
    second.close()
    pointer = context.allocate(64)
    with pytest.raises(CudaError, match="CUDA_ERROR_INVALID_VALUE"):
        context.to_host(address(got), pointer + 1, 64)
    context.free(pointer)


@pytest.mark.parametrize("end", ["freed", "killed"])
def test_memory_that_is_gone(context: Context, cuda_owner: CudaOwner, end: str) -> None:
    region = CudaRegion("g", context, handle(cuda_owner), 4096)
    if end == "freed":
        cuda_owner.destroy("g")
    else:
        cuda_owner.kill()
    got = np.zeros(4, np.int32)
    with pytest.raises(InvalidArgument, match=r"'g' cannot be used .* its owner has freed it or is gone"):
        region.read(address(got), 0, 16)
    with pytest.raises(InvalidArgument, match="its owner has freed it or is gone"):
        region.write(0, address(got), 16)
    region.close()


def test_no_memory(context: Context, cuda_stub: CudaStub) -> None:
    cuda_stub.fail("cuMemAlloc_v2", OUT_OF_MEMORY)
    with pytest.raises(Unavailable, match="the GPU has no 64 bytes left"):
        context.allocate(64)


def test_pages_are_locked_once(context: Context) -> None:
    memory = np.zeros(1 << 16, np.uint8)
    context.pin(address(memory), memory.nbytes)
    with pytest.raises(CudaError):
        context.pin(address(memory) + 4096, 4096)
    context.unpin(address(memory))
    context.pin(address(memory) + 4096, 4096)
    context.unpin(address(memory) + 4096)


def test_only_what_may_be_written_to_is_locked(context: Context) -> None:
    """Read-only memory stays unlocked, as some drivers cannot register it."""
    with mmap.mmap(-1, 4096, prot=mmap.PROT_READ) as memory, memoryview(memory) as view:
        start = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
        with pytest.raises(CudaError, match="CUDA_ERROR_INVALID_VALUE"):
            context.pin(start, 4096)


def test_threads_do_not_wait_for_each_other(cuda_stub: CudaStub, context: Context) -> None:
    """One waits for the device, and for as long as it likes; what another one queues and waits for happens meanwhile."""
    pointer = context.allocate(4096)
    source, got = np.full(64, 7, np.uint8), np.zeros(64, np.uint8)
    handles: list[int] = []

    def wait() -> None:
        context.enter()
        handles.append(context.stream())
        context.synchronize()

    other = threading.Thread(target=wait)
    with cuda_stub.hold("cuStreamSynchronize"):
        other.start()
        until(lambda: cuda_stub.held)
        context.to_device(pointer, address(source), 64)
        context.to_host(address(got), pointer, 64)
        context.synchronize()
        assert got.tolist() == source.tolist()
        assert cuda_stub.held
    other.join()
    assert handles != [context.stream()]
    # The other's stream went with its thread.
    assert len(context._streams) == 1
    context.free(pointer)


@pytest.mark.parametrize("function", ["cuMemHostRegister_v2", "cuMemHostUnregister"])
def test_locking_pages_stops_no_other_thread(cuda_stub: CudaStub, context: Context, function: str) -> None:
    memory = np.zeros(1 << 16, np.uint8)

    def lock() -> None:
        context.pin(address(memory), memory.nbytes)
        context.unpin(address(memory))

    other = threading.Thread(target=lock)
    with cuda_stub.hold(function):
        other.start()
        until(lambda: cuda_stub.held)
        context.check()
        assert cuda_stub.held
    other.join()


def test_no_such_device(driver: Driver) -> None:
    for ordinal in (2, -1, 2**40):
        with pytest.raises(NoCuda, match="does not exist, the process sees 2"):
            driver.context(ordinal)


def test_no_driver(cuda_stub: CudaStub) -> None:
    """In a process that has none to find, and in one that finds no device in it."""
    code = "from tensord.shm.cuda_regions import *\ntry:\n    Driver().context(0)\nexcept NoCuda as e:\n    print(e)"
    for environment, reason in [
        ({}, "the CUDA driver "),
        ({"LD_LIBRARY_PATH": str(cuda_stub.library.parent)}, "found no device (CUDA_ERROR_NO_DEVICE)"),
    ]:
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
        assert reason in done.stdout, done


def test_an_error_that_stays(cuda_stub: CudaStub) -> None:
    """In a process of its own, which is lost after it."""
    code = (
        "from tensord.shm.cuda_regions import *\nd = Driver()\nc = d.context(0)\np = c.allocate(64)\n"
        "for f in (lambda: c.clear(p, 64), c.check, lambda: c.allocate(1)):\n"
        "    try:\n        f()\n    except DeviceLost as e:\n        print(d.lost, e.code, e.message)\nd.close()"
    )
    cuda_stub.fail("cuMemsetD8Async", 700)
    done = subprocess.run(
        [sys.executable, "-c", code], env=cuda_stub.environment, capture_output=True, text=True, check=True
    )
    lines = done.stdout.splitlines()
    assert len(lines) == 3, done
    for line in lines:
        assert line == (
            "CUDA_ERROR_ILLEGAL_ADDRESS UNAVAILABLE the GPU failed (CUDA_ERROR_ILLEGAL_ADDRESS); its worker is being restarted"
        )
    assert issubclass(DeviceLost, Unavailable)
