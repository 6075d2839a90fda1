"""Large messages that repeat pass a real front as prepared requests, both ways, and no memory stays leased."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from typing import Any

import pytest

from tensord.daemon.front.status import DEADLINE_EXCEEDED, OK
from tensord.daemon.grpc import frames
from tensord.shm.messages import Slice
from tests.daemon.grpc.frame_client import (
    INFER,
    STREAM,
    Answer,
    FrameClient,
    GrpcFrontProcess,
    prefixed,
    request,
    serving,
)
from tests.daemon.grpc.requests import Infer
from tests.daemon.grpc.test_large_messages import FULL, WHOLE, is_served, send, values
from tests.daemon.grpc.test_repeated_messages import inner_of
from tests.fakes import MIB, SMALL_BUFFER, EchoWorker, front_process, until
from tests.records import is_numbered

#: As perf_analyzer's client asks: a large answer leaves in one frame.
WIDE = ((frames.INITIAL_WINDOW_SIZE, 1 << 24), (frames.MAX_FRAME_SIZE, 1 << 22))
Served = tuple[GrpcFrontProcess, EchoWorker, FrameClient]
paths = pytest.mark.parametrize("path", [INFER, STREAM])


@pytest.fixture
def served() -> Iterator[Served]:
    with serving(arenas=WHOLE) as (front, (worker,)), front.frames(WIDE) as client:
        worker.numbered = True
        yield front, worker, client


def sent(client: FrameClient, path: str, content: bytes, client_id: str = "", **headers: str) -> int:
    """Sends a whole call; returns its stream."""
    stream = client.open(path, **headers)
    send(client, stream, prefixed(request(content, id=client_id)), 4 * MIB)
    return stream


def ask(client: FrameClient, worker: EchoWorker, path: str, number: int, client_id: str = "") -> Answer:
    """Makes a large call, which the worker echoes; returns the answer."""
    content = values(FULL, number)
    stream = sent(client, path, content, client_id)
    submit = worker.next()
    assert (worker.content(submit), submit.client_id) == (content, client_id)
    worker.echo(submit)
    answer = client.answer(stream)
    assert answer.status == OK
    inner = inner_of(path, answer)
    assert (list(inner.raw_output_contents), inner.id) == ([content], client_id)
    return answer


def known(client: FrameClient, worker: EchoWorker, path: str) -> None:
    """Makes calls until messages like these, and their answers, are prepared."""
    for number in range(4):
        ask(client, worker, path, number)
    assert is_numbered(worker.record)


def nothing_on_loan(front: GrpcFrontProcess, worker: EchoWorker) -> None:
    """Checks that no lease is left, on either side."""
    is_served(front, worker)
    until(lambda: worker.leases == 0)


@paths
@pytest.mark.parametrize("client_id", ["", "id-0", "é"])
def test_answers_are_those_that_were_written_whole(path: str, client_id: str) -> None:
    """A front that gets prepared answers sends the same bytes as one that gets whole answers, first and last."""
    found: list[list[Any]] = []
    for formed in (False, True):
        with serving(arenas=WHOLE) as (front, (worker,)), front.frames(WIDE) as client:
            worker.numbered = formed
            got = [ask(client, worker, path, number, client_id) for number in range(4)]
            assert is_numbered(worker.record)
            assert len(worker.requests.told) == 1
            assert isinstance(worker.record.contents[0], Slice)
            found.append([(answer.messages, sorted(answer.headers.items())) for answer in got])
            nothing_on_loan(front, worker)
    assert found[0] == found[1]


@pytest.mark.parametrize("formed", [False, True])
def test_ids_and_sizes_change_and_calls_take_turns(served: Served, formed: bool) -> None:
    front, worker, client = served
    worker.numbered = formed
    for number, client_id in enumerate(("a", "b", "", "cc", "dd", "a", "", "cc")):
        for path in (INFER, STREAM):
            ask(client, worker, path, number, client_id)
    for size in (FULL, MIB, 100_000, MIB, FULL, 10, 100_000, FULL):
        stream = sent(client, INFER, values(size))
        worker.echo(worker.next())
        assert client.answer(stream).values == values(size)
    nothing_on_loan(front, worker)


@pytest.mark.parametrize("frame_size", [10_000, 300_000, 4 * MIB])
def test_two_tensors_a_large_and_a_small_one(served: Served, frame_size: int) -> None:
    front, worker, client = served
    for large, small in ((0, 1), (1, 0)) * 3 + ((0, 1),) * 4:
        tensors = [b"", b""]
        for number in range(3):
            tensors[large], tensors[small] = values(MIB, number), values(7, number)
            inputs = [Infer.InferInputTensor(name=name, datatype="UINT8", shape=[1]) for name in "ab"]
            asked = Infer(model_name="echo", id="two", inputs=inputs, raw_input_contents=tensors)
            stream = client.open()
            send(client, stream, prefixed(asked), frame_size)
            submit = worker.next()
            assert [worker.content(submit, n) for n in (0, 1)] == tensors
            assert isinstance(submit.inputs[large].place, Slice)
            assert submit.inputs[large].place.offset % 64 == 0
            worker.echo(submit)
            assert client.answer(stream).values == tensors[0]
    # Of a frame that is cut where the second one begins nothing is known.
    assert is_numbered(worker.record) or frame_size == 10_000
    nothing_on_loan(front, worker)


@paths
@pytest.mark.parametrize(
    "settings",
    [(), ((frames.INITIAL_WINDOW_SIZE, 70_000), *WIDE[1:]), ((frames.INITIAL_WINDOW_SIZE, 1 << 24),)],
    ids=["narrow", "window", "frames"],
)
def test_clients_that_take_less_at_a_time(served: Served, settings: tuple[tuple[int, int], ...], path: str) -> None:
    """The lease stays until the last of it has left."""
    front, worker, wide = served
    known(wide, worker, path)
    window = dict(settings).get(frames.INITIAL_WINDOW_SIZE, 65_535)
    with front.frames(settings) as client:
        content = values(FULL, 3)
        stream = sent(client, path, content)
        worker.echo(worker.next())
        assert is_numbered(worker.record)
        if window < FULL:
            client.synchronise()
            assert not client.answers.get(stream, Answer()).messages
            assert worker.leases == 1
            client.send(frames.window_update(stream, 1 << 24))
        answer = client.answer(stream)
        assert list(inner_of(path, answer).raw_output_contents) == [content]
    nothing_on_loan(front, worker)


@paths
def test_a_slow_reader_of_a_known_answer(path: str) -> None:
    """The lease of an answer stays until the client has read what the kernel did not take at once."""
    arenas = {"byte_size": MIB, "max_byte_size": 32 * MIB, "wait": 60.0}
    with front_process(GrpcFrontProcess, send_buffer=SMALL_BUFFER, arenas=arenas) as front:
        worker = front.worker()
        front.model(worker)
        worker.numbered = True
        with front.frames(WIDE) as client:
            # Else the kernel learns, while the client is slow, to take a whole answer for it.
            client.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_BUFFER)
            known(client, worker, path)
            until(lambda: worker.leases == 0)
            stream = sent(client, path, values(FULL, 8))
            worker.echo(worker.next())
            with front.frames() as other:
                # Whatever the front had to do with that answer is done by now.
                other.synchronise()
                other.synchronise()
            assert worker.leases == 1
            assert list(inner_of(path, client.answer(stream)).raw_output_contents) == [values(FULL, 8)]
            until(lambda: worker.leases == 0)


# ----------------------------------------------------------------------------------------------------------- no answer


def until_taken(front: GrpcFrontProcess) -> None:
    """Returns when the front has looked at what other connections sent before."""
    with front.frames() as other:
        other.synchronise()
        other.synchronise()


@paths
def test_no_room_for_a_known_one(served: Served, path: str) -> None:
    """It waits as any other, and is read as any other."""
    front, worker, client = served
    known(client, worker, path)
    first = sent(client, path, values(FULL, 1))
    held = worker.next()
    with front.frames(WIDE) as other:
        second = sent(other, path, values(FULL, 2))
        other.synchronise()
        assert worker.idle(0.05)
        worker.echo(held)
        assert client.answer(first).status == OK
        submit = worker.next()
        assert not is_numbered(worker.record)
        worker.echo(submit)
        assert list(inner_of(path, other.answer(second)).raw_output_contents) == [values(FULL, 2)]
    nothing_on_loan(front, worker)


@pytest.mark.parametrize(
    ("when", "how"),
    [
        *(("arriving", "reset"), ("arriving", "gone"), ("arriving", "deadline")),
        *(("asked", "reset"), ("asked", "gone"), ("asked", "deadline")),
        *(("answered", "reset"), ("answered", "gone")),
    ],
)
@paths
def test_nobody_waits_for_it_any_more(path: str, when: str, how: str) -> None:
    """While it arrives, while it is with the worker, while its answer leaves."""
    with serving(arenas={**WHOLE, "max_byte_size": 8 * MIB}) as (front, (worker,)):
        worker.numbered = True
        with front.frames(WIDE) as client:
            known(client, worker, path)
        with front.frames(((frames.INITIAL_WINDOW_SIZE, 100_000), *WIDE[1:])) as client:
            stream = client.open(path, **({"grpc_timeout": "400m"} if how == "deadline" else {}))
            whole = frames.frame(frames.DATA, frames.END_STREAM, stream, prefixed(request(values(FULL))))
            if (when, how) == ("arriving", "reset"):
                # A frame is whole before the next one comes.
                whole = frames.frame(frames.DATA, 0, stream, prefixed(request(values(FULL)))[:MIB])
                client.send(whole)
            else:
                client.send(whole[: MIB if when == "arriving" else None])
            submit = None if when == "arriving" else worker.next()
            if when == "answered":
                assert submit is not None
                assert is_numbered(worker.record)
                worker.echo(submit)
                while client.step() != frames.DATA:
                    pass
                assert worker.leases == 1
            if how == "deadline":
                assert client.answer(stream).status == DEADLINE_EXCEEDED
            elif how == "reset":
                client.send(frames.rst_stream(stream, frames.CANCEL))
            else:
                # Without the option it would look like a client that still reads.
                client.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                client.sock.close()
            if submit is not None and when == "asked":
                until(lambda: worker.poll() or worker.cancelled == [submit.request_id])
                worker.echo(submit)
            until(lambda: worker.leases == 0)
            if how != "gone":
                client.send(whole[MIB:] if (when, how) == ("arriving", "deadline") else b"")
                stream = client.call(request(b"\1"))
                worker.echo(worker.next())
                assert client.answer(stream).values == b"\1"
        nothing_on_loan(front, worker)


def test_a_held_streams_known_messages_are_given_back() -> None:
    """One request of a stream may be in flight; a large one waits behind it when the client goes, or until it has room."""
    with serving(arenas=WHOLE, grpc={"max_stream_requests": 1}) as (front, (worker,)):
        worker.numbered = True
        with front.frames(WIDE) as client:
            known(client, worker, STREAM)
            for goes in (False, True):
                stream = client.open(STREAM)
                client.data(stream, prefixed(request(b"\1")))
                first = worker.next()
                send(client, stream, prefixed(request(values(FULL, 7))), 4 * MIB, end=not goes)
                until_taken(front)
                assert worker.idle(0.05)
                if not goes:
                    worker.echo(first)
                    worker.echo(worker.next())
                    found = [one.infer_response.raw_output_contents[0] for one in client.answer(stream).streamed()]
                    assert found == [b"\1", values(FULL, 7)]
        until(lambda: worker.poll() or first.request_id in worker.cancelled)
        worker.echo(first)
        nothing_on_loan(front, worker)


@paths
def test_its_worker_dies(path: str) -> None:
    """It is run again by another, from where it lies."""
    with serving(workers=2, arenas=WHOLE) as (front, (first, second)), front.frames(WIDE) as client:
        first.numbered = second.numbered = True
        front.model(first)
        known(client, first, path)
        front.model(first, second)
        stream = sent(client, path, values(FULL, 5))
        first.next()
        assert is_numbered(first.record)
        first.die()
        front.fence(first)
        submit = second.next()
        assert second.content(submit) == values(FULL, 5)
        second.echo(submit)
        assert list(inner_of(path, client.answer(stream)).raw_output_contents) == [values(FULL, 5)]
        nothing_on_loan(front, second)


# -------------------------------------------------------------------------------------------------- what is added to it
