"""Whose regions are whose, and the three ways to use one, on the wire: TCP, a unix socket, memory by descriptor."""

from __future__ import annotations

import contextlib
import fcntl
import json
import mmap
import os
import re
import socket
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from tritonclient.utils import InferenceServerException

from tests import repositories
from tests.daemon_process import PATIENCE, DaemonProcess

SIZE = 1 << 16
COUNT = SIZE // 8


class Served:
    """A daemon with HTTP on TCP, gRPC on a unix socket, the control socket and the clients' socket."""

    def __init__(self, daemon: DaemonProcess, folder: Path) -> None:
        self.daemon, self.folder = daemon, folder
        self.unix, self.regions = f"unix:{folder}/grpc.sock", folder / "clients.sock"

    def tensorctl(self, *arguments: str) -> str:
        command = [
            sys.executable,
            "-m",
            "tensord.daemon.ctl",
            "--socket",
            str(self.folder / "control.sock"),
            *arguments,
        ]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    def records(self) -> dict[str, dict[str, Any]]:
        return {record["name"]: record for record in json.loads(self.tensorctl("--json", "regions", "list"))}


@pytest.fixture(scope="module")
def served(leaves_nothing: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("daemon")
    options: dict[str, dict[str, Any]] = {
        "grpc": {"address": f"unix:{folder}/grpc.sock"},
        "regions": {"reclaim": "owner", "snapshot_key_prefixes": ["tensord-test-snapshot"]},
        "clients": {"socket": str(folder / "clients.sock")},
        "supervisor": {"control_socket": str(folder / "control.sock")},
    }
    with DaemonProcess(folder, [repositories.echo_models(folder / "repository", ["FP32"])], options) as daemon:
        yield Served(daemon, folder)


@pytest.fixture
def shared_object() -> Iterator[Callable[[str], Path]]:
    made: list[Path] = []

    def make(kind: str) -> Path:
        path = Path("/dev/shm", f"tensord-test-{kind}-{uuid.uuid4().hex}")
        path.write_bytes(np.arange(SIZE // 4, dtype=np.float32).tobytes())
        made.append(path)
        return path

    yield make
    for path in made:
        path.unlink(missing_ok=True)


def infer(url: str, region: str) -> None:
    """Sends a request whose input is the first half of a region and whose output goes to the second."""
    given = httpclient.InferInput("x", [COUNT], "FP32")
    given.set_shared_memory(region, SIZE // 2)
    wanted = httpclient.InferRequestedOutput("y")
    wanted.set_shared_memory(region, SIZE // 2, offset=SIZE // 2)
    with httpclient.InferenceServerClient(url, network_timeout=PATIENCE) as client:
        client.infer("echo_fp32", [given], outputs=[wanted])


def copied(client: httpclient.InferenceServerClient) -> int:
    """Returns how many bytes the daemon has copied so far."""
    return int(client.get_inference_statistics("echo_fp32")["model_stats"][0]["copied_byte_size"])


def test_a_users_regions_are_the_users(served: Served, shared_object: Callable[[str], Path]) -> None:
    """
    1. One region comes over TCP, one over the unix socket.
    Result: TCP's "all" takes its own and cannot take the other by name; the user's "all" and the operator can.
    """
    key = "/" + shared_object("owner").name
    with (
        httpclient.InferenceServerClient(served.daemon.url) as tcp,
        grpcclient.InferenceServerClient(served.unix) as user,
    ):
        tcp.register_system_shared_memory("t", key, SIZE)
        user.register_system_shared_memory("u", key, SIZE)
        user.register_system_shared_memory("v", key, SIZE)
        records = served.records()
        assert (records["u"]["owner"], records["u"]["pid"]) == (f"uid {os.getuid()}", os.getpid())
        assert re.fullmatch(r"127\.0\.0\.1:\d+", records["t"]["address"])
        assert {record["access"] for record in records.values()} == {"guarded"}
        assert records["t"]["workers"] == ["worker-0"]
        text = served.tensorctl("regions", "list")
        assert text.split()[:3] == ["name", "kind", "key"]
        assert f"uid {os.getuid()}" in text
        with pytest.raises(InferenceServerException, match="'u' was registered by another user"):
            tcp.unregister_system_shared_memory("u")
        tcp.unregister_system_shared_memory()
        assert set(served.records()) == {"u", "v"}
        tcp.register_system_shared_memory("t", key, SIZE)
        served.tensorctl("regions", "unregister", "v")
        user.unregister_system_shared_memory()
        assert set(served.records()) == {"t"}
        tcp.unregister_system_shared_memory()


def test_a_snapshot_region(served: Served, shared_object: Callable[[str], Path]) -> None:
    """
    1. A region whose key the operator does not trust is used both ways. 2. Its owner truncates it. 3. It grows again.
    Result: right answers; then errors with both numbers, nothing mapped in any worker; then right answers again, as
    nothing needs to be registered again. Copies are counted: one in, one out.
    """
    path = shared_object("snapshot")
    with httpclient.InferenceServerClient(served.daemon.url) as client:
        before = copied(client)
        client.register_system_shared_memory("s", "/" + path.name, SIZE)
        assert served.records()["s"]["access"] == "snapshot"
        infer(served.daemon.url, "s")
        content = path.read_bytes()
        assert content[SIZE // 2 :] == content[: SIZE // 2]
        (worker,) = served.daemon.workers
        assert path.name not in Path(f"/proc/{worker.pid}/maps").read_text()
        assert copied(client) == before + SIZE
        os.truncate(path, 4096)
        with pytest.raises(InferenceServerException, match=f"'s': 4096 of {SIZE // 2} bytes could be read"):
            infer(served.daemon.url, "s")
        os.truncate(path, SIZE // 2 + 100)
        with pytest.raises(InferenceServerException, match=f"'s': 100 of {SIZE // 2} bytes could be written"):
            infer(served.daemon.url, "s")
        assert path.stat().st_size == SIZE // 2 + 100
        os.truncate(path, SIZE)
        infer(served.daemon.url, "s")
        client.unregister_system_shared_memory("s")


@pytest.mark.cpu_workers("what has to be copied")
def test_a_guarded_region_is_copied_once(served: Served, shared_object: Callable[[str], Path]) -> None:
    """The input is used where it lies; the output is written once."""
    path = shared_object("guarded")
    with httpclient.InferenceServerClient(served.daemon.url) as client:
        before = copied(client)
        client.register_system_shared_memory("g", "/" + path.name, SIZE)
        infer(served.daemon.url, "g")
        assert copied(client) == before + SIZE // 2
        client.unregister_system_shared_memory("g")


@pytest.mark.cpu_workers("what has to be copied")
def test_sealed_memory_in_place(served: Served) -> None:
    """It cannot be truncated, is used where it lies, and survives the worker."""
    fd = os.memfd_create("tensord-test", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, SIZE)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    with (
        contextlib.closing(mmap.mmap(fd, SIZE)) as mapped,
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock,
    ):
        mapped[: SIZE // 2] = np.arange(COUNT, dtype=np.float32).tobytes()
        sock.connect(str(served.regions))
        socket.send_fds(sock, [json.dumps({"register": {"name": "m", "byte_size": SIZE}}).encode()], [fd])
        assert sock.recv(4096) == b"{}"
        with pytest.raises(PermissionError):
            os.ftruncate(fd, 0)
        infer(served.daemon.url, "m")
        assert mapped[SIZE // 2 :] == mapped[: SIZE // 2]
        mapped[SIZE // 2 :] = bytes(SIZE // 2)
        (worker,) = served.daemon.workers
        worker.kill()
        infer(served.daemon.url, "m")
        assert mapped[SIZE // 2 :] == mapped[: SIZE // 2]
        sock.send(json.dumps({"unregister": {"name": ""}}).encode())
        assert sock.recv(4096) == b"{}"
        assert served.records() == {}
    os.close(fd)
