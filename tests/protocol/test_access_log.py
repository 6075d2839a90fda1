"""Tests the access log and the counts by code of a real daemon: good and refused requests of both protocols, over all fronts."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensord_client
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

from tests import repositories
from tests.daemon_process import PATIENCE, DaemonProcess, wait_until
from tests.protocol.streaming_models import CONFIG, TALKS, Stream
from tests.scrapes import scrape

BODY = [{"name": "x", "datatype": "FP32", "shape": [2, 4], "data": [1.0] * 8}]


@pytest.fixture
def serve(start_daemon: Callable[..., DaemonProcess], tmp_path: Path) -> Callable[..., DaemonProcess]:
    repositories.scale_model(tmp_path / "models")
    repositories.write_model(tmp_path / "models", "talks", TALKS, CONFIG)

    def start(**log: Any) -> DaemonProcess:
        options = {"http": {"processes": 2}, "clients": {"socket": str(tmp_path / "clients.sock")}}
        daemon = start_daemon(tmp_path / "models", log={"format": "json", **log}, **options)
        daemon.wait_ready()
        return daemon

    return start


def lines(daemon: DaemonProcess) -> list[dict[str, Any]]:
    """Returns the entries of the access log so far."""
    found = [json.loads(line) for line in daemon.log.splitlines() if '"request":' in line]
    assert all((line["logger"], line["message"]) == ("tensord.access", "request") for line in found)
    return [line["request"] for line in found]


def answers(daemon: DaemonProcess, protocol: str) -> dict[str, float]:
    samples = scrape(daemon.metrics_url)
    codes = samples.of("tensord_front_requests_total", "code")
    found = {}
    for code in codes:
        with contextlib.suppress(KeyError):
            found[code] = samples.value("tensord_front_requests_total", protocol=protocol, code=code)
    return {code: count for code, count in found.items() if count}


def raw(daemon: DaemonProcess, content: bytes) -> bytes:
    """Sends bytes; returns all bytes that come back until the connection ends."""
    host, port = daemon.url.split(":")
    with socket.create_connection((host, int(port)), PATIENCE) as connection:
        connection.sendall(content)
        found = b""
        while piece := connection.recv(1 << 16):
            found += piece
        return found


def test_all_answers_are_counted(serve: Callable[..., DaemonProcess]) -> None:
    daemon = serve()
    before = answers(daemon, "http")
    for _ in range(20):
        assert daemon.infer("scale", BODY)[0] == 200
    assert daemon.infer("scale", [{**BODY[0], "shape": [2, 5]}])[0] == 400
    assert daemon.infer("nobody", BODY)[0] == 404
    assert daemon.request("GET", "/nothing")[0] == 404
    assert daemon.request("GET", "/v2/models/scale")[0] == 200
    assert daemon.request("POST", "/v2/models/talks/generate", b'{"n": [2]}')[0] == 400
    assert daemon.request("POST", "/v2/models/talks/generate_stream", b'{"n": [2]}')[0] == 200
    assert b" 400 " in raw(daemon, b"nonsense\r\n\r\n")
    after = answers(daemon, "http")
    grown = {code: after[code] - before.get(code, 0) for code in after if after[code] != before.get(code, 0)}
    assert grown == {"200": 22, "400": 3, "404": 2}
    with grpcclient.InferenceServerClient(daemon.grpc_url) as client:
        given = grpcclient.InferInput("x", [2, 4], "FP32")
        given.set_data_from_numpy(np.ones((2, 4), np.float32))
        for _ in range(20):
            client.infer("scale", [given])
        for _ in range(2):
            with pytest.raises(InferenceServerException):
                client.infer("nobody", [given])
        client.get_server_metadata()
        with pytest.raises(InferenceServerException):
            client.get_model_config("nobody")
    with Stream(daemon.grpc_url) as stream:
        for n in (2, 0, 1):
            stream.answers("talks", n)
        stream.ask("nobody", 1)
        assert "unknown model" in stream.take()[1]
    assert answers(daemon, "grpc") == {"OK": 24, "NOT_FOUND": 4}
    # One line each, of every front that has seen some; a moment gathers what comes together.
    wait_until(lambda: "refused as mistakes of clients" in daemon.log, "line", daemon)
    assert lines(daemon) == []


def test_the_access_log(serve: Callable[..., DaemonProcess]) -> None:
    """
    1. Twenty requests on one connection with access = 5, and one that is refused. 2. A reload turns it off.
    Result: one line in five, with what is known of the request; refusals; nothing afterwards.
    """
    daemon = serve(access=5)
    with grpcclient.InferenceServerClient(daemon.grpc_url) as client:
        given = grpcclient.InferInput("x", [2, 4], "FP32")
        given.set_data_from_numpy(np.ones((2, 4), np.float32))
        for number in range(20):
            client.infer("scale", [given], request_id=f"r{number}")
        with pytest.raises(InferenceServerException):
            client.infer("nobody", [given], request_id="bad")
        wait_until(lambda: len(lines(daemon)) >= 5, "five lines", daemon)
        *good, bad = lines(daemon)
        assert [line["id"] for line in good] == ["r4", "r9", "r14", "r19"]
        for line in good:
            assert line.pop("duration_us") > 0
            assert line.pop("answer_bytes") >= 32
            line.pop("id")
            assert line == {
                "protocol": "grpc",
                "code": "OK",
                "model": "scale",
                "version": 1,
                "input_bytes": 32,
                "client": "tcp 127.0.0.1",
            }
        assert (bad["code"], bad["client"], bad["model"]) == ("NOT_FOUND", "tcp 127.0.0.1", "nobody")
        assert "nobody" in bad["error"]
        daemon.config.write_text(daemon.config.read_text().replace("access = 5", "access = 0"))
        daemon.signal(signal.SIGHUP)
        wait_until(lambda: "reload: done" in daemon.log, "reload", daemon)
        for _ in range(20):
            client.infer("scale", [given])
        assert daemon.request("GET", "/v2/health/live")[0] == 200
        assert len(lines(daemon)) == 5


@pytest.mark.parametrize("prepared", [False, True])
def test_the_access_log_of_lanes(serve: Callable[..., DaemonProcess], tmp_path: Path, prepared: bool) -> None:
    """
    1. Sixty calls over a lane with access = 20, most of which are answered outside of Python, and two that are refused.
    2. Ten calls after a reload with access = 1. 3. A reload turns it off.
    Result: one line in twenty, refusals, every one, and none: as of fronts, with the user in place of an address.
    """
    daemon, x = serve(access=20), np.ones((2, 4), np.float32)

    def reload(before: int, after: int, done: int) -> None:
        daemon.config.write_text(daemon.config.read_text().replace(f"access = {before}", f"access = {after}"))
        daemon.signal(signal.SIGHUP)
        wait_until(lambda: daemon.log.count("reload: done") == done, "reload", daemon)

    with tensord_client.connect(str(tmp_path / "clients.sock")) as client:
        model = client.model("scale")
        call = (
            model.prepare({"x": x}, request_id="p") if prepared else functools.partial(model, {"x": x}, request_id="p")
        )
        for _ in range(60):
            call()
        for name in ("wrong", "again"):
            with pytest.raises(tensord_client.InvalidArgument):
                model({"x": np.ones((2, 5), np.float32)}, request_id=name)
        wait_until(lambda: len(lines(daemon)) == 5, "five lines", daemon)
        *good, wrong, again = lines(daemon)
        for line in good:
            assert line.pop("duration_us") > 0
            assert line == {
                "protocol": "lane",
                "code": "OK",
                "model": "scale",
                "version": 1,
                "id": "p",
                "input_bytes": 32,
                "client": f"uid {os.getuid()}",
            }
        assert (wrong["code"], wrong["id"], again["id"]) == ("INVALID_ARGUMENT", "wrong", "again")
        assert (wrong["model"], wrong["client"]) == ("scale", f"uid {os.getuid()}")
        assert "x" in wrong["error"]
        reload(20, 1, 1)
        for _ in range(10):
            call()
        wait_until(lambda: len(lines(daemon)) == 15, "every one", daemon)
        reload(1, 0, 2)
        for _ in range(10):
            call()
        with pytest.raises(tensord_client.InvalidArgument):
            model({"x": np.ones((2, 5), np.float32)})
        assert len(lines(daemon)) == 15


def test_what_else_is_refused_is_logged_with_its_sentence(serve: Callable[..., DaemonProcess]) -> None:
    daemon = serve(access=5)
    status, body = daemon.request("GET", "/v2/models/nobody")[:2]
    assert status == 404
    wait_until(lambda: lines(daemon), "a line", daemon)
    assert lines(daemon)[0]["error"] == f"GET /v2/models/nobody: {json.loads(body)['error']}"


def test_who_changed_something(serve: Callable[..., DaemonProcess], tmp_path: Path) -> None:
    """
    1. Settings are changed over TCP, over a unix socket, and over gRPC; and read. 2. A region without an object is registered.
    Result: a line for each change with the client's address, or user and process as the kernel knows them; why one was refused.
    """
    daemon = serve()
    assert daemon.request("GET", "/v2/logging")[0] == 200
    body = b'{"log_verbose_level": 0}'
    assert daemon.request("POST", "/v2/logging", body)[0] == 200
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(PATIENCE)
        connection.connect(str(tmp_path / "http.sock"))
        connection.sendall(b"POST /v2/logging HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        assert b" 200 " in connection.recv(1 << 16)
    with grpcclient.InferenceServerClient(daemon.grpc_url) as client:
        client.update_log_settings({"log_verbose_level": 1})
        with pytest.raises(InferenceServerException):
            client.register_system_shared_memory("r", "/tensord-test-no-such-object", 64)

    def audited() -> list[str]:
        messages = [json.loads(line)["message"] for line in daemon.log.splitlines() if line.startswith("{")]
        return [message for message in messages if message.startswith("audit: ")]

    wait_until(lambda: len(audited()) == 4, "four lines", daemon)
    over_tcp, over_unix, over_grpc, region = audited()
    assert over_tcp.startswith("audit: change of log settings (verbose=0) by 127.0.0.1:")
    assert over_unix == f"audit: change of log settings (verbose=0) by uid {os.getuid()}, pid {os.getpid()}"
    assert over_grpc.startswith("audit: change of log settings (verbose=1) by 127.0.0.1:")
    assert region.startswith(
        "audit: registration of region 'r' (64 bytes of '/tensord-test-no-such-object' from 0) by 127.0.0.1:"
    )
    assert ", refused: " in region
