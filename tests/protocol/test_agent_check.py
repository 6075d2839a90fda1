"""HAProxy's agent-check of a real daemon: its weight falls with load, and it drains before it stops."""

from __future__ import annotations

import re
import signal
import socket
import threading
from collections.abc import Callable
from pathlib import Path

from tests import repositories
from tests.daemon_process import PATIENCE, DaemonProcess, wait_until

BUSY = [{"name": "DELAY_MS", "datatype": "INT32", "shape": [1], "data": [300]}]


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def test_a_daemon_that_is_loaded_and_stops(start_daemon: Callable[..., DaemonProcess], tmp_path: Path) -> None:
    """
    1. One client after another keeps the only worker at work. 2. SIGTERM while a request is under way.
    Result: the whole weight at first, little of it under load; then "drain", and the port is closed in the end.
    """
    repositories.sleepy_model(tmp_path / "models")
    port = free_port()
    daemon = start_daemon(tmp_path / "models", metrics={"port": 0, "agent_port": port})

    def line() -> bytes:
        with socket.create_connection(("127.0.0.1", port), PATIENCE) as connection:
            return connection.makefile("rb").read()

    daemon.wait_ready()
    wait_until(lambda: line() == b"up ready 100%\n", "its whole weight", daemon)
    done = threading.Event()

    def load() -> None:
        while not done.is_set():
            daemon.infer("sleepy", BUSY)

    thread = threading.Thread(target=load)
    thread.start()

    def weight() -> int:
        found = re.fullmatch(rb"up ready (\d+)%\n", line())
        assert found is not None
        return int(found[1])

    try:
        wait_until(lambda: weight() <= 50, "less of it under load", daemon)
    finally:
        done.set()
        thread.join(PATIENCE)
    began, until = tmp_path / "began", tmp_path / "until"
    parameters = {"began": str(began), "until": str(until)}
    last = threading.Thread(target=lambda: daemon.infer("sleepy", BUSY, parameters=parameters))
    last.start()
    wait_until(began.exists, "a request that runs", daemon)
    daemon.signal(signal.SIGTERM)
    wait_until(lambda: line() == b"drain\n", "drain", daemon)
    until.touch()
    last.join(PATIENCE)
