"""Connections that become the loop's. Those with a handshake that succeeds: tests/protocol/test_listeners.py."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable

import pytest

from tensord.config.options import Grpc
from tensord.daemon.control.certificates import Certificates
from tensord.daemon.front.opening import Opening


async def opened(make: Callable[[str], asyncio.BaseProtocol], context: ssl.SSLContext | None) -> socket.socket:
    """Opens a connection that the server accepts; returns its client after it has sent a few bytes and no more."""
    certificates = Certificates(Grpc())
    certificates.context = context
    opening = Opening(make, certificates)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname())
        taken, _ = listener.accept()
    opening.open(taken, "tcp 127.0.0.1")
    assert repr(opening) == "<Opening, 1 under way>"
    client.sendall(b"no TLS")
    client.shutdown(socket.SHUT_WR)
    client.setblocking(False)
    while opening.pending:
        await asyncio.sleep(0.001)
    return client


async def test_a_handshake_that_fails(caplog: pytest.LogCaptureFixture) -> None:
    """The connection ends, and nobody hears of it."""
    client = await opened(lambda _: asyncio.Protocol(), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
    while await asyncio.get_running_loop().sock_recv(client, 100):
        pass
    client.close()
    assert not caplog.text


async def test_plain_text() -> None:
    class Answers(asyncio.Protocol):
        def __init__(self, owner: str) -> None:
            self.owner = owner

        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            transport.write(self.owner.encode())  # type: ignore[attr-defined]

    client = await opened(Answers, None)
    assert await asyncio.get_running_loop().sock_recv(client, 100) == b"tcp 127.0.0.1"
    client.close()


async def test_a_protocol_that_cannot_be_made(caplog: pytest.LogCaptureFixture) -> None:
    def make(owner: str) -> asyncio.Protocol:
        raise ZeroDivisionError

    opening = Opening(make, Certificates(Grpc()))
    ours, client = socket.socketpair()
    with client:
        opening.open(ours, "uid 0")
        assert client.recv(1) == b""
    assert caplog.text.count("a connection could not be opened") == 1
    caplog.clear()
