"""Regions on all workers or on none, whoever dies when."""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensord.config.options import RegionsOptions
from tensord.daemon.processes.child import Child
from tensord.daemon.processes.fronts import Fronts
from tensord.daemon.processes.worker_pool import WorkerPool
from tensord.daemon.regions.region_record import RegionState, RegisteredRegion
from tensord.daemon.regions.region_registry import RegionRegistry
from tensord.shm import descriptors
from tensord.shm.control_records import RegionPlace
from tensord.shm.errors import AlreadyExists, InvalidArgument, NotFound, ServingError, Unavailable, Unsupported
from tensord.shm.operations import (
    AwaitRegion,
    Operation,
    Peer,
    RegionRecords,
    RegionStatus,
    RegisterCudaRegion,
    RegisterSystemRegion,
    UnregisterRegion,
)
from tests.generated import examples
from tests.invariants import check_invariants
from tests.open_files import no_descriptors_left

TCP = Peer("tcp", "127.0.0.1:4711")
ALICE = Peer("unix", "", os.getpid(), 1001, 1001)
BOB = Peer("unix", "", os.getpid(), 1002, 1002)


class FakeHolder:
    """A worker that keeps regions as (device, inode) of the descriptor it was given or opened itself."""

    result_of = Child.result_of

    def __init__(self, incarnation: int, memory: int) -> None:
        self.name = f"worker-{incarnation}"
        self.incarnation = incarnation
        self.device = "cpu:0"
        self.alive = True
        self.memory = memory
        self.regions: dict[str, int] = {}
        #: Raised at the next register.
        self.refuses: ServingError | None = None
        self.opened = 0
        #: Of each register.
        self.access: list[str] = []
        #: CUDA regions that it has opened, where others are only known.
        self.near: set[str] = set()
        #: While it is not set, a request is in every region.
        self.idle = asyncio.Event()
        self.idle.set()
        #: Regions whose requests are not done.
        self.leaving: list[str] = []

    async def call(self, operation: Operation, *fds: int) -> tuple[bytes, list[int]]:
        if not self.alive:
            raise Unavailable("dead")
        sent = [os.fstat(fd).st_ino for fd in fds]  # a real channel duplicates when it queues
        await asyncio.sleep(0)
        if isinstance(operation, RegisterCudaRegion):
            self.check_name(operation)
            self.regions[operation.name] = operation.device_id
            self.near |= {operation.name} if operation.near else set()
            return b"", []
        if isinstance(operation, RegisterSystemRegion):
            self.check_name(operation)
            self.opened += not sent
            self.regions[operation.name] = sent[0] if sent else os.fstat(self.memory).st_ino
            self.access.append(operation.access)
            return (b"", []) if sent else (b'{"access": "guarded"}', [os.dup(self.memory)])
        if isinstance(operation, RegionRecords):
            used = dict.fromkeys(self.regions, (1, 0)) | dict.fromkeys(self.leaving, (0, 1))
            return json.dumps(used).encode(), []
        if isinstance(operation, AwaitRegion):
            await self.idle.wait()
            self.leaving.remove(operation.name)
            return b"", []
        assert isinstance(operation, UnregisterRegion)
        if self.regions.pop(operation.name, None) is None or self.idle.is_set():
            return b"0", []
        self.leaving.append(operation.name)
        return b"1", []

    def check_name(self, operation: RegisterSystemRegion | RegisterCudaRegion) -> None:
        if self.refuses is not None:
            raise self.refuses
        if operation.name in self.regions and not operation.renews:
            raise AlreadyExists(operation.name)


def made(
    workers: Callable[[], Iterable[FakeHolder]], options: RegionsOptions, devices: Sequence[str] = ("cpu:0",)
) -> RegionRegistry:
    pool: Any = SimpleNamespace(ready=workers, devices=devices)
    return RegionRegistry(options, pool, cast(Any, SimpleNamespace(publish=lambda place: None)))


@pytest.fixture
def memory() -> Iterator[int]:
    before = set(os.listdir("/proc/self/fd"))
    fd = os.memfd_create("tensord-test")
    yield fd
    os.close(fd)
    assert set(os.listdir("/proc/self/fd")) <= before


def request(name: str = "r", **changes: int | str) -> RegisterSystemRegion:
    return RegisterSystemRegion(**({"name": name, "key": "/k", "offset": 0, "byte_size": 64} | changes))  # type: ignore[arg-type]


def names(registry: RegionRegistry) -> list[str]:
    return [entry["name"] for entry in json.loads(registry.status(RegionStatus("system", "")))]


@pytest.mark.parametrize(
    ("changes", "kind", "words"),
    [
        ({"byte_size": 0}, InvalidArgument, "byte_size 0 must be at least 1"),
        ({"offset": -1}, InvalidArgument, "offset -1"),
        ({"byte_size": (1 << 63) - 1, "offset": 1}, InvalidArgument, "Integer overflow detected"),
        ({"byte_size": 1 << 30}, InvalidArgument, f"{1 << 30} bytes, at most 1048576 are allowed"),
        ({"name": ""}, InvalidArgument, "1 to 255 characters"),
        ({"name": "a\nb"}, InvalidArgument, "control character"),
    ],
)
async def test_bounds(changes: dict[str, int | str], kind: type[ServingError], words: str, memory: int) -> None:
    workers = [FakeHolder(0, memory)]
    registry = made(lambda: workers, RegionsOptions(max_byte_size=1 << 20))
    with pytest.raises(kind, match=words):
        await registry.register(request(**({"name": "r"} | changes)), TCP)  # type: ignore[arg-type]
    assert not workers[0].regions


async def test_count_switch_and_no_worker(memory: int) -> None:
    registry = made(lambda: [holder], RegionsOptions(max_count=1))
    holder = FakeHolder(0, memory)
    await registry.register(request("a"), TCP)
    with pytest.raises(Unavailable, match="1 regions are registered, at most 1 are allowed"):
        await registry.register(request("b"), TCP)
    registry.close()
    with pytest.raises(Unsupported, match="Client shared memory is disabled"):
        await made(lambda: [holder], RegionsOptions(enabled=False)).register(request(), TCP)
    for name in ("a", ""):
        with pytest.raises(Unsupported, match="Client shared memory is disabled"):
            await made(lambda: [holder], RegionsOptions(enabled=False)).unregister(
                UnregisterRegion("system", name), TCP
            )
    with pytest.raises(Unavailable, match="no worker is running"):
        await made(list, RegionsOptions()).register(request(), TCP)


async def test_status_of_the_unknown(memory: int) -> None:
    holder = FakeHolder(0, memory)
    registry = made(lambda: [holder], RegionsOptions())
    await registry.register(request(), TCP)
    with pytest.raises(NotFound, match="Unable to find system shared memory region: 'x'"):
        registry.status(RegionStatus("system", "x"))
    with pytest.raises(NotFound, match="Unable to find cuda shared memory region: 'x'"):
        registry.status(RegionStatus("cuda", "x"))
    with pytest.raises(NotFound, match="registered as system shared memory, not CUDA shared memory"):
        registry.status(RegionStatus("cuda", "r"))
    assert registry.status(RegionStatus("cuda", "")) == b"[]"
    registry.close()


async def test_a_region_that_is_in_use_is_listed_until_its_last_request_ends(memory: int) -> None:
    """
    1. Two ask at once to unregister a region that a request uses. 2. The name is registered again, with another size.
    3. That one is unregistered. 4. The request ends.
    Result: both are answered at once; the old region is listed and counted while its request runs, where its name has no new one.
    """
    holder = FakeHolder(0, memory)
    registry = made(lambda: [holder], RegionsOptions(max_count=2))
    await registry.register(request(), TCP)
    holder.idle.clear()
    await asyncio.gather(*(registry.unregister(UnregisterRegion("system", name), TCP) for name in ("r", "")))
    assert holder.regions == {}
    (listed,) = json.loads(registry.status(RegionStatus("system", "r")))
    assert listed["byte_size"] == 64
    (record,) = json.loads(await registry.records("r"))
    assert (record["state"], record["leases"]) == ("unregistering", 1)
    await registry.register(request(byte_size=32), BOB)
    assert [entry["byte_size"] for entry in json.loads(registry.status(RegionStatus("system", "")))] == [32]
    assert len(json.loads(await registry.records("r"))) == 2
    with pytest.raises(Unavailable, match="2 regions are registered, at most 2 are allowed"):
        await registry.register(request("x"), TCP)
    await registry.unregister(UnregisterRegion("system", "r"), BOB)
    holder.idle.set()
    while names(registry):
        await asyncio.sleep(0)
    assert registry.statistics() == {}
    await registry.register(request(), TCP)
    check_invariants(registry)
    registry.close()


async def test_its_owner_may_register_the_same_again(memory: int) -> None:
    """
    1. A region is registered, and its key made anew. 2. The same host registers it again, without the leading slash.
    3. Others try, and the owner with another key, offset or size.
    Result: every worker has the new object, and the old one's descriptor is given back; everybody else is refused.
    """
    workers = [FakeHolder(i, memory) for i in range(2)]
    registry = made(lambda: workers, RegionsOptions())
    await registry.register(request(), TCP)
    new = os.memfd_create("tensord-test")
    for worker in workers:
        worker.memory = new
    await registry.register(request(key="k"), Peer("tcp", "127.0.0.1:9"))
    assert {worker.regions["r"] for worker in workers} == {os.fstat(new).st_ino}
    assert json.loads(await registry.records("r"))[0]["address"] == "127.0.0.1:9"
    for peer in (ALICE, Peer("tcp", "10.0.0.1:9")):
        with pytest.raises(AlreadyExists):
            await registry.register(request(), peer)
    for change in ({"key": "/other"}, {"offset": 4096}, {"byte_size": 32}):
        with pytest.raises(AlreadyExists):
            await registry.register(request(**change), TCP)  # type: ignore[arg-type]
    with pytest.raises(AlreadyExists):
        await registry.register(cuda("r"), TCP)
    check_invariants(registry)
    registry.close()
    os.close(new)


async def test_a_renewal_that_is_refused_changes_nothing(memory: int) -> None:
    """The second worker cannot take the new object: the first one gets the old one back."""
    workers = [FakeHolder(i, memory) for i in range(2)]
    registry = made(lambda: workers, RegionsOptions())
    await registry.register(request(), TCP)
    before = workers[0].regions["r"]
    new = os.memfd_create("tensord-test")
    workers[0].memory = new
    for refusing in (workers[1], workers[0]):
        refusing.refuses = Unavailable("no more can be guarded")
        with pytest.raises(Unavailable, match="no more can be guarded"):
            await registry.register(request(), TCP)
        refusing.refuses = None
        assert [worker.regions["r"] for worker in workers] == [before, before]
        assert names(registry) == ["r"]
        check_invariants(registry)
    registry.close()
    os.close(new)


async def test_renewals_and_others_at_once(memory: int) -> None:
    workers = [FakeHolder(i, memory) for i in range(2)]
    registry = made(lambda: workers, RegionsOptions())
    await asyncio.gather(*(registry.register(request(), TCP) for _ in range(3)))
    assert names(registry) == ["r"]
    results = await asyncio.gather(
        registry.register(request(), TCP),
        registry.unregister(UnregisterRegion("system", "r"), TCP),
        registry.register(request(), ALICE),
        return_exceptions=True,
    )
    assert results[:2] == [None, None]
    assert isinstance(results[2], AlreadyExists)
    assert names(registry) == []
    check_invariants(registry)
    registry.close()


async def test_the_end_of_who_registered_last_counts(memory: int) -> None:
    """
    1. A process registers a region, another one of its user the same again. 2. The first one ends. 3. The second one ends while a
    third one's renewal is refused.
    """
    holder = FakeHolder(0, memory)
    registry = made(lambda: [holder], RegionsOptions(reclaim="owner"))
    ends = []
    for _ in range(2):
        reading, writing = os.pipe()
        ends.append((reading, writing))
        await registry.register(request(), ALICE, reading)
    os.write(ends[0][1], b".")
    for _ in range(10):
        await asyncio.sleep(0)
    assert names(registry) == ["r"]
    holder.refuses = InvalidArgument("it does not open")
    refused = asyncio.create_task(registry.register(request(), ALICE))
    await asyncio.sleep(0)
    os.write(ends[1][1], b".")
    with pytest.raises(InvalidArgument):
        await refused
    while names(registry):
        await asyncio.sleep(0.001)
    for end in (*ends[0], *ends[1]):
        os.close(end)
    registry.close()


async def test_who_registers_again_as_the_one_before_ends_keeps_the_region(memory: int) -> None:
    """
    1. Alice registers a. 2. In one iteration of the loop another process of hers asks to register it again, and hers has ended.
    Result: whoever was told that the region is registered has it.
    """
    holder = FakeHolder(1, memory)
    registry = made(lambda: [holder], RegionsOptions(reclaim="owner"))
    (first, writing), (second, other) = os.pipe(), os.pipe()
    await registry.register(request("a"), ALICE, first)
    again = asyncio.create_task(registry.register(request("a"), ALICE, second))
    watch = registry._regions["a"].watch
    assert watch is not None
    watch._readable()
    await again
    for _ in range(20):
        await asyncio.sleep(0)
    assert names(registry) == ["a"]
    assert set(holder.regions) == {"a"}
    registry.close()
    for end in (first, writing, second, other):
        os.close(end)


async def test_sealed_memory_is_the_same_only_if_it_is(memory: int) -> None:
    holder = FakeHolder(0, memory)
    registry = made(lambda: [holder], RegionsOptions())
    other = os.memfd_create("tensord-test")
    await registry.register(request(key=""), ALICE, sealed=memory)
    await registry.register(request(key=""), ALICE, sealed=memory)
    with pytest.raises(AlreadyExists):
        await registry.register(request(key=""), ALICE, sealed=other)
    check_invariants(registry)
    registry.close()
    os.close(other)


async def test_a_replacement_gets_every_region(memory: int) -> None:
    workers = [FakeHolder(0, memory)]
    registry = made(lambda: workers, RegionsOptions())
    await registry.register(request("a"), TCP)
    await registry.register(request("b"), TCP)
    workers[0].alive = False
    registry.worker_left(0)
    workers[:] = [FakeHolder(1, -1)]
    await registry.restore(workers[0])
    assert set(workers[0].regions) == {"a", "b"}
    assert workers[0].opened == 0
    check_invariants(registry)
    registry.close()


class LateHolder(FakeHolder):
    """A worker whose answers come late: it has carried out what it was asked."""

    def __init__(self, incarnation: int, memory: int) -> None:
        super().__init__(incarnation, memory)
        self.answers = asyncio.Event()

    async def call(self, operation: Operation, *fds: int) -> tuple[bytes, list[int]]:
        answer = await super().call(operation, *fds)
        await self.answers.wait()
        return answer


async def test_a_name_is_free_also_where_a_worker_just_got_its_region(memory: int) -> None:
    """
    1. A new worker is given a region, and its answer is late. 2. The region is unregistered. 3. Its name gets other memory.
    Result: 3 is done, and every worker has that memory.
    """
    fresh = LateHolder(1, -1)
    workers = [FakeHolder(0, memory)]
    registry = made(lambda: workers, RegionsOptions())
    await registry.register(request(), TCP)
    workers.append(fresh)
    restored = asyncio.create_task(registry.restore(fresh))
    await asyncio.sleep(0.01)
    assert set(fresh.regions) == {"r"}
    unregistered = asyncio.create_task(registry.unregister(UnregisterRegion("system", "r"), TCP))
    await asyncio.sleep(0.01)
    registered = asyncio.create_task(registry.register(request(byte_size=32), TCP))
    await asyncio.sleep(0.01)
    fresh.answers.set()
    await asyncio.gather(restored, unregistered, registered)
    assert set(fresh.regions) == set(workers[0].regions) == {"r"}
    check_invariants(registry)
    registry.close()


async def test_a_worker_that_joins_during_a_renewal_has_the_region(memory: int) -> None:
    """
    1. A region is registered again, of which a worker tells late. 2. Another worker is up, and gets its regions.
    Result: it has the region before it gets requests.
    """
    late = LateHolder(0, memory)
    late.answers.set()
    fresh = FakeHolder(1, -1)
    workers: list[FakeHolder] = [late]
    registry = made(lambda: workers, RegionsOptions())
    await registry.register(request(), TCP)
    late.answers.clear()
    renewed = asyncio.create_task(registry.register(request(), TCP))
    await asyncio.sleep(0.01)
    workers.append(fresh)
    restored = asyncio.create_task(registry.restore(fresh))
    await asyncio.sleep(0.01)
    assert restored.done() is ("r" in fresh.regions)
    late.answers.set()
    await asyncio.gather(renewed, restored)
    assert set(fresh.regions) == {"r"}
    check_invariants(registry)
    registry.close()


class Forgetful(FakeHolder):
    """A worker that has taken a renewal, and refuses the former region when it is given it back."""

    refuses_former: ServingError | None = None

    async def call(self, operation: Operation, *fds: int) -> tuple[bytes, list[int]]:
        if isinstance(operation, RegisterSystemRegion) and self.refuses_former is not None and fds:
            await asyncio.sleep(0)
            raise self.refuses_former
        return await super().call(operation, *fds)


async def test_a_worker_that_refuses_the_former_region_does_not_keep_the_one_that_was_refused(memory: int) -> None:
    """
    1. A region is registered again with other memory, which one worker takes and another refuses. 2. The first one cannot take
    the former memory back, as the object has shrunk. Result: it has no region of the name, and the other one the former.
    """
    takes, refuses = Forgetful(0, memory), FakeHolder(1, memory)
    registry = made(lambda: [takes, refuses], RegionsOptions())
    await registry.register(request(), TCP)
    former = dict(refuses.regions)
    takes.memory = new = os.memfd_create("tensord-test")
    refuses.refuses, takes.refuses_former = InvalidArgument("no"), InvalidArgument("too small")
    with pytest.raises(InvalidArgument, match="no"):
        await registry.register(request(), TCP)
    assert (takes.regions, refuses.regions) == ({}, former)
    check_invariants(registry)
    registry.close()
    os.close(new)


async def test_a_name_is_free_though_a_renewal_has_failed_before(memory: int) -> None:
    """
    1. A region is registered again, which one worker takes and another refuses. 2. The one cannot be given the former region
    back yet. 3. The region is unregistered, and its name gets other memory. Result: every worker has that memory.
    """
    takes, refuses = Forgetful(0, memory), FakeHolder(1, memory)
    workers: list[FakeHolder] = [takes, refuses]
    registry = made(lambda: workers, RegionsOptions())
    await registry.register(request(), TCP)
    refuses.refuses = InvalidArgument("no")
    renewed = asyncio.create_task(registry.register(request(), TCP))
    while set(registry._regions["r"].holders) == {0, 1}:
        await asyncio.sleep(0)
    takes.refuses_former, refuses.refuses = descriptors.none_left(takes.name), None
    await asyncio.sleep(0.01)
    await registry.unregister(UnregisterRegion("system", "r"), TCP)
    takes.refuses_former = None
    await registry.register(request(byte_size=32), TCP)
    assert set(takes.regions) == set(refuses.regions) == {"r"}
    renewed.cancel()
    await asyncio.wait([renewed])
    registry.close()


async def test_who_unregisters_while_a_failed_renewal_is_undone_ends_that(memory: int) -> None:
    """A call that waits for a region that another changes waits until that other is done, and lets the loop run."""
    takes, late = FakeHolder(0, memory), LateHolder(1, memory)
    workers: list[FakeHolder] = [takes, late]
    registry = made(lambda: workers, RegionsOptions())
    late.answers.set()
    await registry.register(request(), TCP)
    region = registry._regions["r"]
    late.refuses = InvalidArgument("no")
    renewed = asyncio.create_task(registry.register(request(), TCP))
    while region.state is RegionState.REGISTERED:
        await asyncio.sleep(0)
    while region.state is not RegionState.REGISTERED:
        await asyncio.sleep(0)
    late.refuses = None
    late.answers.clear()
    unregistered = asyncio.create_task(registry.unregister(UnregisterRegion("system", "r"), TCP))
    with pytest.raises(InvalidArgument, match="no"):
        await renewed
    assert region.state is RegionState.UNREGISTERING
    assert not region.changed.is_set()
    late.answers.set()
    await unregistered
    assert names(registry) == []
    registry.close()


async def test_whose_a_region_is(memory: int) -> None:
    """A user's regions are the user's and the operator's; what came over TCP is everybody's by name, and TCP's by "all"."""
    holder = FakeHolder(0, memory)
    registry = made(lambda: [holder], RegionsOptions())
    for name, peer in (("t", TCP), ("a", ALICE), ("b", BOB)):
        await registry.register(request(name), peer)
    with pytest.raises(InvalidArgument, match="'a' was registered by another user"):
        await registry.unregister(UnregisterRegion("system", "a"), BOB)
    with pytest.raises(InvalidArgument, match="'a' was registered by another user"):
        await registry.unregister(UnregisterRegion("system", "a"), TCP)
    await registry.unregister(UnregisterRegion("system", ""), ALICE)
    assert names(registry) == ["b", "t"]
    await registry.unregister(UnregisterRegion("system", ""), Peer("tcp", "10.0.0.1:1"))
    assert names(registry) == ["b"]
    await registry.register(request("t"), TCP)
    await registry.unregister(UnregisterRegion("system", "t"), BOB)
    await registry.register(request("a"), ALICE)
    await registry.unregister(UnregisterRegion("system", ""), Peer("operator"))
    assert names(registry) == []


async def test_quotas_name_both_numbers(memory: int) -> None:
    options = RegionsOptions(max_count=3, max_owner_count=2, max_total_byte_size=300, max_owner_byte_size=200)
    registry = made(lambda: [holder], options)
    holder = FakeHolder(0, memory)
    await registry.register(request("a"), ALICE)
    with pytest.raises(Unavailable, match="137 bytes beside 64 of this client's user or host, at most 200 are allowed"):
        await registry.register(request("a2", byte_size=137), ALICE)
    await registry.register(request("a2"), ALICE)
    with pytest.raises(Unavailable, match="2 regions are registered by this client's user or host, at most 2"):
        await registry.register(request("a3"), ALICE)
    with pytest.raises(Unavailable, match="173 bytes beside 128 of all regions, at most 300 are allowed"):
        await registry.register(request("b", byte_size=173), BOB)
    await registry.register(request("b"), BOB)
    with pytest.raises(Unavailable, match="3 regions are registered, at most 3 are allowed"):
        await registry.register(request("t"), TCP)
    assert registry.statistics() == {
        "uid 1001": {"count": 2, "byte_size": 128},
        "uid 1002": {"count": 1, "byte_size": 64},
    }
    registry.close()


async def test_key_prefixes(memory: int) -> None:
    registry = made(lambda: [holder], RegionsOptions(key_prefixes=("cam-", "mic-")))
    holder = FakeHolder(0, memory)
    with pytest.raises(InvalidArgument, match=r"keys must begin like one of \['cam-', 'mic-'\], '/other' does not"):
        await registry.register(request(key="/other"), TCP)
    await registry.register(request(key="//mic-1"), TCP)
    registry.close()


async def test_records_say_everything(memory: int) -> None:
    workers = [FakeHolder(i, memory) for i in range(2)]
    registry = made(lambda: workers, RegionsOptions())
    await registry.register(request("a"), ALICE)
    await registry.register(request("t"), TCP)
    (first, second) = json.loads(await registry.records(""))
    assert first.pop("registered").endswith("+00:00")
    assert first == {
        "name": "a",
        "kind": "system",
        "key": "/k",
        "offset": 0,
        "byte_size": 64,
        "state": "registered",
        "access": "guarded",
        "owner": "uid 1001",
        "pid": os.getpid(),
        "address": "",
        "workers": ["worker-0", "worker-1"],
        "leases": 2,
    }
    assert (second["owner"], second["address"]) == ("tcp 127.0.0.1", "127.0.0.1:4711")
    assert [entry["name"] for entry in json.loads(await registry.records("t"))] == ["t"]
    with pytest.raises(NotFound, match="'x'"):
        await registry.records("x")
    registry.close()


@pytest.mark.parametrize("kind", ["system", "cuda"])
async def test_a_region_goes_with_its_end(memory: int, kind: str) -> None:
    """
    1. A process registers a, another client b over TCP. 2. The process ends.
    Result: a is gone, also when the end comes before the registration is through, or while requests use it; b stays.
    """
    holder = FakeHolder(0, memory)
    registry = made(lambda: [holder], RegionsOptions(reclaim="owner"))
    ask = request if kind == "system" else cuda
    owner = await asyncio.create_subprocess_exec("sleep", "1000")
    process = os.pidfd_open(owner.pid)
    await registry.register(ask("a"), ALICE, process)
    await registry.register(ask("gone"), ALICE, process)
    await registry.unregister(UnregisterRegion(kind, "gone"), ALICE)
    await registry.register(request("b"), TCP)
    holder.idle.clear()
    owner.kill()
    await owner.wait()
    # Requests use it: it is found no more, and the worker still has it.
    while "a" in holder.regions:
        await asyncio.sleep(0.001)
    assert holder.leaving == ["a"]
    while json.loads(await registry.records("a"))[0]["state"] != "unregistering":
        await asyncio.sleep(0.001)
    assert "a" in [entry["name"] for entry in json.loads(registry.status(RegionStatus(kind, "")))]
    holder.idle.set()
    while registry.statistics().get("uid 1001"):
        await asyncio.sleep(0.001)
    assert names(registry) == ["b"]
    await registry.register(ask("late"), ALICE, process)
    while registry.statistics().get("uid 1001"):
        await asyncio.sleep(0.001)
    os.close(process)
    registry.close()


@pytest.mark.parametrize("kind", ["system", "cuda"])
async def test_a_region_whose_end_cannot_be_watched_is_refused(memory: int, kind: str) -> None:
    """No worker keeps a refused region, and a region whose renewal is refused still ends with its first owner."""
    holder = FakeHolder(0, memory)
    registry = made(lambda: [holder], RegionsOptions(reclaim="owner"))
    ask = request if kind == "system" else cuda
    ends = [os.pipe() for _ in range(2)]
    with no_descriptors_left(whatever_closes=True), pytest.raises(Unavailable, match="as many files open as it may"):
        await registry.register(ask("a"), ALICE, ends[0][0])
    assert (holder.regions, registry.statistics()) == ({}, {})
    await registry.register(ask("a"), ALICE, ends[0][0])
    with no_descriptors_left(whatever_closes=True), pytest.raises(Unavailable, match="as many files open as it may"):
        await registry.register(ask("a"), ALICE, ends[1][0])
    check_invariants(registry)
    os.close(ends[0][1])
    while holder.regions:
        await asyncio.sleep(0.001)
    for fd in (ends[0][0], *ends[1]):
        os.close(fd)
    registry.close()


@pytest.mark.parametrize("kind", ["system", "cuda"])
async def test_the_watch_of_an_end_takes_no_descriptor_from_requests(
    memory: int, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    holder = FakeHolder(0, memory)
    registry = made(lambda: [holder], RegionsOptions(reclaim="owner"))
    end, other = os.pipe()
    monkeypatch.setattr(descriptors, "limit", lambda: 4)  # of which one is kept: a fourth open file is one too many
    with pytest.raises(Unavailable, match="allowed beside those kept for requests"):
        await registry.register((request if kind == "system" else cuda)("a"), ALICE, end)
    # No worker was asked, so it is not the memory's descriptor that was one too many.
    assert (holder.opened, holder.regions, registry.statistics()) == (0, {}, {})
    os.close(end)
    os.close(other)
    registry.close()


@settings(max_examples=examples(60), deadline=None)
@given(st.integers(0, 2**32))
def test_random_histories(seed: int) -> None:
    """Registers, unregisters, deaths and births in any order, at once: when all is quiet, all living workers have the same."""
    chance = random.Random(seed)

    async def history() -> None:
        memory = os.memfd_create("tensord-test")
        before = len(os.listdir("/proc/self/fd"))
        workers = {i: FakeHolder(i, memory) for i in range(2)}
        registry = made(lambda: list(workers.values()), RegionsOptions())
        tasks: list[asyncio.Task[None]] = []

        async def replace(incarnation: int) -> None:
            workers[incarnation].alive = False
            del workers[incarnation]
            registry.worker_left(incarnation)
            await asyncio.sleep(0)
            born = FakeHolder(incarnation + 10, memory)
            workers[born.incarnation] = born
            await registry.restore(born)

        for _ in range(30):
            match chance.randrange(4):
                case 0 | 1:
                    tasks.append(asyncio.create_task(registry.register(request(chance.choice("ab")), TCP)))
                case 2:
                    name = chance.choice(["a", "b", ""])
                    tasks.append(asyncio.create_task(registry.unregister(UnregisterRegion("system", name), TCP)))
                case 3:
                    tasks.append(asyncio.create_task(replace(chance.choice(list(workers)))))
                    await asyncio.sleep(0)
            for _ in range(chance.randrange(4)):
                await asyncio.sleep(0)
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            assert result is None or isinstance(result, ServingError), result
        check_invariants(registry)
        for worker in workers.values():
            assert sorted(worker.regions) == names(registry)
        registry.close()
        assert len(os.listdir("/proc/self/fd")) <= before
        os.close(memory)

    asyncio.run(history())


# ------------------------------------------------------------------------------------------------------- GPU memory


class Gpus:
    """Workers of some devices, a registry, and what the fronts are told."""

    def __init__(self, *devices: str, each: int = 1) -> None:
        self.workers = [FakeHolder(i, -1) for i in range(len(devices))]
        for worker, device in zip(self.workers, devices, strict=True):
            worker.device = device
        self.told: list[RegionPlace] = []
        pool: Any = SimpleNamespace(ready=lambda: self.workers, devices=devices)
        fronts: Any = SimpleNamespace(publish=self.told.append)
        self.registry = RegionRegistry(RegionsOptions(), pool, fronts, each)

    def near(self, name: str) -> list[int]:
        """Returns the workers whose GPU has the region's memory."""
        return [worker.incarnation for worker in self.workers if name in worker.near]

    def holders(self, name: str) -> list[int]:
        return [worker.incarnation for worker in self.workers if name in worker.regions]


def cuda(name: str = "g", device: int = 0, raw_handle: bytes = bytes(64)) -> RegisterCudaRegion:
    return RegisterCudaRegion(name, raw_handle, device, 64)


async def test_only_the_workers_of_a_gpu_open_its_regions_at_once() -> None:
    gpus = Gpus("cuda:0", "cuda:1", "cuda:1/1", "cpu:0")
    await gpus.registry.register(cuda("a", 1), TCP)
    await gpus.registry.register(cuda("b", 0), TCP)
    assert (gpus.holders("a"), gpus.holders("b")) == ([0, 1, 2, 3], [0, 1, 2, 3])
    assert (gpus.near("a"), gpus.near("b")) == ([1, 2], [0])
    assert gpus.told == [RegionPlace("a", "cuda:1"), RegionPlace("b", "cuda:0")]
    assert gpus.registry.places() == gpus.told
    check_invariants(gpus.registry)
    assert json.loads(gpus.registry.status(RegionStatus("cuda", "a"))) == [
        {"name": "a", "device_id": 1, "byte_size": 64}
    ]
    assert json.loads(gpus.registry.status(RegionStatus("system", ""))) == []
    with pytest.raises(NotFound, match="registered as CUDA shared memory, not system shared memory"):
        gpus.registry.status(RegionStatus("system", "a"))
    await gpus.registry.unregister(UnregisterRegion("system", ""), TCP)
    assert gpus.holders("a") == [0, 1, 2, 3]
    await gpus.registry.unregister(UnregisterRegion("cuda", "a"), TCP)
    assert (gpus.holders("a"), gpus.told[-1]) == ([], RegionPlace("a", ""))


async def test_cpu_workers_all_open_a_region_of_any_gpu() -> None:
    gpus = Gpus("cpu:0", "cpu:1")
    await gpus.registry.register(cuda("a", 1), TCP)
    assert gpus.holders("a") == gpus.near("a") == [0, 1]
    assert gpus.told == gpus.registry.places() == []


async def test_a_single_gpu_needs_no_places() -> None:
    gpus = Gpus("cuda:0")
    await gpus.registry.register(cuda(), TCP)
    assert (gpus.holders("g"), gpus.told) == ([0], [])


@pytest.mark.parametrize(
    ("request_", "error"),
    [
        (cuda(device=2), "no worker has GPU 2, the server uses 2 GPUs, counted from 0"),
        (cuda(raw_handle=bytes(63)), "invalid args: a CUDA handle of 63 bytes, 64 are expected"),
        (RegisterCudaRegion("g", bytes(64), 0, 0), "byte_size 0 must be at least 1"),
        (RegisterCudaRegion("g", bytes(64), 0, 1 << 60), "at most"),
    ],
)
async def test_gpu_memory_that_is_refused(request_: RegisterCudaRegion, error: str) -> None:
    gpus = Gpus("cuda:0", "cuda:1")
    with pytest.raises(InvalidArgument, match=error):
        await gpus.registry.register(request_, TCP)
    assert json.loads(gpus.registry.status(RegionStatus("cuda", ""))) == []


async def test_a_gpu_whose_worker_is_being_replaced() -> None:
    gpus = Gpus("cuda:0", "cuda:1")
    await gpus.registry.register(cuda("a", 1), TCP)
    dead = gpus.workers.pop()
    gpus.registry.worker_left(dead.incarnation)
    with pytest.raises(Unavailable, match="no worker of GPU 1 is running"):
        await gpus.registry.register(cuda("b", 1), TCP)
    fresh = FakeHolder(7, -1)
    fresh.device = "cuda:1"
    gpus.workers.append(fresh)
    await gpus.registry.restore(fresh)
    assert (gpus.holders("a"), gpus.near("a")) == ([0, 7], [7])
    other = FakeHolder(8, -1)
    other.device = "cuda:0"
    await gpus.registry.restore(other)
    assert (set(other.regions), other.near) == ({"a"}, set())


async def test_memory_of_each_gpu_of_a_worker_with_several() -> None:
    gpus = Gpus("cuda:0", "cuda:2", each=2)
    for device in range(4):
        await gpus.registry.register(cuda(f"g{device}", device), TCP)
    assert [gpus.near(f"g{device}") for device in range(4)] == [[0], [0], [1], [1]]
    assert [place.device for place in gpus.told] == ["cuda:0", "cuda:0", "cuda:2", "cuda:2"]
    with pytest.raises(InvalidArgument, match="no worker has GPU 4, the server uses 4 GPUs, counted from 0"):
        await gpus.registry.register(cuda("g4", 4), TCP)


async def test_a_refusal_leaves_no_region() -> None:
    gpus = Gpus("cpu:0", "cpu:1")
    gpus.workers[1].refuses = InvalidArgument("it does not open")
    with pytest.raises(InvalidArgument, match="it does not open"):
        await gpus.registry.register(cuda(), TCP)
    assert gpus.holders("g") == []
    gpus.workers[1].refuses = None
    await gpus.registry.register(cuda(), TCP)


def region(name: str, state: RegionState, byte_size: int = 64) -> RegisteredRegion:
    return RegisteredRegion(
        "system", RegisterSystemRegion(name, "/k", 0, byte_size), Peer("tcp", "h:1"), 0.0, state=state
    )


def having(
    regions: list[RegisteredRegion], leaving: Sequence[RegisteredRegion] = (), workers: Sequence[Holder] = ()
) -> RegionRegistry:
    registry = RegionRegistry(
        RegionsOptions(), cast("WorkerPool", SimpleNamespace(ready=lambda: workers)), cast("Fronts", None)
    )
    registry._regions.update({each.request.name: each for each in regions})
    registry._leaving.extend(leaving)
    return registry


def listed(regions: list[RegisteredRegion], leaving: list[RegisteredRegion], name: str = "") -> list[tuple[str, int]]:
    found = json.loads(having(regions, leaving).status(RegionStatus("system", name)))
    return [(entry["name"], entry["byte_size"]) for entry in found]


def test_all_are_listed_but_those_that_are_not_there_yet() -> None:
    regions = [region(state.value, state) for state in RegionState]
    gone = region("gone", RegionState.UNREGISTERING)
    expected = ["gone", "registered", "renewing", "unregistering"]
    assert listed(regions, [gone]) == [(name, 64) for name in expected]
    assert listed(regions, [gone], "gone") == [("gone", 64)]
    with pytest.raises(NotFound):
        listed(regions, [gone], "registering")


def test_the_newest_of_a_name_is_listed() -> None:
    oldest, old = (region("r", RegionState.UNREGISTERING, byte_size) for byte_size in (128, 64))
    new = region("r", RegionState.REGISTERED, 32)
    assert listed([new], [oldest, old], "r") == listed([new], [oldest, old]) == [("r", 32)]
    assert listed([], [oldest, old], "r") == listed([], [oldest, old]) == [("r", 64)]


def test_counts() -> None:
    regions = [region("a", RegionState.REGISTERED), region("b", RegionState.UNREGISTERING, 32)]
    regions.append(RegisteredRegion("cuda", RegisterCudaRegion("c", bytes(64), 0, 8), Peer("unix", uid=1), 0.0))
    assert having(regions).by_kind() == {"system": (2, 96), "cuda": (1, 8)}
    assert having(regions).statistics() == {
        "tcp h": {"count": 2, "byte_size": 96},
        "uid 1": {"count": 1, "byte_size": 8},
    }


class Holder:
    """A worker that reports these uses of regions; None: its process is gone."""

    result_of = Child.result_of

    def __init__(self, incarnation: int, uses: dict[str, tuple[int, int]] | None) -> None:
        self.name, self.incarnation, self._uses = f"worker-{incarnation}", incarnation, uses

    async def call(self, operation: Operation, *fds: int) -> tuple[bytes, list[int]]:
        if self._uses is None:
            raise Unavailable("gone")
        return json.dumps(self._uses).encode(), []


async def test_records_tell_apart_who_uses_which() -> None:
    old, new = region("r", RegionState.UNREGISTERING), region("r", RegionState.REGISTERED, 32)
    old.holders, new.holders = {0, 1}, {1}
    registry = having([new], [old], [Holder(0, {"r": (0, 1)}), Holder(1, {"r": (2, 3)}), Holder(2, None)])
    found = json.loads(await registry.records(""))
    assert [(entry["byte_size"], entry["leases"], entry["workers"]) for entry in found] == [
        (64, 4, ["worker-0", "worker-1"]),
        (32, 2, ["worker-1"]),
    ]
    with pytest.raises(NotFound, match="'x'"):
        await registry.records("x")
