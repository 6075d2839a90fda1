"""Requests that repeat travel as prepared requests, and their answers as prepared answers; clients see no difference."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
from pathlib import Path
from typing import Any

import pytest

from tensord.shm.control_records import TraceChanged
from tensord.shm.messages import AnswerRecord, RegionSlice
from tensord.shm.trace_counters import SampleCounter
from tests.fakes import PATIENCE_SECONDS, Answer, Client, EchoWorker, serving, until
from tests.records import Tensor, WholeAnswer, is_numbered

PART = {"binary_data_size": 4}


def asked(body: bytes, *headers: str, inputs: Any = None, **fields: Any) -> bytes:
    """Builds a request with a binary body after its JSON."""
    inputs = inputs or [{"name": "x", "datatype": "UINT8", "shape": [4], "parameters": PART}]
    text = json.dumps({"inputs": inputs, **fields}).encode()
    lines = [
        *("POST /v2/models/echo/infer HTTP/1.1", "Host: x", f"Inference-Header-Content-Length: {len(text)}"),
        *(f"Content-Length: {len(text) + len(body)}", *headers),
    ]
    return "".join(f"{line}\r\n" for line in lines).encode() + b"\r\n" + text + body


def y_of(content: bytes) -> tuple[Tensor, ...]:
    return (
        Tensor("y", "UINT8", (len(content),), content),
        Tensor("z", "UINT8", (4,), RegionSlice("region", 0, 4)),
        Tensor("w", "BYTES", (1,), b"\3\0\0\0abc"),
    )


def exchange(client: Client, worker: EchoWorker, request: bytes, content: bytes) -> tuple[Any, Answer]:
    """Sends a request; returns what the worker got, without what is the request's own, and the client's answer."""
    client.send(request)
    submit = worker.next()
    worker.complete(submit.request_id, outputs=y_of(content))
    return (submit.inputs, submit.outputs, submit.parameters, submit.client_id, submit.version), client.answer()


BINARY = {"parameters": {"binary_data_output": True}}


@pytest.mark.parametrize("formed", [False, True])
def test_tracing_that_begins_and_ends_in_between(tmp_path: Path, formed: bool) -> None:
    """A traced request says so to its worker; its trace is whole; those before and after it have none."""
    file = tmp_path / "trace.json"
    with serving() as (front, (worker,)), front.client() as client:
        worker.numbered = formed

        def ask(number: int, traced: bool) -> None:
            client.send(asked(b"%04d" % number, id="me", **BINARY))
            submit = worker.next()
            assert submit.trace == int(traced)
            assert submit.inputs[0].place == b"%04d" % number
            assert (submit.client_id, is_numbered(worker.record)) == ("me", number > 0)
            worker.complete(submit.request_id, outputs=y_of(b"%02d" % number))
            assert client.answer().parts[:2] == b"%02d" % number

        for number in range(4):
            ask(number, False)
        turn = SampleCounter.create(1)
        front.send(TraceChanged("", 1, 1, 0, str(file)), turn.fd)
        turn.close()
        front.sync()
        for number in range(4, 7):
            ask(number, True)
        front.send(TraceChanged("", 0, 1, 0, ""))
        front.sync()
        for number in range(7, 9):
            ask(number, False)
        names = ["HTTP_RECV_START", "HTTP_RECV_END", "REQUEST_START", "REQUEST_END", "HTTP_SEND_START", "HTTP_SEND_END"]
        until(lambda: stamps(file) == [("me", "echo", names)] * 3)


def stamps(file: Path) -> list[tuple[str, str, list[str]]]:
    """Returns request id, model and stamps of each trace."""
    entries: list[dict[str, Any]] = []
    with contextlib.suppress(FileNotFoundError, json.JSONDecodeError):  # not there yet, or being written
        entries = json.loads(file.read_text())
    found: dict[int, tuple[str, str, list[str]]] = {}
    for entry in entries:
        if "model_name" in entry:
            found[entry["id"]] = (entry.get("request_id", ""), entry["model_name"], [])
        found[entry["id"]][2].extend(stamp["name"] for stamp in entry.get("timestamps", ()))
    return list(found.values())


@pytest.mark.parametrize("formed", [False, True])
def test_the_last_answer_of_a_connection_says_so(formed: bool) -> None:
    """The front stops while a known request is with its worker."""
    with serving() as (front, (worker,)), front.client() as client, front.client() as idle:
        worker.numbered = formed
        for number in range(3):
            answer = exchange(client, worker, asked(b"%04d" % number, **BINARY), b"ab")[1]
            assert "connection" not in answer.headers
        client.send(asked(b"last", **BINARY))
        submit = worker.next()
        assert is_numbered(worker.record)
        front.stop(PATIENCE_SECONDS)
        # Closed after those that wait for an answer have been told that it is their last.
        assert idle.ends()
        worker.complete(submit.request_id, outputs=y_of(b"cd"))
        last = client.answer()
        assert (last.headers["connection"], last.body) == ("close", answer.body.replace(b"ab", b"cd", 1))
        assert client.ends()


def test_a_client_that_leaves_with_a_known_request_under_way() -> None:
    with serving() as (front, (worker,)):
        worker.numbered = True
        with front.client() as client:
            for _ in range(3):
                exchange(client, worker, asked(b"abcd", **BINARY), b"ab")
            # Without the option it would look like a client that still reads.
            client.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            client.send(asked(b"abcd", **BINARY))
            gone = worker.next()
        until(lambda: worker.poll() or worker.cancelled == [gone.request_id])
        worker.complete(gone.request_id, outputs=y_of(b"ab"))
        with front.client() as client:
            assert exchange(client, worker, asked(b"abcd", **BINARY), b"ab")[1].status == 200


def test_a_worker_whose_answer_is_not_like_its_form() -> None:
    """It is trusted no more, and its client is told; another worker answers the next one."""
    with serving(workers=2) as (front, (first, second)):
        first.numbered = second.numbered = True
        front.model(first)
        with front.client() as client:
            for _ in range(3):
                exchange(client, first, asked(b"abcd", **BINARY), b"ab")
            client.send(asked(b"abcd", **BINARY))
            garble(first)
            answer = client.answer()
            assert (answer.status, answer.error) == (500, "the worker's answer could not be understood")
            front.model(first, second)
            assert exchange(client, second, asked(b"abcd", **BINARY), b"ab")[1].parts[:2] == b"ab"


def garble(worker: EchoWorker) -> None:
    """Answers the next request with one tensor more than its prepared answer has."""

    request = worker.next()
    form = worker.lane.number(WholeAnswer(0, version=1, outputs=y_of(b"ab")).prepared)
    worker.lane.complete(AnswerRecord(request.request_id, form.number, (b"ab", b"abc", b"cd")), form)
    until(worker.lane.flush)


def test_half_a_head_behind_a_known_request() -> None:
    """It came before the answer: the connection waits for its rest, and is not an idle one then."""
    with (
        serving(http={"port": 0, "keep_alive_timeout": 1.0, "head_timeout": 3.0}) as (front, (worker,)),
        front.client() as client,
    ):
        worker.numbered = True
        for _ in range(3):
            exchange(client, worker, asked(b"abcd", **BINARY), b"ab")
        client.send(asked(b"abcd", **BINARY))
        submit = worker.next()
        assert is_numbered(worker.record)
        client.send(b"POST /v2/models/echo/inf")
        # What it sent is read before the front looks at its lane again.
        assert worker.idle()
        worker.complete(submit.request_id, outputs=y_of(b"cd"))
        assert client.answer().parts[:2] == b"cd"
        assert client.answer().status == 408


def test_strings_of_other_lengths() -> None:
    """Two outputs are as long together as they were, each by itself is not: the head of the answer says so."""
    fields: dict[str, Any] = {"parameters": {"binary_data_output": True}}
    with serving() as (front, (worker,)), front.client() as client:
        worker.numbered = True
        for first, second in ((b"ab", b"c"), (b"de", b"f"), (b"g", b"hi"), (b"jk", b"l")):
            client.send(asked(b"abcd", **fields))
            tensors = tuple(
                Tensor(name, "BYTES", (1,), len(content).to_bytes(4, "little") + content)
                for name, content in (("y", first), ("z", second))
            )
            worker.complete(worker.next().request_id, outputs=tensors)
            answer = client.answer()
            outputs = json.loads(answer.body[: -len(answer.parts)])["outputs"]
            sizes = [output["parameters"]["binary_data_size"] for output in outputs]
            assert sizes == [4 + len(first), 4 + len(second)]


def test_requests_behind_a_known_one_are_answered_in_their_order() -> None:
    with serving(workers=2) as (front, workers), front.client() as client:
        (worker, _) = workers
        front.model(worker)
        worker.numbered = True
        for _ in range(3):
            exchange(client, worker, asked(b"abcd", **BINARY), b"ab")
        client.send(asked(b"1234", **BINARY))
        first = worker.next()
        client.send(asked(b"5678", **BINARY) + b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n")
        worker.complete(first.request_id, outputs=y_of(b"12"))
        assert client.answer().parts[:2] == b"12"
        second = worker.next()
        assert second.inputs[0].place == b"5678"
        worker.complete(second.request_id, outputs=y_of(b"56"))
        assert client.answer().parts[:2] == b"56"
        assert client.answer().status == 200
        assert exchange(client, worker, asked(b"abcd", **BINARY), b"ab")[1].parts[:2] == b"ab"


def test_a_known_request_goes_where_its_model_is_now() -> None:
    """A front remembers which worker has a request's model, until that changes."""
    with serving(workers=2) as (front, (first, second)), front.client() as client:
        first.numbered = second.numbered = True
        for worker in (first, second, first):
            front.model(worker)
            for _ in range(3):
                assert exchange(client, worker, asked(b"abcd", **BINARY), b"ab")[1].status == 200
