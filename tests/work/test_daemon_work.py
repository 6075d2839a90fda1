"""Tests what a request costs the processes of a running daemon: reads, writes, sleeps, copies, executions, system calls.

Requests are sent one after the other, and nobody looks for records instead of sleeping, so most of these counts are exact. What
also happens by the clock (heartbeats, checks of deadlines) is allowed for by the time that passed.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from tritonclient.utils import shared_memory

from tests.daemon_process import ROOT, DaemonOf, DaemonProcess

COUNT = 200
WARM = 5
#: In which programs are compiled, at most.
ROUNDS = 200
MIB = 1 << 20
#: Sleeps, reads and writes of a process that nobody asks anything, per second: far more than there are.
CLOCK = 50
#: System calls of our loops. What allocators, threads and libraries do beside them is not ours.
OURS = {
    "epoll_pwait",
    "epoll_wait",
    "read",
    "write",
    "writev",
    "sendto",
    "sendmsg",
    "recvmsg",
    "recvfrom",
    "sched_yield",
}


@pytest.fixture(scope="module")
def daemon(daemon_of: DaemonOf) -> DaemonProcess:
    options = {
        "expert": {"spin_us": 0},
        "arenas": {"byte_size": 32 * MIB},
        "regions": {"access": "guarded"},
        "repository": {"control_mode": "explicit", "load": ["addsub", "identity"]},
    }
    return daemon_of(ROOT / "bench" / "models", options)


@dataclass(frozen=True)
class Row:
    """A kind of request, and what each of them costs."""

    name: str
    model: str
    protocol: str
    #: FP32 elements of an input.
    shape: tuple[int, ...]
    #: Bytes the worker copies: docs/data-plane.md says why.
    copied: int
    region: bool = False
    #: Most reads of the front for one of them, and as many writes; gRPC has acknowledgements and window updates of its own. What
    #: the HTTP front receives and sends is not counted among them.
    reads: int = 0
    #: Most system calls of the loops of front and worker, as strace counts them.
    front_calls: int = 7
    worker_calls: int = 4


ROWS = [
    # Small tensors are laid out for the program that small requests share; large ones lie well already, and the program writes
    # such outputs where they go.
    Row("small-http", "addsub", "http", (1, 16), 256),
    Row("small-http-shm", "addsub", "http", (1, 16), 256, region=True),
    Row("small-grpc", "addsub", "grpc", (1, 16), 256, reads=3, front_calls=10),
    Row("1MiB-http", "identity", "http", (MIB // 4,), 0),
    Row("1MiB-grpc", "identity", "grpc", (MIB // 4,), 0),
    Row("16MiB-http-shm", "identity", "http", (4 * MIB,), 0, region=True),
]
#: What depends on how the kernel cuts a stream into pieces is counted only where there is one piece.
small_rows = pytest.mark.parametrize("row", ROWS[:3], ids=lambda row: row.name)
rows = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)


class Asker:
    """One connection that sends one kind of request, as the stock client does, and checks every answer."""

    def __init__(self, daemon: DaemonProcess, row: Row) -> None:
        module: Any = httpclient if row.protocol == "http" else grpcclient
        self.client = module.InferenceServerClient(daemon.url if row.protocol == "http" else daemon.grpc_url)
        self.row = row
        names = ("INPUT0", "INPUT1") if row.model == "addsub" else ("INPUT0",)
        self.values = np.arange(np.prod(row.shape), dtype=np.float32).reshape(row.shape)
        self.inputs = [module.InferInput(name, list(row.shape), "FP32") for name in names]
        outputs = ("OUTPUT0", "OUTPUT1") if row.model == "addsub" else ("OUTPUT0",)
        self.outputs = [module.InferRequestedOutput(name) for name in outputs]
        self.right = [2 * self.values, 0 * self.values] if row.model == "addsub" else [self.values]
        self.region: Any = None
        if not row.region:
            for given in self.inputs:
                given.set_data_from_numpy(self.values)
            return
        size = self.values.nbytes
        name = f"tensord-test-work-{os.getpid()}"
        self.region = shared_memory.create_shared_memory_region(name, "/" + name, size * 3)
        shared_memory.set_shared_memory_region(self.region, [self.values])
        self.client.register_system_shared_memory(name, "/" + name, size * 3)
        for given in self.inputs:
            given.set_shared_memory(name, size)
        for number, wanted in enumerate(self.outputs):
            wanted.set_shared_memory(name, size, offset=size * (number + 1))

    def ask(self, count: int) -> None:
        for _ in range(count):
            answer = self.client.infer(self.row.model, self.inputs, outputs=self.outputs)
            for number, (wanted, right) in enumerate(zip(self.outputs, self.right, strict=True)):
                if self.region is None:
                    found = answer.as_numpy(wanted.name())
                else:
                    found = shared_memory.get_contents_as_numpy(
                        self.region, np.float32, list(right.shape), offset=right.nbytes * (number + 1)
                    )
                np.testing.assert_array_equal(found, right)

    def close(self) -> None:
        if self.region is not None:
            self.client.unregister_system_shared_memory()
            shared_memory.destroy_shared_memory_region(self.region)
        self.client.close()


@pytest.fixture
def asker(daemon: DaemonProcess, row: Row) -> Iterator[Asker]:
    with contextlib.closing(Asker(daemon, row)) as made:
        made.ask(WARM)
        yield made


def front_of(daemon: DaemonProcess, row: Row) -> psutil.Process:
    (front,) = daemon.children(f"tensord.daemon.{row.protocol}")
    return front


# -------------------------------------------------------------------------------------------------- what models count


@pytest.mark.cpu_workers("what is copied for them; test_gpu_work.py counts what crosses the bus")
@rows
def test_copies_and_executions(daemon: DaemonProcess, row: Row, asker: Asker) -> None:
    count = 20
    for _ in range(ROUNDS):
        before = statistics(daemon, row.model)
        asker.ask(count)
        after = statistics(daemon, row.model)
        if after["copied_byte_size"] - before["copied_byte_size"] == row.copied * count:
            break  # the program that small requests share was not ready before, or how a large output is allocated was not known
    assert after["copied_byte_size"] - before["copied_byte_size"] == row.copied * count
    assert after["execution_count"] - before["execution_count"] == count
    assert after["inference_stats"]["success"]["count"] - before["inference_stats"]["success"]["count"] == count


def statistics(daemon: DaemonProcess, model: str) -> dict[str, Any]:
    (found,) = json.loads(daemon.get(f"/v2/models/{model}/stats")[1])["model_stats"]
    return found


# ------------------------------------------------------------------------------------------------- what the kernel counts


@dataclass
class Kernel:
    """The kernel's counters of a process so far."""

    reads: int
    writes: int
    #: Of its main thread, which is its loop: times it slept.
    sleeps: int
    at: float

    @classmethod
    def of(cls, pid: int) -> Kernel:
        """Skips the test where the kernel does not say."""
        try:
            fields = dict(line.split(": ") for line in Path(f"/proc/{pid}/io").read_text().splitlines())
        except (FileNotFoundError, PermissionError):
            pytest.skip("the kernel does not count reads and writes, or does not tell")
        status = Path(f"/proc/{pid}/task/{pid}/status").read_text()
        if "\nvoluntary_ctxt_switches:" not in status:
            pytest.skip("the kernel does not count sleeps")
        sleeps = int(status.partition("\nvoluntary_ctxt_switches:")[2].split()[0])
        return cls(int(fields["syscr"]), int(fields["syscw"]), sleeps, time.monotonic())


@dataclass(frozen=True)
class Passed:
    """The time that passed, and the system calls that it allows."""

    seconds: float

    @property
    def allowance(self) -> int:
        return 20 + int(CLOCK * self.seconds)


@small_rows
def test_reads_writes_and_sleeps_of_the_front(daemon: DaemonProcess, row: Row, asker: Asker) -> None:
    """A request is waited for twice: the request itself, and the worker's answer."""
    front = front_of(daemon, row)
    before = Kernel.of(front.pid)
    asker.ask(COUNT)
    after = Kernel.of(front.pid)
    allowance = Passed(after.at - before.at).allowance
    least = COUNT if row.reads else 0
    assert least <= after.reads - before.reads <= row.reads * COUNT + allowance
    assert least <= after.writes - before.writes <= row.reads * COUNT + allowance
    assert after.sleeps - before.sleeps <= 2 * COUNT + allowance


@small_rows
def test_every_system_call(daemon: DaemonProcess, row: Row, asker: Asker) -> None:
    """Front: epoll, that of its clients, receive, send to the lane, epoll, receive from it, send.

    Worker: epoll, receive twice, send.
    """
    (worker,) = daemon.workers
    for process, limit in ((front_of(daemon, row), row.front_calls), (worker, row.worker_calls)):
        with Strace(process.pid) as strace:
            asker.ask(COUNT)
        calls = {name: count for name, count in strace.calls.items() if name in OURS}
        assert COUNT <= sum(calls.values()) <= limit * COUNT + Passed(strace.seconds).allowance, calls


class Strace:
    """Counts the system calls of a process's main thread while the block lasts; skips the test where that cannot be done."""

    def __init__(self, pid: int) -> None:
        found = shutil.which("strace")
        if found is None:
            pytest.skip("strace is not installed")
        self._command = [found, "-c", "-p", str(pid)]
        self.calls: dict[str, int] = {}
        self.seconds = 0.0

    def __enter__(self) -> Strace:
        self._process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        assert self._process.stderr is not None
        said = self._process.stderr.readline()
        if "attached" not in said:
            self._end()
            pytest.skip(f"strace may not look at processes here: {said.strip()}")
        self._began = time.monotonic()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds = time.monotonic() - self._began
        self._process.send_signal(signal.SIGINT)
        for line in self._end().splitlines():
            # % time, seconds, usecs/call, calls, errors if any, name
            fields = line.split()
            if len(fields) >= 5 and fields[3].isdigit():
                self.calls[fields[-1]] = int(fields[3])

    def _end(self) -> str:
        with self._process:
            assert self._process.stderr is not None
            return self._process.stderr.read()
