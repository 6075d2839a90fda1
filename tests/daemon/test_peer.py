"""Who is at the other end, as the kernel says."""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from daemon.peer import peer_of, process_of
from shm.messages import ANONYMOUS

CLIENT = "import socket, sys; s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]); s.send(b'x'); sys.stdin.read()"


def test_a_process_on_a_unix_socket(tmp_path: Path) -> None:
    """The process that connected, even when it is gone."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
        listener.listen()
        client = subprocess.Popen([sys.executable, "-c", CLIENT, str(tmp_path / "s")], stdin=subprocess.PIPE)
        with listener.accept()[0] as connection:
            assert connection.recv(1) == b"x"
            peer = peer_of(connection.fileno())
            assert (peer.kind, peer.pid, peer.uid, peer.gid) == ("unix", client.pid, os.getuid(), os.getgid())
            assert set(peer.groups) == set(os.getgroups())
            assert peer.owner == f"uid {os.getuid()}"
            with process_of(connection.fileno()) as process:
                assert not os.get_inheritable(process)
                assert select.select([process], [], [], 0)[0] == []
                client.communicate()
                assert select.select([process], [], [], 60)[0] == [process]
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
