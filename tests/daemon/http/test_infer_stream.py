"""infer_stream through a real front, its worker scripted: binary requests and responses, errors anywhere."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
from collections.abc import Iterator
from typing import Any

import pytest

from tests.fakes import MIB, Client, EchoWorker, FrontProcess, in_service, serving, until
from tests.records import Tensor


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[FrontProcess, EchoWorker]]:
    with serving(http={"port": 0, "max_body_byte_size": 4 * MIB}) as (front, (worker,)):
        yield front, worker


def asked(content: bytes, *headers: str, version: str = "HTTP/1.1", **more: Any) -> bytes:
    tensor = {
        "name": "x",
        "datatype": "UINT8",
        "shape": [len(content)],
        "parameters": {"binary_data_size": len(content)},
    }
    head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}, **more}).encode()
    lines = [f"POST /v2/models/echo/infer_stream {version}", "Host: x", f"Content-Length: {len(head) + len(content)}"]
    lines += [f"Inference-Header-Content-Length: {len(head)}", *headers]
    return "".join(f"{line}\r\n" for line in lines).encode() + b"\r\n" + head + content


def responses(client: Client) -> tuple[int, str, Iterator[tuple[Any, bytes]]]:
    """Reads the head of a stream of responses; returns status, media type, and an iterator over JSON and tensors."""
    answer = client.answer()

    def each() -> Iterator[tuple[Any, bytes]]:
        for chunk in client.chunks():
            text, tail = struct.unpack_from("<IQ", chunk)
            assert len(chunk) == 12 + text + tail
            yield json.loads(chunk[12 : 12 + text]), chunk[12 + text :]

    return answer.status, answer.headers["content-type"], each()


@pytest.mark.parametrize("size", [2, 5000, 3 << 20])
def test_responses_leave_as_they_come(client: Client, worker: EchoWorker, size: int) -> None:
    content = bytes(range(256)) * (size // 256) + bytes(size % 256)
    client.send(asked(content, id="a"))
    request = worker.next()
    assert (worker.content(request), request.client_id, request.parameters) == (content, "a", {})
    worker.respond(request.request_id, b"\1", False)
    status, media_type, each = responses(client)
    assert (status, media_type) == (200, "application/octet-stream")
    for n in (1, 2, 3):
        said, tail = next(each)
        assert tail == bytes([n]) * n
        assert said == {
            "id": "a",
            "model_name": "echo",
            "model_version": "1",
            "outputs": [{"name": "y", "datatype": "UINT8", "shape": [n], "parameters": {"binary_data_size": n}}],
        }
        worker.respond(request.request_id, bytes([n + 1]) * (n + 1) if n < 3 else b"", n == 3)
    assert list(each) == []


def test_json_is_answered_with_json(client: Client, worker: EchoWorker) -> None:
    body = json.dumps({"inputs": [{"name": "x", "datatype": "UINT8", "shape": [2], "data": [1, 2]}]}).encode()
    client.send(
        b"POST /v2/models/echo/infer_stream HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    )
    worker.answer(worker.next(), b"\7\10")
    ((said, tail),) = responses(client)[2]
    assert (said["outputs"][0]["data"], tail) == ([7, 8], b"")


def test_large_responses_come_from_the_arena(client: Client, worker: EchoWorker) -> None:
    client.send(asked(b"x"))
    worker.answer(worker.next(), bytes(range(256)) * 4096)
    ((_, tail),) = responses(client)[2]
    assert tail == bytes(range(256)) * 4096


def test_an_error_that_is_first_and_last_is_an_ordinary_one(client: Client, worker: EchoWorker) -> None:
    for code, status in (("INTERNAL", 500), ("INVALID_ARGUMENT", 400), ("UNAVAILABLE", 503)):
        client.send(asked(b"x"))
        worker.complete(worker.next().request_id, code=code, message="so it is")
        answer = client.answer()
        assert (answer.status, answer.error) == (status, "so it is")


def test_an_error_among_responses(client: Client, worker: EchoWorker) -> None:
    client.send(asked(b"x"))
    request = worker.next()
    worker.respond(request.request_id, b"\1", False)
    worker.complete(request.request_id, code="INTERNAL", message="so it is", final=True)
    status, _, each = responses(client)
    assert (status, next(each)[1]) == (200, b"\1")
    assert list(each) == [({"error": "so it is", "code": "INTERNAL"}, b"")]


@pytest.mark.parametrize(
    ("request_", "status", "text"),
    [
        (asked(b"x").replace(b"/echo/", b"/nope/"), 404, "Request for unknown model: 'nope' is not found"),
        (asked(b"x", "Content-Encoding: gzip"), 400, "Unsupported content-encoding, only 'identity' is supported."),
        (asked(b"x", "Inference-Header-Content-Length: 1"), 400, "Inference-Header-Content-Length should be"),
        (asked(b"x", id="a" * (256 << 10)), 400, "at most 262144 are read: send large tensors as binary data"),
        (asked(b"x", parameters=3), 400, ""),
        (asked(bytes(5 << 20)), 413, "at most 4194304 are allowed"),
    ],
)
def test_what_is_wrong(client: Client, worker: EchoWorker, request_: bytes, status: int, text: str) -> None:
    client.send(request_)
    answer = client.answer()
    assert answer.status == status
    assert text in answer.error


def test_a_client_of_http_1_0_gets_all_at_once(client: Client, worker: EchoWorker) -> None:
    client.send(asked(b"x", "Connection: keep-alive", version="HTTP/1.0"))
    request = worker.next()
    worker.respond(request.request_id, b"\1", False)
    worker.respond(request.request_id, b"\2", True)
    answer = client.answer()
    assert answer.body.count(b'"model_name":"echo"') == 2


def test_who_leaves_cancels(served: tuple[FrontProcess, EchoWorker], worker: EchoWorker) -> None:
    """The arenas get back the memory of the client's body and of its responses."""
    front, _ = served
    with front.client() as client:
        client.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.send(asked(bytes(1 << 20)))
        request = worker.next()
        worker.complete(request.request_id, outputs=(Tensor("y", "UINT8", (9000,), bytes(9000)),), final=False)
        assert client.answer().status == 200
    until(lambda: worker.idle(0.01) and request.request_id in worker.cancelled)
    worker.complete(request.request_id, version=0)
    with front.client() as client:
        in_service(front, worker, client)
    until(lambda: worker.leases == 0)


def test_a_body_is_asked_for_once_its_model_is_known(client: Client, worker: EchoWorker) -> None:
    content = bytes(range(256)) * 40
    whole = asked(content, "Expect: 100-continue")
    head, body = whole[: whole.index(b"\r\n\r\n") + 4], whole[whole.index(b"\r\n\r\n") + 4 :]
    client.send(head.replace(b"/echo/", b"/nope/"))
    assert client.answer().status == 404
    client.send(body)  # it may come all the same
    client.send(head)
    assert client.take(25) == b"HTTP/1.1 100 Continue\r\n\r\n"
    client.send(body)
    request = worker.next()
    assert worker.content(request) == content
    worker.answer(request, b"x")
    assert [tail for _, tail in responses(client)[2]] == [b"x"]


def test_the_rest_of_a_large_body_that_was_refused_meanwhile(served: tuple[FrontProcess, EchoWorker]) -> None:
    """
    1. Half of a large body has come when the load of its model fails, and the request is refused.
    2. Another request gets the memory. 3. The rest of the first body comes.
    Result: it is discarded, and its connection ends.
    """
    front, worker = served
    size = 3 * MIB
    front.model(name="late", state="LOADING")
    with front.client() as client, front.client() as other:
        whole = asked(bytes(size)).replace(b"/echo/", b"/late/")
        client.send(whole[: -size // 2])
        front.sync()
        front.model(name="late", state="UNAVAILABLE", reason="it failed")
        answer = client.answer()
        assert (answer.status, answer.headers["connection"]) == (404, "close")
        other.send(asked(b"\1" * size))
        request = worker.next()
        with contextlib.suppress(OSError):
            client.sock.sendall(whole[-size // 2 :])
        front.sync()
        assert set(worker.content(request)) == {1}
        assert client.ends()
        worker.respond(request.request_id, b"\2", True)
        assert other.answer().status == 200
    until(lambda: worker.leases == 0)
