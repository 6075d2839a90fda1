"""Clients in a container that has nothing of the host but the folder with the daemon's sockets: no memory, names or processes."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.client.conftest import clients_socket
from tests.daemon_process import PATIENCE, ROOT, DaemonProcess

#: What the container sees of the host's: the folder, at another place. /dev/shm and /tmp are its own, and empty.
_CONTAINED = """
set -e
mount --bind "$1" /mnt || exit 77
mount -t tmpfs tmpfs /tmp || exit 77
mount -t tmpfs -o size=4k tmpfs /dev/shm || exit 77
shift
exec "$@"
"""
_CLIENT = """
import os, sys
import numpy as np
import tensord_client
from tensord_client.lane import Call, LaneConnection

assert os.getpid() < 10, "the processes of the host are seen"
assert os.listdir("/dev/shm") == os.listdir("/tmp") == []
assert sorted(name for name in os.listdir("/mnt") if name.endswith(".sock")) == ["clients.sock", "http.sock"]
connection = LaneConnection("/mnt/clients.sock")
given, place = connection.empty((100_000,), np.float32), connection.empty((100_000,), np.float32)
given[:] = np.arange(100_000)
call = connection.prepare(Call("identity", {"INPUT0": given}, places={"OUTPUT0": place}))
assert call(60)["OUTPUT0"] is place
assert np.array_equal(place, given)
answer = connection.ask(Call("identity", {"INPUT0": given})).result(60)
assert np.array_equal(answer["OUTPUT0"], given)
print("copied", answer.timing.copied_bytes)
with tensord_client.connect("/mnt/http.sock") as client:
    assert np.array_equal(client.model("identity", timeout=60)({"INPUT0": given})["OUTPUT0"], given)
assert os.listdir("/dev/shm") == os.listdir("/tmp") == []
print("answered")
"""


def test_only_the_folder_is_shared(daemon: DaemonProcess) -> None:
    """A lane, with memory of the client's and of the worker's, and HTTP beside it."""
    if any(Path(place).resolve().is_relative_to("/tmp") for place in (sys.prefix, ROOT)):
        pytest.skip(
            f"the container has a /tmp of its own, and the interpreter or this checkout lies there: {sys.prefix}"
        )
    folder = Path(clients_socket(daemon.folder)).parent
    namespaces = [
        "unshare",
        "--user",
        "--map-root-user",
        "--mount",
        "--ipc",
        "--pid",
        "--net",
        "--fork",
        "--mount-proc",
    ]
    done = subprocess.run(
        [*namespaces, "sh", "-c", _CONTAINED, "sh", str(folder), sys.executable, "-c", textwrap.dedent(_CLIENT)],
        cwd=ROOT / "client",
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    if done.returncode == 77 or "unshare failed" in done.stderr or "Operation not permitted" in done.stderr:
        pytest.skip(f"this host allows no namespaces of our own: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[-2] == "answered"
