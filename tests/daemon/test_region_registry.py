"""Regions on all workers or on none, whoever dies when."""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections.abc import Callable, Iterable, Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from config.options import Regions
from daemon.region_registry import RegionRegistry
from shm.errors import AlreadyExists, Internal, InvalidArgument, NotFound, ServingError, Unavailable, Unsupported
from shm.messages import (
    Operation,
    RegionPlace,
    RegionStatus,
    RegisterCudaRegion,
    RegisterSystemRegion,
    UnregisterRegion,
)


class FakeHolder:
    """A worker that keeps regions as (device, inode) of the descriptor it was given or opened itself."""

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
        #: Unregister waits for it.
        self.idle = asyncio.Event()
        self.idle.set()

    async def call(self, operation: Operation, *fds: int) -> tuple[bytes, list[int]]:
        if not self.alive:
            raise Unavailable("dead")
        sent = [os.fstat(fd).st_ino for fd in fds]  # a real channel duplicates when it queues
        await asyncio.sleep(0)
        if isinstance(operation, RegisterCudaRegion):
            if self.refuses is not None:
                raise self.refuses
            self.regions[operation.name] = operation.device_id
            return b"", []
        if isinstance(operation, RegisterSystemRegion):
            if self.refuses is not None:
                raise self.refuses
            self.opened += not sent
            self.regions[operation.name] = sent[0] if sent else os.fstat(self.memory).st_ino
            return b"", [] if sent else [os.dup(self.memory)]
        assert isinstance(operation, UnregisterRegion)
        await self.idle.wait()
        self.regions.pop(operation.name, None)
        return b"", []


def made(
    workers: Callable[[], Iterable[FakeHolder]], options: Regions, devices: Sequence[str] = ("cpu:0",)
) -> RegionRegistry:
    return RegionRegistry(options, workers, lambda: devices, lambda place: None)


@pytest.fixture
def memory() -> Iterator[int]:
    before = set(os.listdir("/proc/self/fd"))
    fd = os.memfd_create("tensord-test")
    yield fd
    os.close(fd)
    assert set(os.listdir("/proc/self/fd")) == before


def request(name: str = "r", **changes: int | str) -> RegisterSystemRegion:
    return RegisterSystemRegion(**({"name": name, "key": "/k", "offset": 0, "byte_size": 64} | changes))  # type: ignore[arg-type]


def names(registry: RegionRegistry) -> list[str]:
    return [entry["name"] for entry in json.loads(registry.status(RegionStatus("system", "")))]


async def test_one_opens_and_all_have_it(memory: int) -> None:
    workers = [FakeHolder(i, memory) for i in range(3)]
    registry = made(lambda: workers, Regions())
    await registry.register(request())
    assert [worker.opened for worker in workers] == [1, 0, 0]
    assert len({worker.regions["r"] for worker in workers}) == 1
    assert json.loads(registry.status(RegionStatus("system", "r"))) == [
        {"name": "r", "key": "/k", "offset": 0, "byte_size": 64}
    ]
    with pytest.raises(AlreadyExists, match="shared memory region 'r' already in manager"):
        await registry.register(request())
    registry.check_invariants()
    await registry.unregister(UnregisterRegion("cuda", "r"))
    assert names(registry) == ["r"]
    await registry.unregister(UnregisterRegion("system", "r"))
    await registry.unregister(UnregisterRegion("system", "r"))
    assert not any(worker.regions for worker in workers)
    registry.close()


@pytest.mark.parametrize("culprit", [0, 1])
async def test_a_refusal_undoes_everything(memory: int, culprit: int) -> None:
    workers = [FakeHolder(i, memory) for i in range(3)]
    workers[culprit].refuses = Internal("Unable to open shared memory region: 'r'")
    registry = made(lambda: workers, Regions())
    with pytest.raises(Internal, match="Unable to open"):
        await registry.register(request())
    assert not any(worker.regions for worker in workers)
    assert names(registry) == []
    workers[culprit].refuses = None
    await registry.register(request())
    registry.close()


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
    registry = made(lambda: workers, Regions(max_byte_size=1 << 20))
    with pytest.raises(kind, match=words):
        await registry.register(request(**({"name": "r"} | changes)))  # type: ignore[arg-type]
    assert not workers[0].regions


async def test_count_switch_and_no_worker(memory: int) -> None:
    registry = made(lambda: [holder], Regions(max_count=1))
    holder = FakeHolder(0, memory)
    await registry.register(request("a"))
    with pytest.raises(Unavailable, match="1 regions are registered, at most 1 are allowed"):
        await registry.register(request("b"))
    registry.close()
    with pytest.raises(Unsupported, match="Client shared memory is disabled"):
        await made(lambda: [holder], Regions(enabled=False)).register(request())
    with pytest.raises(Unavailable, match="no worker is running"):
        await made(list, Regions()).register(request())


async def test_status_of_the_unknown(memory: int) -> None:
    holder = FakeHolder(0, memory)
    registry = made(lambda: [holder], Regions())
    await registry.register(request())
    with pytest.raises(NotFound, match="Unable to find system shared memory region: 'x'"):
        registry.status(RegionStatus("system", "x"))
    with pytest.raises(NotFound, match="Unable to find cuda shared memory region: 'x'"):
        registry.status(RegionStatus("cuda", "x"))
    with pytest.raises(NotFound, match="registered as system shared memory, not CUDA shared memory"):
        registry.status(RegionStatus("cuda", "r"))
    assert registry.status(RegionStatus("cuda", "")) == b"[]"
    registry.close()


async def test_unregister_waits_for_its_users_and_two_may_ask(memory: int) -> None:
    holder = FakeHolder(0, memory)
    registry = made(lambda: [holder], Regions())
    await registry.register(request())
    holder.idle.clear()
    asked = [asyncio.create_task(registry.unregister(UnregisterRegion("system", name))) for name in ("r", "")]
    for _ in range(5):
        await asyncio.sleep(0)
    assert not any(task.done() for task in asked)
    with pytest.raises(AlreadyExists):
        await registry.register(request())
    holder.idle.set()
    await asyncio.gather(*asked)
    await registry.register(request())
    registry.close()


async def test_a_replacement_gets_every_region(memory: int) -> None:
    workers = [FakeHolder(0, memory)]
    registry = made(lambda: workers, Regions())
    await registry.register(request("a"))
    await registry.register(request("b"))
    workers[0].alive = False
    registry.worker_left(0)
    workers[:] = [FakeHolder(1, -1)]
    await registry.restore(workers[0])
    assert set(workers[0].regions) == {"a", "b"}
    assert workers[0].opened == 0
    registry.check_invariants()
    registry.close()


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32))
def test_random_histories(seed: int) -> None:
    """Registers, unregisters, deaths and births in any order, at once: when all is quiet, all living workers have the same."""
    chance = random.Random(seed)

    async def history() -> None:
        memory = os.memfd_create("tensord-test")
        before = len(os.listdir("/proc/self/fd"))
        workers = {i: FakeHolder(i, memory) for i in range(2)}
        registry = made(lambda: list(workers.values()), Regions())
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
                    tasks.append(asyncio.create_task(registry.register(request(chance.choice("ab")))))
                case 2:
                    name = chance.choice(["a", "b", ""])
                    tasks.append(asyncio.create_task(registry.unregister(UnregisterRegion("system", name))))
                case 3:
                    tasks.append(asyncio.create_task(replace(chance.choice(list(workers)))))
                    await asyncio.sleep(0)
            for _ in range(chance.randrange(4)):
                await asyncio.sleep(0)
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            assert result is None or isinstance(result, ServingError), result
        registry.check_invariants()
        for worker in workers.values():
            assert sorted(worker.regions) == names(registry)
        registry.close()
        assert len(os.listdir("/proc/self/fd")) == before
        os.close(memory)

    asyncio.run(history())


# ------------------------------------------------------------------------------------------------------- GPU memory


class Gpus:
    """Workers of some devices, a registry, and what the fronts are told."""

    def __init__(self, *devices: str) -> None:
        self.workers = [FakeHolder(i, -1) for i in range(len(devices))]
        for worker, device in zip(self.workers, devices, strict=True):
            worker.device = device
        self.told: list[RegionPlace] = []
        self.registry = RegionRegistry(Regions(), lambda: self.workers, lambda: devices, self.told.append)

    def holders(self, name: str) -> list[int]:
        return [worker.incarnation for worker in self.workers if name in worker.regions]


def cuda(name: str = "g", device: int = 0, raw_handle: bytes = bytes(64)) -> RegisterCudaRegion:
    return RegisterCudaRegion(name, raw_handle, device, 64)


async def test_only_the_workers_of_a_gpu_open_its_regions() -> None:
    gpus = Gpus("cuda:0", "cuda:1")
    await gpus.registry.register(cuda("a", 1))
    await gpus.registry.register(cuda("b", 0))
    assert (gpus.holders("a"), gpus.holders("b")) == ([1], [0])
    assert gpus.told == [RegionPlace("a", "cuda:1"), RegionPlace("b", "cuda:0")]
    assert gpus.registry.places() == gpus.told
    gpus.registry.check_invariants()
    assert json.loads(gpus.registry.status(RegionStatus("cuda", "a"))) == [
        {"name": "a", "device_id": 1, "byte_size": 64}
    ]
    assert json.loads(gpus.registry.status(RegionStatus("system", ""))) == []
    with pytest.raises(NotFound, match="registered as CUDA shared memory, not system shared memory"):
        gpus.registry.status(RegionStatus("system", "a"))
    await gpus.registry.unregister(UnregisterRegion("system", ""))
    assert gpus.holders("a") == [1]
    await gpus.registry.unregister(UnregisterRegion("cuda", "a"))
    assert (gpus.holders("a"), gpus.told[-1]) == ([], RegionPlace("a", ""))


async def test_cpu_workers_all_open_a_region_of_any_gpu() -> None:
    gpus = Gpus("cpu:0", "cpu:1")
    await gpus.registry.register(cuda("a", 1))
    assert gpus.holders("a") == [0, 1]
    assert gpus.told == gpus.registry.places() == []


async def test_a_single_gpu_needs_no_places() -> None:
    gpus = Gpus("cuda:0")
    await gpus.registry.register(cuda())
    assert (gpus.holders("g"), gpus.told) == ([0], [])


@pytest.mark.parametrize(
    ("request_", "error"),
    [
        (cuda(device=2), "no worker has GPU 2, the server uses 2 GPUs, counted from 0"),
        (cuda(raw_handle=bytes(63)), "failed to register shared memory region: invalid args"),
        (RegisterCudaRegion("g", bytes(64), 0, 0), "byte_size 0 must be at least 1"),
        (RegisterCudaRegion("g", bytes(64), 0, 1 << 60), "at most"),
    ],
)
async def test_gpu_memory_that_is_refused(request_: RegisterCudaRegion, error: str) -> None:
    gpus = Gpus("cuda:0", "cuda:1")
    with pytest.raises(InvalidArgument, match=error):
        await gpus.registry.register(request_)
    assert json.loads(gpus.registry.status(RegionStatus("cuda", ""))) == []


async def test_a_gpu_whose_worker_is_being_replaced() -> None:
    gpus = Gpus("cuda:0", "cuda:1")
    await gpus.registry.register(cuda("a", 1))
    dead = gpus.workers.pop()
    gpus.registry.worker_left(dead.incarnation)
    with pytest.raises(Unavailable, match="no worker of GPU 1 is running"):
        await gpus.registry.register(cuda("b", 1))
    fresh = FakeHolder(7, -1)
    fresh.device = "cuda:1"
    gpus.workers.append(fresh)
    await gpus.registry.restore(fresh)
    assert gpus.holders("a") == [7]
    other = FakeHolder(8, -1)
    other.device = "cuda:0"
    await gpus.registry.restore(other)
    assert not other.regions


async def test_a_refusal_leaves_no_region() -> None:
    gpus = Gpus("cpu:0", "cpu:1")
    gpus.workers[1].refuses = InvalidArgument("it does not open")
    with pytest.raises(InvalidArgument, match="it does not open"):
        await gpus.registry.register(cuda())
    assert gpus.holders("g") == []
    gpus.workers[1].refuses = None
    await gpus.registry.register(cuda())
