from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bench.server import children, log_file, serving, used_us
from tests.daemon_process import wait_until


def test_used_time_counts_work() -> None:
    before, began = used_us(os.getpid())["supervisor"], time.process_time()
    while time.process_time() - began < 0.2:
        pass
    assert used_us(os.getpid())["supervisor"] - before >= 190_000


def test_children_are_named_by_the_module_they_run() -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "http.server", "--bind", "127.0.0.1", "0"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:
        try:
            wait_until(lambda: children(os.getpid()).get(process.pid) == "http.server", "the child's command line")
        finally:
            process.kill()


def test_nobody_else_is_measured_in_a_servers_place(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        # It would be started, and another one found at its address.
        with (
            pytest.raises(SystemExit, match=f"cannot serve on {address}: somebody else does"),
            serving([sys.executable, "-c", ""], address, tmp_path / "log"),
        ):
            pass
    assert not (tmp_path / "log").exists()


def test_a_server_that_is_never_ready_is_told_with_its_last_words(tmp_path: Path) -> None:
    """It listens, and a model of it does not load."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    server = (
        "import http.server, sys\n"
        "print('model \\'mlp\\' does not load: no memory', flush=True)\n"
        "kind = http.server.BaseHTTPRequestHandler\n"
        "kind.do_GET, kind.log_message = (lambda self: self.send_error(503)), (lambda *_: None)\n"
        "http.server.HTTPServer(('127.0.0.1', int(sys.argv[1])), kind).serve_forever()\n"
    )
    command = [sys.executable, "-u", "-c", server, str(port)]
    with (
        pytest.raises(
            SystemExit, match=r"(?s)is not ready after 2 s; see .*/log\n.*model 'mlp' does not load: no memory"
        ),
        serving(command, f"127.0.0.1:{port}", tmp_path / "log", patience=2.0),
    ):
        pass
    with socket.socket() as gone:
        assert gone.connect_ex(("127.0.0.1", port))


def test_a_log_is_never_written_through_a_link(tmp_path: Path) -> None:
    """In /tmp, where it goes unless told otherwise, anybody may have put one."""
    (tmp_path / "victim").write_text("mine")
    (tmp_path / "log").symlink_to("victim")
    with pytest.raises(SystemExit, match="cannot be written"):
        log_file(tmp_path / "log")
    assert (tmp_path / "victim").read_text() == "mine"
    with log_file(tmp_path / "victim") as file:
        file.write(b"x")
    assert (tmp_path / "victim").read_text() == "x"
    if os.geteuid() == 0:
        os.chown(tmp_path / "victim", 54321, -1)
        with pytest.raises(SystemExit, match="is somebody else's"):
            log_file(tmp_path / "victim")
        assert (tmp_path / "victim").read_text() == "x"
