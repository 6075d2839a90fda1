"""Some thousand requests of all kinds over both protocols, every answer compared, while a process of each kind is killed.

1. A daemon has two workers and two fronts of each protocol; two clients of each protocol ask: tensors of many shapes, in binary,
   in JSON, in records and arenas, in registered regions, and models that are not there.
2. After each fifth of them one process is killed: a worker, an HTTP front, a gRPC front, a worker again.
3. A killed worker costs nobody anything; a killed front its connections, and nothing else. What stays holds no descriptor more
   than before, and no name in shared memory is left.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from bench.bystander import SocketBystander, requests
from bench.server import children
from bench.soak import LOST, first_of_each
from tests.daemon_process import (
    PATIENCE,
    ROOT,
    DaemonProcess,
    nothing_left_behind,
    shared_memory_names,
    tensorctl_status,
    wait_until,
)

_CLIENTS = 2
#: Of each client.
_REQUESTS = 500
#: Descriptors of segments and pages, two for each: a process has four lanes at most, with a segment each way, and two pages.
_ARENAS = 2 * (4 * 2 + 2)
#: The event loop opens one with its first connection, to be able to refuse more than it may have.
_SPARE = 1
#: The supervisor listens on the clients' socket, which is of the same kind as what leads to its children.
_LISTENING = 1
_VICTIMS = ("workers", "daemon.http", "daemon.grpc", "workers")


class Client(threading.Thread):
    """Asks its requests one after the other."""

    def __init__(self, protocol: str, address: str) -> None:
        super().__init__()
        self._protocol = protocol
        self._address = address
        self.asked = 0
        self.failures: dict[str, int] = {}

    def run(self) -> None:
        with requests(self._protocol, self._address, "mixed") as exchanges:
            bystander = SocketBystander(self._protocol, self._address, exchanges)
            for _ in range(_REQUESTS):
                bystander.ask()
                self.asked += 1
            bystander.close()
        self.failures = bystander.report()["failures"]


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[DaemonProcess]:
    options = {
        "repository": {"control_mode": "explicit", "load": ["addsub", "identity"]},
        # Large enough for most of it; segments that come besides are closed as soon as they are free.
        "arenas": {"byte_size": 32 << 20, "keep_byte_size": 0},
        "workers": {"cpu": 2},
        "http": {"processes": 2},
        "grpc": {"processes": 2},
        "supervisor": {"control_socket": str(tmp_path / "control")},
    }
    with nothing_left_behind(), DaemonProcess(tmp_path, [ROOT / "bench" / "models"], options) as daemon:
        daemon.wait_ready()
        yield daemon


def test_everything_at_once(daemon: DaemonProcess, tmp_path: Path) -> None:
    urls = {"http": daemon.url, "grpc": daemon.grpc_url}
    staying = first_of_each(daemon.pid)
    everybody = sorted(children(daemon.pid).values())
    before = {kind: descriptors(pid) for kind, pid in staying.items()}
    clients = [Client(protocol, url) for protocol, url in urls.items() for _ in range(_CLIENTS)]
    for client in clients:
        client.start()
    for number, kind in enumerate(_VICTIMS, 1):
        due = number * len(clients) * _REQUESTS // (len(_VICTIMS) + 1)
        wait_until(lambda due=due: sum(client.asked for client in clients) >= due, f"{due} requests", daemon)
        kill(daemon, kind, staying[kind])
        wait_until(lambda: sorted(children(daemon.pid).values()) == everybody, f"{kind} to be there again", daemon)
    for client in clients:
        client.join(PATIENCE)
    failures = [said for client in clients for said, count in client.failures.items() for _ in range(count)]
    assert [said for said in failures if not said.startswith(LOST)] == []
    # Only connections of the two fronts that were killed.
    assert len(failures) <= len(clients)
    daemon.wait_ready()

    def nothing_held() -> bool:
        now = {kind: descriptors(pid) for kind, pid in staying.items()}
        return all(
            now[kind].others <= before[kind].others + _SPARE
            and now[kind].arenas <= _ARENAS
            and now[kind].channels <= len(everybody) + _LISTENING
            for kind in staying
        )

    wait_until(nothing_held, "descriptors to be given back", daemon)
    status = tensorctl_status(tmp_path / "control")
    assert status["regions"] == {}
    assert [name for name in shared_memory_names() if name.startswith(f"tensord-bench-{os.getpid()}-")] == []
    assert "Traceback" not in daemon.log


class Descriptors(NamedTuple):
    """The number of a process's descriptors, by what they are for."""

    #: Segments of arenas and status pages, which are made when they are needed first.
    arenas: int
    #: Lanes and what leads to the supervisor. A lane to a worker may come after the daemon is ready by its other worker.
    channels: int
    others: int


def descriptors(pid: int) -> Descriptors:
    links = []
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            links.append(os.readlink(link))
    # Memory of the stand-in for a GPU: a file for each allocation.
    links = [link for link in links if f"/devices/{pid}-" not in link]
    # The type of a socket that keeps records apart, and behind it its state and its inode.
    entries = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    records = {f"socket:[{entry[6]}]" for entry in entries if entry[4] == f"{socket.SOCK_SEQPACKET:04x}"}
    arenas = links.count("/memfd:tensord (deleted)")
    channels = sum(link in records for link in links)
    return Descriptors(arenas, channels, len(links) - arenas - channels)


def kill(daemon: DaemonProcess, kind: str, stays: int) -> None:
    """Kills a process of a kind, but not ``stays``."""
    for process in daemon.children(f"tensord.{kind}"):
        if process.pid != stays:
            process.kill()
            process.wait(PATIENCE)
            return
    raise AssertionError(f"no {kind} to kill")
