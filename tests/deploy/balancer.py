"""Runs HAProxy with the configuration of deploy/, before daemons of the tests."""

from __future__ import annotations

import csv
import shutil
import socket
import subprocess
import threading
from collections.abc import Mapping
from pathlib import Path

from tests.daemon_process import PATIENCE, wait_until
from tests.deploy import haproxy_configuration
from tests.deploy.hosts import Host, free_ports

HAPROXY = shutil.which("haproxy") or shutil.which("/usr/sbin/haproxy")


class Balancer:
    """HAProxy with deploy's file, in which only addresses are replaced. Use as a context manager."""

    def __init__(self, folder: Path, hosts: Mapping[str, Host]) -> None:
        self.http_port, self.grpc_port, self.metrics_port = free_ports(3)
        self._socket = folder / "admin.sock"
        self._file = folder / "haproxy.cfg"
        daemons = [
            haproxy_configuration.Daemon(host.http_port, host.grpc_port, host.agent_port) for host in hosts.values()
        ]
        listens = haproxy_configuration.Balancer(self.http_port, self.grpc_port, self.metrics_port, self._socket)
        self._file.write_text(haproxy_configuration.configuration(daemons, listens))
        self._log: list[str] = []

    def __enter__(self) -> Balancer:
        assert HAPROXY is not None
        # In the foreground and without a master: one process.
        self._process = subprocess.Popen(
            [HAPROXY, "-db", "-f", str(self._file)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        wait_until(self._listens, f"HAProxy to listen: {self._log}")
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait(PATIENCE)
        self._reader.join(PATIENCE)
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        self._log += self._process.stdout

    def _listens(self) -> bool:
        assert self._process.poll() is None, self.log
        try:
            socket.create_connection(("127.0.0.1", self.http_port)).close()
            # It binds the admin socket by itself, before or after.
            self.ask("show info")
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        return True

    @property
    def log(self) -> str:
        """Returns what HAProxy wrote so far: changes of servers, and requests that failed or were sent twice."""
        return "".join(self._log)

    def ask(self, command: str) -> str:
        """Sends a command to the admin socket; returns the answer."""
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(self._socket))
            connection.sendall(f"{command}\n".encode())
            return connection.makefile().read()

    def row(self, backend: str, server: str) -> dict[str, str]:
        """Returns a server's statistics, by HAProxy's names (management guide, 9.1)."""
        lines = self.ask("show stat").removeprefix("# ").splitlines()
        (found,) = (row for row in csv.DictReader(lines) if (row["pxname"], row["svname"]) == (backend, server))
        return found

    def status(self, server: str, backend: str = "http") -> str:
        """Returns a server's status: UP, DOWN, DRAIN, and the like."""
        return self.row(backend, server)["status"]

    def wait_for(self, server: str, *statuses: str, backends: tuple[str, ...] = ("http", "grpc", "daemons")) -> None:
        """Waits until a server has one of the statuses in each of the backends that check it."""

        def reached() -> bool:
            return all(self.status(server, backend) in statuses for backend in backends)

        wait_until(reached, f"{server} to be {statuses} at HAProxy, in {backends}")
