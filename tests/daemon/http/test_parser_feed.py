"""Much at a time on one connection: it is answered in order, others get their turn; what is too much is refused when seen."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator

import pytest

from tensord.daemon.http.parser_feed import _bare_line_feed
from tests.fakes import Client, EchoWorker, FrontProcess, chunked, in_service, json_request, post, serving

CHUNKED = b"POST /v2/models/echo/infer HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
BODY_LIMIT, HEAD_LIMIT = 1 << 20, 1 << 16


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[FrontProcess, EchoWorker]]:
    with serving(http={"port": 0, "max_body_byte_size": BODY_LIMIT}) as (front, (worker,)):
        yield front, worker


def test_a_flood_of_requests(served: tuple[FrontProcess, EchoWorker]) -> None:
    """Thousands sent ahead that are answered at once: each gets its answer, and another client is served meanwhile."""
    front, worker = served
    count = 20_000
    with front.client() as client, front.client() as other:
        client.sock.setblocking(False)
        flood, sent, answered = memoryview(post(b"{}", model="nothing") * count), 0, 0
        received = b""
        while answered < count:
            if sent < len(flood):
                with contextlib.suppress(BlockingIOError):
                    sent += client.sock.send(flood[sent : sent + (1 << 20)])
            try:
                received += client.sock.recv(1 << 20)
            except BlockingIOError:
                in_service(front, worker, other)
            answered += received.count(b"HTTP/1.1 404 ")
            received = received[received.rfind(b"\r\n\r\n") :][-1000:].replace(b"HTTP/1.1 404 ", b"")
        in_service(front, worker, other)


@pytest.mark.parametrize("upgrade", [False, True])
def test_one_read_with_many_requests_and_bodies(served: tuple[FrontProcess, EchoWorker], upgrade: bool) -> None:
    """Bytes that wait for the next iteration are not lost, and parsing resumes at any point."""
    front, worker = served
    fields = ("Connection: Upgrade", "Upgrade: h2c") if upgrade else ()
    refused = post(b"{}", *fields, model="nothing")
    values = bytes(range(200)) * 300
    with front.client() as client:
        client.send(refused * 150 + json_request(values) + refused * 150 + chunked(json_body(values), 5) + refused * 50)
        assert {client.answer().status for _ in range(150)} == {404}
        worker.echo(worker.next())
        assert client.answer().values == values
        assert {client.answer().status for _ in range(150)} == {404}
        worker.echo(worker.next())
        assert client.answer().values == values
        assert {client.answer().status for _ in range(50)} == {404}


def json_body(values: bytes) -> bytes:
    return json_request(values).partition(b"\r\n\r\n")[2]


@pytest.mark.parametrize("cut", range(1, 12))
def test_a_head_in_pieces_with_a_chunked_body(served: tuple[FrontProcess, EchoWorker], cut: int) -> None:
    """Its end is found wherever it was cut, and the framing is followed from there on."""
    front, worker = served
    content = chunked(json_body(b"\5"), 3)
    head = content.index(b"\r\n\r\n") + 4
    with front.client() as client, front.client() as other:
        client.send(content[: head - cut])
        in_service(front, worker, other)
        client.send(content[head - cut : head - cut + 2])
        in_service(front, worker, other)
        client.send(content[head - cut + 2 :])
        worker.echo(worker.next())
        assert client.answer().values == b"\5"
        client.send(CHUNKED[:-cut])
        in_service(front, worker, other)
        client.send(CHUNKED[-cut:] + b"%x\r\n" % (BODY_LIMIT + 1))
        assert client.answer().status == 413


@pytest.mark.parametrize(
    ("content", "status", "text"),
    [
        (b"%x\r\n" % (BODY_LIMIT + 1), 413, f"has at least {BODY_LIMIT + 1} bytes, at most {BODY_LIMIT} are allowed"),
        (b"10\r\n" + bytes(16) + b"\r\nFFFFFFFFFFFF\r\n", 413, "bytes, at most"),
        (b"1;" + b"a" * HEAD_LIMIT, 431, "the chunk extensions have at least"),
        (b"1;a=" + b"b" * 1000 + b"\r\nx\r\n", 0, ""),
        ((b"1;a=" + b"b" * 1000 + b"\r\nx\r\n") * 70, 431, "the chunk extensions have at least"),
        (b"0\r\nX: " + b"a" * HEAD_LIMIT, 431, "the trailers have at least"),
    ],
)
@pytest.mark.parametrize("path", ["models/echo/infer", "models/echo/generate"])
def test_what_is_announced_is_refused_when_it_is_seen(
    served: tuple[FrontProcess, EchoWorker], content: bytes, status: int, text: str, path: str
) -> None:
    """Nothing more has to come: the client waits for the answer."""
    front, worker = served
    head = CHUNKED.replace(b"models/echo/infer", path.encode())
    with front.client() as client, front.client() as other:
        client.send(head + content)
        if not status:
            client.send(b"0\r\n\r\n")
            assert client.answer().status == 400
            return
        answer = client.answer()
        assert (answer.status, answer.headers["connection"]) == (status, "close")
        assert text in answer.error
        in_service(front, worker, other)


def test_bare_line_feeds_are_found_where_a_request_may_follow() -> None:
    """The search agrees with its plain definition on all short texts, cut in every way."""

    def wanted(text: bytes, begin: int, end: int) -> int:
        for at in range(begin, end):
            follows = text[at:end].lstrip(b"\r\n")[:1]
            if text[at : at + 1] == b"\n" and text[at - 1 : at] != b"\r" and (not follows or follows.isupper()):
                return at
        return -1

    for size in range(7):
        for letters in itertools.product(b"\r\nAa", repeat=size):
            text = bytes(letters)
            for begin, end in itertools.combinations(range(size + 1), 2):
                assert _bare_line_feed(text, begin, end) == wanted(text, begin, end), (text, begin, end)


def test_many_line_feeds_are_looked_at_once() -> None:
    """Again and again they would take hours."""
    text = b"G" + b"\n" * (4 << 20) + b"0"
    assert _bare_line_feed(text, 1, len(text)) == -1


def test_a_flood_of_chunks(served: tuple[FrontProcess, EchoWorker]) -> None:
    """A byte each: the body is read, and another client is served meanwhile."""
    front, worker = served
    values = b"\7" * 30_000
    with front.client() as client, front.client() as other:
        client.send(chunked(json_body(values), 1))
        in_service_beside(front, worker, other, values)
        assert client.answer().values == values


def in_service_beside(front: FrontProcess, worker: EchoWorker, other: Client, values: bytes) -> None:
    """Answers both clients, whichever comes first."""
    other.send(json_request(b"\1"))
    for _ in range(2):
        worker.echo(worker.next())
    assert other.answer().values == b"\1"
