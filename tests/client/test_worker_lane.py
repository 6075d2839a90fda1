"""A lane without a daemon: the test is the worker, reads what was sent, and answers it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
from tensord_client.answer_memory import HeldResults
from tensord_client.common.call import Call
from tensord_client.common.scheduling import UNSCHEDULED
from tensord_client.errors import Internal, Unavailable
from tensord_client.lane_request import LaneRequest, Sender
from tensord_client.memory import Memory
from tensord_client.native import wire
from tensord_client.worker_lane import ClientLane

from tensord.shm.messages import WIRE_VERSION, AnswerRecord, PrepareAnswer, PreparedAnswer, PreparedTensor, WireVersion
from tests.daemon_process import PATIENCE, wait_until
from tests.raw_lane import packed

_NUMBERED = PrepareAnswer(0, PreparedAnswer(3, (PreparedTensor("y", "FP32", (2,)),), {"kind": "good"}))


class Loop:
    """An event loop that keeps what it is to call."""

    def __init__(self) -> None:
        self.soon: list[Callable[[], None]] = []

    def call_soon(self, what: Callable[[], None]) -> None:
        self.soon.append(what)


class Connection(Sender):
    """A connection that nothing is sent again on."""

    def __init__(self) -> None:
        self.begin()
        self.held = HeldResults(64)


class Ends:
    """Both ends of a lane of a worker that takes 1000 requests at a time, and knows the client's edition."""

    def __init__(self) -> None:
        ours, self.worker = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.worker.setblocking(False)
        self.connection = Connection()
        self.lane = ClientLane(
            ours, 1, Memory(), itertools.count(1 << 32), self.connection.held, 1 << 20, most=1000, spin_ns=0
        )
        self.worker.send(packed(WireVersion(WIRE_VERSION)))
        self.receive()
        self.sent()

    def request(self) -> LaneRequest:
        """Makes a request of four bytes. Each has a prepared request of its own, so that all are sent in full."""
        own, inputs = wire.own_fields("", 0, UNSCHEDULED), [("x", "FP32", (1,), None)]
        prepared = wire.prepared_request("m", next(self.lane.ids), inputs, (), {})
        return LaneRequest(
            self.connection, Call("m", {}), wire.Placed((prepared, [bytes(4)], (), None, None, None)), own
        )

    def submit(self, loop: Loop | None = None) -> tuple[LaneRequest, int]:
        made = self.request()
        return made, self.lane.submit(made, loop)

    def receive(self) -> None:
        with self.lane.reading:
            assert self.lane.receive()

    def sent(self) -> list[int]:
        """Returns how many records each datagram has that the worker has received."""
        found = []
        while True:
            try:
                datagram = self.worker.recv(1 << 17)
            except BlockingIOError:
                return found
            found.append(len(wire_records(datagram)))

    def close(self) -> None:
        self.lane.close(Internal("the test has ended"))
        self.worker.close()


def wire_records(datagram: bytes) -> list[Any]:
    assert datagram[:1] == b"\x01"
    found: list[Any] = msgspec.msgpack.decode(datagram[1:])
    return found


@pytest.fixture
def ends() -> Iterator[Ends]:
    made = Ends()
    yield made
    made.close()


def answer(
    request_id: int, prepared: int | PreparedAnswer = 0, contents: tuple[bytes, ...] | None = None
) -> AnswerRecord:
    content = np.array([request_id % 1000, 7], np.float32).tobytes()
    return AnswerRecord(request_id, prepared, (content,) if contents is None else contents, timing=(1, 2, 3))


def test_what_a_loop_submits_beside_others_leaves_in_one_datagram(ends: Ends) -> None:
    loop = Loop()
    ends.submit(loop)
    assert (ends.sent(), loop.soon) == ([1], []), "an idle worker gets its first request at once"
    ids = [ends.submit(loop)[1] for _ in range(20)]
    assert (ends.sent(), len(loop.soon)) == ([], 1)
    assert sorted(ends.lane.in_flight)[1:] == ids
    loop.soon.pop()()
    assert ends.sent() == [20]


def test_a_request_of_a_thread_leaves_at_once_and_behind_those_that_a_loop_keeps(ends: Ends) -> None:
    loop = Loop()
    for _ in range(3):
        ends.submit(loop)
    assert ends.sent() == [1]
    ends.submit()
    assert ends.sent() == [2, 1]
    ends.submit()
    assert ends.sent() == [1]
    loop.soon.pop()()
    assert ends.sent() == []


def test_what_is_kept_is_cut_into_datagrams_that_the_socket_takes(ends: Ends) -> None:
    loop = Loop()
    ends.submit(loop)
    for _ in range(9):
        made = ends.request()
        made.placed.contents[0] = bytes(15 << 10)
        ends.lane.submit(made, loop)
    loop.soon.pop()()
    assert ends.sent() == [1, 4, 4, 1]


def test_the_answers_of_a_datagram_are_their_requests(ends: Ends) -> None:
    asked = [ends.submit() for _ in range(5)]
    ends.worker.send(packed(_NUMBERED, *[answer(request_id) for _, request_id in reversed(asked)]))
    ends.receive()
    assert not ends.lane.in_flight
    for request, request_id in asked:
        assert request.done()
        found = request.result(0)
        assert (found["y"].tolist(), found.version, found.times) == ([request_id % 1000, 7.0], 3, (1, 2, 3))
        assert found.parameters == {"kind": "good"}
        found["y"][0] = 5  # its own array


def test_a_request_has_one_last_answer(ends: Ends) -> None:
    """An answer to a request that has had its last answer is dropped, also in the same datagram."""
    (first, first_id), (second, second_id) = ends.submit(), ends.submit()
    again = answer(first_id, 0, (np.zeros(2, np.float32).tobytes(),))
    ends.worker.send(packed(_NUMBERED, answer(first_id), again, answer(second_id)))
    ends.receive()
    ends.worker.send(packed(again))
    ends.receive()
    assert first.result(0)["y"].tolist() == [first_id % 1000, 7.0]
    assert second.result(0)["y"].tolist() == [second_id % 1000, 7.0]
    assert ends.lane.usable


@pytest.mark.parametrize("wrong", ["record", "number"])
def test_no_answer_of_a_malformed_datagram_is_taken(ends: Ends, wrong: str) -> None:
    request, request_id = ends.submit()
    if wrong == "record":
        datagram = bytearray(packed(_NUMBERED, answer(request_id)))
        datagram[3] += 1  # it would have another record
        ends.worker.send(datagram)
    else:
        ends.worker.send(packed(_NUMBERED, answer(request_id), answer(request_id + 1, 5)))
    ends.receive()
    assert not ends.lane.usable
    with pytest.raises(Internal, match="which may not be run twice"):
        request.result(0)


def test_a_request_on_lanes_that_were_not_taken(ends: Ends) -> None:
    """The request is sent once more, and then ends with an error after which its caller may send it again."""
    request, _ = ends.submit()
    error = Unavailable("the worker could open no lane")
    request.lane_ended(False, error, untaken=True)
    assert request.claim()
    request.lane_ended(False, error, untaken=True)
    with pytest.raises(Unavailable, match="could open no lane"):
        request.result(0)


@pytest.mark.parametrize("size", [4, 12])
def test_contents_of_another_size_than_the_output_are_an_error(ends: Ends, size: int) -> None:
    request, request_id = ends.submit()
    other, other_id = ends.submit()
    ends.worker.send(packed(_NUMBERED, answer(request_id, 0, (bytes(size),)), answer(other_id)))
    ends.receive()
    with pytest.raises(Internal, match="malformed"):
        request.result(0)
    assert other.result(0)["y"].tolist() == [other_id % 1000, 7.0]


def test_an_answer_to_a_cancelled_request_is_dropped(ends: Ends) -> None:
    request, request_id = ends.submit()
    request.cancel()
    ends.worker.send(packed(_NUMBERED, answer(request_id)))
    ends.receive()
    assert not ends.lane.in_flight
    with pytest.raises(Exception, match="cancelled"):
        request.result(0)


def test_outputs_go_to_the_callers_arrays(ends: Ends) -> None:
    request, request_id = ends.submit()
    place = request.call.places = {"y": np.zeros(2, np.float32)}
    ends.worker.send(packed(_NUMBERED, answer(request_id)))
    ends.receive()
    found = request.result(0)
    assert found["y"] is place["y"]
    assert place["y"].tolist() == [request_id % 1000, 7.0]


def asked(ends: Ends, byte_size: int = 4) -> LaneRequest:
    made = ends.request()
    made.placed.contents[0] = bytes(byte_size)
    made.lane, made.request_id = ends.lane, ends.lane.submit(made)
    return made


def fill(ends: Ends) -> None:
    """Submits requests until the worker's socket has no room for the last one."""
    while not ends.lane.socket.backlog:
        asked(ends, 15 << 10)


def waits_for(request: LaneRequest) -> Callable[[], None]:
    """Has a thread wait for an answer to the request. Returns a function that waits for the thread's end."""

    def wait() -> None:
        with pytest.raises(Internal):
            request.result(PATIENCE)

    thread = threading.Thread(target=wait)
    thread.start()
    wait_until(lambda: request.lane is not None and request.lane.reading.held, "the thread to read")
    return thread.join


def awaited_once(request: LaneRequest) -> Callable[[], None]:
    """Has an event loop read the lane, which is closed then."""
    loop = asyncio.new_event_loop()
    assert request.lane is not None
    request.lane.attach(loop)
    loop.close()
    return lambda: None


@pytest.mark.parametrize("reads", [lambda _: lambda: None, waits_for, awaited_once], ids=["nobody", "thread", "loop"])
def test_what_found_the_socket_full_is_sent_whoever_waits(
    ends: Ends, reads: Callable[[LaneRequest], Callable[[], None]]
) -> None:
    """
    1. Nobody reads the lane, or a thread waits there for another answer, or an event loop did that is closed.
    2. The worker takes nothing for a time, until its socket is full. 3. A request is cancelled.
    Result: the worker gets all requests and the cancellation, though it answers nothing. They stayed until somebody waited.
    """
    first = asked(ends)
    end = reads(asked(ends))
    fill(ends)
    first.cancel()
    ends.worker.settimeout(PATIENCE)
    came: list[Any] = []
    while ["X", first.request_id] not in came:
        came += wire_records(ends.worker.recv(1 << 17))
    assert [record[1] for record in came if record[0] == "q"] == sorted(ends.lane.in_flight)
    ends.lane.close(Internal("the test has ended"))
    end()


def test_a_lane_that_ends_closes_its_socket_though_that_is_full(ends: Ends) -> None:
    request = asked(ends)
    fill(ends)
    ends.lane.close(Internal("the test has ended"))
    wait_until(lambda: ends.lane.socket.sock.fileno() < 0, "the socket to be closed")
    with pytest.raises(Internal, match="may not be run twice"):
        request.result(0)


def test_a_lane_is_read_until_what_was_cancelled_has_its_end(ends: Ends) -> None:
    """
    1. A thread takes one of many responses. 2. The worker fills the socket with others, and reads nothing then. 3. The thread
    leaves, and waits for nothing more.
    Result: the worker sends what it has, then takes the cancellation, and sends the end. It had no room, and kept the request.
    """
    request = asked(ends)
    response = packed(answer(request.request_id, msgspec.structs.replace(_NUMBERED.prepared, final=False)))
    ends.worker.send(response)
    responses = request.responses(PATIENCE)
    assert next(responses)["y"].tolist() == [request.request_id % 1000, 7.0]
    sent = 0
    with contextlib.suppress(BlockingIOError):
        while ends.worker.send(response):
            sent += 1
    responses.close()  # type: ignore[attr-defined]
    ends.worker.settimeout(PATIENCE)
    for _ in range(2 * sent):
        ends.worker.send(response)
    came: list[Any] = []
    while ["X", request.request_id] not in came:
        came += wire_records(ends.worker.recv(1 << 17))
    ends.worker.send(packed(_NUMBERED, answer(request.request_id)))
    wait_until(lambda: not (ends.lane.in_flight or ends.lane.watched), "the request to end")


def test_no_thread_keeps_the_socket_of_a_dropped_client_though_that_is_full(ends: Ends) -> None:
    """The worker hangs: it neither takes anything nor closes its end."""
    fill(ends)
    ends.lane.leave()
    wait_until(lambda: not ends.lane.socket._has_sender, "the thread that sends to end")
    ends.lane.ended = False
