"""Worker processes: started for each device, reported, and gone."""

from __future__ import annotations

import asyncio
from typing import Any

from tensord.config.options import Options
from tensord.daemon.processes.child import Worker
from tensord.daemon.processes.devices import Device
from tensord.daemon.processes.spawned import spawn_worker
from tensord.daemon.processes.worker_pool import WorkerPool
from tensord.shm.control_records import ChildReady, Load, Loaded, Unload, Unloaded

FAKE = "tests.daemon.fake_worker"
DEVICES = [Device("cpu:0", {}), Device("cpu:1", {})]


class Owner:
    """What the supervisor hears of them."""

    def __init__(self) -> None:
        self.heard: asyncio.Queue[Any] = asyncio.Queue()
        self.last = 0
        self.worker_pool = WorkerPool(
            FAKE,
            Options,
            self.incarnation,
            lambda worker: self.heard.put_nowait(("joined", worker.name, worker.device)),
            lambda worker, record: self.heard.put_nowait((worker.name, record)),
            lambda worker, call: self.heard.put_nowait((worker.name, call)),
            lambda worker, device: self.heard.put_nowait(("died", worker.name, device.name)),
        )

    def incarnation(self) -> int:
        self.last += 1
        return self.last

    async def hear(self, count: int) -> list[Any]:
        return sorted([await self.heard.get() for _ in range(count)], key=repr)


async def test_life_of_two() -> None:
    owner = Owner()
    worker_pool = owner.worker_pool
    worker_pool.start_all([(device, spawn_worker(FAKE, device)) for device in DEVICES])
    assert (worker_pool.devices, worker_pool.ready()) == (["cpu:0", "cpu:1"], [])
    assert worker_pool.posts == {"worker-0": "cpu:0", "worker-1": "cpu:1"}
    assert await owner.hear(2) == [("joined", "worker-0", "cpu:0"), ("joined", "worker-1", "cpu:1")]
    first, second = worker_pool.ready()
    assert all(worker.page is not None for worker in (first, second))
    first.send(Load("good", 1, "/models/good", "/models/good/1", b""))
    assert len(first.owed) == 1
    ((name, loaded),) = await owner.hear(1)
    assert (name, type(loaded), loaded.name, len(first.owed)) == ("worker-0", Loaded, "good", 0)
    first.send(Unload("good", 1))
    assert await owner.hear(1) == [("worker-0", Unloaded("good", 1))]
    second.kill()
    assert await owner.hear(1) == [("died", "worker-1", "cpu:1")]
    assert worker_pool.ready() == [first]
    # Those that die before they are ready cannot use their device; three in a row say that nobody can.
    for _ in range(3):
        assert worker_pool.usable == ["cpu:0", "cpu:1"]
        worker_pool.start("worker-1", DEVICES[1])
        max(worker_pool, key=lambda worker: worker.incarnation).kill()
        assert await owner.hear(1) == [("died", "worker-1", "cpu:1")]
    assert worker_pool.usable == ["cpu:0"]
    worker_pool.start("worker-1", DEVICES[1])
    assert await owner.hear(1) == [("joined", "worker-1", "cpu:1")]
    assert worker_pool.usable == ["cpu:0", "cpu:1"]
    assert [worker.incarnation for worker in worker_pool] == [1, 6]
    for worker in worker_pool:
        worker.kill()
    assert len(await owner.hear(2)) == 2
    assert not worker_pool.by_incarnation


async def test_one_that_reports_without_its_page() -> None:
    """A program that is no worker says what a front would say: it is killed, not believed."""
    owner = Owner()
    worker = Worker("x", "worker-0", 1, "cpu:0", lambda *_: None, lambda _: None)
    owner.worker_pool._reported(worker, ChildReady(1), [])
    assert owner.heard.empty()
    assert worker.page is None
