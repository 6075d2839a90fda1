"""Regions that go by themselves: with the process or the connection behind them, over both protocols, in real processes."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient

from tests import prepared, repositories
from tests.cuda_owner import CudaOwner
from tests.cuda_stub.library import CudaStub
from tests.daemon_process import DaemonProcess, wait_until

SIZE = 4096
#: A process that registers regions over the unix socket of a protocol and does what it is told: name=key, "close", the end.
OWNER = """
import http.client, json, socket, sys
protocol, path = sys.argv[1:]

class Http:
    def __init__(self):
        self.connection = http.client.HTTPConnection("x")
        self.connection.sock = socket.socket(socket.AF_UNIX)
        self.connection.sock.connect(path)

    def register(self, name, key):
        body = json.dumps({"key": key, "byte_size": 4096})
        self.connection.request("POST", f"/v2/systemsharedmemory/region/{name}/register", body)
        answer = self.connection.getresponse()
        assert answer.status == 200, answer.read()
        answer.read()

    def close(self):
        self.connection.close()

class Grpc:
    def __init__(self):
        import tritonclient.grpc
        self.client = tritonclient.grpc.InferenceServerClient("unix:" + path)

    def register(self, name, key):
        self.client.register_system_shared_memory(name, key, 4096)

    def close(self):
        self.client.close()

client = {"http": Http, "grpc": Grpc}[protocol]()
for line in sys.stdin:
    name, _, key = line.strip().partition("=")
    client.register(name, key) if key else client.close()
    print("done", flush=True)
"""


class Owner:
    """A process that registers regions. Use as a context manager."""

    def __init__(self, protocol: str, path: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", OWNER, protocol, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.pid = self._process.pid

    def __enter__(self) -> Owner:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        assert self._process.stdout.readline() == "done\n"

    def register(self, name: str, path: Path) -> None:
        self._tell(f"{name}=/{path.name}")

    def close_connection(self) -> None:
        self._tell("close")

    def kill(self) -> None:
        """Kills the process; may be called again."""
        self._process.kill()
        self._process.wait()


class Served:
    """A daemon with ``protocol`` on a unix socket, and gRPC over TCP for all other clients."""

    def __init__(self, folder: Path, reclaim: str, protocol: str, environment: dict[str, str] | None = None) -> None:
        (folder / "daemon").mkdir()
        repository = repositories.sleepy_model(folder / "repository")
        self.folder, self.protocol, self.path = folder, protocol, folder / f"{protocol}.sock"
        options: dict[str, dict[str, Any]] = {
            "regions": {"reclaim": reclaim},
            "supervisor": {"control_socket": str(folder / "control.sock")},
            protocol: {"address": f"unix:{self.path}"},
        }
        self.daemon = DaemonProcess(folder / "daemon", [repository], options, environment=environment)
        self.daemon.served_on = "ready: "
        self.daemon.start()

    def tensorctl(self, *arguments: str) -> str:
        done = prepared.run(["tensord.daemon.ctl", "--socket", str(self.folder / "control.sock"), *arguments])
        assert done.returncode == 0, done.stderr
        return done.stdout

    def records(self) -> dict[str, dict[str, Any]]:
        return {record["name"]: record for record in json.loads(self.tensorctl("--json", "regions", "list"))}

    def wait_gone(self, *names: str) -> None:
        wait_until(lambda: not set(names) & set(self.records()), f"{names} to be gone", self.daemon)

    def tcp(self) -> Tcp:
        return Tcp(self.daemon)


class Tcp:
    """A client over TCP. Use as a context manager; its connection ends with the block."""

    def __init__(self, daemon: DaemonProcess) -> None:
        self._daemon = daemon
        self._grpc = grpcclient.InferenceServerClient(daemon.grpc_url) if not daemon.port else None

    def __enter__(self) -> Tcp:
        return self

    def __exit__(self, *_: object) -> None:
        if self._grpc is not None:
            self._grpc.close()

    def register(self, name: str, path: Path) -> None:
        if self._grpc is not None:
            self._grpc.register_system_shared_memory(name, "/" + path.name, SIZE)
            return
        body = json.dumps({"key": "/" + path.name, "byte_size": SIZE}).encode()
        status, answer = self._daemon.request("POST", f"/v2/systemsharedmemory/region/{name}/register", body)
        assert status == 200, answer

    def names(self) -> set[str]:
        if self._grpc is not None:
            return set(self._grpc.get_system_shared_memory_status(as_json=True).get("regions", {}))
        return {entry["name"] for entry in json.loads(self._daemon.get("/v2/systemsharedmemory/status")[1])}

    def sleep(self, region: str, began: Path, until: Path) -> None:
        """Sends a request that touches ``began`` and waits for ``until``.

        Its delay comes from the region and is written 64 bytes further on.
        """
        told = {"began": str(began), "until": str(until)}
        if self._grpc is None:
            places = [
                {"shared_memory_region": region, "shared_memory_byte_size": 4, "shared_memory_offset": o}
                for o in (0, 64)
            ]
            status, answer = self._daemon.infer(
                "sleepy",
                [{"name": "DELAY_MS", "shape": [1], "datatype": "INT32", "parameters": places[0]}],
                outputs=[{"name": "OUTPUT", "parameters": places[1]}],
                parameters=told,
            )
            assert status == 200, answer
            return
        given, wanted = grpcclient.InferInput("DELAY_MS", [1], "INT32"), grpcclient.InferRequestedOutput("OUTPUT")
        given.set_shared_memory(region, 4)
        wanted.set_shared_memory(region, 4, offset=64)
        self._grpc.infer("sleepy", [given], outputs=[wanted], parameters=told)


@pytest.fixture
def serve(leaves_nothing: None, tmp_path: Path) -> Iterator[Callable[..., Served]]:
    started: list[Served] = []

    def start(reclaim: str, protocol: str, environment: dict[str, str] | None = None) -> Served:
        started.append(Served(tmp_path, reclaim, protocol, environment))
        return started[-1]

    yield start
    for served in started:
        served.daemon.stop()


@contextlib.contextmanager
def let_go(until: Path) -> Iterator[None]:
    """Ends the waiting request at the end of the block in any case, because the thread pool could not."""
    try:
        yield
    finally:
        until.touch()


@pytest.fixture
def shared_object() -> Iterator[Path]:
    path = Path("/dev/shm", f"tensord-test-{uuid.uuid4().hex}")
    path.write_bytes(np.full(SIZE // 4, 7, np.int32).tobytes())
    yield path
    path.unlink()


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_a_region_goes_with_its_connection(
    serve: Callable[..., Served], shared_object: Path, tmp_path: Path, protocol: str
) -> None:
    """
    1. An owner registers two regions on one unix connection, somebody else one over TCP. 2. A slow request uses one of them.
    3. Both close their connections; the processes live on.
    Result: the owner's regions are found no more; the request has its answer, in the region; TCP's region stays.
    """
    served = serve("connection", protocol)
    began, until = tmp_path / "began", tmp_path / "until"
    with served.tcp() as tcp, ThreadPoolExecutor(1) as pool, let_go(until), Owner(protocol, served.path) as owner:
        with served.tcp() as other:
            other.register("t", shared_object)
        owner.register("a", shared_object)
        owner.register("b", shared_object)
        assert served.records()["b"]["pid"] == owner.pid
        slow = pool.submit(tcp.sleep, "a", began, until)
        wait_until(began.exists, "the slow request to run", served.daemon)
        owner.close_connection()
        wait_until(lambda: tcp.names() == {"a", "t"}, "the one that is not used to be gone", served.daemon)
        wait_until(
            lambda: served.records()["a"]["state"] == "unregistering",
            "the one that is used to be found no more",
            served.daemon,
        )
        assert set(served.records()) == {"a", "t"}
        until.touch()
        slow.result()
        assert np.fromfile(shared_object, np.int32, 1, offset=64).tolist() == [7]
        served.wait_gone("a", "b")
        assert set(served.records()) == {"t"}
        (worker,) = served.daemon.workers
        wait_until(
            lambda: sum(shared_object.name in entry.path for entry in worker.memory_maps(grouped=False)) == 1,
            "the worker to have one mapping of the object left",
            served.daemon,
        )
    assert "region 'a' goes: the connection of process" in served.daemon.log


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_a_connection_also_ends_with_its_process_or_its_front(
    serve: Callable[..., Served], shared_object: Path, protocol: str
) -> None:
    """
    1. One owner is killed. 2. Then the front that serves the other one dies.
    Result: each time the regions of those connections go; nobody else's.
    """
    served = serve("connection", protocol)
    with Owner(protocol, served.path) as first, Owner(protocol, served.path) as second:
        first.register("a", shared_object)
        second.register("b", shared_object)
        with served.tcp() as tcp:
            tcp.register("t", shared_object)
        first.kill()
        served.wait_gone("a")
        assert set(served.records()) == {"b", "t"}
        (front,) = served.daemon.children(f"tensord.daemon.{protocol}")
        front.kill()
        served.wait_gone("b")
        assert set(served.records()) == {"t"}


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_a_region_goes_with_its_process(serve: Callable[..., Served], shared_object: Path, protocol: str) -> None:
    """
    1. An owner registers a region and closes its connection. 2. It is killed.
    Result: the region stays as long as the process.
    """
    served = serve("owner", protocol)
    with Owner(protocol, served.path) as owner, served.tcp() as tcp:
        owner.register("a", shared_object)
        tcp.register("t", shared_object)
        owner.close_connection()
        for _ in range(50):
            assert tcp.names() == {"a", "t"}
        owner.kill()
        served.wait_gone("a")
        assert tcp.names() == {"t"}
    assert "region 'a' goes: the process" in served.daemon.log


def test_by_default_a_region_stays(serve: Callable[..., Served], shared_object: Path) -> None:
    """The owner closes its connection and dies; its region goes on working, and the operator can take it away."""
    served = serve("never", "http")
    with Owner("http", served.path) as owner, served.tcp() as tcp:
        owner.register("a", shared_object)
        owner.close_connection()
        owner.kill()
        for _ in range(50):
            assert tcp.names() == {"a"}
        served.tensorctl("regions", "unregister", "a")
        assert served.records() == {}


@pytest.mark.parametrize("reclaim", ["never", "owner", "connection"])
def test_the_owner_of_gpu_memory_dies(serve: Callable[..., Served], tmp_path: Path, reclaim: str) -> None:
    """
    1. A process registers its GPU memory over the unix socket, twice. 2. It is killed while a request uses one of them.
    Result: that request has an answer or an error, the next ones an error; where regions go by themselves both are gone and
    closed. The worker is the same, and another owner's memory works all the time.
    """
    (tmp_path / "cuda").mkdir()
    stub = CudaStub(tmp_path / "cuda", delay_us=200)
    served = serve(reclaim, "grpc", stub.environment)
    (worker,) = served.daemon.workers
    began, until = tmp_path / "began", tmp_path / "until"
    environment = os.environ | stub.environment
    with served.tcp() as tcp, CudaOwner(environment) as other, ThreadPoolExecutor(1) as pool, let_go(until):
        other.create("kept", SIZE)
        other.put("kept", np.zeros(SIZE // 4, np.int32))
        other.register(f"unix:{served.path}", "kept", SIZE)
        with CudaOwner(environment) as owner:
            for name in ("a", "b"):
                owner.create(name, SIZE)
                owner.put(name, np.full(SIZE // 4, 7, np.int32))
                owner.register(f"unix:{served.path}", name, SIZE)
            assert {record["kind"] for record in served.records().values()} == {"cuda"}
            slow = pool.submit(tcp.sleep, "a", began, until)
            wait_until(began.exists, "the slow request to run", served.daemon)
            owner.kill()
            until.touch()
            error = str(slow.exception() or "")
            assert not error or "its owner has freed it or is gone" in error
        if reclaim == "never":
            assert set(served.records()) == {"a", "b", "kept"}
            expected = "its owner has freed it or is gone"
        else:
            served.wait_gone("a", "b")
            assert set(served.records()) == {"kept"}
            expected = "Unable to find shared memory region: 'b'"
        with pytest.raises(AssertionError, match=expected):
            tcp.sleep("b", tmp_path / "never", until)
        tcp.sleep("kept", tmp_path / "again", until)
        served.tensorctl("regions", "unregister", "")
        assert served.records() == {}
        wait_until(
            lambda: (
                not [
                    # What it page-locked itself the stand-in notes in a file of its own, which stays.
                    found
                    for found in worker.memory_maps(grouped=False)
                    if found.path.startswith(str(stub.folder)) and not Path(found.path).name.startswith("host-")
                ]
            ),
            "no mapping of GPU memory",
            served.daemon,
        )
    assert [found.pid for found in served.daemon.workers] == [worker.pid]
