"""Compressed requests and answers through a real front, its worker scripted."""

from __future__ import annotations

import gzip
import json
import random
import zlib
from collections.abc import Iterator

import pytest

from tests.fakes import (
    MIB,
    Answer,
    Client,
    EchoWorker,
    FrontProcess,
    binary_request,
    chunked,
    in_service,
    post,
    serving,
    until,
)

BODY_LIMIT = 8 * MIB
PACK = {"gzip": gzip.compress, "deflate": zlib.compress}
UNPACK = {"gzip": gzip.decompress, "deflate": zlib.decompress}
CODINGS = sorted(PACK)
JSON = b'{"inputs":[{"name":"x","datatype":"UINT8","shape":[3],"data":[1,2,3]}]}'


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[FrontProcess, EchoWorker]]:
    http = {"port": 0, "max_body_byte_size": BODY_LIMIT, "response_compression": "low"}
    with serving(http=http, arenas={"byte_size": MIB, "max_byte_size": 64 * MIB}) as (front, (worker,)):
        yield front, worker


def packed(content: bytes, coding: str, *headers: str) -> bytes:
    """Builds a binary request whose whole body is compressed."""
    head, _, body = binary_request(content).partition(b"\r\n\r\n")
    size = head.partition(b"Inference-Header-Content-Length: ")[2].decode()
    fields = (f"Inference-Header-Content-Length: {size}", f"Content-Encoding: {coding}", *headers)
    return post(PACK[coding](body), *fields)


def parts(answer: Answer, coding: str) -> bytes:
    """Returns the binary parts of a compressed answer. The size of the JSON is stated before compression."""
    assert (answer.status, answer.headers["content-encoding"]) == (200, coding)
    whole = UNPACK[coding](answer.body)
    return whole[int(answer.headers["inference-header-content-length"]) :]


@pytest.mark.parametrize("coding", CODINGS)
@pytest.mark.parametrize("size", [0, 1, 5000, 3 * MIB])
def test_both_ways(client: Client, worker: EchoWorker, coding: str, size: int) -> None:
    content = random.Random(size).randbytes(size // 2) + bytes(size - size // 2)
    for _ in range(2):
        client.send(packed(content, coding, f"Accept-Encoding: {coding}"))
        request = worker.next()
        assert worker.content(request) == content
        worker.echo(request)
        answer = client.answer()
        if size:
            assert parts(answer, coding) == content
        else:
            assert "inference-header-content-length" not in answer.headers
            assert json.loads(UNPACK[coding](answer.body))["outputs"][0]["shape"] == [0]


@pytest.mark.parametrize("coding", CODINGS)
def test_json(client: Client, worker: EchoWorker, coding: str) -> None:
    for request in (
        post(PACK[coding](JSON), f"Content-Encoding: {coding}"),
        chunked(PACK[coding](JSON), 7, f"Content-Encoding: {coding}"),
    ):
        client.send(request + post(JSON))
        for _ in range(2):
            worker.echo(worker.next())
            answer = client.answer()
            assert (answer.values, "content-encoding" in answer.headers) == (b"\1\2\3", False)


def test_errors_are_not_compressed(client: Client, worker: EchoWorker) -> None:
    client.send(post(b"{", "Accept-Encoding: gzip"))
    answer = client.answer()
    assert (answer.status, "content-encoding" in answer.headers) == (400, False)
    assert answer.error


def bomb(coding: str) -> bytes:
    """Compresses a GiB of zeros, piece by piece."""
    packer = zlib.compressobj(1, wbits=31 if coding == "gzip" else 15)
    return b"".join(packer.compress(bytes(MIB)) for _ in range(1024)) + packer.flush()


@pytest.mark.parametrize("coding", CODINGS)
def test_a_bomb_is_refused_with_both_numbers_and_others_go_on(
    served: tuple[FrontProcess, EchoWorker], client: Client, worker: EchoWorker, coding: str
) -> None:
    client.send(post(bomb(coding), f"Content-Encoding: {coding}"))
    with served[0].client() as other:
        in_service(served[0], worker, other)
    answer = client.answer()
    assert answer.status == 413
    assert str(BODY_LIMIT) in answer.error


def test_the_limit_counts_inflated_bytes(client: Client, worker: EchoWorker) -> None:
    count = BODY_LIMIT // 2 - 64
    head = b'{"inputs":[{"name":"x","datatype":"UINT8","shape":[%d],"data":[' % count
    body = head + b",".join([b"7"] * count) + b"]}]}"
    body += b" " * (BODY_LIMIT - len(body))
    client.send(post(gzip.compress(body), "Content-Encoding: gzip"))
    worker.echo(worker.next())
    assert client.answer().values == b"\7" * count
    client.send(post(gzip.compress(body + b" "), "Content-Encoding: gzip"))
    assert client.answer().status == 413


def test_broken_streams_are_refused_and_the_connection_stays(client: Client) -> None:
    stream = gzip.compress(JSON)
    for body in (stream[:-5], stream[:30], stream + b"x", JSON, b"", zlib.compress(JSON)):
        client.send(post(body, "Content-Encoding: gzip"))
        answer = client.answer()
        assert answer.status == 400
        assert "failed to decompress" in answer.error
    client.send(packed(b"abc", "gzip").replace(b"Header-Content-Length: ", b"Header-Content-Length: 9"))
    answer = client.answer()
    assert answer.status == 400
    assert "inference header size should be in range" in answer.error


@pytest.mark.parametrize("stage", ["request", "answer"])
def test_who_leaves_in_the_middle(served: tuple[FrontProcess, EchoWorker], worker: EchoWorker, stage: str) -> None:
    front, _ = served
    content = random.Random(3).randbytes(4 * MIB)
    with front.client() as client:
        if stage == "request":
            client.send(packed(content, "gzip")[:-1000])
        else:
            client.send(binary_request(b"\1", "Accept-Encoding: gzip"))
            worker.answer(worker.next(), content)
    with front.client() as client:
        in_service(front, worker, client)
    until(lambda: worker.leases == 0)


def test_pipelined(client: Client, worker: EchoWorker) -> None:
    """A compressed body that takes many steps, with other requests before and behind it in the same packets."""
    content = random.Random(4).randbytes(2 * MIB)
    client.send(post(JSON) + packed(content, "gzip", "Accept-Encoding: deflate") + post(JSON))
    worker.echo(worker.next())
    assert client.answer().values == b"\1\2\3"
    worker.echo(worker.next())
    assert parts(client.answer(), "deflate") == content
    worker.echo(worker.next())
    assert client.answer().values == b"\1\2\3"
