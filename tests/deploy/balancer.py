"""HAProxy with a configuration of deploy/, in front of hosts of the tests."""

from __future__ import annotations

import csv
import re
import shutil
import socket
import subprocess
import threading
from collections.abc import Mapping
from pathlib import Path

from tests.daemon_process import PATIENCE, ROOT, wait_until
from tests.deploy.hosts import Host, free_ports

HAPROXY = shutil.which("haproxy") or shutil.which("/usr/sbin/haproxy")
CONFIGURATION = ROOT / "deploy/haproxy/haproxy.cfg"


class Balancer:
    """The file as it is, but for addresses: those of the hosts, in their order, and where it listens. A context manager."""

    def __init__(self, folder: Path, hosts: Mapping[str, Host]) -> None:
        self.http_port, self.grpc_port, self.metrics_port = free_ports(3)
        self._socket = folder / "admin.sock"
        self._file = folder / "haproxy.cfg"
        self._file.write_text(self._with_addresses(hosts))
        self._log: list[str] = []

    def _with_addresses(self, hosts: Mapping[str, Host]) -> str:
        replaced = {
            "bind :8000": f"bind 127.0.0.1:{self.http_port}",
            "bind :8001": f"bind 127.0.0.1:{self.grpc_port}",
            "bind 127.0.0.1:8405": f"bind 127.0.0.1:{self.metrics_port}",
            "/run/haproxy/admin.sock": str(self._socket),
        }
        for number, host in enumerate(hosts.values(), 1):
            address = f"10.0.0.{number}"
            replaced |= {
                f"{address}:8000": f"127.0.0.1:{host.http_port}",
                f"{address}:8001": f"127.0.0.1:{host.grpc_port}",
                f"{address} port 8000": f"127.0.0.1 port {host.http_port}",
                f"{address} agent-port 8003": f"127.0.0.1 agent-port {host.agent_port}",
            }
        text = CONFIGURATION.read_text()
        for found, given in replaced.items():
            assert found in text, f"{found!r} is not in {CONFIGURATION}"
            text = text.replace(found, given)
        assert not re.search(r"10\.0\.0\.\d", text)
        return text

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
        except ConnectionRefusedError:
            return False
        return True

    @property
    def log(self) -> str:
        """Returns what HAProxy wrote so far: changes of servers, and requests that were not answered well at the first try."""
        return "".join(self._log)

    def ask(self, command: str) -> str:
        """Returns the answer to a command on the admin socket."""
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
        """UP, DOWN, DRAIN, and the like."""
        return self.row(backend, server)["status"]

    def wait_for(self, server: str, *statuses: str, backends: tuple[str, ...] = ("http", "grpc", "daemons")) -> None:
        """Waits until a server has one of the statuses in each of the backends that look at it."""

        def reached() -> bool:
            return all(self.status(server, backend) in statuses for backend in backends)

        wait_until(reached, f"{server} to be {statuses} at HAProxy, in {backends}")
