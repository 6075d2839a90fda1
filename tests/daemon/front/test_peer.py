"""Tests how a front finds out who is at the other end of a connection, as the kernel says."""

from __future__ import annotations

import contextlib
import os
import resource
import select
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tensord.daemon.front import peer as peer_module
from tensord.daemon.front.peer import ConnectionEnd, end_of, peer_of, process_of
from tensord.shm.errors import Unavailable
from tensord.shm.operations import ANONYMOUS

CLIENT = "import socket, sys; s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]); s.send(b'x'); sys.stdin.read()"


@pytest.fixture
def unix_client(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], socket.socket]]:
    """Yields a process that has connected, and our end of its connection."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
        listener.listen()
        client = subprocess.Popen([sys.executable, "-c", CLIENT, str(tmp_path / "s")], stdin=subprocess.PIPE)
        with listener.accept()[0] as connection:
            assert connection.recv(1) == b"x"
            yield client, connection
        client.communicate()


def test_a_process_on_a_unix_socket(unix_client: tuple[subprocess.Popen[bytes], socket.socket]) -> None:
    """The process that connected, even when it is gone."""
    client, connection = unix_client
    peer = peer_of(connection.fileno())
    assert (peer.kind, peer.pid, peer.uid, peer.gid) == ("unix", client.pid, os.getuid(), os.getgid())
    assert set(peer.groups) == set(os.getgroups())
    assert peer.owner == f"uid {os.getuid()}"
    with process_of(connection.fileno()) as process:
        assert not os.get_inheritable(process)
        assert select.select([process], [], [], 0)[0] == []
        client.communicate()
        assert select.select([process], [], [], 600)[0] == [process]
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(process)
    assert peer_of(connection.fileno()) == peer


def test_tcp_and_nobody() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as client,
        listener.accept()[0] as connection,
    ):
        peer = peer_of(connection.fileno())
        assert (peer.kind, peer.uid, peer.owner) == ("tcp", -1, "tcp 127.0.0.1")
        assert peer.address == f"127.0.0.1:{client.getsockname()[1]}"
        with process_of(connection.fileno()) as process:
            assert process == -1
    assert peer_of(-1) == ANONYMOUS
    with process_of(-1) as process:
        assert process == -1


def test_when_regions_are_to_go(unix_client: tuple[subprocess.Popen[bytes], socket.socket]) -> None:
    client, connection = unix_client
    end = ConnectionEnd()
    with end_of(connection.fileno(), end, "never") as found:
        assert found == -1
    with (
        end_of(connection.fileno(), end, "owner") as process,
        end_of(connection.fileno(), end, "connection") as closed,
        end_of(connection.fileno(), end, "connection") as again,
    ):
        assert select.select([process, closed, again], [], [], 0)[0] == []
        end.close()
        assert select.select([process, closed, again], [], [], 600)[0] == [closed, again]
        client.communicate()
        assert select.select([process], [], [], 600)[0] == [process]
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(closed)


def test_tcp_clients_regions_stay() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()),
        listener.accept()[0] as connection,
    ):
        end = ConnectionEnd()
        for reclaim in ("never", "owner", "connection"):
            with end_of(connection.fileno(), end, reclaim) as found:
                assert found == -1
            with end_of(-1, end, reclaim) as found:
                assert found == -1


def test_a_kernel_that_does_not_tell_the_process(
    unix_client: tuple[subprocess.Popen[bytes], socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    1. The process is found by its number as long as its connection is open. 2. It is gone: its number may be another's.
    Result: 2. leaves the end of the connection to go by.
    """
    client, connection = unix_client
    monkeypatch.setattr(peer_module, "_SO_PEERPIDFD", 0x7FFF)
    end = ConnectionEnd()
    with end_of(connection.fileno(), end, "owner") as process:
        assert select.select([process], [], [], 0)[0] == []
        client.communicate()
        assert select.select([process], [], [], 600)[0] == [process]
    with process_of(connection.fileno()) as process:
        assert process == -1
    with end_of(connection.fileno(), end, "owner") as found:
        assert select.select([found], [], [], 0)[0] == []
        end.close()
        assert select.select([found], [], [], 600)[0] == [found]


CHILD = """
import os, sys
from tensord.daemon.front.peer import ConnectionEnd
connection = ConnectionEnd()
with connection.descriptor() as end:
    os.dup2(end, int(sys.argv[1]))
print("made", flush=True)
sys.stdin.read()
"""


def is_readable(fd: int) -> bool:
    return bool(select.select([fd], [], [], 0)[0])


def test_readable_from_the_end_on() -> None:
    before = set(os.listdir("/proc/self/fd"))
    connection = ConnectionEnd()
    assert set(os.listdir("/proc/self/fd")) <= before
    with connection.descriptor() as first, connection.descriptor() as second:
        kept = os.dup(first)
        assert not os.get_inheritable(first)
        assert not is_readable(first)
        assert "to come" in repr(connection)
        connection.close()
        assert is_readable(first)
        assert is_readable(second)
    assert is_readable(kept)
    with connection.descriptor() as late:
        assert is_readable(late)
    connection.close()
    os.close(kept)
    assert set(os.listdir("/proc/self/fd")) <= before


def test_the_process_that_serves_it_dies() -> None:
    """Nobody has to say anything: the kernel closes its half."""
    # The child's reading half cannot come back without a socket: it is reached through /proc while the child lives.
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, "100"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    assert child.stdin is not None
    assert child.stdout.readline() == "made\n"
    end = os.open(f"/proc/{child.pid}/fd/100", os.O_RDONLY)
    assert not is_readable(end)
    child.kill()
    child.wait()
    assert is_readable(end)
    os.close(end)
    child.stdin.close()
    child.stdout.close()


@contextlib.contextmanager
def no_descriptors() -> Iterator[None]:
    """Lets this process open no further descriptor."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_no_descriptors_are_left() -> None:
    connection = ConnectionEnd()
    with (
        no_descriptors(),
        pytest.raises(Unavailable, match="connection cannot be watched now"),
        connection.descriptor(),
    ):
        pass
    with connection.descriptor() as end:
        assert not is_readable(end)
    connection.close()


@pytest.mark.parametrize("tells_process", [True, False])
def test_no_descriptor_is_left_for_the_process(
    unix_client: tuple[subprocess.Popen[bytes], socket.socket], monkeypatch: pytest.MonkeyPatch, tells_process: bool
) -> None:
    """The end of the connection does not stand for that of the process then, also where one for the connection is there."""
    _, connection = unix_client
    if not tells_process:
        monkeypatch.setattr(peer_module, "_SO_PEERPIDFD", 0x7FFF)
    refused = pytest.raises(Unavailable, match="client's process cannot be watched now")
    with no_descriptors(), refused, process_of(connection.fileno()):
        pass
    with process_of(connection.fileno()) as process:
        assert not is_readable(process)
