"""Servers under measurement: one that has died is started again."""

from __future__ import annotations

import os
import signal
import socket
import sys
from pathlib import Path

from bench.server import ready, serving
from bench.vary.servers import Server

#: Is ready, and does nothing else.
_READY = """
import http.server, sys

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

    def log_message(self, *words):
        pass

http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def test_one_that_has_died_is_started_again(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    address, logs = f"127.0.0.1:{port}", [tmp_path / "first.log", tmp_path / "second.log"]
    command = [sys.executable, "-c", _READY, str(port)]
    with Server("peer", address, "", lambda start: serving(command, address, logs[start])) as server:
        first = server.pid
        assert first is not None
        assert not server.revive()
        os.kill(first, signal.SIGKILL)
        os.waitid(os.P_PID, first, os.WEXITED | os.WNOWAIT)
        assert server.revive()
        assert server.pid != first
        assert ready(address)
        assert not server.revive()
    assert not ready(address)
    assert all(log.exists() for log in logs)


def test_somebody_elses_is_left_alone() -> None:
    with Server("peer", "127.0.0.1:1", "127.0.0.1:2") as server:
        assert not server.revive()
        assert server.pid is None
