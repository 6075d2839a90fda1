"""Large requests through a real front: straight into the arena however they come, and nothing of it is lost when they do not."""

from __future__ import annotations

import gzip
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from tensord.daemon.front.status import DEADLINE_EXCEEDED, INVALID_ARGUMENT, UNAVAILABLE
from tensord.daemon.grpc import frames
from tensord.shm.messages import Slice
from tests.daemon.grpc.frame_client import STREAM, FrameClient, GrpcFrontProcess, prefixed, request, serving
from tests.daemon.grpc.requests import Infer, fields
from tests.fakes import MIB, EchoWorker, until

#: One request of this size fills the arena.
FULL = 2 * MIB
ARENAS = {"byte_size": MIB, "max_byte_size": 3 * MIB, "keep_byte_size": 0, "wait": 60.0}
#: All clients here are one, and it may have all.
WHOLE = {**ARENAS, "connection_share": 1.0, "client_share": 1.0, "arriving_share": 1.0}

Served = tuple[GrpcFrontProcess, EchoWorker, FrameClient]


@pytest.fixture
def served() -> Iterator[Served]:
    with serving(arenas=WHOLE) as (front, (worker,)), front.frames() as client:
        yield front, worker, client


def values(size: int, first: int = 0) -> bytes:
    return (bytes((first + n) % 251 for n in range(251)) * (size // 251 + 1))[:size]


def send(client: FrameClient, stream: int, content: bytes, frame_size: int, end: bool = True) -> None:
    """Sends content in DATA frames of ``frame_size`` bytes."""
    for at in range(0, len(content), frame_size):
        flags = frames.END_STREAM if end and at + frame_size >= len(content) else 0
        client.send(frames.frame(frames.DATA, flags, stream, content[at : at + frame_size]))


def answered(client: FrameClient, worker: EchoWorker, stream: int) -> bytes:
    """Answers the next request with the first bytes of it."""
    sent = worker.next()
    worker.answer(sent, worker.content(sent)[:100])
    return client.answer(stream).values


def is_served(front: GrpcFrontProcess, worker: EchoWorker) -> None:
    """Checks that the whole request arena is free: a request that needs all of it is served."""
    content = values(FULL, 9)
    with front.frames() as other:
        stream = other.open()
        send(other, stream, prefixed(request(content)), MIB)
        assert answered(other, worker, stream) == content[:100]


def answered_after(client: FrameClient, worker: EchoWorker, held: Any, first: int, second: int) -> bytes:
    small = client.call(request(b"\7"))
    assert answered(client, worker, small) == b"\7"  # whatever was sent before it is taken by now
    worker.answer(held, b"done")
    assert client.answer(first).values == b"done"
    return answered(client, worker, second)


@pytest.mark.parametrize("frame_size", [10_000, 70_000, 3 * MIB])
@pytest.mark.parametrize("sizes", [(MIB,), (300_001, 3, 200_000, 32_766, 32_765, 100_000)])
def test_tensors_lie_where_a_worker_reads_them(served: Served, sizes: tuple[int, ...], frame_size: int) -> None:
    _, worker, client = served
    tensors = [values(size, n) for n, size in enumerate(sizes)]
    inputs = [Infer.InferInputTensor(name=f"x{n}", datatype="UINT8", shape=[size]) for n, size in enumerate(sizes)]
    asked = Infer(model_name="echo", id="large", inputs=inputs, raw_input_contents=tensors)
    for _ in range(2):
        stream = client.open()
        send(client, stream, prefixed(asked), frame_size)
        sent = worker.next()
        assert [worker.content(sent, n) for n in range(len(sizes))] == tensors
        assert sent.client_id == "large"
        places = [each.place for each in sent.inputs]
        assert all(place.offset % 64 == 0 for place in places if isinstance(place, Slice))
        assert [isinstance(place, Slice) for place in places] == [size not in (3, 32_765) for size in sizes]
        worker.answer(sent, b"ok")
        assert client.answer(stream).values == b"ok"


def test_large_and_small_ones_in_turn(served: Served) -> None:
    """The order also holds after many small messages, when the connection is read like any other again."""
    _, worker, client = served
    for small in (0, 1, 40, 0):
        content = values(MIB, small)
        stream = client.open()
        send(client, stream, prefixed(request(content)), 3 * MIB)
        sent = worker.next()
        assert worker.content(sent) == content
        worker.answer(sent, b"ok")
        assert client.answer(stream).values == b"ok"
        for n in range(small):
            assert answered(client, worker, client.call(request(bytes([n])))) == bytes([n])


def test_fields_in_another_order(served: Served) -> None:
    _, worker, client = served
    content = values(MIB)
    pieces = fields(request(content, id="late"))
    for order in (pieces[::-1], pieces[2:] + pieces[:2]):
        stream = client.open()
        send(client, stream, prefixed(b"".join(order)), 100_000)
        sent = worker.next()
        assert (worker.content(sent), sent.client_id) == (content, "late")
        worker.answer(sent, b"ok")
        assert client.answer(stream).values == b"ok"


def test_a_compressed_one(served: Served) -> None:
    _, worker, client = served
    content = values(MIB)
    stream = client.open(grpc_encoding="gzip")
    send(client, stream, prefixed(gzip.compress(request(content).SerializeToString(), 1, mtime=0), 1), 1000)
    assert answered(client, worker, stream) == content[:100]


@pytest.mark.parametrize("arenas", [WHOLE, ARENAS])
def test_many_on_one_stream_between_small_ones(arenas: dict[str, Any]) -> None:
    """In one go, frames cut anywhere: each is a request of its own, in the order they were sent, also where one has to wait."""
    with serving(arenas=arenas) as (front, (worker,)), front.frames() as client:
        stream_of_both(worker, client)


def stream_of_both(worker: EchoWorker, client: FrameClient) -> None:
    large = [values(200_000 + n, n) for n in range(4)]
    messages = [piece for n in range(4) for piece in (prefixed(request(large[n])), prefixed(request(bytes([n]))))]
    stream = client.open(STREAM)
    send(client, stream, b"".join(messages), 123_457)
    for n in range(4):
        for expected in (large[n], bytes([n])):
            sent = worker.next()
            assert worker.content(sent) == expected
            worker.answer(sent, b"%d" % n)
    answer = client.answer(stream)
    assert answer.status == 0
    assert [each.infer_response.raw_output_contents[0] for each in answer.streamed()] == [
        b"%d" % n for n in range(4) for _ in range(2)
    ]


def test_a_long_one_is_granted_at_once() -> None:
    """More than a window: the client learns in one WINDOW_UPDATE that all of it may come, once its place is known."""
    with serving(arenas={**WHOLE, "max_byte_size": 32 * MIB}) as (front, (worker,)), front.frames() as client:
        content = prefixed(request(values(12 * MIB)))
        stream = client.open()
        send(client, stream, content[:1000], 1000, end=False)
        while True:
            kind, _, number, payload = client.peek()
            client.step()
            if kind == frames.WINDOW_UPDATE and number == stream:
                break
        assert int.from_bytes(payload, "big") == len(content)
        send(client, stream, content[1000:], 4 * MIB)
        assert answered(client, worker, stream) == values(100)


# ---------------------------------------------------------------------------------------------------------------- room


def test_the_arena_is_full(served: Served) -> None:
    """
    1. One request fills the arena and is not answered. 2. Another one comes as far as its window goes, a small one beside it.
    3. The first one is answered.
    Result: the small one is served meanwhile, no more window is granted, and the second one is served after the first.
    """
    front, worker, client = served
    first = client.open()
    send(client, first, prefixed(request(values(FULL))), MIB)
    held = worker.next()
    content = values(FULL, 5)
    whole = prefixed(request(content))
    second = client.open()
    send(client, second, whole[: len(whole) // 2], MIB, end=False)
    small = client.call(request(b"\7"))
    assert answered(client, worker, small) == b"\7"
    assert worker.idle()
    worker.answer(held, b"done")
    assert client.answer(first).values == b"done"
    send(client, second, whole[len(whole) // 2 :], MIB)
    assert answered(client, worker, second) == content[:100]
    is_served(front, worker)


def test_all_of_it_came_before_there_was_room(served: Served) -> None:
    front, worker, client = served
    first = client.open()
    send(client, first, prefixed(request(values(FULL))), MIB)
    held = worker.next()
    content = values(FULL, 5)
    second = client.open()
    send(client, second, prefixed(request(content)), MIB)
    assert answered_after(client, worker, held, first, second) == content[:100]
    is_served(front, worker)


def test_waiting_for_room_is_not_the_clients_fault() -> None:
    """Longer than a message may take; once it has its place, the client's time runs again.

    The first message and the last have to be as quick, on whatever machine: so the bound is no shorter.
    """
    with serving(arenas=WHOLE, grpc={"body_timeout": 4.0}) as (front, (worker,)), front.frames() as client:
        first = client.open()
        send(client, first, prefixed(request(values(FULL))), MIB)
        held = worker.next()
        with front.frames() as slow, front.frames() as late:
            second, third = late.open(), slow.open()
            whole = prefixed(request(values(FULL, 5)))
            send(late, second, whole[:1000], MIB, end=False)
            late.synchronise()
            # Another client's message, which began later, is given up meanwhile: the time of both has run out.
            slow.data(third, prefixed(request(b"\1"))[:7])
            assert "did not arrive within 4 s" in slow.answer(third).text
            late.synchronise()
            assert second not in late.answers
            worker.answer(held, b"done")
            assert client.answer(first).values == b"done"
            assert "did not arrive within 4 s" in late.answer(second).text
        is_served(front, worker)


def test_no_room_in_time() -> None:
    with serving(arenas={**WHOLE, "wait": 0.2}) as (front, (worker,)), front.frames() as client:
        first = client.open()
        send(client, first, prefixed(request(values(FULL))), MIB)
        held = worker.next()
        second = client.open()
        send(client, second, prefixed(request(values(FULL))), MIB)
        answer = client.answer(second)
        assert answer.status == UNAVAILABLE
        assert "bytes in the request arena" in answer.text
        worker.answer(held, b"done")
        assert client.answer(first).values == b"done"
        is_served(front, worker)


def test_it_could_never_fit(served: Served) -> None:
    front, worker, client = served
    stream = client.open()
    send(client, stream, prefixed(request(values(4 * MIB))), MIB)
    answer = client.answer(stream)
    assert answer.status == INVALID_ARGUMENT
    assert "cannot fit into an arena whose largest place is" in answer.text
    assert "(arenas.max_byte_size; " in answer.text
    is_served(front, worker)


# --------------------------------------------------------------------------------------------------------- in the middle


@pytest.mark.parametrize("frame_size", [10_000, 4 * MIB])
@pytest.mark.parametrize("shutdown", [False, True])
def test_the_client_goes_in_the_middle(served: Served, shutdown: bool, frame_size: int) -> None:
    front, worker, _ = served
    whole = prefixed(request(values(FULL)))
    with front.frames() as client:
        stream = client.open()
        content = b"".join(
            frames.frame(frames.DATA, 0, stream, whole[at : at + frame_size]) for at in range(0, len(whole), frame_size)
        )
        client.send(content[:MIB])
        if shutdown:
            client.sock.shutdown(socket.SHUT_WR)
            assert client.ends()
    is_served(front, worker)


def test_a_reset_in_the_middle(served: Served) -> None:
    front, worker, client = served
    whole = prefixed(request(values(FULL)))
    for frame_size in (10_000, MIB):
        stream = client.open()
        send(client, stream, whole[:MIB], frame_size, end=False)
        client.send(frames.rst_stream(stream, frames.CANCEL))
        is_served(front, worker)
    assert answered(client, worker, client.call(request(b"\1"))) == b"\1"


def test_the_stream_ends_in_the_middle(served: Served) -> None:
    front, worker, client = served
    whole = prefixed(request(values(FULL)))
    stream = client.open()
    send(client, stream, whole[:MIB], 100_000)
    assert client.answer(stream).text == "the stream ended in the middle of a message"
    is_served(front, worker)
    assert answered(client, worker, client.call(request(b"\1"))) == b"\1"


@pytest.mark.parametrize("frame_size", [10_000, 4 * MIB])
def test_the_deadline_passes_in_the_middle(served: Served, frame_size: int) -> None:
    """The deadline may also pass in a frame that is read straight into the arena: the rest of it is skipped."""
    front, worker, client = served
    whole = prefixed(request(values(FULL)))
    stream = client.open(grpc_timeout="200m")
    content = b"".join(
        frames.frame(frames.DATA, 0, stream, whole[at : at + frame_size]) for at in range(0, len(whole), frame_size)
    )
    client.send(content[:MIB])
    assert client.answer(stream).status == DEADLINE_EXCEEDED
    is_served(front, worker)
    client.send(content[MIB:])
    assert answered(client, worker, client.call(request(b"\1"))) == b"\1"


@pytest.mark.parametrize("frame_size", [10_000, 4 * MIB])
def test_it_does_not_go_on(frame_size: int) -> None:
    with serving(arenas=WHOLE, grpc={"body_timeout": 0.2}) as (front, (worker,)), front.frames() as client:
        whole = prefixed(request(values(FULL)))
        stream = client.open()
        content = b"".join(
            frames.frame(frames.DATA, 0, stream, whole[at : at + frame_size]) for at in range(0, len(whole), frame_size)
        )
        client.send(content[:MIB])
        assert "did not arrive within 0.2 s" in client.answer(stream).text
        with front.frames() as other:
            assert answered(other, worker, other.call(request(b"\1"))) == b"\1"


def test_a_held_streams_large_messages_are_given_back(served: Served) -> None:
    """One request of a stream may be in flight; a large one waits behind it when the client goes."""
    with serving(arenas=WHOLE, grpc={"max_stream_requests": 1}) as (front, (worker,)):
        with front.frames() as client:
            stream = client.open(STREAM)
            client.data(stream, prefixed(request(b"\1")))
            sent = worker.next()
            send(client, stream, prefixed(request(values(FULL))), MIB, end=False)
            other = client.call(request(b"\2"))
            assert answered(client, worker, other) == b"\2"
        until(lambda: worker.poll() or sent.request_id in worker.cancelled)
        worker.answer(sent, b"late")
        is_served(front, worker)
