"""Worker processes: started for each device, reported, and gone."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
from typing import Any

import pytest

from tensord.config.options import Options
from tensord.daemon.processes.child import WorkerProcess
from tensord.daemon.processes.devices import Device
from tensord.daemon.processes.spawned import Spawned, spawn_worker
from tensord.daemon.processes.worker_pool import WorkerPool
from tensord.shm.control_records import ChildReady, Load, Loaded, Unload, Unloaded
from tensord.shm.errors import Unavailable

FAKE = "tests.daemon.fake_worker"
DEVICES = [Device("cpu:0", {}), Device("cpu:1", {})]


class Owner:
    """Stands for the supervisor and notes what it is told of workers."""

    options = Options()
    #: True: the daemon is stopping and starts no more workers.
    stops = False
    #: The names of workers that have yet to serve a model.
    loading: frozenset[str] = frozenset()

    def __init__(self) -> None:
        self.heard: asyncio.Queue[Any] = asyncio.Queue()
        hear = self.heard.put_nowait
        self.worker_pool = WorkerPool(
            FAKE,
            lambda: self.options,
            itertools.count(1).__next__,
            self._said,
            lambda worker, device: hear(("died", worker.name, device.name)),
            lambda worker: hear(("dismissed", worker.name)),
            lambda worker: worker.name in self.loading,
            lambda: self.stops,
        )

    def _said(self, worker: WorkerProcess, record: Any) -> None:
        said = (worker.name, record)
        self.heard.put_nowait(("joined", worker.name, worker.device) if isinstance(record, ChildReady) else said)

    async def hear(self, count: int) -> list[Any]:
        return sorted([await self.heard.get() for _ in range(count)], key=repr)


async def test_life_of_two() -> None:
    owner = Owner()
    worker_pool = owner.worker_pool
    worker_pool.start_all([(device, spawn_worker(FAKE, device)) for device in DEVICES])
    assert (worker_pool.devices, worker_pool.ready()) == (["cpu:0", "cpu:1"], [])
    assert worker_pool.missing() == ["worker-0", "worker-1"]
    assert worker_pool.slots == {"worker-0": "cpu:0", "worker-1": "cpu:1"}
    assert await owner.hear(2) == [("joined", "worker-0", "cpu:0"), ("joined", "worker-1", "cpu:1")]
    first, second = worker_pool.ready()
    assert worker_pool.missing() == []
    assert all(worker.page is not None for worker in (first, second))
    first.send(Load("good", 1, "/models/good", "/models/good/1", b""))
    assert (len(first.owed), worker_pool.missing()) == (1, [])
    owner.loading = frozenset({"worker-0"})
    assert worker_pool.missing() == ["worker-0"]
    ((name, loaded),) = await owner.hear(1)
    assert (name, type(loaded), loaded.name, len(first.owed)) == ("worker-0", Loaded, "good", 0)
    owner.loading = frozenset()
    first.send(Unload("good", 1))
    assert await owner.hear(1) == [("worker-0", Unloaded("good", 1))]
    second.kill()
    assert await owner.hear(1) == [("died", "worker-1", "cpu:1")]
    # Its slot counts while nobody is in it, too.
    assert (worker_pool.ready(), worker_pool.missing()) == ([first], ["worker-1"])
    # That somebody kills those that are not up yet, however often, says nothing about their device.
    for number in (signal.SIGKILL, signal.SIGKILL, signal.SIGKILL, signal.SIGSTKFLT):
        worker_pool.start("worker-1", DEVICES[1])
        os.kill(max(worker_pool, key=lambda worker: worker.incarnation).pid, number)
        assert await owner.hear(1) == [("died", "worker-1", "cpu:1")]
    # Those that end by themselves before they are ready cannot use it; three in a row say that nobody can.
    worker_pool._program = "tests.no_such_program"
    for _ in range(3):
        assert worker_pool.usable == ["cpu:0", "cpu:1"]
        worker_pool.start("worker-1", DEVICES[1])
        assert await owner.hear(1) == [("died", "worker-1", "cpu:1")]
    assert worker_pool.usable == ["cpu:0"]
    worker_pool._program = FAKE
    worker_pool.start("worker-1", DEVICES[1])
    assert await owner.hear(1) == [("joined", "worker-1", "cpu:1")]
    assert worker_pool.usable == ["cpu:0", "cpu:1"]
    assert [worker.incarnation for worker in worker_pool] == [1, 10]
    for worker in worker_pool:
        worker.kill()
    assert len(await owner.hear(2)) == 2
    assert not worker_pool.by_incarnation


async def test_a_restart_ends_with_the_new_worker_or_the_daemon() -> None:
    """
    1. A worker is restarted, and the new one dies before it is ready.
    2. A worker is restarted, and the daemon stops before the old one has ended.
    Result: who asked for it is told, and no worker is started that nobody asks to stop.
    """
    owner = Owner()
    worker_pool = owner.worker_pool
    worker_pool.start_all([(DEVICES[0], spawn_worker(FAKE, DEVICES[0]))])
    assert await owner.hear(1) == [("joined", "worker-0", "cpu:0")]
    worker_pool._program = "tests.no_such_program"
    with pytest.raises(Unavailable, match=r"^the new worker-0 exited with status 1$"):
        await worker_pool.restart("worker-0")
    died = ("died", "worker-0", "cpu:0")
    assert await owner.hear(3) == [died, died, ("dismissed", "worker-0")]
    worker_pool._program = FAKE
    worker_pool.start("worker-0", DEVICES[0])
    assert await owner.hear(1) == [("joined", "worker-0", "cpu:0")]
    restarting = asyncio.ensure_future(worker_pool.restart("worker-0"))
    assert await owner.hear(1) == [("dismissed", "worker-0")]
    owner.stops = True
    with pytest.raises(Unavailable, match=r"^the new worker-0 is needed no more$"):
        await restarting
    assert await owner.hear(1) == [died]
    assert not worker_pool.by_incarnation


async def test_one_that_reports_without_its_page() -> None:
    """A program that is no worker says what a front would say: it is killed, not believed."""
    owner = Owner()
    worker = WorkerProcess("worker-0", 1, "cpu:0", lambda *_: None, lambda _: None)
    owner.worker_pool._reported(worker, ChildReady(1), [])
    assert owner.heard.empty()
    assert worker.page is None


async def test_workers_of_isolated_models_come_and_go() -> None:
    """
    1. One is wanted, and there; another one besides.
    2. The first is wanted no more, and again at once.
    Result: its process ends without an accident, and another one has the slot; nobody else's is touched.
    """
    owner = Owner()
    worker_pool = owner.worker_pool
    worker_pool.start_all([(DEVICES[0], spawn_worker(FAKE, DEVICES[0]))])
    assert await owner.hear(1) == [("joined", "worker-0", "cpu:0")]
    worker_pool.isolate({"cpu:0#m": 0.1})
    assert await owner.hear(1) == [("joined", "worker-0#m", "cpu:0#m")]
    worker_pool.isolate({"cpu:0#m": 0.1, "cpu:0#n": 0.1})
    assert await owner.hear(1) == [("joined", "worker-0#n", "cpu:0#n")]
    assert worker_pool.slots == {"worker-0": "cpu:0", "worker-0#m": "cpu:0#m", "worker-0#n": "cpu:0#n"}
    assert (worker_pool.devices, worker_pool.usable) == (["cpu:0"], ["cpu:0", "cpu:0#m", "cpu:0#n"])
    _, former, other = worker_pool.ready()
    assert (former.model, other.model, worker_pool.is_vacant("worker-0#m")) == ("m", "n", False)
    worker_pool.isolate({"cpu:0#n": 0.1})
    assert await owner.hear(1) == [("dismissed", "worker-0#m")]
    assert not worker_pool.is_vacant("worker-0#m")
    worker_pool.isolate({"cpu:0#m": 0.1, "cpu:0#n": 0.1})
    assert await owner.hear(2) == [("died", "worker-0#m", "cpu:0#m"), ("joined", "worker-0#m", "cpu:0#m")]
    assert (former.returncode, other.alive) == (0, True)
    # One that is killed leaves its slot vacant: whoever fills slots fills it.
    next(worker for worker in worker_pool if worker.name == "worker-0#m").kill()
    assert await owner.hear(1) == [("died", "worker-0#m", "cpu:0#m")]
    assert worker_pool.is_vacant("worker-0#m")
    worker_pool.isolate({})
    assert await owner.hear(2) == [("died", "worker-0#n", "cpu:0#n"), ("dismissed", "worker-0#n")]
    assert worker_pool.slots == {"worker-0": "cpu:0"}
    for worker in worker_pool:
        worker.kill()
    await owner.hear(1)


async def test_there_is_no_room_for_one_yet(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    owner = Owner()
    worker_pool = owner.worker_pool
    worker_pool.start_all([(DEVICES[0], spawn_worker(FAKE, DEVICES[0]))])
    await owner.hear(1)

    def fails(*_: object) -> Spawned:
        monkeypatch.undo()
        raise OSError(11, "Resource temporarily unavailable")

    monkeypatch.setattr("tensord.daemon.processes.worker_pool.spawn_worker", fails)
    worker_pool.isolate({"cpu:0#m": 0.1})
    assert "worker-0#m cannot be started: Resource temporarily unavailable" in caplog.text
    assert await owner.hear(1) == [("joined", "worker-0#m", "cpu:0#m")]
    for worker in worker_pool:
        worker.kill()
    await owner.hear(2)


def test_the_environment_of_an_isolated_worker_of_a_gpu() -> None:
    shared = Device("cuda:1", {"CUDA_VISIBLE_DEVICES": "1"}, "0-3")
    alone = shared.alone("cuda:1#m", 0.25)
    assert (alone.name, alone.cores, alone.memory_fraction) == ("cuda:1#m", "0-3", 0.25)
    assert alone.environment == {
        "CUDA_VISIBLE_DEVICES": "1",
        "XLA_CLIENT_MEM_FRACTION": "0.25",
        "XLA_PYTHON_CLIENT_MEM_FRACTION": "",
    }
    assert DEVICES[0].alone("cpu:0#m", 0.25) == Device("cpu:0#m")
