"""Helpers of measurements: gone when their block ends, and with them what they had in shared memory."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from bench.helper import helper, report, reports
from tests.daemon_process import PATIENCE, ROOT, DaemonProcess, wait_until

#: Serves HTTP's "ready" with a process of its own beside it, until it is told to end.
_MEASUREMENT = """
import signal, subprocess, sys
from pathlib import Path
from bench.server import serving
# A run of tests in the background of a shell has SIGINT ignored, and passes that on.
signal.signal(signal.SIGINT, signal.default_int_handler)
server = "import http.server as h, subprocess, sys;" \\
    "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(3600)']);" \\
    "H = type('H', (h.BaseHTTPRequestHandler,), {'do_GET': lambda self: self.send_response(200) or self.end_headers()});" \\
    "h.HTTPServer(('127.0.0.1', int(sys.argv[1])), H).serve_forever()"
with serving([sys.executable, "-c", server, sys.argv[1]], f"127.0.0.1:{sys.argv[1]}", Path(sys.argv[2])) as pid:
    print(pid, flush=True)
    input()
"""


def _names(pid: int) -> set[str]:
    """Returns the names in shared memory that belong to a process."""
    return {name for name in os.listdir("/dev/shm") if name.startswith(f"tensord-bench-{pid}-")}


@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("bench.attackers", ("regions-cut-while-registered", "{http}", "{grpc}", "600")),
        ("bench.attackers", ("regions-many", "{http}", "{grpc}", "600")),
        ("bench.attackers", ("grpc-no-window-and-stays", "{http}", "{grpc}", "600")),
        ("bench.bystander", ("http", "{http}", "mixed")),
        ("bench.bystander", ("grpc", "{grpc}", "mixed")),
    ],
)
def test_one_that_is_told_to_end_leaves_nothing_in_shared_memory(
    daemon: DaemonProcess, module: str, words: tuple[str, ...]
) -> None:
    mine = [word.format(http=daemon.url, grpc=daemon.grpc_url) for word in words]
    with helper(module, *mine) as process:
        wait_until(lambda: _names(process.pid) or process.poll() is not None, "an object in shared memory")
        assert process.poll() is None
    assert process.returncode == 128 + signal.SIGTERM
    assert not _names(process.pid)


def test_reports_come_when_the_input_ends(daemon: DaemonProcess) -> None:
    addresses = {"http": daemon.url, "grpc": daemon.grpc_url}
    with contextlib.ExitStack() as stack:
        running = [
            stack.enter_context(helper("bench.bystander", protocol, address, "mixed"))
            for protocol, address in addresses.items()
        ]
        for process in running:
            wait_until(lambda pid=process.pid: _names(pid), "its region")
        seen = reports(running)
    assert all(not one["failures"] for one in seen)
    assert not any(_names(process.pid) for process in running)


def test_one_that_fails_is_said() -> None:
    with helper("bench.attackers", "nothing") as process, pytest.raises(SystemExit, match="ended with 1"):
        report(process)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_measurement_that_is_told_to_end_takes_its_server_along(tmp_path: Path, number: signal.Signals) -> None:
    """Processes that the server has left behind are ended too."""
    with socket.create_server(("127.0.0.1", 0)) as chosen:
        port = chosen.getsockname()[1]
    command = [sys.executable, "-c", _MEASUREMENT, str(port), str(tmp_path / "log")]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, stderr=pipe) as process:
        assert process.stdout is not None
        server = psutil.Process(int(process.stdout.readline()))
        family = [server, *server.children()]
        assert len(family) == 2
        process.send_signal(number)
        process.wait(PATIENCE)
        gone, alive = psutil.wait_procs(family, PATIENCE)
    assert not alive
    assert len(gone) == 2
