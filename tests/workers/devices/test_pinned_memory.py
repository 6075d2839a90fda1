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

from tensord.config.options import RegionsOptions
from tensord.shm import guard
from tensord.shm.arena import Arena, ArenaMap
from tensord.shm.arrays import address_of
from tensord.shm.cuda_regions import Context, Driver
from tensord.shm.operations import RegisterSystemRegion
from tensord.shm.regions import Region
from tensord.workers.devices.pinned_memory import PinnedBudget, PinnedMemory
from tensord.workers.regions.region_table import RegionPolicy, RegionTable
from tensord.workers.threads.inbox import Inbox
from tensord.workers.threads.work_thread import WorkThread
from tests.cuda_stub.library import CudaStub, HostMemory
from tests.fakes import until

MIB = 1 << 20


class Loop:
    """The parts of a worker's loop that page-locking uses: the inbox and a thread."""

    def __init__(self, context: Context) -> None:
        self.inbox = Inbox()
        self.thread = WorkThread("page-locking", self.inbox)
        self.context = context

    def pinned(self, byte_size: int) -> PinnedMemory:
        self.budget = PinnedBudget(byte_size)
        return PinnedMemory(self.context, self.budget, self.thread)

    def settle(self) -> None:
        """Waits until everything asked for has happened and the loop has been told."""
        until(lambda: self.inbox.drain() or not self.thread.pending)


@pytest.fixture
def loop(context: Context) -> Iterator[Loop]:
    made = Loop(context)
    yield made
    made.thread.finish()
    made.inbox.close()


def host() -> HostMemory:
    """Returns the driver's statistics of this process."""
    return _stub[0].host(os.getpid())


_stub: list[CudaStub] = []


@pytest.fixture(autouse=True)
def nothing_is_unmapped_too_early(cuda_stub: CudaStub, driver: Driver, context: Context) -> Iterator[None]:
    _stub[:] = [cuda_stub]
    before = host()
    yield
    assert (host().locked, host().violations) == (before.locked, before.violations)


def test_segments_of_both_sides_while_they_are_open(loop: Loop) -> None:
    """The worker's own, and a front's, whose view it cannot write to."""
    pinned, before = loop.pinned(64 * MIB), host().locked
    arena, opened = Arena(MIB, 8 * MIB, 0, pinned.pin_segment), ArenaMap(pinned.pin_segment, writable=True)
    front = Arena(MIB, 8 * MIB, 0)
    first = front.segments[0]
    opened.open(0, first.byte_size, os.dup(first.share(writable=True)))
    loop.settle()
    assert loop.budget.byte_size == 2 * MIB
    assert host().locked == before + 2 * MIB
    large = arena.loan(2 * MIB)
    assert large is not None
    loop.settle()
    assert host().locked == before + 4 * MIB
    large.release()
    assert loop.budget.byte_size == 2 * MIB
    opened.close()
    arena.close()
    assert loop.budget.byte_size == 0
    loop.settle()
    assert host().locked == before
    front.close()


def test_nobody_waits_and_nothing_goes_before_its_time(cuda_stub: CudaStub, loop: Loop) -> None:
    """1. memory is being locked; 2. it is used, and closed by its owner; 3. it stays mapped until the driver lets go of it."""
    pinned = loop.pinned(64 * MIB)
    arena = Arena(MIB, 8 * MIB, 0)
    with cuda_stub.hold("cuMemHostRegister_v2"):
        pinned.pin_segment(arena.segments[0])
        until(lambda: cuda_stub.held)
        view = arena.segments[0].view
        view[:4] = b"used"
        del view
        mapped = maps()
        arena.close()
        assert cuda_stub.held
        assert (maps(), loop.budget.byte_size) == (mapped, 0)
        with cuda_stub.hold("cuMemHostUnregister"):
            cuda_stub.go_on()
            until(lambda: cuda_stub.held)
            assert maps() == mapped
    loop.settle()
    del arena
    assert maps() == mapped - 1


def test_what_is_closed_before_its_turn_is_not_locked_any_more(cuda_stub: CudaStub, loop: Loop) -> None:
    pinned, before = loop.pinned(64 * MIB), host().registered
    with cuda_stub.hold("cuMemHostRegister_v2"):
        memory = [mmap.mmap(-1, 4096) for _ in range(3)]
        views = [memoryview(each) for each in memory]
        for view in views:
            pinned.pin(view, "a region")
        until(lambda: cuda_stub.held)
        for view in views:
            pinned.unpin(view)
    loop.settle()
    assert host().registered == before + 1


def maps() -> int:
    """Returns how many mappings of arenas this process has."""
    return Path("/proc/self/maps").read_text().count("memfd:tensord")


def missing(table: RegionTable, name: str) -> bool:
    region = table.find(name)
    assert isinstance(region, Region)
    return guard.may_be_missing(address_of(region.view(0, 1)))


def test_regions_while_they_are_registered(driver: Driver, loop: Loop) -> None:
    pinned, before = loop.pinned(64 * MIB), host().locked
    table = RegionTable(RegionPolicy(RegionsOptions()), driver, 0, pinned)
    name = f"/tensord-test-pinned-{os.getpid()}"
    made = posix_ipc.SharedMemory(name, posix_ipc.O_CREX, size=8192)
    try:
        table.register(RegisterSystemRegion("sparse", name, 0, 8192), None)
        assert loop.budget.byte_size == 0
        with mmap.mmap(made.fd, 8192) as memory:
            memory[:] = bytes([1]) * 8192
        table.register(RegisterSystemRegion("full", name, 4096, 4096), None)
        # Until its pages are locked, and where they are not, the driver is not handed a client's memory.
        assert missing(table, "full")
        loop.settle()
        assert (missing(table, "sparse"), missing(table, "full")) == (True, False)
        assert (loop.budget.byte_size, host().locked) == (4096, before + 4096)
        table.unregister("system", "full")
        assert loop.budget.byte_size == 0
        table.register(RegisterSystemRegion("again", name, 0, 8192), None)
        assert loop.budget.byte_size == 8192
        table.close()
        loop.settle()
        assert (loop.budget.byte_size, host().locked) == (0, before)
    finally:
        os.close(made.fd)
        posix_ipc.unlink_shared_memory(name)


def test_the_bound(loop: Loop, caplog: pytest.LogCaptureFixture) -> None:
    """It is the operator's; what the process may lock by itself (RLIMIT_MEMLOCK) is not the driver's concern."""
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (4096, hard))
    try:
        pinned, before = loop.pinned(8192), host().locked
    finally:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (soft, hard))
    memory = [mmap.mmap(-1, 4096) for _ in range(4)]
    views = [memoryview(each) for each in memory]
    with caplog.at_level(logging.WARNING):
        for view in views:
            pinned.pin(view, "a region")
        loop.settle()
    assert host().locked == before + 8192
    (told,) = caplog.messages
    assert told.startswith(
        "a region of 4096 bytes is not page-locked: 8192 are, and workers.pinned_byte_size allows 8192"
    )
    pinned.unpin(views[0])
    pinned.unpin(views[3])
    pinned.pin(views[3], "a region")
    assert loop.budget.byte_size == 8192
    pinned.close()
    for view in views:
        pinned.unpin(view)
        view.release()
    assert (loop.budget.byte_size, host().locked) == (0, before)


def test_a_driver_that_refuses(loop: Loop, cuda_stub: CudaStub, caplog: pytest.LogCaptureFixture) -> None:
    pinned, before = loop.pinned(MIB), host().locked
    memory = mmap.mmap(-1, 4096)
    cuda_stub.fail("cuMemHostRegister_v2", 2)
    with caplog.at_level(logging.WARNING), memoryview(memory) as view:
        pinned.pin(view, "a region")
        loop.settle()
        assert (loop.budget.byte_size, host().locked) == (0, before)
        pinned.pin(view, "a region")
        loop.settle()
        assert host().locked == before + 4096
        pinned.unpin(view)
    assert len(caplog.messages) == 1
    assert "is not page-locked: CUDA" in caplog.messages[0]
    loop.settle()
    memory.close()


def test_a_thousand_rounds_lock_no_more_than_one(driver: Driver, loop: Loop) -> None:
    """Registered, used, unregistered, again and again: what is locked, mapped and open is as before.

    The driver refuses to lock what overlaps with memory that is locked already, so it has forgotten the earlier ones as well.
    """
    pinned, locked = loop.pinned(MIB), host().locked
    table = RegionTable(RegionPolicy(RegionsOptions()), driver, 0, pinned)
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
            assert loop.budget.byte_size == 65536
            region.write(64, b"used")
            table.unregister("system", "r")
            assert loop.budget.byte_size == 0
            del region
            loop.inbox.drain()
        loop.settle()
        assert host().locked == locked
        maps, descriptors = held()
        assert (maps, descriptors <= before[1]) == (before[0], True)
        table.close()
    finally:
        os.close(made.fd)
        posix_ipc.unlink_shared_memory(name)


def test_what_does_not_fit_takes_nothing() -> None:
    budget = PinnedBudget(100)
    assert budget.take(60)
    assert not budget.take(41)
    assert budget.byte_size == 60
    assert budget.take(40)
    budget.give_back(60)
    assert budget.byte_size == 40
