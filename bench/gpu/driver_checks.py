"""Checks what this host's driver allows of what tensord's worker needs: page-locking, handles of other processes, bandwidth.

python -m bench.gpu.driver_checks NAME       runs one check and prints JSON
"""

from __future__ import annotations

import mmap
import os
import resource
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from bench.gpu import checking
from bench.gpu.checking import MIB, largest, rate, timed, tried
from bench.gpu.driver_calls import (
    PORTABLE,
    READ_ONLY,
    Owner,
    address_of,
    driver,
    good,
    handle_of,
    make_stream,
    memory,
    name_of,
    open_context,
    open_handle,
)  # fmt: skip

_ATTRIBUTES = (
    "READ_ONLY_HOST_REGISTER_SUPPORTED", "HOST_REGISTER_SUPPORTED", "CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM",
    "PAGEABLE_MEMORY_ACCESS", "ASYNC_ENGINE_COUNT", "UNIFIED_ADDRESSING", "ECC_ENABLED", "MEMORY_POOLS_SUPPORTED",
    "HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED", "MULTIPROCESSOR_COUNT", "IPC_EVENT_SUPPORTED", "DMA_BUF_SUPPORTED",
)  # fmt: skip
_UNPRIVILEGED = 65534


def attributes() -> dict[str, Any]:
    """Reads the device's attributes, the driver's version and the sizes of memory."""
    device = open_context()
    found: dict[str, Any] = {"driver": good(driver.cuDriverGetVersion())}
    for name in _ATTRIBUTES:
        kind = getattr(driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}", None)
        if kind is not None:
            found[name] = tried(lambda kind=kind: good(driver.cuDeviceGetAttribute(kind, device)))  # type: ignore[misc]
    found["memory: free, all"] = [int(size) for size in good(driver.cuMemGetInfo())]
    return found


def page_locking(confine: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """Finds which mappings can be page-locked, with which flags, how long that takes and how it speeds up copies.

    ``confine`` is called before anything is locked.
    """
    open_context()
    confine()
    stream, byte_size = make_stream(), min(64 * MIB, largest())
    pointer = int(good(driver.cuMemAlloc(byte_size)))
    fd = os.memfd_create("bench-gpu")
    os.ftruncate(fd, byte_size)
    written = mmap.mmap(fd, byte_size)
    written[:: mmap.PAGESIZE] = bytes(byte_size // mmap.PAGESIZE)
    read = mmap.mmap(fd, byte_size, prot=mmap.PROT_READ)
    found: dict[str, Any] = {"RLIMIT_MEMLOCK": resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]}
    for name, view, flags in (
        ("memfd, written here", written, PORTABLE),
        ("memfd, read here", read, PORTABLE),
        ("memfd, read here, as read-only", read, PORTABLE | READ_ONLY),
    ):
        start = address_of(view)
        began = time.perf_counter()
        result = driver.cuMemHostRegister(start, byte_size, flags)
        entry = found[name] = {"result": name_of(result), "lock_ms": round(1e3 * (time.perf_counter() - began), 2)}

        def send(start: int = start) -> None:
            good(driver.cuMemcpyHtoDAsync(pointer, start, byte_size, stream))
            good(driver.cuStreamSynchronize(stream))

        entry["to the device"] = tried(lambda send=send: rate(byte_size, send, 8))  # type: ignore[misc]
        if name_of(result) == "CUDA_SUCCESS":
            began = time.perf_counter()
            good(driver.cuMemHostUnregister(start))
            entry["unlock_ms"] = round(1e3 * (time.perf_counter() - began), 2)
    start = address_of(written)
    found["twice"] = [name_of(driver.cuMemHostRegister(start, byte_size // 2, PORTABLE)) for _ in range(2)]
    found["a copy that ends outside"] = name_of(driver.cuMemcpyHtoDAsync(pointer, start, byte_size // 2 + 1, stream))
    found["context"] = name_of(driver.cuCtxSynchronize())
    return found


def page_locking_with_little_memlock() -> dict[str, Any]:
    """Finds whether page-locking fails in an unprivileged process with a small RLIMIT_MEMLOCK."""

    def confine() -> None:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (64 << 10, 64 << 10))
        if os.getuid() == 0:
            os.setgid(_UNPRIVILEGED)
            os.setuid(_UNPRIVILEGED)

    return page_locking(confine)


def bandwidth() -> dict[str, Any]:
    """Measures copies in bytes a second: each way, page-locked or not, within the device, both ways at once; and one call."""
    open_context()
    ours, other, most = make_stream(), make_stream(), largest()
    one, two = int(good(driver.cuMemAlloc(most))), int(good(driver.cuMemAlloc(most)))
    # Kept until the end.
    views = [memory(most, locked=True), memory(most, locked=True), memory(most, locked=False)]
    locked, second, pageable = map(address_of, views)

    def wait(stream: Any = ours) -> None:
        good(driver.cuStreamSynchronize(stream))

    def then_wait(function: Any, *arguments: Any) -> Callable[[], None]:
        def call() -> None:
            good(function(*arguments, ours))
            wait()

        return call

    found: dict[str, Any] = {}
    for byte_size in (64, 4096, 65536, MIB, 16 * MIB, 256 * MIB):
        if byte_size > most:
            continue
        count = 200 if byte_size <= MIB else 20

        def both(byte_size: int = byte_size) -> None:
            good(driver.cuMemcpyHtoDAsync(one, locked, byte_size, ours))
            good(driver.cuMemcpyDtoHAsync(second, two, byte_size, other))
            wait()
            wait(other)

        found[f"{byte_size} bytes"] = {
            "in, page-locked": rate(byte_size, then_wait(driver.cuMemcpyHtoDAsync, one, locked, byte_size), count),
            "out, page-locked": rate(byte_size, then_wait(driver.cuMemcpyDtoHAsync, locked, one, byte_size), count),
            "in, pageable": rate(byte_size, then_wait(driver.cuMemcpyHtoDAsync, one, pageable, byte_size), count),
            "out, pageable": rate(byte_size, then_wait(driver.cuMemcpyDtoHAsync, pageable, one, byte_size), count),
            "within the device": rate(byte_size, then_wait(driver.cuMemcpyDtoDAsync, two, one, byte_size), count),
            "both ways at once, of each": rate(byte_size, both, count),
        }
    found["a wait for nothing"] = timed(wait)
    found["16 MiB from two threads, GB/s in and out"] = tried(
        lambda: _duplex(min(most, 16 * MIB), one, two, locked, second, ours, other)
    )
    return found


def _duplex(byte_size: int, one: int, two: int, locked: int, second: int, ours: Any, other: Any) -> list[float]:
    """Measures copies in both directions at once, each in a thread of its own; returns the GB/s of both."""
    context, counts = good(driver.cuCtxGetCurrent()), [0, 0]
    ends = time.perf_counter() + 1.5

    def pump(who: int, function: Any, to: int, start: int, stream: Any) -> None:
        good(driver.cuCtxSetCurrent(context))
        while time.perf_counter() < ends:
            good(function(to, start, byte_size, stream))
            good(driver.cuStreamSynchronize(stream))
            counts[who] += 1

    began = time.perf_counter()
    threads = [
        threading.Thread(target=pump, args=(0, driver.cuMemcpyHtoDAsync, one, locked, ours)),
        threading.Thread(target=pump, args=(1, driver.cuMemcpyDtoHAsync, second, two, other)),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [round(count * byte_size / (time.perf_counter() - began) / 1e9, 1) for count in counts]


def handles() -> dict[str, Any]:
    """Opens memory of another process: checks its address, its range and its values, and what the driver refuses."""
    open_context()
    stream, found = make_stream(), dict[str, Any]()
    with Owner() as owner:
        pointers = {}
        for byte_size in (256, 4 * MIB):
            made = owner.make(byte_size)
            began = time.perf_counter()
            pointer = pointers[byte_size] = open_handle(made["handle"])
            start, extent = good(driver.cuMemGetAddressRange(pointer))
            found[f"{byte_size} bytes"] = {
                "open_us": round(1e6 * (time.perf_counter() - began), 1),
                "in its block: there, here": [made["pointer"] % (2 * MIB), pointer % (2 * MIB)],
                "its range: offset, bytes": [pointer - int(start), int(extent)],
                "values are right": _values(pointer, stream) == [0, 1, 2, 3],
            }
        found["made of an address 1 MiB in, begins with"] = tried(
            lambda: _values(open_handle(owner.make(4 * MIB, MIB)["handle"]), stream)
        )
        again = owner.make(MIB)["handle"]
        found["opened twice, the same address"] = tried(lambda: open_handle(again) == open_handle(again))
    own = int(good(driver.cuMemAlloc(4096)))
    found["of this process"] = tried(lambda: open_handle(handle_of(own)))
    found["of a pool"] = tried(lambda: handle_of(int(good(driver.cuMemAllocAsync(4096, stream)))))
    found["context"] = name_of(driver.cuCtxSynchronize())
    return found


def owner_frees() -> dict[str, Any]:
    """Reads memory of another process after that process has freed it and allocated other memory."""
    return _gone(lambda owner: owner.free(0))


def owner_dies() -> dict[str, Any]:
    """Reads memory of another process after that process was killed."""

    def kill(owner: Owner) -> None:
        owner.process.kill()
        owner.process.wait()

    return _gone(kill)


def _gone(end: Callable[[Owner], None]) -> dict[str, Any]:
    open_context()
    stream = make_stream()
    with Owner() as owner:
        handle = owner.make(4 * MIB)["handle"]
        pointer = open_handle(handle)
        found = {"before": _values(pointer, stream)}
        end(owner)
        found["afterwards"] = tried(lambda: _values(pointer, stream))
        found["opened again"] = tried(lambda: open_handle(handle) and "yes")
        found["closed"] = name_of(driver.cuIpcCloseMemHandle(pointer))
        found["context"] = name_of(driver.cuCtxSynchronize())
    return found


def _values(pointer: int, stream: Any) -> list[float]:
    values = np.empty(4, np.float32)
    good(driver.cuMemcpyDtoHAsync(values.ctypes.data, pointer, values.nbytes, stream))
    good(driver.cuStreamSynchronize(stream))
    found: list[float] = values.tolist()
    return found


#: By worth.
CHECKS: dict[str, checking.Check] = {
    check.__name__: check
    for check in (
        attributes,
        page_locking,
        handles,
        owner_frees,
        bandwidth,
        owner_dies,
        page_locking_with_little_memlock,
    )
}

if __name__ == "__main__":
    checking.main(CHECKS)
