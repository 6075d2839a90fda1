"""Three HTTP and two gRPC fronts on their two ports: whichever a client has, it has the whole daemon."""

from __future__ import annotations

import contextlib
import fcntl
import json
import re
import signal
import socket
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
import tritonclient.utils.shared_memory as shm
from tritonclient.utils import InferenceServerException

from tests import repositories
from tests.daemon_process import PATIENCE, DaemonProcess, tensorctl_status, wait_until

#: Channels of one process share a connection otherwise.
OWN_CONNECTION = [("grpc.use_local_subchannel_pool", 1)]
VALUES = np.array([[1, 2, 3, 4]], np.float32)


class Fronts:
    """A daemon with several fronts, and a client at each of them: ``http`` and ``grpc``, in any order."""

    def __init__(self, folder: Path, options: dict[str, dict[str, Any]]) -> None:
        self.control = folder / "control.sock"
        repository = repositories.scale_model(folder / "models")
        repositories.sleepy_model(repository)
        repositories.scale_model(repository, "coming")
        sections = {
            "repository": {"control_mode": "explicit", "load": ["scale", "sleepy"]},
            "supervisor": {"control_socket": str(self.control)},
            "trace": {"file": str(folder / "trace.json")},
            **options,
        }
        self.daemon = DaemonProcess(folder, [repository], sections)
        self.clients = contextlib.ExitStack()
        self.http: list[Any] = []
        self.grpc: list[Any] = []
        #: Process of the front that a client has.
        self.pid_of: dict[Any, int] = {}

    def __enter__(self) -> Fronts:
        self.daemon.start()
        try:
            self.daemon.wait_ready()
            self.connect()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.clients.close()
        self.daemon.stop()

    def status(self) -> list[dict[str, Any]]:
        """Returns the fronts of ``tensorctl status``."""
        return list(tensorctl_status(self.control)["fronts"])

    def connections(self, protocol: str) -> dict[int, int]:
        """Returns how many connections each front of a protocol has, by process id."""
        return {front["pid"]: front["connections"] for front in self.status() if front["name"].startswith(protocol)}

    def connect(self) -> None:
        """Connects clients until there is one at every front."""
        for protocol, found in (("http", self.http), ("grpc", self.grpc)):
            found.clear()
            wait_until(lambda protocol=protocol: not any(self.connections(protocol).values()), "quiet")
            before = self.connections(protocol)
            while set(before) - {self.pid_of[client] for client in found}:
                client = self.client(protocol)
                # An answer that is read to its end: the HTTP client keeps the connection.
                assert client.get_server_metadata()
                after = self.connections(protocol)
                (pid,) = [pid for pid, count in after.items() if count > before[pid]]
                if pid not in {self.pid_of[client] for client in found}:
                    self.pid_of[client] = pid
                    found.append(self.clients.enter_context(client))
                    before = after
                else:
                    # The other front was slow to come for it.
                    client.close()
                    wait_until(lambda protocol=protocol, before=before: self.connections(protocol) == before, "end")

    def client(self, protocol: str) -> Any:
        """Returns a client that is not connected yet."""
        if protocol == "http":
            return httpclient.InferenceServerClient(
                self.daemon.url, network_timeout=PATIENCE, connection_timeout=PATIENCE
            )
        return grpcclient.InferenceServerClient(self.daemon.grpc_url, channel_args=OWN_CONNECTION)

    @property
    def all(self) -> list[Any]:
        return [*self.http, *self.grpc]

    def pairs(self) -> Iterator[tuple[Any, Any]]:
        """Yields every pair of different clients, of both protocols."""
        yield from ((one, other) for one in self.all for other in self.all if one is not other)


@pytest.fixture(scope="module")
def fronts(leaves_nothing: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fronts]:
    options = {"http": {"port": 0, "processes": 3}, "grpc": {"port": 0, "processes": 2}}
    with Fronts(tmp_path_factory.mktemp("fronts"), options) as running:
        yield running


def library(client: Any) -> Any:
    return httpclient if isinstance(client, httpclient.InferenceServerClient) else grpcclient


def infer(client: Any, model: str = "scale", values: np.ndarray = VALUES) -> None:
    given = library(client).InferInput("x", list(values.shape), "FP32")
    given.set_data_from_numpy(values)
    np.testing.assert_array_equal(client.infer(model, [given]).as_numpy("y"), 3 * values + 1)


def as_json(client: Any, method: str, *arguments: Any, **options: Any) -> Any:
    """Calls a method of either client and returns the answer as JSON."""
    if library(client) is grpcclient:
        options["as_json"] = True
    return getattr(client, method)(*arguments, **options)


def test_clients_are_at_different_fronts(fronts: Fronts) -> None:
    """By the operating system as well: the process that holds the other end of a connection is the one tensorctl says."""
    assert [front["name"] for front in fronts.status()] == ["http-0", "http-1", "http-2", "grpc-0", "grpc-1"]
    assert len({fronts.pid_of[client] for client in fronts.http}) == 3
    assert len({fronts.pid_of[client] for client in fronts.grpc}) == 2
    assert {process.pid for process in fronts.daemon.fronts} == {fronts.pid_of[client] for client in fronts.http}
    with socket.create_connection(("127.0.0.1", fronts.daemon.port)) as sock:
        sock.sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n")
        assert sock.recv(4096).startswith(b"HTTP/1.1 200")
        pids = {process.pid for process in fronts.daemon.fronts}
        port = sock.getsockname()[1]
        holders = [c.pid for c in psutil.net_connections("tcp") if c.pid in pids and c.raddr and c.raddr.port == port]
        assert len(holders) == 1
        assert fronts.connections("http")[holders[0]] >= 2
    announced = {line.split(" on ")[1] for line in fronts.daemon.log.splitlines() if "serving http on" in line}
    (addresses,) = announced
    assert f"http://{fronts.daemon.url}" in re.split(r"[ ,]+", addresses)


def test_a_region_of_one_front_is_there_for_all(fronts: Fronts) -> None:
    """Registered, used, listed and unregistered each time at another front."""
    key = f"/tensord-test-{uuid.uuid4().hex}"
    handle = shm.create_shared_memory_region("region", key, 64)
    shm.set_shared_memory_region(handle, [VALUES])
    try:
        for registering, using in fronts.pairs():
            registering.register_system_shared_memory("region", key, 64)
            given = library(using).InferInput("x", [1, 4], "FP32")
            given.set_shared_memory("region", 16)
            np.testing.assert_array_equal(using.infer("scale", [given]).as_numpy("y"), 3 * VALUES + 1)
            with pytest.raises(InferenceServerException, match="shared memory region 'region' already in manager"):
                using.register_system_shared_memory("region", key, 32)
            assert "region" in json.dumps(as_json(using, "get_system_shared_memory_status"))
            using.unregister_system_shared_memory("region")
            with pytest.raises(InferenceServerException, match="Unable to find shared memory region: 'region'"):
                registering.infer("scale", [given if library(registering) is library(using) else _other(registering)])
    finally:
        shm.destroy_shared_memory_region(handle)


def _other(client: Any) -> Any:
    given = library(client).InferInput("x", [1, 4], "FP32")
    given.set_shared_memory("region", 16)
    return given


def test_statistics_are_whole(fronts: Fronts) -> None:
    """Requests go through each front in a different number; each tells of all of them."""

    def successes(client: Any) -> int:
        (entry,) = as_json(client, "get_inference_statistics", "scale")["model_stats"]
        return int(entry["inference_stats"]["success"]["count"])

    before = successes(fronts.http[0])
    for count, client in enumerate(fronts.all, 1):
        for _ in range(count):
            infer(client)
    assert {successes(client) for client in fronts.all} == {before + 15}


def test_settings_of_one_front_hold_for_all(fronts: Fronts) -> None:
    def verbose(client: Any) -> int:
        answer = as_json(client, "get_log_settings")
        level = answer["settings"]["log_verbose_level"]["uint32_param"] if "settings" in answer else None
        return int(answer["log_verbose_level"] if level is None else level)

    for changing, asking in fronts.pairs():
        for level in (1, 0):
            as_json(changing, "update_log_settings", {"log_verbose_level": level})
            assert verbose(asking) == level


def test_traces_are_counted_over_all_fronts(fronts: Fronts) -> None:
    """One request in three, wherever it comes in, until there are five."""
    path = fronts.daemon.folder / "trace.json"
    settings = {"trace_level": ["TIMESTAMPS"], "trace_rate": "3", "trace_count": "5"}
    as_json(fronts.grpc[1], "update_trace_settings", settings=settings)
    for number in range(24):
        client = fronts.all[number % 5]
        given = library(client).InferInput("x", [1, 4], "FP32")
        given.set_data_from_numpy(VALUES)
        client.infer("scale", [given], request_id=str(number))
    assert '"0"' in json.dumps(as_json(fronts.http[1], "get_trace_settings"))

    def traced() -> list[int]:
        with path.open() as file:
            # Not in the middle of a write.
            fcntl.flock(file, fcntl.LOCK_SH)
            entries = json.loads(file.read() or "[]")
        return sorted(int(entry["request_id"]) for entry in entries if "request_id" in entry)

    wait_until(lambda: len(traced()) == 5, "five traces")
    assert traced() == [2, 5, 8, 11, 14]
    as_json(fronts.http[2], "update_trace_settings", settings={"trace_level": ["OFF"], "trace_count": "-1"})
    for client in fronts.all:
        assert "OFF" in json.dumps(as_json(client, "get_trace_settings"))


def test_streams_of_every_front(fronts: Fronts) -> None:
    for client in fronts.grpc:
        answers: list[Any] = []
        client.start_stream(lambda result, error, answers=answers: answers.append((result, error)))
        for _ in range(3):
            given = grpcclient.InferInput("x", [1, 4], "FP32")
            given.set_data_from_numpy(VALUES)
            client.async_stream_infer("scale", [given])
        client.stop_stream()
        assert [error for _, error in answers] == [None] * 3


def test_a_restart_for_another_number_of_fronts(fronts: Fronts) -> None:
    """SIGHUP does not change how many there are, and says so."""
    sections = {**fronts.daemon.sections, "http": {**fronts.daemon.sections["http"], "processes": 2}}
    before = {process.pid for process in fronts.daemon.fronts}
    fronts.daemon.write_config(sections)
    fronts.daemon.signal(signal.SIGHUP)
    fronts.daemon.wait_log(r"reload: these keys need a restart: http\.processes\n")
    fronts.daemon.wait_log("reload: done")
    assert {process.pid for process in fronts.daemon.fronts} == before
    fronts.daemon.write_config(fronts.daemon.sections)


def test_the_limit_of_connections_is_one_for_all(tmp_path: Path) -> None:
    options = {
        "http": {"port": 0, "processes": 2, "max_connections": 3},
        "grpc": {"port": 0, "processes": 2, "max_connections": 2},
    }
    ask = b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n"
    with Fronts(tmp_path, options) as fronts, contextlib.ExitStack() as stack:
        # A client each at two fronts; the third connection is this one.
        third = stack.enter_context(socket.create_connection(("127.0.0.1", fronts.daemon.port)))
        third.sendall(ask)
        assert third.recv(4096).startswith(b"HTTP/1.1 200")
        # One that was idle makes room for the fourth, at whichever front that is.
        fourth = stack.enter_context(socket.create_connection(("127.0.0.1", fronts.daemon.port)))
        fourth.sendall(ask)
        assert fourth.recv(4096).startswith(b"HTTP/1.1 200")
        with fronts.client("grpc") as another:
            assert another.is_server_live()
        fronts.daemon.wait_log(r"3 connections are allowed \(max_connections\): those idle longest make room")
        fronts.daemon.wait_log(r"2 connections are allowed \(max_connections\): those idle longest make room")
        wait_until(lambda: sum(fronts.connections("http").values()) <= 3, "no more than are allowed")
        wait_until(lambda: sum(fronts.connections("grpc").values()) <= 2, "no more than are allowed")


def test_stop_answers_what_every_front_accepted(tmp_path: Path) -> None:
    """
    1. A slow request is in flight at each front; SIGTERM arrives.
    Result: all are answered, and the exit status is 0.
    """
    models = [f"sleepy-{number}" for number in range(4)]
    for model in models:
        repositories.sleepy_model(tmp_path / "models", model)
    options = {
        "http": {"port": 0, "processes": 2},
        "grpc": {"port": 0, "processes": 2},
        "repository": {"control_mode": "explicit", "load": ["scale", *models]},
    }
    with Fronts(tmp_path, options) as fronts, ThreadPoolExecutor(4) as pool:

        def slow_grpc(client: Any, model: str) -> Any:
            given = grpcclient.InferInput("DELAY_MS", [1], "INT32")
            given.set_data_from_numpy(np.array([1500], np.int32))
            answer = client.infer(model, [given], parameters={"began": str(tmp_path / f"{model}-began")})
            return answer.as_numpy("OUTPUT").tolist()

        # The stock HTTP client belongs to the thread that made it. These connections go to one front each, as those do.
        def slow_http(model: str) -> Any:
            given = [{"name": "DELAY_MS", "shape": [1], "datatype": "INT32", "data": [1500]}]
            began = {"began": str(tmp_path / f"{model}-began")}
            status, answer = fronts.daemon.infer(model, given, parameters=began)
            assert status == 200
            return answer["outputs"][0]["data"]

        asked = [pool.submit(slow_grpc, client, model) for client, model in zip(fronts.grpc, models[:2], strict=True)]
        asked += [pool.submit(slow_http, model) for model in models[2:]]
        for model in models:
            wait_until((tmp_path / f"{model}-began").exists, f"{model} to run", fronts.daemon)
        fronts.daemon.signal(signal.SIGTERM)
        assert [each.result() for each in asked] == [[1500]] * 4
        assert fronts.daemon.stop() == 0


def test_unix_sockets(tmp_path: Path) -> None:
    """Both fronts take connections of one name, which goes with the daemon."""
    path, control = tmp_path / "http.sock", tmp_path / "control.sock"
    options: dict[str, dict[str, Any]] = {
        "http": {"address": f"unix:{path}", "processes": 2},
        "supervisor": {"control_socket": str(control)},
    }
    daemon = DaemonProcess(tmp_path, [repositories.scale_model(tmp_path / "models")], options)
    daemon.served_on = f"serving http on unix:{path}"
    with daemon, contextlib.ExitStack() as stack:
        while not all(front["connections"] for front in tensorctl_status(control)["fronts"][:2]):
            sock = stack.enter_context(socket.socket(socket.AF_UNIX))
            sock.connect(str(path))
            sock.sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n")
            assert sock.recv(4096).startswith(b"HTTP/1.1 200")
        assert [front["name"] for front in tensorctl_status(control)["fronts"]] == ["http-0", "http-1", "grpc-0"]
    assert not path.exists()
