"""Answers of HTTP in whatever pieces they come, and connections that break at any byte."""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from tensord_client.http_channel import Address, HttpChannel, HttpResponse, MalformedResponse

BINARY = (
    b"HTTP/1.1 200 OK\r\nContent-Type: application/octet-stream\r\nInference-Header-Content-Length: 4\r\n"
    b"Content-Length: 12\r\n\r\n{12}\0\1\2\3\4\5\6\7"
)
CHUNKED = (
    b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
    b"3\r\nabc\r\n10;x=y\r\n0123456789abcdef\r\n0\r\nTrailer: x\r\n\r\n"
)
EMPTY = b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\nConnection: close\r\n\r\n"
CONTINUED = b"HTTP/1.1 100 Continue\r\n\r\n" + BINARY


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize("answer", [BINARY, CHUNKED, EMPTY, CONTINUED], ids=["binary", "chunked", "empty", "continued"])
def test_any_pieces(answer: bytes, size: int) -> None:
    response = HttpResponse(answer is CHUNKED)
    for at in range(0, len(answer), size):
        assert not response.whole
        response.feed(answer[at : at + size])
    assert response.whole
    if answer is CHUNKED:
        assert (response.status, bytes(response.stream), response.keep_alive) == (200, b"abc0123456789abcdef", True)
    elif answer is EMPTY:
        assert (response.status, response.text, response.tail, response.keep_alive) == (400, b"", None, False)
    else:
        assert (response.status, response.text) == (200, b"{12}")
        assert response.tail is not None
        assert response.tail.tolist() == [*range(8)]


@pytest.mark.parametrize("size", [1, 5, 1000])
@pytest.mark.parametrize("framing", ["chunks", "a length", "the end"])
def test_any_framing(framing: str, size: int) -> None:
    """The body is the same, whether it is read while it arrives or afterwards, and errors are read as a whole."""
    for status, streams in ((200, True), (200, False), (400, True)):
        head, body = b"HTTP/1.1 %d X\r\nInference-Header-Content-Length: 4\r\n" % status, b"{12}\0\1\2\3"
        if framing == "chunks":
            head, body = (
                head + b"Transfer-Encoding: chunked\r\n",
                b"3\r\n" + body[:3] + b"\r\n5\r\n" + body[3:] + b"\r\n0\r\n\r\n",
            )
        elif framing == "a length":
            head += b"Content-Length: 8\r\n"
        answer = head + b"\r\n" + body
        response, read = HttpResponse(streams), bytearray()
        for at in range(0, len(answer), size):
            assert not response.whole
            response.feed(answer[at : at + size])
            read += response.stream
            response.stream.clear()
        assert response.whole == (framing != "the end")
        if framing == "the end":
            response.end()
        assert response.whole
        if status == 200 and streams:
            assert (bytes(read), response.text, response.tail) == (b"{12}\0\1\2\3", b"", None)
        else:
            assert response.tail is not None
            assert (read, response.text, response.tail.tolist()) == (b"", b"{12}", [0, 1, 2, 3])


def test_a_body_that_the_end_ends() -> None:
    response = HttpResponse()
    response.feed(b"HTTP/1.0 200 OK\r\n\r\nall ")
    response.feed(b"of it")
    assert not response.whole
    response.end()
    assert (response.whole, response.text, response.keep_alive) == (True, b"all of it", False)


@pytest.mark.parametrize(
    "answer",
    [
        b"SSH-2.0-x\r\n\r\n",
        b"HTTP/1.1 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nInference-Header-Content-Length: 4\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nab",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nx\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nInference-Header-Content-Length: 1\r\n\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1" * 300,
        b"x" * (65 << 10),
    ],
)
def test_what_is_no_answer(answer: bytes) -> None:
    with pytest.raises(MalformedResponse):
        HttpResponse().feed(answer)


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[Callable[[Callable[[socket.socket], None]], Address]]:
    """Serves one connection by a function."""
    path = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path)
        listening.listen()
        threads: list[threading.Thread] = []

        def serve(function: Callable[[socket.socket], None]) -> Address:
            def main() -> None:
                with listening.accept()[0] as connection:
                    function(connection)

            threads.append(threading.Thread(target=main))
            threads[0].start()
            return Address(path)

        yield serve
        for thread in threads:
            thread.join()


def driven(channel: HttpChannel) -> HttpResponse:
    while mask := channel.advance():
        poll = select.poll()
        poll.register(channel, mask)
        poll.poll()
    return channel.response


def test_a_request_and_its_answer(listener: Callable[[Callable[[socket.socket], None]], Address]) -> None:
    """A large body is sent from where it lies, and a large answer is received where it stays."""
    sent = np.arange(1 << 20, dtype=np.uint8)

    def echo(connection: socket.socket) -> None:
        got = bytearray()
        while len(got) < len(sent) + 4:
            got += connection.recv(1 << 20)
        connection.sendall(
            b"HTTP/1.1 200 OK\r\nInference-Header-Content-Length: 4\r\nContent-Length: %d\r\n\r\n" % len(got) + got
        )
        connection.recv(1)

    channel = HttpChannel(listener(echo))
    channel.send([b"head", sent.data])
    response = driven(channel)
    assert (response.text, channel.sent, channel.may_be_kept, channel.is_readable) == (b"head", True, True, False)
    assert response.tail is not None
    np.testing.assert_array_equal(response.tail, sent)
    assert response.tail.flags.aligned
    channel.close()


def test_a_refusal_before_the_request_is_whole(listener: Callable[[Callable[[socket.socket], None]], Address]) -> None:
    """It is read although the rest cannot be sent, and the connection is not used again."""

    def refuse(connection: socket.socket) -> None:
        connection.recv(100)
        connection.sendall(b"HTTP/1.1 413 Content Too Large\r\nContent-Length: 2\r\n\r\nno")

    channel = HttpChannel(listener(refuse))
    channel.send([bytes(64 << 20)])
    response = driven(channel)
    assert (response.status, response.text, channel.sent, channel.may_be_kept) == (413, b"no", False, False)
    channel.close()


@pytest.mark.parametrize("count", [0, 1, 20, len(BINARY) - 1])
def test_an_answer_that_breaks_off(listener: Callable[[Callable[[socket.socket], None]], Address], count: int) -> None:
    def answer(connection: socket.socket) -> None:
        connection.recv(100)
        connection.sendall(BINARY[:count])

    channel = HttpChannel(listener(answer))
    channel.send([b"x"])
    with pytest.raises(ConnectionResetError):
        driven(channel)
    assert (channel.sent, channel.response.begun) == (True, count > 0)
    channel.close()


def test_nobody_is_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        HttpChannel(Address(str(tmp_path / "none")))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        channel = HttpChannel(Address("", *free.getsockname()))
        channel.send([b"x"])
        with pytest.raises(ConnectionRefusedError):
            driven(channel)
        assert not channel.sent
        channel.close()
