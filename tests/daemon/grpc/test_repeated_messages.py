"""Messages that repeat travel as prepared requests, and their answers as prepared answers; clients see no difference."""

from __future__ import annotations

import json
import socket
import struct
from pathlib import Path
from typing import Any

import pytest
from tritonclient.grpc import service_pb2

from tensord.daemon.front.status import INTERNAL, INVALID_ARGUMENT, OK
from tensord.daemon.grpc import frames
from tensord.shm.control_records import ControlCall, ModelGone, TraceChanged
from tensord.shm.messages import AnswerRecord, RegionSlice
from tensord.shm.operations import RecentErrors
from tensord.shm.trace_counters import SampleCounter
from tests.daemon.grpc.frame_client import INFER, STREAM, Answer, FrameClient, GrpcFrontProcess, prefixed, serving
from tests.daemon.grpc.test_infer import BEGIN, END, traces
from tests.fakes import EchoWorker, until
from tests.records import Tensor, WholeAnswer, is_numbered

Infer = service_pb2.ModelInferRequest
Parameter = service_pb2.InferParameter
REGION = {
    "shared_memory_region": Parameter(string_param="region"),
    "shared_memory_offset": Parameter(int64_param=8),
    "shared_memory_byte_size": Parameter(int64_param=4),
}


def message(content: bytes, client_id: str = "", region: bool = False, **fields: Any) -> Any:
    inputs = [Infer.InferInputTensor(name="x", datatype="UINT8", shape=[len(content)])]
    if region:
        inputs.append(Infer.InferInputTensor(name="r", datatype="UINT8", shape=[4], parameters=REGION))
    return Infer(model_name="echo", id=client_id, inputs=inputs, raw_input_contents=[content], **fields)


def y_of(content: bytes) -> tuple[Tensor, ...]:
    return (
        Tensor("y", "UINT8", (len(content),), content),
        Tensor("z", "UINT8", (4,), RegionSlice("region", 0, 4)),
        Tensor("w", "UINT8", (0,), b""),
    )


def ask(client: FrameClient, worker: EchoWorker, path: str, asked: Any, content: bytes, **headers: str) -> Any:
    """Makes a call; returns what the worker got, without what is the request's own, and the client's answer."""
    stream = client.open(path, **headers)
    client.data(stream, prefixed(asked), end=True)
    submit = worker.next()
    worker.complete(submit.request_id, outputs=y_of(content))
    answer = client.answer(stream)
    return (submit.inputs, submit.outputs, submit.parameters, submit.client_id, submit.priority), answer


def inner_of(path: str, answer: Answer) -> Any:
    if path == STREAM:
        return answer.streamed()[0].infer_response
    return service_pb2.ModelInferResponse.FromString(answer.messages[0])


def test_many_of_a_stream_at_a_time() -> None:
    """Answers come back in any order, some prepared and some not, one of them an error."""
    with serving() as (front, (worker,)), front.frames() as client:
        stream = client.open(STREAM)
        for number in range(20):
            client.data(stream, prefixed(message(b"%04d" % number, f"id{number:02}")), end=number == 19)
        asked = [worker.next() for _ in range(20)]
        for number, submit in reversed(list(enumerate(asked))):
            worker.numbered = number % 3 != 0
            if number == 7:
                worker.complete(submit.request_id, code="INVALID_ARGUMENT", message="no")
            else:
                worker.complete(submit.request_id, outputs=y_of(b"%02d" % number))
        answer = client.answer(stream)
        assert answer.status == OK
        found = {one.infer_response.id: one for one in answer.streamed()}
        assert len(found) == len(answer.messages) == 20
        for number in range(20):
            one = found[f"id{number:02}"]
            assert one.error_message == ("no" if number == 7 else "")
            if number != 7:
                assert one.infer_response.raw_output_contents[0] == b"%02d" % number


def test_headers_are_parameters_of_their_request_alone() -> None:
    """With headers that are forwarded something is added to each message, however known it is."""
    with serving(grpc={"header_forward_pattern": "x-fwd-.*"}) as (front, (worker,)), front.frames() as client:
        worker.numbered = True
        for value in ("1", "1", "1", " \t2  2 \t", "2", "", "", "1"):
            headers = {"x_fwd_a": value} if value else {}
            for path in (INFER, STREAM):
                (_, _, parameters, _, _), answer = ask(client, worker, path, message(b"abcd"), b"ab", **headers)
                # As over HTTP, without the blanks around it.
                assert parameters == ({"x-fwd-a": value.strip()} if value else {})
                assert list(inner_of(path, answer).raw_output_contents) == [b"ab", b"", b""]


@pytest.mark.parametrize("path", [INFER, STREAM])
@pytest.mark.parametrize("formed", [False, True])
def test_tracing_that_begins_and_ends_in_between(tmp_path: Path, path: str, formed: bool) -> None:
    file = tmp_path / "trace.json"
    with serving() as (front, (worker,)), front.frames() as client:
        worker.numbered = formed

        def asked(number: int, traced: bool) -> None:
            stream = client.call(message(b"%04d" % number, f"id{number}"), path)
            submit = worker.next()
            assert submit.trace == int(traced)
            assert (submit.inputs[0].place, submit.client_id) == (b"%04d" % number, f"id{number}")
            worker.complete(submit.request_id, outputs=y_of(b"%02d" % number))
            assert inner_of(path, client.answer(stream)).raw_output_contents[0] == b"%02d" % number

        for number in range(3):
            asked(number, False)
        assert is_numbered(worker.record)
        turn = SampleCounter.create(1)
        front.send(TraceChanged("", 1, 1, 0, str(file)), turn.fd)
        turn.close()
        front.sync()
        for number in range(3, 6):
            asked(number, True)
        front.send(TraceChanged("", 0, 1, 0, ""))
        front.sync()
        for number in range(6, 8):
            asked(number, False)
        assert is_numbered(worker.record)
        until(lambda: traces(file) == {f"id{number}": BEGIN + END for number in range(3, 6)})


def test_a_deadline_of_a_known_message() -> None:
    with serving() as (front, (worker,)), front.frames() as client:
        for number in range(3):
            ask(client, worker, INFER, message(b"%04d" % number), b"ab")
        stream = client.call(message(b"late"), INFER, grpc_timeout="600S")
        submit = worker.next()
        assert is_numbered(worker.record)
        assert submit.deadline_ns > submit.received_ns > 0
        worker.complete(submit.request_id, outputs=y_of(b"ab"))
        assert client.answer(stream).status == OK


@pytest.mark.parametrize("path", [INFER, STREAM])
def test_errors_and_defects_of_workers(path: str) -> None:
    with serving(workers=2) as (front, (first, second)), front.frames() as client:
        first.numbered = second.numbered = True
        front.model(first)
        for number in range(3):
            ask(client, first, path, message(b"%04d" % number), b"ab")
        stream = client.call(message(b"abcd"), path)
        first.complete(first.next().request_id, code="INVALID_ARGUMENT", message="not that")
        assert said(path, client.answer(stream)) == (INVALID_ARGUMENT, "not that")
        stream = client.call(message(b"abcd"), path)
        request = first.next()
        form = first.lane.number(WholeAnswer(0, version=1, outputs=y_of(b"ab")).prepared)
        first.lane.complete(AnswerRecord(request.request_id, form.number, (b"ab",)), form)
        until(first.lane.flush)
        assert said(path, client.answer(stream)) == (INTERNAL, "the worker's answer could not be understood")
        front.model(first, second)
        (_, answer) = ask(client, second, path, message(b"abcd"), b"cd")
        assert inner_of(path, answer).raw_output_contents[0] == b"cd"


def said(path: str, answer: Answer) -> tuple[int, str]:
    """Returns code and text of an error. A stream has only the text, from which the code is derived."""
    if path == INFER:
        return answer.status, answer.text
    text = answer.streamed()[0].error_message
    return {"not that": INVALID_ARGUMENT}.get(text, INTERNAL), text


def test_a_client_that_leaves_with_a_known_call_under_way() -> None:
    with serving() as (front, (worker,)):
        worker.numbered = True
        with front.frames() as client:
            for number in range(3):
                ask(client, worker, INFER, message(b"%04d" % number), b"ab")
            # Without the option it would look like a client that still reads.
            client.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            client.call(message(b"gone"))
            gone = worker.next()
            assert is_numbered(worker.record)
        until(lambda: worker.poll() or worker.cancelled == [gone.request_id])
        worker.complete(gone.request_id, outputs=y_of(b"ab"))
        with front.frames() as client:
            assert ask(client, worker, INFER, message(b"abcd"), b"ab")[1].status == OK


def known(front: GrpcFrontProcess, client: FrameClient, worker: EchoWorker) -> None:
    """Makes calls until messages like ``message(b"abcd")`` and their answers are prepared, in unary calls and streams."""
    worker.numbered = True
    for path in (INFER, STREAM):
        for number in range(3):
            assert ask(client, worker, path, message(b"%04d" % number), b"ab")[1].status == OK
    assert is_numbered(worker.record)


@pytest.mark.parametrize("path", [INFER, STREAM])
def test_a_known_answer_waits_for_its_window(path: str) -> None:
    with serving() as (front, (worker,)), front.frames() as warm:
        known(front, warm, worker)
        with front.frames(((frames.INITIAL_WINDOW_SIZE, 20),)) as client:
            stream = client.open(path)
            client.data(stream, prefixed(message(b"abcd")), end=True)
            worker.complete(worker.next().request_id, outputs=y_of(b"ab"))
            client.synchronise()
            assert not client.answers.get(stream, Answer()).messages
            client.send(frames.window_update(stream, 1000))
            answer = client.answer(stream)
            assert (answer.status, inner_of(path, answer).raw_output_contents[0]) == (OK, b"ab")


@pytest.mark.parametrize("path", [INFER, STREAM])
def test_a_known_message_of_a_model_that_is_another_now(path: str) -> None:
    """Gone, decoupled, and as before."""
    with serving() as (front, (worker,)), front.frames() as client:
        known(front, client, worker)
        front.send(ModelGone("echo", 1))
        front.sync()
        answer = client.answer(client.call(message(b"abcd"), path))
        text = answer.text if path == INFER else answer.streamed()[0].error_message
        assert text == "Request for unknown model: 'echo' is not found"
        front.model(worker, repeatable=False, streams=True)
        stream = client.call(message(b"abcd"), path)
        if path == INFER:
            assert client.answer(stream).text.startswith(
                "ModelInfer RPC doesn't support models with decoupled transaction policy"
            )
        else:
            submit = worker.next()
            for content, final in ((b"1", False), (b"2", True)):
                worker.complete(submit.request_id, outputs=y_of(content), final=final)
            assert [one.infer_response.raw_output_contents[0] for one in client.answer(stream).streamed()] == [
                b"1",
                b"2",
            ]
        front.model(worker)
        assert ask(client, worker, path, message(b"abcd"), b"cd")[1].status == OK
        assert is_numbered(worker.record)


@pytest.mark.parametrize("path", [INFER, STREAM])
def test_a_known_message_among_too_many(path: str) -> None:
    with serving(requests={"max_in_flight": 1}) as (front, (worker,)), front.frames() as client:
        known(front, client, worker)
        first = client.call(message(b"abcd"), path)
        submit = worker.next()
        other = client.answer(client.call(message(b"efgh", "7"), path))
        text = "1 requests are in flight, at most 1 are allowed"
        assert (other.text if path == INFER else other.streamed()[0].error_message) == text
        front.send(ControlCall(1, RecentErrors()))
        (error,) = json.loads(front.receive().result)
        assert (error["error"], error["model"], error["id"]) == (text, "echo", "7")
        worker.complete(submit.request_id, outputs=y_of(b"ab"))
        assert client.answer(first).status == OK


@pytest.mark.parametrize("path", [INFER, STREAM])
def test_a_known_call_that_is_reset(path: str) -> None:
    with serving() as (front, (worker,)), front.frames() as client:
        known(front, client, worker)
        stream = client.open(path)
        client.data(stream, prefixed(message(b"abcd")), end=path == INFER)
        gone = worker.next()
        assert is_numbered(worker.record)
        client.send(frames.rst_stream(stream, frames.CANCEL))
        until(lambda: worker.poll() or worker.cancelled == [gone.request_id])
        worker.complete(gone.request_id, outputs=y_of(b"ab"))
        assert ask(client, worker, path, message(b"abcd"), b"ab")[1].status == OK
        assert not client.answers.get(stream, Answer()).messages


def test_two_known_messages_of_a_unary_call() -> None:
    with serving() as (front, (worker,)), front.frames() as client:
        known(front, client, worker)
        stream = client.open(INFER)
        client.data(stream, 2 * prefixed(message(b"abcd")), end=True)
        assert client.answer(stream).text == "a unary call has one request message"
        assert worker.idle()


def test_known_messages_of_a_stream_wait_their_turn() -> None:
    """More than may be in flight on it."""
    with serving(grpc={"max_stream_requests": 2}) as (front, (worker,)), front.frames() as client:
        known(front, client, worker)
        stream = client.open(STREAM)
        for number in range(6):
            client.data(stream, prefixed(message(b"%04d" % number)), end=number == 5)
        client.synchronise()
        got = []
        for _ in range(6):
            got.append(worker.next())
            assert len(worker._requests) <= 1
            worker.complete(got[-1].request_id, outputs=y_of(b"ab"))
        assert [submit.inputs[0].place for submit in got] == [b"%04d" % number for number in range(6)]
        answer = client.answer(stream)
        assert (answer.status, len(answer.messages)) == (OK, 6)
