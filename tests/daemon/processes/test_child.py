"""One child: spawned with what it needs and no more, spoken to, buried."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import msgspec
import psutil
import pytest

from tensord.config.options import Options
from tensord.daemon.processes.child import WorkerProcess
from tensord.daemon.processes.spawned import spawn
from tensord.shm.control_records import ChildReady, Load, Loaded
from tensord.shm.errors import Internal, Unavailable
from tensord.shm.operations import ModelStatistics, RegisterSystemRegion
from tests.open_files import no_descriptors_left

OPTIONS = msgspec.msgpack.encode(Options())


class Records:
    """Notes the records that come from a child, and its end."""

    def __init__(self, module: str = "tests.daemon.fake_worker") -> None:
        self.seen: list[Any] = []
        self.came = asyncio.Event()
        self.ended = asyncio.Event()
        self.module = module
        self.worker = WorkerProcess("worker-0", 7, "cpu:0", self.record, lambda _: self.ended.set())

    def start(self, variables: dict[str, str]) -> None:
        self.worker.adopt(spawn(self.module, ["--device", "cpu:0"], variables), OPTIONS)

    def record(self, worker: WorkerProcess, record: Any, fds: list[int]) -> None:
        if type(record).__name__ == "Reply":
            worker.calls.answered(record, fds)
        else:
            self.seen.append(record)
            for fd in fds:
                os.close(fd)
        self.came.set()

    async def wait_for(self, kind: type) -> Any:
        while not [record for record in self.seen if isinstance(record, kind)]:
            self.came.clear()
            await self.came.wait()
        return next(record for record in self.seen if isinstance(record, kind))


async def started(**variables: str) -> Records:
    records = Records()
    records.start(variables)
    assert (await records.wait_for(ChildReady)).incarnation == 7
    return records


async def test_life(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NOTIFY_SOCKET", "WATCHDOG_USEC", "LISTEN_FDS"):
        monkeypatch.setenv(name, "1")
    leak = os.open("/dev/null", os.O_RDONLY)
    os.set_inheritable(leak, True)
    records = await started(ONLY_HERE="1")
    worker = records.worker
    environment = psutil.Process(worker.pid).environ()
    assert environment["ONLY_HERE"] == "1"
    assert not {"NOTIFY_SOCKET", "WATCHDOG_USEC", "LISTEN_FDS"} & set(environment)
    assert "/dev/null" not in {
        os.readlink(f"/proc/{worker.pid}/fd/{fd}") for fd in (leak,) if fd > 2 and _has(worker, fd)
    }
    os.close(leak)
    worker.send(Load("m", 1, "/models/m", "/models/m/1", b""))
    begun = worker.load_progress_ns
    worker.send(Load("m", 2, "/models/m", "/models/m/2", b""))
    # The clock of a load runs from its sending, or from the last answer before it.
    assert (len(worker.owed), worker.load_progress_ns) == (2, begun)
    worker.load_answered("m", 1)
    assert worker.load_progress_ns > begun > 0
    assert (await records.wait_for(Loaded)).name == "m"
    result, fds = await worker.call(ModelStatistics())
    assert (b"model_stats" in result, fds) == (True, [])
    with pytest.raises(Internal, match="Unable to open shared memory region"):
        await worker.call(RegisterSystemRegion("r", "/../x", 0, 1))
    worker.stop(10**9)
    await records.ended.wait()
    assert (worker.returncode, worker.alive) == (0, False)
    assert worker.describe_exit() == "exited with status 0"
    with pytest.raises(Unavailable):
        await worker.call(ModelStatistics())
    worker.send(Load("m", 1, "", "", b""))  # into the void
    worker.kill()


def _has(worker: WorkerProcess, fd: int) -> bool:
    return os.path.lexists(f"/proc/{worker.pid}/fd/{fd}")


async def test_death_with_a_call_open() -> None:
    records = await started()
    psutil.Process(records.worker.pid).suspend()
    asked = asyncio.create_task(records.worker.call(ModelStatistics()))
    await asyncio.sleep(0)
    records.worker.kill("was told to die by a test")
    with pytest.raises(Unavailable, match="worker-0 stopped before it answered"):
        await asked
    await records.ended.wait()
    assert records.worker.describe_exit() == "was killed by SIGKILL"


async def test_a_program_that_does_not_start() -> None:
    records = Records("tests.daemon.no_such_program")
    records.start({})
    await records.ended.wait()
    assert records.worker.describe_exit() == "exited with status 1"


async def test_without_a_descriptor_it_is_not_taken_over() -> None:
    """A child that cannot be adopted is killed, its descriptors are closed, and its death is not reported."""
    records = Records()
    before = len(os.listdir("/proc/self/fd"))
    spawned = spawn(records.module, ["--device", "cpu:0"], {})
    with no_descriptors_left(), pytest.raises(OSError, match="Too many open files"):
        records.worker.adopt(spawned, OPTIONS)
    assert (spawned.process.returncode, spawned.channel.fileno()) == (-signal.SIGKILL, -1)
    assert len(os.listdir("/proc/self/fd")) == before
    assert not records.worker.alive
    assert not records.seen
