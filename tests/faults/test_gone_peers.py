"""Peers that have gone before they were answered: an ordinary end for every server of the daemon, no error in the log."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import repositories
from tests.daemon_process import PATIENCE, DaemonProcess
from tests.deploy.hosts import free_ports

BODY = json.dumps({"inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}]})
INFER = f"POST /v2/models/scale/infer HTTP/1.1\r\nHost: x\r\nContent-Length: {len(BODY)}\r\n\r\n{BODY}".encode()
HTTP2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\x04\0\0\0\0\0"
#: A close with it is a reset.
RESET = struct.pack("ii", 1, 0)


def get(path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode()


@pytest.mark.parametrize("paused", [True, False], ids=["before", "while"])
def test_a_peer_that_has_gone(start_daemon: Callable[..., DaemonProcess], tmp_path: Path, paused: bool) -> None:
    """
    1. Clients connect to every server of a daemon, send nothing, a part of a question, one, or three, and close or reset.
    2. They do so before a process accepts them (it is paused), or while it answers.
    Result: no error in the log, and each server answers the next client.
    """
    models = repositories.scale_model(tmp_path / "models")
    (agent,) = free_ports(1)
    control, clients = tmp_path / "control.sock", tmp_path / "clients.sock"
    daemon = start_daemon(
        models,
        metrics={"port": 0, "agent_port": agent},
        supervisor={"control_socket": str(control)},
        clients={"socket": str(clients)},
    )
    daemon.wait_ready()
    metrics = int(daemon.metrics_url.rpartition(":")[2])
    servers: list[tuple[str | int, tuple[bytes, ...]]] = [
        (agent, (b"agent-send\n",)),
        (metrics, (get("/metrics"), get("/"))),
        (daemon.port, (get("/v2/health/ready"), get("/v2/models/scale/stats"), INFER)),
        (int(daemon.grpc_url.rpartition(":")[2]), (HTTP2,)),
        (str(control), (b'{"command": "status"}\n',)),
        (str(clients), (b'{"hello": {}}', b'{"open": {"model": "scale"}}')),
        (str(clients.with_name("http.sock")), (get("/v2/health/ready"), INFER)),
    ]
    processes = [daemon.pid, *(front.pid for front in daemon.fronts)] if paused else []
    for pid in processes:
        os.kill(pid, signal.SIGSTOP)
    try:
        for address, questions in servers:
            for question in questions:
                for sent in (b"", question[: len(question) // 2], question, 3 * question):
                    for options in ((), (RESET,)):
                        with connected(address) as client:
                            client.sendall(sent)
                            for option in options:
                                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, option)
    finally:
        for pid in processes:
            os.kill(pid, signal.SIGCONT)
    # Each server takes its connections one after the other.
    for address, questions in servers:
        with connected(address) as client:
            client.sendall(questions[0])
            assert client.recv(1)
    assert daemon.stop() == 0
    assert re.findall(r"(?m)^(?:[EC]\d{4} .*|\s*Traceback.*)", daemon.log) == []


def connected(address: str | int) -> socket.socket:
    """Connects to a TCP port, or to a Unix socket."""
    if isinstance(address, int):
        return socket.create_connection(("127.0.0.1", address), PATIENCE)
    kind = socket.SOCK_SEQPACKET if address.endswith("clients.sock") else socket.SOCK_STREAM
    sock = socket.socket(socket.AF_UNIX, kind)
    sock.settimeout(PATIENCE)
    sock.connect(address)
    return sock
