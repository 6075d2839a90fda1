"""Page-locked memory over the tests' stand-in for the driver: what is locked, how much, and until when."""

from __future__ import annotations

import logging
import mmap
import os
import resource
import uuid
from collections.abc import Iterator
from pathlib import Path

import posix_ipc
import pytest

from config.options import Regions
from shm.arena import Arena, ArenaMap
from shm.cuda_regions import Context, CudaError, Driver
from shm.messages import RegisterSystemRegion
from shm.regions import Region
from tests.cuda_stub.library import CudaStub
from workers import pinned_memory
from workers.pinned_memory import PinnedMemory
from workers.region_policy import RegionPolicy
from workers.region_table import RegionTable

MIB = 1 << 20


@pytest.fixture
def driver(cuda_stub: CudaStub, monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    monkeypatch.setattr(resource, "getrlimit", lambda which: unlimited)
    made = Driver()
    yield made
    made.close()


@pytest.fixture
def context(driver: Driver) -> Context:
    return driver.context(0)


def is_locked(context: Context, view: memoryview) -> bool:
    """Asks the driver: it refuses to lock twice."""
    address = pinned_memory._address(view)
    try:
        context.pin(address, view.nbytes, writable=not view.readonly)
    except CudaError:
        return True
    context.unpin(address)
    return False


def test_segments_of_both_sides_while_they_are_open(context: Context) -> None:
    pinned = PinnedMemory(context, 64 * MIB)
    arena, opened = Arena(MIB, 8 * MIB, 0, pinned.pin_segment), ArenaMap(pinned.pin_segment)
    first = arena.segment(0)
    opened.open(0, first.byte_size, os.dup(first.fd))
    assert pinned.byte_size == 2 * MIB
    assert is_locked(context, first.view)
    large = arena.loan(2 * MIB)
    assert large is not None
    assert pinned.byte_size == 4 * MIB
    large.release()
    assert pinned.byte_size == 2 * MIB
    opened.close()
    arena.close()
    assert pinned.byte_size == 0


def test_regions_while_they_are_registered(driver: Driver, context: Context) -> None:
    pinned = PinnedMemory(context, 64 * MIB)
    table = RegionTable(RegionPolicy(Regions()), driver, 0, pinned)
    name = f"/tensord-test-pinned-{os.getpid()}"
    made = posix_ipc.SharedMemory(name, posix_ipc.O_CREX, size=8192)
    try:
        table.register(RegisterSystemRegion("sparse", name, 0, 8192), None)
        assert pinned.byte_size == 0
        with mmap.mmap(made.fd, 8192) as memory:
            memory[:] = bytes([1]) * 8192
        region, _ = table.register(RegisterSystemRegion("full", name, 4096, 4096), None)
        assert isinstance(region, Region)
        assert (pinned.byte_size, is_locked(context, region.view(0, 4096))) == (4096, True)
        table.unregister("system", "full", lambda: None)
        assert pinned.byte_size == 0
        table.register(RegisterSystemRegion("again", name, 0, 8192), None)
        assert pinned.byte_size == 8192
        table.close()
        assert pinned.byte_size == 0
    finally:
        os.close(made.fd)
        posix_ipc.unlink_shared_memory(name)


@pytest.mark.parametrize("bound", ["workers.pinned_byte_size", "RLIMIT_MEMLOCK"])
def test_the_bound(
    context: Context, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, bound: str
) -> None:
    budget = 8192
    if bound == "RLIMIT_MEMLOCK":
        budget = 1 << 30
        monkeypatch.setattr(resource, "getrlimit", lambda which: (8192, 8192))
    pinned = PinnedMemory(context, budget)
    memory = [mmap.mmap(-1, 4096) for _ in range(4)]
    views = [memoryview(each) for each in memory]
    with caplog.at_level(logging.WARNING):
        assert [pinned.pin(view, "a region") for view in views] == [True, True, False, False]
    (told,) = caplog.messages
    assert told.startswith(f"a region of 4096 bytes is not page-locked: 8192 are, and {bound} allows 8192")
    pinned.unpin(views[0])
    pinned.unpin(views[3])
    assert pinned.pin(views[3], "a region")
    for view in views:
        pinned.unpin(view)
        view.release()
    assert pinned.byte_size == 0


def test_a_driver_that_refuses(context: Context, cuda_stub: CudaStub, caplog: pytest.LogCaptureFixture) -> None:
    pinned = PinnedMemory(context, MIB)
    memory = mmap.mmap(-1, 4096)
    cuda_stub.fail("cuMemHostRegister_v2", 2)
    with caplog.at_level(logging.WARNING), memoryview(memory) as view:
        assert not pinned.pin(view, "a region")
        assert pinned.pin(view, "a region")
        pinned.unpin(view)
    assert len(caplog.messages) == 1
    assert "is not page-locked: CUDA" in caplog.messages[0]


def test_a_thousand_rounds_lock_no_more_than_one(driver: Driver, context: Context) -> None:
    """Registered, used, unregistered, again and again: what is locked, mapped and open is as before.

    The driver refuses to lock what overlaps with memory that is locked already, so it has forgotten the earlier ones as well.
    """
    pinned = PinnedMemory(context, MIB)
    table = RegionTable(RegionPolicy(Regions()), driver, 0, pinned)
    name = f"/tensord-test-{uuid.uuid4().hex}"
    made = posix_ipc.SharedMemory(name, posix_ipc.O_CREX, size=65536)

    def held() -> tuple[int, int]:
        maps = Path("/proc/self/maps").read_text()
        return maps.count(name), len(os.listdir("/proc/self/fd"))

    try:
        os.pwrite(made.fd, bytes(65536), 0)
        before = held()
        for _ in range(1000):
            region, _ = table.register(RegisterSystemRegion("r", name, 0, 65536), None)
            assert isinstance(region, Region)
            assert pinned.byte_size == 65536
            region.write(64, b"used")
            table.unregister("system", "r", lambda: None)
            assert pinned.byte_size == 0
        maps, descriptors = held()
        assert (maps, descriptors <= before[1]) == (before[0], True)
        table.close()
    finally:
        os.close(made.fd)
        posix_ipc.unlink_shared_memory(name)
