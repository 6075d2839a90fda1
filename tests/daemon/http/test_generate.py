"""generate and generate_stream through a real front, its worker scripted: any number of answers, errors anywhere."""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Iterator

import pytest

from tests.fakes import MIB, SMALL_BUFFER, Client, EchoWorker, FrontProcess, in_service, json_request, serving, until
from tests.records import Tensor


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[FrontProcess, EchoWorker]]:
    with serving(http={"port": 0, "max_body_byte_size": MIB}) as (front, (worker,)):
        yield front, worker


def asked(endpoint: str, body: bytes, *headers: str, version: str = "HTTP/1.1") -> bytes:
    lines = [f"POST /v2/models/echo/{endpoint} {version}", "Host: x", f"Content-Length: {len(body)}", *headers]
    return "".join(f"{line}\r\n" for line in lines).encode() + b"\r\n" + body


def events(client: Client) -> tuple[int, str, Iterator[dict[str, object]]]:
    """Reads the head of a stream of events; returns status, media type, and an iterator over the events."""
    answer = client.answer()

    def each() -> Iterator[dict[str, object]]:
        for chunk in client.chunks():
            assert chunk.startswith(b"data: ")
            assert chunk.endswith(b"\n\n")
            yield json.loads(chunk[6:])

    return answer.status, answer.headers["content-type"], each()


def test_generate(client: Client, worker: EchoWorker) -> None:
    client.send(asked("generate", b'{"id":"a","x":[1,2],"p":3}'))
    request = worker.next()
    assert (worker.content(request), request.client_id, request.parameters) == (b"\1\2", "a", {"p": 3})
    worker.respond(request.request_id, b"\5", True)
    answer = client.answer()
    assert answer.headers["content-type"] == "application/json"
    assert json.loads(answer.body) == {"id": "a", "model_name": "echo", "model_version": "1", "y": 5}


def test_a_large_text_goes_through_the_arena(client: Client, worker: EchoWorker) -> None:
    content = bytes(range(256)) * 400
    client.send(asked("versions/1/generate", json.dumps({"x": list(content)}).encode()))
    request = worker.next()
    assert worker.content(request) == content
    worker.answer(request, content)
    assert json.loads(client.answer().body)["y"] == list(content)


@pytest.mark.parametrize("count", [0, 2])
def test_generate_wants_exactly_one_answer(client: Client, worker: EchoWorker, count: int) -> None:
    client.send(asked("generate", b'{"x":1}'))
    request = worker.next()
    for n in range(count):
        worker.respond(request.request_id, bytes([n]), False)
    worker.respond(request.request_id, b"", True)
    answer = client.answer()
    assert answer.status == 400
    assert "generate expects model to produce exactly 1 response" in answer.error


@pytest.mark.parametrize(
    ("code", "status"), [("INTERNAL", 400), ("INVALID_ARGUMENT", 400), ("NOT_FOUND", 400), ("UNAVAILABLE", 503)]
)
def test_errors_of_the_model(client: Client, worker: EchoWorker, code: str, status: int) -> None:
    client.send(asked("generate", b'{"x":1}'))
    worker.complete(worker.next().request_id, code=code, message="so it is")
    answer = client.answer()
    assert (answer.status, answer.error) == (status, "so it is")


def test_events_leave_as_they_come(client: Client, worker: EchoWorker) -> None:
    client.send(asked("generate_stream", b'{"id":"s","x":1}'))
    request = worker.next()
    worker.respond(request.request_id, b"\1", False)
    status, media_type, each = events(client)
    assert (status, media_type) == (200, "text/event-stream; charset=utf-8")
    for n in (1, 2, 3):
        assert next(each) == {"id": "s", "model_name": "echo", "model_version": "1", "y": n}
        worker.respond(request.request_id, bytes([n + 1]) if n < 3 else b"", n == 3)
    assert list(each) == []


def test_one_event_of_a_model_with_one_answer(client: Client, worker: EchoWorker) -> None:
    client.send(asked("generate_stream", b'{"x":1}'))
    worker.answer(worker.next(), bytes(600))
    assert [event["y"] for event in events(client)[2]] == [[0] * 600]


def test_no_events(client: Client, worker: EchoWorker) -> None:
    client.send(asked("generate_stream", b'{"x":1}'))
    worker.respond(worker.next().request_id, b"", True)
    status, _, each = events(client)
    assert (status, list(each)) == (200, [])


def test_an_error_in_the_middle_is_an_event(client: Client, worker: EchoWorker) -> None:
    client.send(asked("generate_stream", b'{"x":1}'))
    request = worker.next()
    worker.respond(request.request_id, b"\1", False)
    worker.complete(request.request_id, code="INTERNAL", message="bad word")
    status, _, each = events(client)
    assert (status, [event.get("error") for event in each]) == (200, [None, "bad word"])


@pytest.mark.parametrize(("first", "status"), [(True, 400), (False, 200)])
def test_after_an_error_that_is_not_the_last_answer_others_follow(
    client: Client, worker: EchoWorker, first: bool, status: int
) -> None:
    """A decoupled model may go on after an error, as in Triton; the first answer decides the status."""
    client.send(asked("generate_stream", b'{"x":1}'))
    request = worker.next()
    if not first:
        worker.respond(request.request_id, b"\1", False)
    worker.complete(request.request_id, code="INTERNAL", message="bad word", final=False)
    worker.respond(request.request_id, b"\2", False)
    worker.respond(request.request_id, b"", True)
    found, _, each = events(client)
    told = [event.get("error") or event["y"] for event in each]
    assert (found, told) == (status, ["bad word", 2] if first else [1, "bad word", 2])


def test_generate_answers_with_the_first_error_among_several_answers(client: Client, worker: EchoWorker) -> None:
    client.send(asked("generate", b'{"x":1}'))
    request = worker.next()
    worker.complete(request.request_id, code="INTERNAL", message="bad word", final=False)
    answer = client.answer()
    assert (answer.status, answer.error) == (400, "bad word")
    worker.respond(request.request_id, b"", True)


def test_a_models_error_at_once_is_an_event_with_a_status(client: Client, worker: EchoWorker) -> None:
    client.send(asked("generate_stream", b'{"x":1}'))
    worker.complete(worker.next().request_id, code="INTERNAL", message="bad word")
    status, media_type, each = events(client)
    assert (status, media_type, list(each)) == (400, "text/event-stream; charset=utf-8", [{"error": "bad word"}])


def test_what_is_wrong_with_the_request_is_no_event(client: Client, worker: EchoWorker) -> None:
    client.send(asked("generate_stream", b'{"x":1}'))
    worker.complete(worker.next().request_id, code="INVALID_ARGUMENT", message="expected 1 inputs")
    answer = client.answer()
    assert (answer.status, answer.headers["content-type"]) == (400, "application/json")
    for body, headers, status in (
        (b"{", (), 400),
        (b"[1]", (), 400),
        (b"{}", ("Content-Encoding: gzip",), 400),
        (b" " * (MIB + 1), (), 413),
    ):
        for endpoint in ("generate", "generate_stream"):
            client.send(asked(endpoint, body, *headers))
            answer = client.answer()
            assert answer.status == status
            assert answer.error
            if status == 413:
                assert str(MIB) in answer.error
    client.send(asked("generate_stream", b"{").replace(b"/echo/", b"/nope/"))
    assert client.answer().status == 404
    client.send(b"GET /v2/models/echo/generate HTTP/1.1\r\nHost: x\r\n\r\n")
    assert client.answer().status == 405


def test_http_10_gets_its_events_with_a_length(client: Client, worker: EchoWorker) -> None:
    client.send(asked("generate_stream", b'{"x":1}', "Connection: keep-alive", version="HTTP/1.0"))
    request = worker.next()
    for n in (1, 2):
        worker.respond(request.request_id, bytes([n]), n == 2)
    answer = client.answer()
    assert answer.status == 200
    assert [json.loads(line[6:])["y"] for line in answer.body.split(b"\n\n")[:-1]] == [1, 2]


@pytest.mark.parametrize("endpoint", ["generate", "generate_stream"])
@pytest.mark.parametrize("begun", [True, False])
def test_who_leaves_cancels(
    served: tuple[FrontProcess, EchoWorker], worker: EchoWorker, endpoint: str, begun: bool
) -> None:
    front, _ = served
    with front.client() as client:
        client.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.send(asked(endpoint, b'{"x":1}'))
        request = worker.next()
        if begun:
            worker.complete(request.request_id, outputs=(Tensor("y", "UINT8", (1,), b"\1"),), final=False)
            if endpoint == "generate_stream":
                assert client.answer().status == 200
    until(lambda: worker.idle(0.01) and request.request_id in worker.cancelled)
    worker.complete(request.request_id, version=0)
    with front.client() as client:
        in_service(front, worker, client)
    until(lambda: worker.leases == 0)


def test_in_order_with_everything_else(client: Client, worker: EchoWorker) -> None:
    get = b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n"
    client.send(asked("generate_stream", b'{"x":1}') + get + asked("generate", b'{"x":2}') + json_request(b"\3") + get)
    first = worker.next()
    worker.respond(first.request_id, b"\1", False)
    _, _, each = events(client)
    assert next(each)["y"] == 1
    assert worker.idle()
    worker.respond(first.request_id, b"", True)
    assert list(each) == []
    assert client.answer().status == 200
    worker.echo(worker.next())
    assert json.loads(client.answer().body)["y"] == 2
    worker.echo(worker.next())
    assert client.answer().values == b"\3"
    assert client.answer().status == 200


@pytest.mark.parametrize("endpoint", ["generate", "generate_stream"])
def test_a_body_is_asked_for_once_its_model_is_known(client: Client, worker: EchoWorker, endpoint: str) -> None:
    whole = asked(endpoint, b'{"x":1}', "Expect: 100-continue")
    head = whole[:-7]
    client.send(head.replace(b"/echo/", b"/nope/"))
    assert client.answer().status == 404
    client.send(b'{"x":1}')  # it may come all the same
    client.send(head)
    assert client.take(25) == b"HTTP/1.1 100 Continue\r\n\r\n"
    client.send(b'{"x":1}')
    worker.complete(worker.next().request_id, code="UNAVAILABLE", message="so it is")
    assert (answer := client.answer()).status == 503
    assert answer.error == "so it is"


def test_a_body_that_is_refused_behind_its_answer_gets_no_second_one(
    served: tuple[FrontProcess, EchoWorker],
) -> None:
    """The client would take it for the answer to what it sends next."""
    head = "POST /v2/models/nope/generate HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nExpect: 100-continue\r\n\r\n"
    with served[0].client() as client:
        client.send(head.encode())
        assert client.answer().status == 404
        client.send(b"%x\r\n" % (MIB + 1))
        assert client.ends()


@pytest.mark.parametrize("endpoint", ["generate", "generate_stream"])
@pytest.mark.parametrize("comes", [True, False])
def test_a_model_that_is_being_loaded_is_waited_for(endpoint: str, comes: bool) -> None:
    with serving(requests={"worker_wait": 20.0 if comes else 0.1}) as (front, (worker,)), front.client() as client:
        front.model(name="late", state="LOADING")
        client.send(asked(endpoint, b'{"x":[7]}').replace(b"/echo/", b"/late/"))
        if comes:
            assert worker.idle()
            front.model(worker, name="late")
            worker.complete(worker.next().request_id, code="INVALID_ARGUMENT", message="so it is")
            assert client.answer().error == "so it is"
        else:
            answer = client.answer()
            assert answer.status == 503
            assert "late" in answer.error
        in_service(front, worker, client)


def test_a_client_that_takes_nothing_holds_its_model_up() -> None:
    """Its worker is told of no more responses than were written; these are what the sockets hold, and one more."""
    content = bytes(range(256)) * 256
    ahead = {"max_ahead": 4 * len(content)}
    with serving(send_buffer=SMALL_BUFFER, expert=ahead) as (front, (worker,)), front.client(SMALL_BUFFER) as client:
        client.send(asked("generate_stream", b'{"x":1}', "Connection: close"))
        request = worker.next()
        count = 200
        for _ in range(count):
            worker.respond(request.request_id, content, False)
        front.sync()
        worker.poll()
        told = sum(size for _, size in worker.taken)
        assert told < 20 * len(content)
        status, _, each = events(client)
        assert status == 200
        assert [len(next(each)["y"]) for _ in range(count)] == [len(content)] * count  # type: ignore[arg-type]
        until(lambda: worker.idle(0.01) and sum(size for _, size in worker.taken) > (count - 4) * len(content))
        worker.respond(request.request_id, b"", True)
        assert list(each) == []
        assert client.ends()
        until(lambda: worker.leases == 0)


def test_responses_are_read_after_the_death_of_their_worker() -> None:
    """
    1. Responses that lie in the worker's memory wait for a slow client. 2. The worker dies. 3. The client reads on.
    Result: it gets all of them, and then an error.
    """
    content, count = bytes(range(256)) * 64, 50
    with serving(send_buffer=SMALL_BUFFER) as (front, (worker,)), front.client(SMALL_BUFFER) as client:
        client.send(asked("generate_stream", b'{"x":1}'))
        request = worker.next()
        for _ in range(count):
            worker.answer(request, content, final=False)
        front.sync()
        worker.die()
        front.fence(worker)
        _, _, each = events(client)
        assert [len(next(each)["y"]) for _ in range(count)] == [len(content)] * count  # type: ignore[arg-type]
        assert [str(event["error"])[:23] for event in each] == ["the worker process died"]


@pytest.mark.parametrize("endpoint", ["generate_stream", "infer_stream"])
def test_a_request_behind_a_stream_that_says_it_is_the_last_is_not_run(endpoint: str) -> None:
    with serving() as (front, (worker,)), front.client() as client, front.client() as other:
        in_service(front, worker, other)
        body = b'{"x":[1]}' if endpoint == "generate_stream" else json_request(b"\1").partition(b"\r\n\r\n")[2]
        client.send(asked(endpoint, body))
        request = worker.next()
        front.stop(30)

        def stops() -> bool:
            other.send(b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n")
            return other.answer().headers.get("connection") == "close"

        until(stops)
        worker.respond(request.request_id, b"\5", False)
        assert client.answer().headers["connection"] == "close"
        client.send(json_request(b"\1"))
        assert worker.idle()
        worker.respond(request.request_id, b"\6", True)
        assert len(list(client.chunks())) == 2
        assert client.ends()
        assert worker.idle()
