"""Inference calls that are traced, through a real front whose worker answers as it is told: any number of answers, and errors."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tensord.daemon.front.status import INTERNAL, OK, UNIMPLEMENTED
from tensord.daemon.grpc import frames
from tensord.shm.control_records import TraceChanged
from tensord.shm.trace_counters import SampleCounter
from tests.daemon.grpc.frame_client import STREAM, FrameClient, GrpcFrontProcess, prefixed, request, serving
from tests.fakes import EchoWorker, until
from tests.records import Tensor

BEGIN = ["GRPC_WAITREAD_START", "GRPC_WAITREAD_END", "REQUEST_START"]
END = ["REQUEST_END", "GRPC_SEND_START", "GRPC_SEND_END"]
MANY = {
    "repeatable": False,
    "streams": True,
    "config": json.dumps({"name": "many", "model_transaction_policy": {"decoupled": True}}).encode(),
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "trace.json"


@pytest.fixture
def served(file: Path) -> Iterator[tuple[GrpcFrontProcess, EchoWorker, FrameClient]]:
    with serving() as (front, (worker,)), front.frames() as client:
        turn = SampleCounter.create(1)
        front.send(TraceChanged("", 1, 1, 0, str(file)), turn.fd)
        turn.close()
        front.model(worker, name="many", **MANY)
        yield front, worker, client


def traces(file: Path) -> dict[str, list[str]]:
    """Reads the stamps of each trace, in the order in which they were written: request id -> names."""
    found: dict[str, list[str]] = {}
    numbers: dict[int, str] = {}
    entries: list[dict[str, Any]] = []
    with contextlib.suppress(FileNotFoundError, json.JSONDecodeError):  # not there yet, or being written
        entries = json.loads(file.read_text())
    for entry in entries:
        if "model_name" in entry:
            numbers[entry["id"]] = entry["request_id"]
            found[entry["request_id"]] = []
        found[numbers[entry["id"]]] += [stamp["name"] for stamp in entry.get("timestamps", ())]
    return found


def answer(worker: EchoWorker, request_id: int, content: bytes, final: bool) -> None:
    outputs = (Tensor("y", "UINT8", (len(content),), content),) if content else ()
    worker.complete(request_id, outputs=outputs, final=final, version=1 if outputs else 0)


@pytest.mark.parametrize("last", [b"", b"c"])
def test_a_trace_ends_with_the_last_of_many_answers(
    served: tuple[GrpcFrontProcess, EchoWorker, FrameClient], file: Path, last: bytes
) -> None:
    _, worker, client = served
    stream = client.open(STREAM)
    client.data(stream, prefixed(request(model="many", id="a")), end=True)
    submitted = worker.next()
    assert submitted.trace == 1
    for content in (b"a", b"b"):
        answer(worker, submitted.request_id, content, False)
    while len(client.answers[stream].messages if stream in client.answers else ()) < 2:
        client.step()
    assert traces(file) == {}
    answer(worker, submitted.request_id, last, True)
    got = client.answer(stream)
    assert (got.status, len(got.messages)) == (OK, 3 if last else 2)
    until(lambda: traces(file) == {"a": BEGIN + END})


@pytest.mark.parametrize("content", [b"", b"a"])
def test_a_call_that_turns_out_to_ask_a_decoupled_model_leaves_one_trace(
    served: tuple[GrpcFrontProcess, EchoWorker, FrameClient], file: Path, content: bytes
) -> None:
    """The trace file has the refused call once, whether the model has sent no response, or the first of several."""
    _, worker, client = served
    call = client.call(request(id="a"))
    answer(worker, worker.next().request_id, content, final=not content)
    assert client.answer(call).status == UNIMPLEMENTED
    stream = client.call(request(id="b"))
    worker.echo(worker.next())
    assert client.answer(stream).status == OK
    ended = BEGIN + (END if not content else END[1:])
    until(lambda: traces(file) == {"a": ended, "b": BEGIN + END})


def test_an_answer_that_cannot_be_written(served: tuple[GrpcFrontProcess, EchoWorker, FrameClient]) -> None:
    """A gRPC answer that cannot be written is an error of the front: it names no model version, and the model goes on."""
    front, worker, client = served
    stream = client.open(STREAM)
    client.data(stream, prefixed(request(model="many", id="a")), end=True)
    submitted = worker.next()
    worker.complete(submitted.request_id, outputs=(Tensor("y", "UINT8", (1 << 63,), b"a"),), final=False)
    answer(worker, submitted.request_id, b"b", True)
    failed, good = client.answer(stream).streamed()
    assert failed.error_message == "internal error; the server's log has the details"
    assert (failed.infer_response.id, failed.infer_response.model_name) == ("a", "")
    assert not failed.infer_response.parameters
    assert good.infer_response.raw_output_contents == [b"b"]
    assert front.counters.counts(0, "grpc").answers["INTERNAL"] == 1


def test_an_error_that_ends_the_stream(served: tuple[GrpcFrontProcess, EchoWorker, FrameClient], file: Path) -> None:
    _, worker, client = served
    block = client.block(STREAM) + b"\0\x11triton_grpc_error\4true"
    client.send(frames.frame(frames.HEADERS, frames.END_HEADERS, 1, block))
    client.data(1, prefixed(request(id="a")))
    worker.complete(worker.next().request_id, code="INTERNAL", message="no")
    assert (client.answer(1).status, client.answer(1).text) == (INTERNAL, "no")
    until(lambda: traces(file) == {"a": BEGIN + END})


def test_a_request_nobody_waits_for_leaves_no_trace(
    served: tuple[GrpcFrontProcess, EchoWorker, FrameClient], file: Path
) -> None:
    front, worker, client = served
    with front.frames() as other:
        other.call(request(id="gone"))
        gone = worker.next()
    until(lambda: worker.poll() or worker.cancelled == [gone.request_id])
    worker.echo(gone)
    stream = client.call(request(id="stays"))
    worker.echo(worker.next())
    assert client.answer(stream).status == OK
    until(lambda: traces(file) == {"stays": BEGIN + END})
