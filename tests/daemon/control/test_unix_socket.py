"""Tests where the supervisor's sockets are, and who may have left one there."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from tensord.daemon.control import unix_socket


def test_where() -> None:
    assert unix_socket.path("", "control.sock", {}) is None
    runtime = {"RUNTIME_DIRECTORY": "/run/tensord:/run/other"}
    assert unix_socket.path("", "control.sock", runtime) == Path("/run/tensord/control.sock")
    assert unix_socket.path("/x", "control.sock", runtime) == Path("/x")


@pytest.mark.parametrize("kind", [socket.SOCK_STREAM, socket.SOCK_SEQPACKET])
def test_a_dead_predecessor_makes_room_and_a_living_one_does_not(tmp_path: Path, kind: int) -> None:
    path = tmp_path / "s"
    unix_socket.bind(path, kind, 0o600).close()
    with unix_socket.bind(path, kind, 0o660) as sock:
        assert path.stat().st_mode & 0o777 == 0o660
        sock.listen()
        with pytest.raises(OSError, match="in use"):
            unix_socket.bind(path, kind, 0o600)


@pytest.mark.parametrize("kind", [socket.SOCK_STREAM, socket.SOCK_SEQPACKET])
def test_a_full_backlog_is_not_waited_for(tmp_path: Path, kind: int) -> None:
    """A process that is stopped listens and accepts nothing."""
    path = tmp_path / "s"
    with unix_socket.bind(path, kind, 0o600) as sock, socket.socket(socket.AF_UNIX, kind) as client:
        sock.listen(0)
        client.connect(str(path))
        with pytest.raises(OSError, match="in use"):
            unix_socket.bind(path, kind, 0o600)
