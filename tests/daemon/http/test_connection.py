"""A connection, byte by byte: a real front process, a raw socket on one side and a scripted worker on the other."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import time
from collections.abc import Callable, Iterator

import pytest

from tensord.shm.messages import Slice
from tests.fakes import (
    MIB,
    Client,
    EchoWorker,
    FrontProcess,
    binary_request,
    chunked,
    front_process,
    json_request,
    post,
    serving,
    until,
)

HEAD_LIMIT, BODY_LIMIT = 16 << 10, 40 * MIB
GET = b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n"
JSON = b'{"inputs":[{"name":"x","datatype":"UINT8","shape":[3],"data":[1,2,3]}]}'


@pytest.fixture(scope="module")
def front() -> Iterator[FrontProcess]:
    with front_process(
        http={
            "port": 0,
            "max_head_byte_size": HEAD_LIMIT,
            "max_body_byte_size": BODY_LIMIT,
            "answer_half_closed": True,
        },
        arenas={"byte_size": MIB, "max_byte_size": 256 * MIB, "keep_byte_size": 0},
    ) as front:
        front.model(front.worker())
        yield front


@pytest.fixture
def worker(front: FrontProcess) -> EchoWorker:
    """Returns the only worker of ``front``."""
    return front.workers[0]


@pytest.fixture
def client(front: FrontProcess, worker: EchoWorker) -> Iterator[Client]:
    """Yields a connection, and checks at its end that nothing is left at the worker."""
    with front.client() as client:
        yield client
    assert worker.idle(0.05)
    until(lambda: worker.leases == 0)


# ------------------------------------------------------------------------------------------------------ one request


def test_json_and_binary(client: Client, worker: EchoWorker) -> None:
    for request in (json_request(b"\1\2\3"), post(JSON)):
        client.send(request)
        worker.echo(worker.next())
        answer = client.answer()
        assert (answer.status, answer.values) == (200, b"\1\2\3")
    client.send(binary_request(b"abc"))
    worker.echo(worker.next())
    assert client.answer().parts == b"abc"


@pytest.mark.parametrize("size", [0, 1, 2048, 2049, 5000, 70_000, 3 * MIB])
def test_any_size_both_ways(client: Client, worker: EchoWorker, size: int) -> None:
    content = bytes(range(256)) * (size // 256) + bytes(size % 256)
    for _ in range(3):
        client.send(binary_request(content))
        request = worker.next()
        assert worker.content(request) == content
        worker.echo(request)
        answer = client.answer()
        assert answer.status == 200
        if size:
            assert answer.parts == content
        else:
            assert "inference-header-content-length" not in answer.headers


def test_large_parts_are_aligned(client: Client, worker: EchoWorker) -> None:
    for size in (32_769, 100_000, 2 * MIB):
        client.send(binary_request(bytes(size)))
        request = worker.next()
        place = request.inputs[0].place
        assert isinstance(place, Slice)
        assert place.offset % 64 == 0
        worker.echo(request)
        client.answer()


@pytest.mark.parametrize(
    "request_", [json_request(b"\1\2"), binary_request(b"ab"), binary_request(bytes(5000))[:-4990]]
)
def test_split_at_every_boundary(client: Client, worker: EchoWorker, request_: bytes) -> None:
    rest = bytes(4990) if b"5000" in request_ else b""
    for at in range(1, len(request_), 3 if rest else 2):
        client.send(request_[:at], request_[at:] + rest)
        worker.echo(worker.next())
        assert client.answer().status == 200


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_chunked(client: Client, worker: EchoWorker, size: int) -> None:
    client.send(chunked(JSON, size), chunked(JSON, size))
    for _ in range(2):
        worker.echo(worker.next())
        assert client.answer().values == b"\1\2\3"


def test_expect_continue(client: Client, worker: EchoWorker) -> None:
    request = post(JSON, "Expect: 100-continue")
    client.send(request[: -len(JSON)])
    assert client.answer().status == 100
    client.send(JSON)
    worker.echo(worker.next())
    assert client.answer().values == b"\1\2\3"


def test_expect_continue_of_a_refused_request_gets_its_error_at_once(client: Client) -> None:
    client.send(post(JSON, "Expect: 100-continue", model="unknown")[: -len(JSON)])
    answer = client.answer()
    assert (answer.status, answer.headers["connection"]) == (404, "close")


def test_expect_continue_behind_another_request(client: Client, worker: EchoWorker) -> None:
    client.send(json_request(b"\1") + post(JSON, "Expect: 100-continue")[: -len(JSON)])
    worker.echo(worker.next())
    assert client.answer().values == b"\1"
    assert client.answer().status == 100
    client.send(JSON)
    worker.echo(worker.next())
    assert client.answer().values == b"\1\2\3"


def test_who_waits_for_100_continue_is_not_late() -> None:
    """
    1. Three clients each send a request and, behind it, the head of one whose body waits for 100 Continue.
    2. Another client sends half a body, and is refused after ``body_timeout``: so long the others have waited, too.
    Result: their time begins when they are told to send.
    """
    lines = "HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 7\r\n\r\n"
    follow = [
        (post(JSON, "Expect: 100-continue")[: -len(JSON)], JSON, 200),
        (f"POST /v2/models/echo/generate {lines}".encode(), b'{"x":1}', 200),
        (f"POST /v2/repository/index {lines}".encode(), b"no JSON", 400),
    ]
    with serving(http={"port": 0, "body_timeout": 2.0}) as (front, (worker,)), contextlib.ExitStack() as stack:
        clients = [stack.enter_context(front.client()) for _ in follow]
        for client, (head, _, _) in zip(clients, follow, strict=True):
            client.send(json_request(b"\1") + head)
        slow = [worker.next() for _ in follow]
        with front.client() as late:
            late.send(post(JSON)[:-1])
            assert late.answer().status == 408
        for request in slow:
            worker.echo(request)
        for client, (_, body, status) in zip(clients, follow, strict=True):
            assert client.answer().values == b"\1"
            assert client.answer().status == 100
            client.send(body)
            if status == 200:
                worker.answer(worker.next(), b"\1")
            assert client.answer().status == status


def test_http_10_and_close(front: FrontProcess, worker: EchoWorker) -> None:
    for request in (
        json_request(b"\1").replace(b"HTTP/1.1", b"HTTP/1.0"),
        json_request(b"\1", "Connection: close"),
        json_request(b"\1").replace(b"HTTP/1.1\r\nHost: x", b"HTTP/1.0"),
    ):
        with front.client() as client:
            client.send(request)
            worker.echo(worker.next())
            answer = client.answer()
            assert (answer.status, answer.headers["connection"]) == (200, "close")
            assert client.ends()


def test_http_10_keep_alive(client: Client, worker: EchoWorker) -> None:
    """A client that asks for it is told that the connection stays, whichever way the request goes."""
    for request in (json_request(b"\1", "Connection: keep-alive"), GET[:-2] + b"Connection: keep-alive\r\n\r\n"):
        for _ in range(2):
            client.send(request.replace(b"HTTP/1.1", b"HTTP/1.0"))
            if request.startswith(b"POST"):
                worker.echo(worker.next())
            answer = client.answer()
            assert (answer.status, answer.headers["connection"]) == (200, "keep-alive")
    client.send(post(b"{", "Connection: keep-alive").replace(b"HTTP/1.1", b"HTTP/1.0"))
    answer = client.answer()
    assert (answer.status, answer.headers["connection"]) == (400, "keep-alive")


def test_an_encoded_slash_is_no_border_of_segments(front: FrontProcess) -> None:
    with front.client() as client:
        client.send(b"GET /v2/models/echo%2Fready HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (answer := client.answer()).status == 404
        assert "echo%2Fready" in answer.error
        client.send(b"GET /v2/models/%65cho/%72eady HTTP/1.1\r\nHost: x\r\n\r\n")
        assert client.answer().status == 200


def test_an_offered_upgrade_is_not_taken(client: Client, worker: EchoWorker) -> None:
    """Java's client offers HTTP/2 with its first request, and keeps the connection."""
    for _ in range(2):
        client.send(json_request(b"\1", "Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMA"))
        worker.echo(worker.next())
        assert client.answer().values == b"\1"


@pytest.mark.parametrize(
    ("target", "status"),
    [
        (b"/v2/models/echo/infer/", 404),
        (b"/v2/models/nope/infer", 404),
        (b"/v2/models/%ff/infer", 404),
        (b"/v2/models/echo/versions/2/infer", 404),
        (b"/v2/models/echo/versions/0/infer", 404),
        (b"/v2/models/echo/versions/x/infer", 404),
        (b"/v2/models/echo/versions/99999999999999999999/infer", 400),
        (b"/v2/models/echo/versions/" + b"9" * 5000 + b"/infer", 400),
        (b"//", 404),
        (b"http://host", 404),
        (b"*", 404),
    ],
)
def test_paths_to_nowhere_keep_the_connection(client: Client, worker: EchoWorker, target: bytes, status: int) -> None:
    client.send(post(JSON).replace(b"/v2/models/echo/infer", target) + json_request(b"\1"))
    assert client.answer().status == status
    worker.echo(worker.next())
    assert client.answer().values == b"\1"


# --------------------------------------------------------------------------------------------------------- pipelines


@pytest.mark.parametrize("make", [json_request, binary_request])
@pytest.mark.parametrize("size", [1, 3000, 10_000, 200_000])
def test_a_pipelined_body_that_comes_later(
    client: Client, worker: EchoWorker, make: Callable[[bytes], bytes], size: int
) -> None:
    second = make(bytes(size))
    end_of_head = second.index(b"\r\n\r\n") + 4
    for at in (end_of_head, end_of_head + 1, len(second) - 1):
        client.send(json_request(b"\1") + second[:at])
        request = worker.next()
        client.send(second[at:])
        worker.echo(request)
        assert client.answer().values == b"\1"
        worker.answer(worker.next(), b"\2")
        assert client.answer().status == 200


def test_a_body_that_was_not_read_is_not_late() -> None:
    """
    1. A client sends two requests and, behind them, a part of a third: the front reads no further until the first is answered.
       Two others send a part of a request.
    2. The front is stopped (SIGSTOP) for longer than ``body_timeout``; meanwhile the worker answers.
    3. The front goes on: it reads again, and then looks who is late. The first two clients send the rest after that.
    Result: the third client is late, once the front has run for ``body_timeout``. The time in which it read nothing does not
    count, neither of the client that it had not gone on reading, nor of the others.
    """
    with (
        serving(http={"port": 0, "body_timeout": 3.0}) as (front, (worker,)),
        front.client() as client,
        front.client() as other,
        front.client() as late,
    ):
        for each in (other, late):
            each.send(post(JSON)[:-1])
        front.sync()
        client.send(json_request(b"\1") + json_request(b"\2") + post(JSON)[:-1])
        request = worker.next()
        os.kill(front.process.pid, signal.SIGSTOP)
        worker.echo(request)
        time.sleep(3.5)
        os.kill(front.process.pid, signal.SIGCONT)
        assert client.answer().values == b"\1"
        for _ in range(3):
            front.sync()  # meanwhile it looks who is late
        client.send(JSON[-1:])
        worker.echo(worker.next())
        assert client.answer().values == b"\2"
        worker.echo(worker.next())
        assert client.answer().values == b"\1\2\3"
        other.send(JSON[-1:])
        worker.echo(worker.next())
        assert other.answer().values == b"\1\2\3"
        assert late.answer().status == 408


def test_a_large_body_followed_by_another_request(client: Client, worker: EchoWorker) -> None:
    """The large one is read past the parser; not a byte of the next may be lost."""
    content = bytes(range(256)) * 2000
    client.send((binary_request(content) + json_request(b"\1") + GET) * 3)
    for _ in range(3):
        request = worker.next()
        assert worker.content(request) == content
        worker.echo(request)
        assert client.answer().parts == content
        worker.echo(worker.next())
        assert client.answer().values == b"\1"
        assert client.answer().status == 200


def test_too_many_pipelined_requests(front: FrontProcess, worker: EchoWorker) -> None:
    with front.client() as client:
        # Who sends ahead is read no further: what counts is what one read brings, so it has to be few bytes.
        client.send(json_request(b"\1") + b"GET /v2 HTTP/1.1\r\nHost: x\r\n\r\n" * 300)
        with front.client() as other:
            # Some turns of the loop: by then all of them were looked at.
            for _ in range(8):
                assert other.ask("GET", "/v2/health/live").status == 200
        worker.echo(worker.next())
        for _ in range(256):
            assert client.answer().status == 200
        answer = client.answer()
        assert (answer.status, answer.headers["connection"]) == (400, "close")
        assert "256" in answer.error
        assert client.ends()
    assert worker.idle()


# ------------------------------------------------------------------------------------------------------- malformed


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"GARBAGE\r\n\r\n", 400),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
        (b"GET /v2 HTTP/1.1\r\n\r\n", 400),
        (b"GET /v2 HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", 400),
        (b"GET /v2 HTTP/1.1\r\nHost : a\r\n\r\n", 400),
        (b"GET /v2 HTTP/1.1\r\nHost: a\r\n folded\r\n\r\n", 400),
        (b"GET /v2 HTTP/1.1\r\nHost: a\r\nX: b\r\n\tfolded\r\n\r\n", 400),
        (b"GET /v2 HTTP/1.1\nHost: a\n\n", 400),
        (b"GET /v2 HTTP/1.1\r\nHost: a\nX: b\r\n\r\n", 400),
        (b"GET /v2 HTTP/1.1\r\nHost: a\r\nX: a\0b\r\n\r\n", 400),
        (b"GET /v2 HTTP/1.1\r\nHost: a\r\nX: a\rb\r\n\r\n", 400),
        (b"GET /v2 HTTP/1.1\r\nHost: a\r\nno colon\r\n\r\n", 400),
        (b"GET /v2 HTTP/1.1\r\nHost: a\r\n: b\r\n\r\n", 400),
        (b"FETCH /v2 HTTP/1.1\r\nHost: a\r\n\r\n", 400),
        (b"GET /v2\r\n\r\n", 505),
        (b"GET /v2 HTTP/0.9\r\nHost: a\r\n\r\n", 505),
        (b"GET /v2 HTTP/2.0\r\nHost: a\r\n\r\n", 505),
        (b"GET /v2 HTTP/1.7\r\nHost: a\r\n\r\n", 400),
        (b"GET /v2 HTTP/1.1\r\nHost: a\r\n" + b"X: b\r\n" * 1024 + b"\r\n", 431),
        (chunked(JSON, 10).replace(b": chunked", b": gzip, chunked"), 501),
        (chunked(JSON, 10).replace(b": chunked", b": gzip"), 501),
        (chunked(JSON, 10).replace(b": chunked", b": identity"), 501),
        (chunked(JSON, 10, "Transfer-Encoding: chunked"), 400),
        (chunked(JSON, 10).replace(b"HTTP/1.1", b"HTTP/1.0"), 501),
        (chunked(JSON, 10).replace(b"\r\na\r\n", b"\r\n+a\r\n", 1), 400),
        (chunked(JSON, 10).replace(b"\r\na\r\n", b"\r\n" + b"f" * 17 + b"\r\n", 1), 413),
        (chunked(JSON, 10).replace(b"\r\na\r\n", b"\na\n", 1), 400),
        (post(JSON).replace(b"Content-Length: ", b"Content-Length: 71, "), 400),
        (post(JSON).replace(b"Content-Length: ", b"Content-Length: +"), 400),
        (post(JSON).replace(b"Content-Length: ", b"Content-Length: 0x"), 400),
        (post(JSON, "Content-Length: 5"), 400),
        (post(JSON, "Transfer-Encoding: chunked"), 400),
        (post(JSON).replace(b"Content-Length: ", b"Content-Length: -"), 400),
        (post(JSON).replace(b"Content-Length: ", b"Content-Length: x"), 400),
        (post(JSON, "X: " + "a" * HEAD_LIMIT), 431),
        (b"GET /" + b"a" * HEAD_LIMIT + b" HTTP/1.1\r\nHost: x\r\n\r\n", 431),
        (b"GET /v2 HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 2 * HEAD_LIMIT, 431),
        (b"POST /v2/models/echo/infer HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (BODY_LIMIT + 1), 413),
        (b"POST /v2/models/echo/infer HTTP/1.1\r\nHost: x\r\nContent-Length: " + b"9" * 30 + b"\r\n\r\n", 400),
        (chunked(JSON, 10).replace(b"\r\na\r\n", b"\r\nzz\r\n", 1), 400),
    ],
)  # fmt: skip
def test_what_cannot_be_understood_is_answered_and_ends(
    front: FrontProcess, worker: EchoWorker, request_: bytes, status: int
) -> None:
    with front.client() as client:
        # What follows in the same packet belongs to nobody: it must not be run.
        client.send(request_ + json_request(b"\1") * 2)
        answer = client.answer()
        assert (answer.status, answer.headers["connection"]) == (status, "close")
        assert answer.error
        assert client.ends()
    assert worker.idle(0.05)


def test_a_chunked_body_over_the_limit(front: FrontProcess, worker: EchoWorker) -> None:
    with front.client() as client:
        body = bytes(BODY_LIMIT + 1)
        with contextlib.suppress(ConnectionError):  # the last bytes may come after it has hung up
            client.send(chunked(body, MIB))
        answer = client.answer()
        assert (answer.status, answer.headers["connection"]) == (413, "close")
        assert str(BODY_LIMIT) in answer.error
    assert worker.idle(0.05)


@pytest.mark.parametrize(
    ("header", "status", "found"),
    [
        ("Inference-Header-Content-Length: 100000", 400, "inference header size should be in range"),
        ("Inference-Header-Content-Length: -1", 400, "should be an unsigned integer"),
        ("Inference-Header-Content-Length: x", 400, "should be an unsigned integer"),
        ("Inference-Header-Content-Length:", 400, "should be an unsigned integer"),
        ("Inference-Header-Content-Length: 99999999999999999999", 400, "should be an unsigned integer"),
        ("Content-Encoding: br", 501, "Unsupported compression"),
        ("Content-Encoding: gzip, deflate", 501, "Unsupported compression"),
        ("Content-Encoding: gzip\r\nContent-Encoding: gzip", 501, "Unsupported compression"),
        ("Content-Encoding: gzip", 400, "it is no gzip stream"),
        ("Content-Encoding: deflate", 400, "it is no deflate stream"),
    ],
)
def test_refused_headers_keep_the_connection(
    client: Client, worker: EchoWorker, header: str, status: int, found: str
) -> None:
    client.send(post(JSON, header) + json_request(b"\1"))
    answer = client.answer()
    assert (answer.status, found in answer.error) == (status, True), answer
    worker.echo(worker.next())
    assert client.answer().values == b"\1"


# ------------------------------------------------------------------------------------------------- clients that leave


def test_a_client_that_leaves_in_the_middle_of_a_body(front: FrontProcess, worker: EchoWorker) -> None:
    for size in (1000, 10_000, 3 * MIB):
        request = binary_request(bytes(size))
        for at in (len(request) - 900, len(request) - 1):
            with front.client() as client:
                client.send(request[:at])
    assert worker.idle()


def leave(client: Client) -> None:
    """Closes at once and for good. Without the option it would look like a client that still reads, until it is written to."""
    client.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def test_a_client_that_leaves_before_its_answer(front: FrontProcess, worker: EchoWorker) -> None:
    for content in (b"\1", bytes(3 * MIB)):
        with front.client() as client:
            leave(client)
            client.send(binary_request(content))
            request = worker.next()
        until(lambda request=request: worker.idle(0.01) and request.request_id in worker.cancelled)  # type: ignore[misc]
        worker.echo(request)
        until(lambda: worker.leases == 0)


def test_a_client_that_ends_its_sending_side_without_a_request(front: FrontProcess) -> None:
    with front.client() as client:
        client.sock.shutdown(socket.SHUT_WR)
        assert client.ends()
        with front.client() as other:
            other.send(GET)
            assert other.answer().status == 200
            other.sock.shutdown(socket.SHUT_WR)
            assert other.ends()


@pytest.mark.parametrize("size", [0, 10, 10_000, 3 * MIB])
def test_half_a_request_is_none(front: FrontProcess, worker: EchoWorker, size: int) -> None:
    """The whole requests before it are answered."""
    with front.client() as client:
        half = binary_request(bytes(size))[:-1] if size else GET[:-1]
        client.send(json_request(b"\1") + half)
        client.sock.shutdown(socket.SHUT_WR)
        worker.echo(worker.next())
        assert client.answer().values == b"\1"
        answer = client.answer()
        assert (answer.status, answer.headers["connection"]) == (400, "close")
        assert client.ends()
    assert worker.idle(0.05)


def test_who_leaves_in_the_middle_of_a_question_leaves_no_trace(capfd: pytest.CaptureFixture[str]) -> None:
    """A traceback for every client that loses its connection would fill the log."""
    with serving() as (front, _):
        with front.client() as client:
            # Refused before anybody asks for the body it announces: no 100 behind the refusal.
            client.send(
                b"POST /v2/repository/index HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\n"
                b"Transfer-Encoding: chunked\r\n\r\n8\r\n" + b"x" * 30
            )
            assert client.answer().status == 400
            assert client.ends()
        for _ in range(3):
            with front.client() as client:
                client.send(b"POST /v2/repository/index HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n{")
                client.sock.shutdown(socket.SHUT_WR)
                assert client.answer().status == 400
                assert client.ends()
        front.sync()
    assert "Traceback" not in capfd.readouterr().err


# ------------------------------------------------------------------------------------------------- after the body


@pytest.mark.parametrize(
    "flood", [b"X: y\r\n" * 100_000, b"X: " + b"y" * 600_000], ids=["many trailers", "one endless trailer"]
)
def test_trailers_are_bounded_like_the_head(front: FrontProcess, worker: EchoWorker, flood: bytes) -> None:
    """Headers after the last chunk are wanted by nobody, so they may not fill the memory."""
    with front.client() as client:
        with contextlib.suppress(ConnectionError):
            client.send(chunked(JSON, 10)[:-2], flood, b"\r\n\r\n")
        answer = client.answer()
        assert (answer.status, answer.headers["connection"]) == (431, "close")
    assert worker.idle(0.05)


def test_a_few_trailers_are_ignored(client: Client, worker: EchoWorker) -> None:
    client.send(chunked(JSON, 10)[:-2] + b"Expect: 100-continue\r\nX: y\r\n\r\n" + json_request(b"\2"))
    for values in (b"\1\2\3", b"\2"):
        worker.echo(worker.next())
        assert client.answer().values == values
