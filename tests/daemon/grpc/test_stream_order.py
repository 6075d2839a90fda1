"""The order of answers on one stream: that of the requests, whoever is done first, but for models with several responses."""

from __future__ import annotations

from typing import Any

import pytest

from tensord.daemon.front.status import INVALID_ARGUMENT
from tensord.daemon.grpc import frames
from tests.daemon.grpc.frame_client import STREAM, FrameClient, prefixed, request, serving
from tests.fakes import EchoWorker, until
from tests.records import WholeRequest

MIB = 1 << 20
#: A client that takes large answers at once.
WIDE = ((frames.INITIAL_WINDOW_SIZE, 16 * MIB),)


def asked(client: FrameClient, stream: int, *values: bytes, **fields: Any) -> None:
    for value in values:
        client.data(stream, prefixed(request(value, id=value.decode(), **fields)))


def taken(worker: EchoWorker, count: int) -> dict[str, WholeRequest]:
    """Returns the next requests by their inputs."""
    found = [worker.next() for _ in range(count)]
    return {worker.content(each).decode(): each for each in found}


def ids(client: FrameClient, stream: int, count: int) -> list[str]:
    """Reads until so many answers have come; returns the ids of all that have."""
    while stream not in client.answers or len(client.answers[stream].messages) < count:
        client.step()
    return [answer.infer_response.id for answer in client.answers[stream].streamed()]


def test_whoever_is_done_first_waits_for_those_before_it() -> None:
    """Answers, errors of the worker and refusals of the front alike; another stream of the connection waits for none of them."""
    with serving() as (front, (worker,)), front.frames() as client:
        stream, other = client.open(STREAM), client.open(STREAM)
        asked(client, stream, b"a", b"b")
        asked(client, stream, b"unknown", model="nothing")
        asked(client, stream, b"d")
        asked(client, other, b"e")
        found = taken(worker, 4)
        worker.echo(found["d"])
        worker.complete(found["b"].request_id, code="INTERNAL", message="bad")
        worker.echo(found["e"])
        assert ids(client, other, 1) == ["e"]
        client.synchronise()
        assert stream not in client.answers or not client.answers[stream].messages
        worker.echo(found["a"])
        assert ids(client, stream, 4) == ["a", "b", "unknown", "d"]
        errors = [answer.error_message for answer in client.answers[stream].streamed()]
        assert (errors[0], errors[1], errors[3]) == ("", "bad", "")
        assert "unknown model: 'nothing'" in errors[2]
        # And with nothing before it nothing waits.
        asked(client, stream, b"f")
        worker.echo(worker.next())
        assert ids(client, stream, 5)[4:] == ["f"]


def test_several_responses_wait_for_nothing() -> None:
    """Those of a model that has such, and of one of which that is not known until its first response comes."""
    with serving() as (front, (worker,)), front.frames() as client:
        front.model(worker, name="many", streams=True)
        stream = client.open(STREAM)
        asked(client, stream, b"a")
        asked(client, stream, b"m", model="many")
        asked(client, stream, b"late", b"b")
        found = taken(worker, 4)
        worker.echo(found["b"])
        for name in ("m", "late", "m"):
            worker.answer(found[name], b"", final=False)
        assert ids(client, stream, 3) == ["m", "late", "m"]
        worker.echo(found["a"])
        assert ids(client, stream, 5)[3:] == ["a", "b"]
        worker.echo(found["late"])
        worker.echo(found["m"])
        assert ids(client, stream, 7)[5:] == ["late", "m"]


def test_an_error_that_ends_the_stream_has_its_turn() -> None:
    """What is behind it gets no answer, and its memory is given back."""
    with serving() as (front, (worker,)), front.frames() as client:
        stream = client.open(STREAM, triton_grpc_error="true")
        asked(client, stream, b"a", b"b", b"c", b"d")
        found = taken(worker, 4)
        worker.answer(found["c"], bytes(MIB))
        worker.complete(found["b"].request_id, code="INVALID_ARGUMENT", message="bad")
        client.synchronise()
        assert worker.leases == 1
        worker.echo(found["a"])
        answer = client.answer(stream)
        assert (answer.status, answer.text) == (INVALID_ARGUMENT, "bad")
        assert [each.infer_response.id for each in answer.streamed()] == ["a"]
        until(lambda: not worker.leases)
        until(lambda: worker.poll() or worker.cancelled == [found["d"].request_id])


def test_answers_that_wait_are_given_back_with_their_client() -> None:
    with serving() as (front, (worker,)):
        with front.frames() as client:
            stream = client.open(STREAM)
            asked(client, stream, b"a", b"b")
            found = taken(worker, 2)
            worker.answer(found["b"], bytes(MIB))
            client.synchronise()
            assert worker.leases == 1
        until(lambda: not worker.leases)
        assert worker.cancelled == [found["a"].request_id]


@pytest.mark.parametrize(("most", "size"), [(3, 1), (256, 2 * MIB)], ids=["count", "bytes"])
def test_what_waits_is_bounded(most: int, size: int) -> None:
    """
    1. A stream's first request is not answered; the others are.
    Result: once as many answers wait as requests may be in flight, or 4 MiB of them, no more requests are taken; they are, later.
    """
    with serving(grpc={"max_stream_requests": most}) as (front, (worker,)), front.frames(WIDE) as client:
        stream = client.open(STREAM)
        asked(client, stream, b"0")
        first = worker.next()
        for number in (b"1", b"2"):
            asked(client, stream, number)
            worker.answer(worker.next(), bytes(size))
        # The front has read those answers where it sends one that comes behind them from the same worker.
        call = client.call(request(b"another"))
        worker.echo(worker.next())
        assert client.answer(call).values == b"another"
        asked(client, stream, b"3")
        asked(client, stream, b"4", model="nothing")
        client.synchronise()
        assert worker.idle()
        worker.echo(first)
        worker.echo(worker.next())
        assert ids(client, stream, 5) == ["0", "1", "2", "3", "4"]
        until(lambda: not worker.leases)


def test_a_stream_with_enough_requests_goes_on_when_its_client_has_read() -> None:
    """
    1. A stream has as many requests in flight as it may, and another one waits.
    2. All are answered, with more than 4 MiB, of which the client reads nothing.
    Result: as soon as it has read them, its next request is taken.
    """
    settings = ((frames.INITIAL_WINDOW_SIZE, 0),)
    with serving(grpc={"max_stream_requests": 2}) as (front, (worker,)), front.frames(settings) as client:
        stream = client.open(STREAM)
        asked(client, stream, b"0", b"1", b"2")
        for size in (3 * MIB, 3 * MIB, 1):
            worker.answer(worker.next(), bytes(size))
        # The front has read those answers where it sends one that comes behind them from the same worker.
        call = client.call(request(b"another"))
        worker.echo(worker.next())
        client.send(frames.window_update(call, MIB))
        assert client.answer(call).values == b"another"
        client.send(frames.window_update(stream, 16 * MIB))
        assert len(ids(client, stream, 3)) == 3
        asked(client, stream, b"3")
        worker.echo(worker.next())
        assert ids(client, stream, 4)[3:] == ["3"]


def test_a_request_that_others_wait_for_is_not_held_up_by_their_answers() -> None:
    """
    1. Answers that wait for a stream's first request fill the connection's share of response memory.
    2. The worker gives that request back, as it does for connections that do not take their answers.
    Result: it is sent again without room, because its answer makes room; all are answered in order.
    """
    arenas = {"byte_size": MIB, "max_byte_size": 8 * MIB, "connection_share": 0.25}
    with serving(workers=2, arenas=arenas) as (front, (worker, quick)), front.frames(WIDE) as client:
        front.model(quick, name="quick")
        stream = client.open(STREAM)
        asked(client, stream, b"0")
        first = (worker if not worker.idle(0.05) else quick).next()
        asked(client, stream, b"1", b"2", b"3", model="quick")
        behind = [quick.next() for _ in range(3)]
        for each in behind:
            quick.answer(each, bytes(MIB))
        until(lambda: worker.poll() or quick.poll() or first.request_id in (*worker.cancelled, *quick.cancelled))
        busy = worker if first.request_id in worker.cancelled else quick
        busy.complete(first.request_id, code="CANCELLED", message="the request was cancelled")
        busy.echo(busy.next())
        assert ids(client, stream, 4) == ["0", "1", "2", "3"]
        until(lambda: not quick.leases)
