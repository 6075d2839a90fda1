"""Answers of an ASGI application on a connection of ours: byte for byte as uvicorn sends them, and what becomes of bad ones."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import uvicorn

from tensord.daemon.front.socket_transport import SocketWatch
from tensord.daemon.http.connection import Http1Connection
from tests.fakes import until
from tests.work.connection import Bench

PATIENCE = 20.0


class Application:
    """Answers by path."""

    def __init__(self) -> None:
        #: Types of the last messages received, where they are noted.
        self.received: list[str] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await getattr(self, scope["path"][1:].partition("/")[0])(scope, receive, send)

    async def start(self, send: Any, status: int = 200, **fields: str) -> None:
        headers = [(name.replace("_", "-").encode(), value.encode("latin-1")) for name, value in fields.items()]
        await send({"type": "http.response.start", "status": status, "headers": headers})

    async def whole(self, scope: Any, receive: Any, send: Any) -> None:
        await self.start(send, Content_Type="text/plain", content_length="5", x_a="\xe4\t b")
        await send({"type": "http.response.body", "body": b"hello"})

    async def nothing(self, scope: Any, receive: Any, send: Any) -> None:
        await self.start(send, 204)
        await send({"type": "http.response.body"})

    async def unknown(self, scope: Any, receive: Any, send: Any) -> None:
        await self.start(send, 405, content_length="0", allow="GET")
        await send({"type": "http.response.body"})

    async def closes(self, scope: Any, receive: Any, send: Any) -> None:
        await self.start(send, content_length="1", connection="x, Close")
        await send({"type": "http.response.body", "body": b"c"})

    async def echo(self, scope: Any, receive: Any, send: Any) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            assert message["type"] == "http.request"
            body, more = body + message["body"], message["more_body"]
        told = f"{scope['method']} {scope['raw_path']!r} {scope['query_string']!r} {scope['http_version']}".encode()
        await self.start(send, content_length=str(len(told) + len(body)))
        await send({"type": "http.response.body", "body": told + body})

    # ------------------------------------------------------------------------------------------------- bad ones

    async def fails(self, scope: Any, receive: Any, send: Any) -> None:
        raise ValueError("on purpose")

    async def silent(self, scope: Any, receive: Any, send: Any) -> None:
        pass

    async def headless(self, scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.body", "body": b"a"})

    async def begun(self, scope: Any, receive: Any, send: Any) -> None:
        await self.start(send)

    async def split(self, scope: Any, receive: Any, send: Any) -> None:
        await self.start(send, x_a="a\r\nx-b: c")

    async def long(self, scope: Any, receive: Any, send: Any) -> None:
        await self.start(send, content_length="1")
        await send({"type": "http.response.body", "body": b"ab"})

    async def short(self, scope: Any, receive: Any, send: Any) -> None:
        await self.start(send, content_length="5")
        await send({"type": "http.response.body", "body": b"he"})

    async def parts(self, scope: Any, receive: Any, send: Any) -> None:
        await self.start(send, content_length="5")
        await send({"type": "http.response.body", "body": b"he", "more_body": True})

    async def waits(self, scope: Any, receive: Any, send: Any) -> None:
        self.received = []
        while self.received[-1:] != ["http.disconnect"]:
            self.received.append((await receive())["type"])
        await self.start(send)  # which nobody hears


APPLICATION = Application()


class Ours:
    """Runs our own connections on a loop in a thread."""

    def __init__(self) -> None:
        self._ready, self._done = threading.Event(), asyncio.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))
        self._thread.start()
        assert self._ready.wait(PATIENCE)

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._bench = Bench()
        self._bench.serving.application = APPLICATION
        self._watch = SocketWatch()
        self._ready.set()
        await self._done.wait()
        self._watch.close()
        self._bench.close()

    def connect(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        connection = Http1Connection(self._bench.serving, "tcp 127.0.0.1")
        self._loop.call_soon_threadsafe(self._watch.open, ours, connection)
        theirs.settimeout(PATIENCE)
        return theirs

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._done.set)
        self._thread.join()


@pytest.fixture(scope="module")
def ours() -> Iterator[Ours]:
    with contextlib.closing(Ours()) as made:
        yield made


@pytest.fixture(scope="module")
def theirs() -> Iterator[tuple[str, int]]:
    """Runs uvicorn within the block; yields its address."""
    options: dict[str, Any] = {"server_header": False, "date_header": False, "lifespan": "off", "log_config": None}
    server = uvicorn.Server(uvicorn.Config(APPLICATION, http="httptools", ws="none", loop="asyncio", **options))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        yield listener.getsockname()
        server.should_exit = True
        thread.join()


def asked(method: str, target: str, *fields: str, version: str = "1.1", body: bytes = b"") -> bytes:
    lines = [f"{method} {target} HTTP/{version}", "Host: x", *fields]
    if body and not fields:
        lines.append(f"Content-Length: {len(body)}")
    return "".join(f"{line}\r\n" for line in lines).encode() + b"\r\n" + body


def answers(client: socket.socket, *requests: bytes) -> bytes:
    """Sends requests; returns all bytes until the server hangs up."""
    with client:
        client.sendall(b"".join(requests))
        found = b""
        with contextlib.suppress(ConnectionResetError):
            while piece := client.recv(1 << 16):
                found += piece
        return found


LAST = asked("GET", "/whole", "Connection: close")
PATHS = ["whole", "nothing", "unknown", "closes", "echo/a%20b?c=%2F"]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("method", ["GET", "HEAD", "POST"])
@pytest.mark.parametrize(
    ("fields", "version", "body"),
    [
        ((), "1.1", b""),
        (("Connection: close",), "1.1", b""),
        ((), "1.0", b""),
        ((), "1.1", b"a body"),
        (("Transfer-Encoding: chunked",), "1.1", b"3\r\nabc\r\n4\r\ndefg\r\n0\r\n\r\n"),
        (("Expect: 100-continue", "Content-Length: 3"), "1.1", b"abc"),
    ],
)
def test_as_uvicorn(
    ours: Ours, theirs: tuple[str, int], path: str, method: str, fields: tuple[str, ...], version: str, body: bytes
) -> None:
    request = asked(method, f"/{path}", *fields, version=version, body=body)
    # A client whose body has come already need not be told to send it (RFC 9110, 10.1.1), and is told so by uvicorn.
    interim = b"HTTP/1.1 100 Continue\r\n\r\n"
    expected = answers(socket.create_connection(theirs, PATIENCE), request, LAST).removeprefix(interim)
    assert answers(ours.connect(), request, LAST).removeprefix(interim) == expected
    assert expected.count(b"HTTP/1.1 ") in (1, 2)


def test_a_connection_of_http_10_stays_where_that_is_wanted(ours: Ours) -> None:
    first = asked("GET", "/whole", "Connection: keep-alive", version="1.0")
    heads = answers(ours.connect(), first, LAST).split(b"\r\n\r\n")
    assert b"\r\nconnection: keep-alive\r\n" in heads[0]
    assert b"\r\nconnection: close" in heads[1]


def test_a_large_body(ours: Ours) -> None:
    body = bytes(range(256)) * 4096
    assert answers(ours.connect(), asked("POST", "/echo", body=body), LAST).partition(b"\r\n\r\n")[2].count(body) == 1


@pytest.mark.parametrize("path", ["fails", "silent", "headless", "begun", "split", "long", "short", "parts"])
def test_who_has_answered_nothing_is_answered_for(ours: Ours, path: str) -> None:
    head, _, body = answers(ours.connect(), asked("GET", f"/{path}"), LAST).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 500 ")
    assert b"Connection: close" in head
    assert "internal error" in json.loads(body)["error"]


def test_a_client_that_leaves(ours: Ours) -> None:
    with ours.connect() as client:
        client.sendall(asked("POST", "/waits", "Content-Length: 9") + b"abc")
        until(lambda: APPLICATION.received == ["http.request"])
    until(lambda: APPLICATION.received == ["http.request", "http.disconnect"])
