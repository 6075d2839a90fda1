"""A listening socket, and the connections that it takes."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path

import pytest

from tensord.daemon.front.listening_socket import ListeningSocket


@pytest.mark.parametrize("family", ["ipv4", "ipv6", "unix"])
def test_what_is_accepted_is_a_socket_like_any_other(family: str, tmp_path: Path) -> None:
    if family == "unix":
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(tmp_path / "socket"))
        listener.listen()
    elif family == "ipv4":
        listener = socket.create_server(("127.0.0.1", 0))
    else:
        try:
            listener = socket.create_server(("::1", 0), family=socket.AF_INET6)
        except OSError:
            pytest.skip("no IPv6 here")
    listening = ListeningSocket(listener)
    with pytest.raises(BlockingIOError):
        listening.accept()
    with socket.socket(listener.family) as client:
        client.connect(listener.getsockname())
        connection, address = listening.accept()
        with contextlib.closing(connection):
            assert connection.family == listener.family
            assert connection.type == socket.SOCK_STREAM
            assert address == client.getsockname()
            assert not os.get_inheritable(connection.fileno())
            client.sendall(b"x")
            assert connection.recv(1) == b"x"
    listening.close()
    assert listening.fileno() == -1
