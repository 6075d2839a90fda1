"""Runs the real supervisor with fake children as a process, and asks it and its fronts."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from tests import prepared
from tests.daemon_process import end_group, has_ended
from tests.written_log import WrittenLog

ROOT = Path(__file__).parent.parent.parent
#: These machines are shared; no test decides by time.
PATIENCE = 120.0


def write_model(repository: Path, name: str, *versions: int, config: str = "") -> Path:
    """Writes a model folder that the repository accepts; returns it. The model is never loaded."""
    for version in versions or (1,):
        folder = repository / name / str(version)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "model.py").write_text("def create(path, config, device):\n    raise NotImplementedError\n")
    if config:
        (repository / name / "config.pbtxt").write_text(config)
    return repository / name


class FakeFrontClient:
    """One connection to a fake front."""

    def __init__(self, port: int) -> None:
        self._sock = socket.create_connection(("127.0.0.1", port), PATIENCE)
        self._lines = self._sock.makefile("rb")

    def send(self, operation: str, **fields: Any) -> None:
        """Sends an operation without waiting for its answer."""
        self._sock.sendall(json.dumps({"operation": operation, "fields": fields}).encode() + b"\n")

    def answer(self) -> Any:
        """Waits for the answer to the oldest question that has none yet."""
        return json.loads(self._lines.readline())

    def has_answer(self) -> bool:
        """Returns whether an answer has come that was not read yet."""
        return bool(select.select([self._sock], [], [], 0)[0])

    def ask(self) -> Any:
        """Returns everything that this front knows."""
        self._sock.sendall(b"{}\n")
        return self.answer()

    def close(self) -> None:
        self._lines.close()
        self._sock.close()


class FakeDaemon:
    """Runs ``tests.daemon.serve_fakes`` as a child process."""

    def __init__(self, folder: Path, options: dict[str, dict[str, Any]], environment: dict[str, str] | None = None):
        """Starts the daemon.

        ``environment``: variables added to those of this process; unless it is None, the daemon is not a forked process.
        """
        self.file = folder / "tensord.toml"
        self.control = folder / "control.sock"
        self.sections: dict[str, dict[str, Any]] = {
            "repository": {"paths": [str(folder / "models")]},
            "http": {"port": 0},
            "grpc": {"enabled": False},
            "metrics": {"port": 0},
            # A test of a bound sets that one.
            "workers": {"device": "cpu", "cpu": 2, "idle_timeout": PATIENCE},
            "supervisor": {"control_socket": str(self.control)},
            "expert": {"restart_delay": 0.05, "start_timeout": 2 * PATIENCE},
        }
        for section, values in options.items():
            self.sections.setdefault(section, {}).update(values)
        self.write_config()
        self._log = WrittenLog()
        words = ["tests.daemon.serve_fakes", str(self.file)]
        self.process: prepared.Process | subprocess.Popen[bytes]
        if environment is None:
            variables = {k: v for k, v in os.environ.items() if not k.startswith("TENSORD_")}
            errors = self._log.fileno()
            self.process = prepared.start(words, environment=variables, new_session=True, output=None, errors=errors)
        else:
            self.process = subprocess.Popen(
                [sys.executable, "-m", *words],
                cwd=ROOT,
                env={k: v for k, v in os.environ.items() if not k.startswith("TENSORD_")} | environment,
                stderr=self._log,
                start_new_session=True,
            )

    def write_config(self) -> None:
        lines: list[str] = []
        for section, values in self.sections.items():
            lines += [f"[{section}]", *(f"{key} = {json.dumps(value)}" for key, value in values.items())]
        self.file.write_text("\n".join(lines) + "\n")

    @property
    def log(self) -> str:
        return self._log.text

    def wait_log(self, pattern: str, count: int = 1) -> None:
        self.wait(lambda: len(re.findall(pattern, self.log)) >= count, repr(pattern))

    def wait(self, condition: Callable[[], Any], what: str) -> None:
        deadline = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < deadline, f"no {what}:\n{self.log}"
            if has_ended(self.process):
                assert condition(), f"exited before {what}:\n{self.log}"
                return
            time.sleep(0.02)

    def wait_ready(self) -> None:
        self.wait_log(r"ready: ")

    @property
    def port(self) -> int:
        self.wait_log(r"serving http on")
        return int(re.findall(r"serving http on http://127\.0\.0\.1:(\d+)", self.log)[-1])

    @property
    def metrics(self) -> str:
        """Returns the HOST:PORT that Prometheus scrapes."""
        self.wait_log(r"serving metrics on")
        return re.findall(r"serving metrics on http://(\S+)/metrics", self.log)[-1]

    def ask(self, question: dict[str, Any] | None = None) -> Any:
        """Returns everything that the front knows, or its answer to an operation."""
        with (
            socket.create_connection(("127.0.0.1", self.port), PATIENCE) as connection,
            connection.makefile("rb") as lines,
        ):
            connection.sendall(json.dumps(question or {}).encode() + b"\n")
            return json.loads(lines.readline())

    def front(self, pid: int) -> FakeFrontClient:
        """Returns a connection to the front with that process id. Connections that other fronts accept are closed."""
        while True:
            client = FakeFrontClient(self.port)
            if client.ask()["pid"] == pid:
                return client
            client.close()

    def call(self, operation: str, **fields: Any) -> tuple[str, str]:
        """Runs an operation; returns its error code ("": none), and its message or result."""
        answer = self.ask({"operation": operation, "fields": fields})
        return answer["code"], answer["message"] or answer["result"]

    def state(self, name: str, version: int = 1) -> dict[str, Any]:
        """Returns what the supervisor told the front of a version of a model."""
        return dict(self.ask()["models"].get(f"{name}/{version}", {"state": "", "workers": []}))

    def tensorctl(self, command: str, **fields: Any) -> dict[str, Any]:
        """Returns the daemon's answer to a command of tensorctl: "result", or "error"."""
        with socket.socket(socket.AF_UNIX) as sock, sock.makefile("rb") as lines:
            sock.connect(str(self.control))
            sock.sendall(json.dumps({"command": command, **fields}).encode() + b"\n")
            return dict(json.loads(lines.readline()))

    def status(self) -> Any:
        """Returns the result of tensorctl status."""
        return self.tensorctl("status")["result"]

    def children(self, module: str) -> list[psutil.Process]:
        found = []
        for process in psutil.Process(self.process.pid).children():
            with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                if module in process.cmdline():
                    found.append(process)
        return found

    @property
    def workers(self) -> list[psutil.Process]:
        return self.children("tests.daemon.fake_worker")

    @property
    def fronts(self) -> list[psutil.Process]:
        return self.children("tests.daemon.fake_front")

    def other_front(self, *pids: int) -> int:
        """Returns the process id of a front that is none of these; waits for one."""
        self.wait(lambda: {front.pid for front in self.fronts} - {*pids}, "front")
        return ({front.pid for front in self.fronts} - {*pids}).pop()

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Ends the daemon; returns its exit status."""
        try:
            return end_group(self.process, number)
        finally:
            self._log.close()
