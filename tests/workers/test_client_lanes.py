"""Clients' own lanes in a worker: served as any, believed in nothing, and nobody else's affair."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gc
import os
import re
import socket
import sys
import time
import tracemalloc
from collections.abc import Iterator
from types import FrameType, SimpleNamespace

import numpy as np
import pytest
from msgspec.structs import replace

from tensord.shm.channel import MAX_DATAGRAM, ChannelClosed, pair
from tensord.shm.control_records import LaneClient, LaneClosed, LaneLimits, LaneOpened
from tensord.shm.messages import (
    TIMING,
    WIRE_VERSION,
    AnswerRecord,
    Cancel,
    EndSequence,
    Prepare,
    PreparedRequest,
    PreparedTensor,
    RegionSlice,
    Release,
    RequestedOutput,
    RequestRecord,
    SegmentClosed,
    SegmentOpened,
    SegmentRefused,
    Slice,
    Taken,
    WireVersion,
)
from tensord.shm.operations import Peer
from tensord.shm.record import Record, encoder
from tensord.shm.seldom import LineRate
from tensord.workers.models.model_version import ModelVersion
from tensord.workers.native import extensions
from tensord.workers.parameters.parameter_set import ParameterSet
from tensord.workers.programs.executable import Content
from tensord.workers.programs.grouped_calls import GroupedProgram
from tensord.workers.scheduling.queue import QueueRules
from tests.daemon_process import ROOT, descriptors
from tests.raw_lane import SEALS, RawLane, addsub, memory, packed
from tests.records import Tensor
from tests.repositories import total_model
from tests.work.counter import ROOMS
from tests.workers.worker_loop import LIMITS, WorkerLoop, ever_queued

CLIENT = 1000
MODELS = ("addsub", "identity", "repeat")
FUTURE_WRITE = 0x10


@pytest.fixture(scope="module")
def loop(leaves_nothing: None) -> Iterator[WorkerLoop]:
    made = WorkerLoop()
    for name in MODELS:
        made.load(ROOT / "bench" / "models" / name)
    yield made
    made.close()


@pytest.fixture(scope="module")
def total(loop: WorkerLoop, tmp_path_factory: pytest.TempPathFactory) -> ModelVersion:
    """Loads a model that keeps a sum for each sequence; returns its version."""
    loop.load(total_model(tmp_path_factory.mktemp("models")))
    return loop.worker._models.find("total", 1)


@pytest.fixture
def lane(loop: WorkerLoop) -> Iterator[RawLane]:
    made = loop.open_client(CLIENT)
    loop.worker._refusals._lines = 0
    yield made
    made.close()
    for _ in range(3):
        loop.worker.iterate()
    assert loop.closed() == [CLIENT]
    assert loop.worker._regions.private_byte_size == 0
    assert loop.worker._regions.leaving == []
    assert [each.peer for each in loop.worker._submitters.values()] == [7]


def vector(value: float, rows: int = 1) -> bytes:
    return np.full((rows, 16), value, np.float32).tobytes()


def sums(lane: RawLane, answer: AnswerRecord) -> tuple[float, float]:
    outputs = lane.outputs(answer)
    return float(np.frombuffer(outputs["OUTPUT0"], np.float32)[0]), float(
        np.frombuffer(outputs["OUTPUT1"], np.float32)[0]
    )


def add(loop: WorkerLoop, lane: RawLane, a: float = 3.0, b: float = 1.0) -> None:
    """Checks that the lane is served."""
    lane.ask(addsub(), vector(a), vector(b))
    (answer,) = loop.client_answers(lane, 1)
    assert sums(lane, answer) == (a + b, a - b)


def together(lane: RawLane, count: int) -> None:
    """Sends so many requests in one datagram: all of them wait before any runs."""
    lane.send(*[RequestRecord(number + 1, addsub(), (vector(3), vector(1))) for number in range(count)])
    lane.last_id = count


def received(lane: RawLane) -> list[AnswerRecord]:
    """Returns the answers that have come."""
    answers: list[AnswerRecord] = []
    while (found := lane.receive()) is not None:
        answers += found
    return answers


def leave(loop: WorkerLoop, *lanes: RawLane) -> None:
    """Closes the lanes of clients ``CLIENT`` and those that follow it; each end is told once."""
    for lane in lanes:
        lane.close()
    while loop.worker._clients:
        loop.worker.iterate()
    assert sorted(loop.closed()) == list(range(CLIENT, CLIENT + len(lanes)))


def ended(loop: WorkerLoop, lane: RawLane) -> bool:
    """Returns whether the worker has closed its end of the lane by now."""
    for _ in range(4):
        loop.worker.iterate()
    try:
        while lane.receive() is not None:
            pass
    except ChannelClosed:
        return True
    return False


# ------------------------------------------------------------------------------------------------------------ it serves


def test_inputs_and_outputs_in_segments_are_not_copied(loop: WorkerLoop, lane: RawLane) -> None:
    """Fixed slots: one number for each, and nothing but it in a call. Soon outside of Python, too."""
    count, before = 1 << 20, loop.worker._poller.lane_requests
    a = lane.open_segment(3, 4 * count)
    b = lane.open_segment(4, 4 * count)
    source, target = RegionSlice("@3", 0, 4 * count), RegionSlice("@4", 0, 4 * count)
    prepared = PreparedRequest(
        "identity", 0, (PreparedTensor("INPUT0", "FP32", (count,), source),), (RequestedOutput("OUTPUT0", target),)
    )
    lane.prepare(0, prepared)
    copied = []
    for value in range(1, 40):
        a[: 4 * count] = np.full(count, value, np.float32).tobytes()
        lane.ask(0, trace=TIMING)
        (answer,) = loop.client_answers(lane, 1)
        assert lane.outputs(answer)["OUTPUT0"] == a[:]
        assert np.frombuffer(b[:], np.float32).tolist()[:2] == [value, value]
        assert answer.timing is not None
        copied.append(answer.timing[2])
    # The first run shows how XLA allocates its outputs.
    assert copied[3:] == [0] * 36
    assert loop.worker._poller.lane_requests - before > 20 or not extensions.available
    # What was learned goes with the segment.
    lane.close_segment(3)
    lane.ask(0)
    (failed,) = loop.client_answers(lane, 1)
    assert failed.message == "segment '@3' is not open on this lane"
    lane.open_segment(3, 4 * count)
    lane.ask(0)
    assert loop.client_answers(lane, 1)[0].code == ""
    assert b[:] == bytes(4 * count)
    assert lane.kind(answer).outputs[0].region == target


def test_large_outputs_without_a_place_come_in_leased_memory(loop: WorkerLoop, lane: RawLane) -> None:
    rows = 1 << 15
    source = lane.open_segment(0, rows * 64)
    source[:] = vector(2, rows)
    places = (RegionSlice("@0", 0, rows * 64),) * 2
    for _ in range(5):
        lane.ask(addsub(rows, places))
        (answer,) = loop.client_answers(lane, 1)
        assert lane.outputs(answer) == {"OUTPUT0": vector(4, rows), "OUTPUT1": vector(0, rows)}
        assert answer.lease is not None
        lane.release(answer.lease)


def test_an_idle_lane_has_no_memory_for_answers(loop: WorkerLoop, lane: RawLane) -> None:
    add(loop, lane)
    submitter = next(each for each in loop.worker._submitters.values() if each.peer == CLIENT)
    assert submitter.lane.arena.segments == {}


def test_what_only_a_front_may_say_is_ignored(loop: WorkerLoop, lane: RawLane) -> None:
    lane.ask(addsub(), vector(5), vector(1), received_ns=1, strikes=9, trace=3 | TIMING)
    (answer,) = loop.client_answers(lane, 1)
    assert sums(lane, answer) == (6, 4)
    assert answer.trace is None
    assert answer.timing is not None
    assert answer.timing[0] < 60_000_000_000


def test_the_supervisor_ends_a_lane(loop: WorkerLoop) -> None:
    lane = loop.open_client(CLIENT + 1)
    add(loop, lane)
    loop.tell(LaneClosed(CLIENT + 1))
    assert ended(loop, lane)
    loop.tell(LaneClosed(CLIENT + 1))
    loop.worker.iterate()
    assert loop.closed() == [CLIENT + 1]
    lane.close()


# ------------------------------------------------------------------------------------------------------- segments are its own


def test_nobody_names_anothers_segment(loop: WorkerLoop, lane: RawLane) -> None:
    """Two lanes' segments of one number are two memories, also for requests that are answered outside of Python."""
    other = loop.open_client(CLIENT + 1)
    memories = {each: each.open_segment(3, 4096) for each in (lane, other)}
    places = (RegionSlice("@3", 0, 64), RegionSlice("@3", 64, 64))
    for each, value in ((lane, 1.0), (other, 100.0)):
        memories[each][:128] = vector(value) + vector(value / 2)
        each.prepare(0, addsub(places=places, outputs=(RequestedOutput("OUTPUT0", RegionSlice("@3", 128, 64)),)))
    for _ in range(40):
        for each, value in ((lane, 1.0), (other, 100.0)):
            memories[each][128:192] = bytes(64)
            each.ask(0)
            (answer,) = loop.client_answers(each, 1)
            assert each.outputs(answer) == {"OUTPUT0": vector(1.5 * value)}
    other.close_segment(3)
    other.ask(0)
    (answer,) = loop.client_answers(other, 1)
    assert (answer.code, answer.message) == ("INVALID_ARGUMENT", "segment '@3' is not open on this lane")
    lane.ask(0)
    (answer,) = loop.client_answers(lane, 1)
    assert lane.outputs(answer) == {"OUTPUT0": vector(1.5)}
    other.close()
    assert ended(loop, other)
    assert loop.closed() == [CLIENT + 1]


def test_a_segment_is_there_for_requests_before_its_end(loop: WorkerLoop, lane: RawLane) -> None:
    """The segment serves them also when its end is in the same datagram; afterwards its memory is unmapped."""
    lane.open_segment(3, 4096)[:128] = vector(5) + vector(1)
    places = (RegionSlice("@3", 0, 64), RegionSlice("@3", 64, 64))
    lane.send(RequestRecord(1, addsub(places=places)), SegmentClosed(3), RequestRecord(2, addsub(places=places)))
    first, second = sorted(loop.client_answers(lane, 2), key=lambda answer: answer.request_id)
    assert sums(lane, first) == (6, 4)
    assert second.message == "segment '@3' is not open on this lane"
    loop.worker.iterate()
    assert loop.worker._regions.leaving == []
    assert loop.worker._regions.private_byte_size == 0


def test_too_many_segments_and_too_many_bytes_are_refused_with_both_numbers(loop: WorkerLoop, lane: RawLane) -> None:
    for number in range(LIMITS.segments):
        lane.open_segment(number, 4096)
    lane.open_segment(9, 4096)
    lane.ask(addsub(places=(RegionSlice("@9", 0, 64),) * 2))
    (answer,) = loop.client_answers(lane, 1)
    assert answer.code == "UNAVAILABLE"
    assert answer.message == "segment 9 was refused: 4 are open on this lane, at most 4 may be"
    lane.close_segment(0)
    fd = os.memfd_create("large", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, LIMITS.segment_byte_size)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
    lane.send(SegmentOpened(10, LIMITS.segment_byte_size), fds=(fd,))
    os.close(fd)
    lane.ask(addsub(places=(RegionSlice("@10", 0, 64),) * 2))
    (answer,) = loop.client_answers(lane, 1)
    assert answer.message == (
        "segment 10 was refused: with it this lane's segments have 67121152 bytes, at most 67108864 are allowed"
    )
    assert [each.segment for each in lane.received if isinstance(each, SegmentRefused)] == [9, 10]
    add(loop, lane)


def test_registered_regions_are_named_as_ever(loop: WorkerLoop, lane: RawLane) -> None:
    lane.ask(addsub(places=(RegionSlice("frames", 0, 64),) * 2))
    (answer,) = loop.client_answers(lane, 1)
    assert (answer.code, answer.message) == ("NOT_FOUND", "Unable to find shared memory region: 'frames'")


# ------------------------------------------------------------------------------------------------------------- its bounds


def test_more_requests_than_may_be_in_flight_are_refused_with_both_numbers(loop: WorkerLoop, lane: RawLane) -> None:
    lane.prepare(3, addsub())
    for round in range(3):
        first = lane.last_id + 1
        lane.last_id += 20
        lane.send(*[RequestRecord(first + n, 3, (vector(n), vector(1))) for n in range(20)])
        answers = {answer.request_id - first: answer for answer in loop.client_answers(lane, 20)}
        assert [sums(lane, answers[n]) for n in range(16)] == [(n + 1, n - 1) for n in range(16)], round
        assert {(answers[n].code, answers[n].message) for n in range(16, 20)} == {
            ("UNAVAILABLE", "16 requests are in flight on this lane, at most 16 may be")
        }


def test_who_reads_nothing_is_asked_nothing_more_and_costs_bounded_memory(loop: WorkerLoop, lane: RawLane) -> None:
    """A client that reads again gets every answer."""
    lane.prepare(3, addsub(8))
    asked = 0
    for _ in range(10_000):
        try:
            lane.ask(3, vector(asked, 8), vector(1, 8))
        except BlockingIOError:
            break
        asked += 1
        loop.worker.iterate()
    submitter = next(each for each in loop.worker._submitters.values() if each.peer == CLIENT)
    assert 10 < asked < 10_000
    waiting = submitter.lane.channel.waiting
    assert 0 < waiting <= 2 * LIMITS.in_flight
    # Others are served as ever, outside of Python, too.
    other = loop.open_client(CLIENT + 1)
    for _ in range(40):
        add(loop, other)
    other.close()
    # What was being computed then has been answered since.
    assert waiting <= submitter.lane.channel.waiting <= 2 * LIMITS.in_flight
    lane.last_id -= 1  # the one that was not sent
    answers = loop.client_answers(lane, asked)
    assert sorted(answer.request_id for answer in answers) == list(range(1, asked + 1))
    assert {answer.code for answer in answers} <= {"", "UNAVAILABLE"}
    add(loop, lane)
    assert loop.closed() == [CLIENT + 1]


def clients_memory() -> int:
    """Counts open descriptors of clients' memory."""
    return sum("memfd:client" in what for what in descriptors().values())


@pytest.fixture
def calls(loop: WorkerLoop, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Loads the policy and records the calls of grouped programs: for how many requests each was."""
    found: list[int] = []
    run = GroupedProgram.run

    def counted(self: GroupedProgram, chosen: ParameterSet | None = None) -> list[Content]:
        found.append(self.rows)
        return run(self, chosen)

    monkeypatch.setattr(GroupedProgram, "run", counted)
    loop.load(ROOT / "bench" / "lane" / "models" / "policy")
    return found


def policy(number: int) -> PreparedRequest:
    """Returns a simulator's request: a frame and a state in a segment, and a place for its actions."""
    image, state, actions = (
        RegionSlice(f"@{number}", at, size) for at, size in ((0, 27648), (27648, 128), (27776, 128))
    )
    inputs = PreparedTensor("image", "UINT8", (96, 96, 3), image), PreparedTensor("state", "FP32", (32,), state)
    return PreparedRequest("policy", 0, inputs, (RequestedOutput("actions", actions),))


def test_requests_of_many_lanes_share_calls_as_those_of_one_do(loop: WorkerLoop, calls: list[int]) -> None:
    """64 simulators with a request each, beside one client with 64 requests, in C and in Python."""
    count = 64
    limits = replace(LIMITS, in_flight=count)
    together: dict[str, list[list[int]]] = {}
    for way, opened in (("many", count), ("one", 1)):
        lanes = [loop.open_client(CLIENT + n, limits) for n in range(opened)]
        for lane in lanes:
            lane.open_segment(0, 1 << 16)
            lane.prepare(3, policy(0))
        rounds = together[way] = []
        for _ in range(6):
            calls.clear()
            for at in range(count):
                lanes[at % len(lanes)].ask(3)
            left = count
            while left:
                loop.worker.iterate()
                left -= sum(len(received(lane)) for lane in lanes)
            rounds.append(sorted(calls))
        leave(loop, *lanes)
    assert together["many"][-1] == together["one"][-1] == [8] * (count // 8)


def test_who_asks_again_at_once_does_not_keep_the_c_part_out(loop: WorkerLoop, calls: list[int]) -> None:
    """Clients begin together, and each asks again as soon as it is answered: something waits in the worker at any time."""
    lanes = [loop.open_client(CLIENT + n) for n in range(64)]
    for lane in lanes:
        lane.open_segment(0, 1 << 16)
        lane.prepare(3, policy(0))
        lane.ask(3)
    answered = in_c = 0
    while answered < 40 * len(lanes):
        before = loop.worker._poller.lane_requests
        loop.worker.iterate()
        in_c += loop.worker._poller.lane_requests - before
        for lane in lanes:
            for answer in received(lane):
                assert answer.code == "", answer.message
                answered += 1
                lane.ask(3)
    assert in_c > answered // 2 or not extensions.available
    leave(loop, *lanes)


def test_descriptors_that_come_where_none_belong_are_closed(loop: WorkerLoop) -> None:
    """With the version, a request or nothing at all, with more than the worker takes, and behind what has ended the lane."""
    before = clients_memory()
    fd, mapping = memory(1 << 16)
    opened = packed(SegmentOpened(1, 1 << 16))
    version, garbage = packed(WireVersion(WIRE_VERSION)), b"\x01\xff"
    lives: list[list[tuple[bytes, int]]] = [
        [(version, 4)],
        [(b"", 4)],
        [(version, 0), (b"", 1), (opened, 1)],
        *([(version, 0), (opened, count)] for count in (2, 4, 5, 9)),
        [(version, 0), (packed(RequestRecord(1, addsub(), (vector(1), vector(1)))), 1)],
        [(version, 0), (packed(SegmentOpened(1, 4096), SegmentOpened(2, 4096)), 1)],
        [(version, 0), (b"\x02junk", 1)],
        [(version, 0), (b"junk", 3)],
        [(version, 0), (packed(Release(((0, 0, 0),))), 2)],
        [(version, 0), (garbage, 0), (opened, 1), (opened, 1)],
        [(version, 0), (packed(Prepare(0, addsub()), RequestRecord(1, 0, ())), 0), (garbage, 1), (opened, 1)],
        [(version, 0), (opened, 1), (opened, 1), (opened, 1)],
    ]
    for peer, life in enumerate(lives, CLIENT):
        lane = loop.open_client(peer, agree=False)
        for content, count in life:
            lane.send_bytes(content, *[fd] * count)
        assert ended(loop, lane)
        lane.close()
    assert sorted(loop.closed()) == list(range(CLIENT, CLIENT + len(lives)))
    mapping.close()
    os.close(fd)
    assert clients_memory() == before


def test_who_gives_no_lease_back_costs_its_own_requests(loop: WorkerLoop, lane: RawLane) -> None:
    """Each waits for its time and is told both numbers; nobody else's do."""
    rows = 1 << 17
    lane.open_segment(0, rows * 64)
    places = (RegionSlice("@0", 0, rows * 64),) * 2
    leases = []
    for _ in range(2):
        lane.ask(addsub(rows, places))
        (answer,) = loop.client_answers(lane, 1)
        if answer.lease is not None:
            leases.append(answer.lease)
    assert answer.code == "UNAVAILABLE"
    assert answer.message == (
        f"no room for an answer of {2 * rows * 64} bytes in the response arena: {2 * rows * 64} of {LIMITS.response_byte_size} "
        "are in use"
    )
    add(loop, lane)
    lane.release(*leases)
    lane.ask(addsub(rows, places))
    assert loop.client_answers(lane, 1)[0].code == ""


def test_answers_to_all_lanes_of_a_user_are_bounded(loop: WorkerLoop) -> None:
    """In response memory and blocked: both numbers are told, other users are served, and what one lane gives back another has."""
    most, rows = 2 << 20, 1 << 13
    limits = replace(LIMITS, max_owner_response_byte_size=most)
    first, second, other = [loop.open_client(CLIENT + n, limits, uid=uid) for n, uid in enumerate((77, 77, 78))]
    places = (RegionSlice("@0", 0, rows * 64),) * 2
    leases = []
    for lane in (first, second):
        lane.open_segment(0, rows * 64)
        lane.ask(addsub(rows, places))
        (answer,) = loop.client_answers(lane, 1)
        assert answer.lease is not None, answer.message
        leases.append(answer.lease)
    second.ask(addsub(rows, places))
    while not loop.worker._dispatcher._outbox.blocked:
        loop.worker.iterate()
    first.ask(addsub(), vector(1), vector(2))
    (refused,) = loop.client_answers(first, 1)
    assert (refused.code, refused.message) == (
        "UNAVAILABLE",
        f"{3 << 20} bytes of answers to clients of this user are held, at most {most} may be "
        "(clients.max_owner_response_byte_size)",
    )
    add(loop, other)
    (refused,) = loop.client_answers(second, 1)
    assert (refused.code, refused.message) == (
        "UNAVAILABLE",
        f"no room for an answer of {1 << 20} bytes in the response arenas of this user: {most} of {most} are in use "
        "(clients.max_owner_response_byte_size)",
    )
    add(loop, first)
    second.ask(addsub(rows, places))
    while not loop.worker._dispatcher._outbox.blocked:
        loop.worker.iterate()
    first.release(leases[0])
    assert loop.client_answers(second, 1)[0].code == ""
    while first.responses:
        loop.worker.iterate()
        first.receive()
    leave(loop, first, second, other)
    assert loop.worker._owners == {}


def test_a_lane_that_holds_little_is_served_whatever_its_user_s_others_hold(loop: WorkerLoop) -> None:
    """It has its share of the user's bound, small answers and large ones, and no more."""
    most, rows = 2 << 20, 1 << 13
    limits = replace(LIMITS, max_owner_response_byte_size=most)
    full, other = [loop.open_client(CLIENT + n, limits) for n in range(2)]
    places = (RegionSlice("@0", 0, rows * 64),) * 2
    for lane in (full, full, other):
        if not lane.segments:
            lane.open_segment(0, rows * 64)
        lane.ask(addsub(rows, places))
        (answer,) = loop.client_answers(lane, 1)
        assert answer.lease is not None, answer.message
    for lane in (full, other):
        lane.ask(addsub(), vector(1), vector(2))
        (refused,) = loop.client_answers(lane, 1)
        assert (refused.code, refused.message.split(" of answers")[0]) == ("UNAVAILABLE", f"{3 << 20} bytes")
    third = loop.open_client(CLIENT + 2, limits)
    add(loop, third)
    leave(loop, full, other, third)


def test_requests_on_all_lanes_of_a_user_are_bounded(loop: WorkerLoop) -> None:
    """As they are kept. Both numbers are told, a lane has its share whatever the others hold, and all is given back."""
    limits = replace(LIMITS, max_owner_request_byte_size=20 << 10)
    full, other = [loop.open_client(CLIENT + n, limits, uid=77) for n in range(2)]
    loop.worker.iterate()
    owner = loop.worker._owners[Peer("unix", uid=77).owner]
    for lane, count in ((full, 16), (other, 1)):
        together(lane, count)
    answers = loop.client_answers(full, 16)
    assert loop.client_answers(other, 1)[0].code == ""
    refused = [answer for answer in answers if answer.code]
    assert 4 < len(refused) < 16
    assert {answer.code for answer in refused} == {"UNAVAILABLE"}
    assert re.fullmatch(
        r"\d+ bytes of requests of clients of this user are held, and one of \d+ came: at most 20480 may be "
        r"\(clients.max_owner_request_byte_size\)",
        refused[0].message,
    )
    assert owner.request_byte_size == 0
    full.prepare(0, addsub())
    for _ in range(3):
        full.ask(0, vector(3), vector(1))
        loop.client_answers(full, 1)
    assert 2048 < owner.request_byte_size < 4096
    # What waits of a lane that ends counts no longer, nor does what it has prepared.
    full.ask(addsub(), vector(3), vector(1))
    leave(loop, full, other)
    assert owner.request_byte_size == 0


def test_a_lane_that_has_prepared_too_much_takes_nothing_off_its_owners_account(loop: WorkerLoop) -> None:
    other, many = [loop.open_client(CLIENT + n, uid=77) for n in range(2)]
    loop.worker.iterate()
    owner = loop.worker._owners[Peer("unix", uid=77).owner]
    large = Prepare(0, PreparedRequest("addsub", parameters={"x": "x" * 999_000}))
    for number in range(17):
        for datagram in parts(large, number):
            many.send_bytes(datagram)
            loop.worker.iterate()
    assert ended(loop, many)
    assert loop.closed() == [CLIENT + 1]
    many.close()
    assert owner.request_byte_size == 0
    add(loop, other)
    leave(loop, other)


def test_a_record_that_does_not_become_whole_ends_its_lane(
    loop: WorkerLoop, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The bytes of it count until then, and each record of a lane has its own time."""
    slow, quick = [loop.open_client(CLIENT + n, uid=77) for n in range(2)]
    datagrams = parts(Prepare(0, PreparedRequest("addsub", parameters={"x": "x" * 200_000})), 0)

    def halves(*numbers: int) -> None:
        while tuple(number for number, _ in loop.worker._halves.values()) != numbers:
            loop.worker.iterate()

    for number in (0, 2):
        quick.send_bytes(datagrams[0])
        halves(number)
        assert loop.worker._owners[Peer("unix", uid=77).owner].request_byte_size >= 60_000
        for datagram in [*datagrams[1:], *datagrams[:1]]:
            quick.send_bytes(datagram)
        halves(number + 1)
        for datagram in datagrams[1:]:
            quick.send_bytes(datagram)
        halves()
    slow.send_bytes(datagrams[0])
    halves(0)
    slow.send_bytes(datagrams[1])
    past = loop.worker._client_time.look() + loop.worker._options.clients.body_timeout
    monkeypatch.setattr(loop.worker, "_client_time", SimpleNamespace(look=lambda: past))
    loop.worker._dispatcher.agenda.wake(loop.worker._end_halves)
    assert ended(loop, slow)
    assert "bytes of a record came, and not its end within 60 s (clients.body_timeout)" in caplog.text
    add(loop, quick)
    leave(loop, quick, slow)


def test_users_have_their_shares_of_a_queue(loop: WorkerLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who fills it is refused, and nobody else: on lanes the kernel says who it is; all that fronts send is of one user."""
    (version,) = [version for version in loop.worker._models if version.name == "addsub"]
    monkeypatch.setattr(version.queue, "_rules", QueueRules(8))
    many = [loop.open_client(CLIENT + n, uid=77) for n in range(3)]
    few = loop.open_client(CLIENT + 3, uid=78)
    loop.worker.iterate()
    for lane, count in (*[(lane, LIMITS.in_flight) for lane in many], (few, 2)):
        together(lane, count)
    for _ in range(2):
        loop.submit("addsub", [Tensor(f"INPUT{n}", "FP32", (1, 16), vector(1)) for n in (0, 1)])
    assert [answer.code for answer in loop.answers(2)] == ["", ""]
    assert [answer.code for answer in loop.client_answers(few, 2)] == ["", ""]
    answers = [answer for lane in many for answer in loop.client_answers(lane, LIMITS.in_flight)]
    assert {answer.message for answer in answers} == {"", "[request id: <id_unknown>] Exceeds maximum queue size"}
    leave(loop, *many, few)


def test_a_sequence_ends_with_the_lane_that_asked_for_it(loop: WorkerLoop, total: ModelVersion) -> None:
    """In C and in Python. A front's goes on, and so does one that somebody else has asked for since."""
    step = PreparedRequest("total", 0, (PreparedTensor("x", "FP32", (1, 1)),))
    one = np.ones(1, np.float32).tobytes()
    sequences = total.sequences
    assert sequences is not None
    for known in (False, True):
        leaving, staying = loop.open_client(CLIENT), loop.open_client(CLIENT + 1)
        for lane in (leaving, staying):
            lane.prepare(3, step)
        if known:
            for _ in range(40):
                for lane in (leaving, staying):
                    lane.ask(3, one, sequence_id=9, sequence_start=True, sequence_end=True)
                    assert loop.client_answers(lane, 1)[0].code == ""
            served = loop.worker._poller.lane_requests
        for lane, name in ((leaving, "leaves"), (leaving, "taken"), (staying, "taken"), (staying, "stays")):
            lane.ask(3, one, sequence_id=name, sequence_start=name != "taken" or lane is leaving)
            assert loop.client_answers(lane, 1)[0].code == ""
        if known:
            assert not extensions.available or loop.worker._poller.lane_requests == served + 4
        x = Tensor("x", "FP32", (1, 1), one)
        loop.submit("total", [x], own={"sequence_id": "front", "sequence_start": True})
        assert loop.answers(1)[0].code == ""
        assert sequences.table.live == 4
        leaving.close()
        while len(loop.worker._clients) > 1:
            loop.worker.iterate()
        assert sorted(each.correlation_id for each in sequences.table.sequences()) == ["front", "stays", "taken"]
        staying.close()
        while len(loop.worker._clients):
            loop.worker.iterate()
        assert [each.correlation_id for each in sequences.table.sequences()] == ["front"]
        sequences.close("front")
    assert sorted(loop.closed()) == [CLIENT, CLIENT, CLIENT + 1, CLIENT + 1]


def test_a_client_ends_its_own_sequences(loop: WorkerLoop, total: ModelVersion) -> None:
    """What waits is answered. One that somebody else has asked for since, a front's, or none is left alone."""
    one = np.ones(1, np.float32).tobytes()
    step = PreparedRequest("total", 0, (PreparedTensor("x", "FP32", (1, 1)),))
    sequences = total.sequences
    assert sequences is not None
    leaving, staying = loop.open_client(CLIENT), loop.open_client(CLIENT + 1)
    for lane, name in ((leaving, "leaves"), (leaving, 7), (leaving, "taken"), (staying, "taken")):
        lane.ask(step, one, sequence_id=name, sequence_start=name != "taken" or lane is leaving)
        assert loop.client_answers(lane, 1)[0].code == ""
    loop.submit("total", [Tensor("x", "FP32", (1, 1), one)], own={"sequence_id": "front", "sequence_start": True})
    assert loop.answers(1)[0].code == ""
    for name in ("taken", "front", "nowhere", "7"):
        leaving.send(EndSequence("total", name))
    leaving.send(EndSequence("nothing", 7))
    leaving.ask(step, one, sequence_id="leaves")
    leaving.send(EndSequence("total", "leaves"))
    leaving.ask(step, one, sequence_id=7)
    answers = loop.client_answers(leaving, 2)
    assert [answer.code for answer in answers] == ["", ""]
    assert sorted(str(each.correlation_id) for each in sequences.table.sequences()) == ["7", "front", "taken"]
    leaving.send(EndSequence("total", 7))
    while sequences.table.live > 2:
        loop.worker.iterate()
    leaving.ask(step, one, sequence_id=7)
    assert loop.client_answers(leaving, 1)[0].code == "INVALID_ARGUMENT"
    leave(loop, leaving, staying)
    sequences.close("front")


def test_lanes_that_come_and_go_leave_nothing(loop: WorkerLoop) -> None:
    """Descriptors, mappings, submitters; and whoever else is served need not be learned anew."""

    def count() -> tuple[int, int]:
        with open("/proc/self/maps") as maps:
            return len(os.listdir("/proc/self/fd")), sum("memfd:client" in line for line in maps)

    known = loop.open_client(CLIENT)
    known.prepare(0, addsub())
    for _ in range(40):
        known.ask(0, vector(1), vector(2))
        loop.client_answers(known, 1)
    queued = queued_in_python(loop)
    before = count()
    for number in range(100):
        lane = loop.open_client(CLIENT + 1 + number)
        lane.open_segment(1, 1 << 16)
        if number % 2:
            add(loop, lane)
        lane.ask(addsub(places=(RegionSlice("@1", 0, 64),) * 2))
        if number % 3:
            loop.worker.iterate()
        lane.close()
        loop.worker.iterate()
        loop.worker.iterate()
    assert sorted(loop.closed()) == [CLIENT + 1 + number for number in range(100)]
    assert count() == before
    queued = queued_in_python(loop)
    for _ in range(10):
        known.ask(0, vector(1), vector(2))
        assert sums(known, loop.client_answers(known, 1)[0]) == (3, -1)
    if loop.worker._poller.lane_requests:
        assert queued_in_python(loop) == queued
    known.close()
    assert ended(loop, known)
    assert loop.closed() == [CLIENT]


@pytest.mark.parametrize("client", [None, LaneClient(Peer("unix", uid=0), LIMITS)])
def test_a_lane_that_cannot_be_watched_leaves_nothing(
    loop: WorkerLoop, monkeypatch: pytest.MonkeyPatch, client: LaneClient | None
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no watch is free")

    epoll, before = loop.worker._epoll, sorted(descriptors())
    with monkeypatch.context() as patched:
        watch = SimpleNamespace(register=full, modify=epoll.modify, unregister=epoll.unregister)
        patched.setattr(loop.worker, "_epoll", watch)
        ours, theirs = pair()
        loop.tell(LaneOpened(91, client=client), theirs.fileno())
        ours.close()
        theirs.close()
    if client is not None:
        assert loop.hear(LaneClosed).peer == 91
    assert sorted(descriptors()) == before


def test_hundreds_of_lanes_are_cheap(loop: WorkerLoop) -> None:
    """Each costs some kilobytes; an iteration costs what those cost that something came from."""
    gc.collect()
    with contextlib.ExitStack() as stack:
        tracemalloc.start()
        stack.callback(tracemalloc.stop)
        lanes = [stack.enter_context(contextlib.closing(loop.open_client(CLIENT + number))) for number in range(600)]
        serve_hundreds(loop, lanes)
        # What our code has allocated, not what is resident: that depends on what the process has freed before.
        allocated = tracemalloc.take_snapshot().statistics("filename")
        assert sum(each.size for each in allocated if each.traceback[0].filename.startswith(ROOMS)) < 600 * (48 << 10)
        tracemalloc.stop()
        # Now and then an iteration tells besides that the worker lives.
        assert min(len(calls_of(loop)) for _ in range(3)) <= 8
        lanes[300].ask(0, vector(1), vector(2))
        assert len(calls_of(loop)) <= 150
        loop.client_answers(lanes[300], 1)
    for _ in range(10):
        loop.worker.iterate()
    assert len(loop.closed()) == 600


def serve_hundreds(loop: WorkerLoop, lanes: list[RawLane]) -> None:
    for lane in lanes:
        lane.prepare(0, addsub())
    for value in range(5):
        for number, lane in enumerate(lanes):
            lane.ask(0, vector(number), vector(value))
        for number, lane in enumerate(lanes):
            (answer,) = loop.client_answers(lane, 1)
            assert sums(lane, answer) == (number + value, number - value)
    for _ in range(5):
        loop.worker.iterate()


def calls_of(loop: WorkerLoop) -> list[str]:
    """Returns the calls of our own functions in one iteration."""
    files: list[str] = []

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(ROOMS):
            files.append(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        loop.worker.iterate()
    finally:
        sys.setprofile(None)
    return files


def queued_in_python(loop: WorkerLoop) -> int:
    (version,) = [version for version in loop.worker._models if version.name == "addsub"]
    return ever_queued(version.queue)


# --------------------------------------------------------------------------------------------------------- what ends a lane


def wrong_records() -> Iterator[tuple[str, list[Record | bytes]]]:
    request = RequestRecord(1, 0, (vector(1), vector(1)))
    yield "another edition", [packed(WireVersion(WIRE_VERSION + 1))]
    yield "no edition", [packed(request)]
    agreed = packed(WireVersion(WIRE_VERSION))
    yield "junk", [agreed, b"\x01\xc1\xc1\xc1"]
    yield (
        "text that is not UTF-8",
        [agreed, packed(Prepare(0, PreparedRequest("model"))).replace(b"model", b"m\xffdel")],
    )
    yield "no kind", [agreed, b"\x07" + packed(request)[1:]]
    yield "truncated", [agreed, packed(request)[:-9]]
    yield "too long for a datagram", [agreed, packed(request) + bytes(MAX_DATAGRAM)]
    yield "a record without an end", [agreed, *[b"\x02" + bytes(60_000)] * 18]
    yield "something between the parts of a record", [agreed, b"\x02\x91", packed(request)]
    yield "the other direction", [agreed, packed(AnswerRecord(1, 0))]
    yield "a number that was never prepared", [agreed, packed(request)]
    yield "a number beyond all", [agreed, packed(Prepare(1024, addsub()))]
    yield "a negative id", [agreed, packed(RequestRecord(-1, addsub(), (vector(1), vector(1))))]
    yield "a negative priority", [agreed, packed(RequestRecord(1, addsub(), (vector(1), vector(1)), priority=-1))]
    yield "a lease that is not on loan", [agreed, packed(Release(((0, 0, 1),)))]
    yield "an id twice", [agreed, packed(*[RequestRecord(1, addsub(), (vector(1), vector(1)))] * 2)]
    yield "a segment without memory", [agreed, packed(SegmentOpened(1, 4096))]
    large = Prepare(0, PreparedRequest("addsub", parameters={f"p{n}": "x" * 1000 for n in range(900)}))
    yield "too much that is prepared", [agreed, *[part for number in range(20) for part in parts(large, number)]]
    # Ten times as much in memory as on its way.
    many = Prepare(0, PreparedRequest("addsub", parameters={f"{n:x}": 1 for n in range(80_000)}))
    yield "too many parameters", [agreed, *parts(many, 0), *parts(many, 1)]
    axes = Prepare(0, PreparedRequest("addsub", 0, (PreparedTensor("INPUT0", "FP32", tuple(range(250_000))),)))
    yield "too many axes", [agreed, *parts(axes, 0), *parts(axes, 1)]
    inputs = Prepare(0, PreparedRequest("addsub", 0, tuple(PreparedTensor("x", "FP32", ()) for _ in range(70_000))))
    yield "too many inputs", [agreed, *parts(inputs, 0)]


def parts(record: Prepare, number: int) -> list[bytes]:
    """Cuts a record that is larger than a datagram into datagrams."""
    content = b"\x91" + encoder.encode(Prepare(number, record.prepared))
    pieces = [content[at : at + 60_000] for at in range(0, len(content), 60_000)]
    return [b"\x02" + piece for piece in pieces[:-1]] + [b"\x03" + pieces[-1]]


WRONG = dict(wrong_records())


@pytest.mark.parametrize("what", WRONG)
def test_what_no_client_sends_ends_its_lane_and_no_other(
    loop: WorkerLoop, lane: RawLane, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    enemy = loop.open_client(CLIENT + 1, agree=False)
    for datagram in WRONG[what]:
        assert isinstance(datagram, bytes)
        try:
            enemy.send_bytes(datagram)
        except (BrokenPipeError, OSError):
            break
        loop.worker.iterate()
    assert ended(loop, enemy)
    assert loop.closed() == [CLIENT + 1]
    assert len(caplog.records) == 1
    assert not [record for record in caplog.records if record.exc_info]
    add(loop, lane)
    enemy.close()


def wrong_memory() -> Iterator[tuple[str, int, int]]:
    """Yields memory that must be refused: what is wrong, a descriptor and the stated size."""
    yield "not sealed", memory(4096, 0)[0], 4096
    yield "not sealed for good", memory(4096, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)[0], 4096
    yield "sealed against writing", memory(4096, SEALS | FUTURE_WRITE)[0], 4096
    yield "smaller than said", memory(4096)[0], 8192
    yield "larger than said", memory(8192)[0], 4096
    yield "of no size", memory(4096)[0], 0
    yield "of a negative size", memory(4096)[0], -4096
    yield "a socket", socket.socket(socket.AF_UNIX).detach(), 4096
    reading, writing = os.pipe()
    os.close(writing)
    yield "a pipe", reading, 4096
    yield "a folder", os.open("/", os.O_RDONLY), 4096
    yield "a device", os.open("/dev/zero", os.O_RDWR), 4096


WRONG_MEMORY = [(what, os.close(fd))[0] for what, fd, _ in wrong_memory()]


@pytest.mark.parametrize("what", WRONG_MEMORY)
def test_memory_of_the_wrong_kind_ends_its_lane_and_no_other(loop: WorkerLoop, lane: RawLane, what: str) -> None:
    enemy = loop.open_client(CLIENT + 1)
    for each, fd, byte_size in wrong_memory():
        if each == what:
            enemy.send(SegmentOpened(1, byte_size), fds=(fd,))
        os.close(fd)
    assert ended(loop, enemy)
    assert loop.closed() == [CLIENT + 1]
    add(loop, lane)
    enemy.close()


def test_descriptors_where_none_belong_are_closed(loop: WorkerLoop, lane: RawLane) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for content, count in (
        (packed(RequestRecord(1, addsub(), (vector(1), vector(1)))), 1),
        (packed(SegmentOpened(1, 4096)), 2),
        (packed(SegmentOpened(1, 4096)), 4),
        (packed(SegmentOpened(1, 4096)), 9),
        (packed(SegmentOpened(1, 4096), SegmentOpened(2, 4096)), 1),
        (b"\x02junk", 1),
        (b"junk", 3),
    ):
        enemy = loop.open_client(CLIENT + 1)
        fd, mapping = memory(4096)
        enemy.send_bytes(content, *[fd] * count)
        assert ended(loop, enemy)
        enemy.close()
        os.close(fd)
        mapping.close()
        assert loop.closed() == [CLIENT + 1]
        assert len(os.listdir("/proc/self/fd")) == before
    add(loop, lane)


@pytest.mark.parametrize(
    ("prepared", "contents", "sentence"),
    [
        (addsub(), (Slice(0, 0, 64), vector(1)), "64 bytes are said to lie in an arena"),
        (addsub(), (vector(1),), "1 tensors came in a record that was prepared for 2"),
        (addsub(), (vector(1)[:-1], vector(1)), "Expected 64, got 63"),
        (addsub(places=(RegionSlice("@1", 0, 64), None)), (vector(1),), "segment '@1' is not open"),
        (addsub(places=(RegionSlice("@", 0, 64), None)), (vector(1),), "segment '@' is not open"),
        (addsub(places=(RegionSlice("@0", -64, 64), None)), (vector(1),), "Invalid offset"),
        (addsub(places=(RegionSlice("@0", 4096, 64), None)), (vector(1),), "Invalid offset"),
        (addsub(places=(RegionSlice("@0", 4064, 64), None)), (vector(1),), "Invalid offset + byte size"),
        (addsub(places=(RegionSlice("@0", 0, 1 << 63), None)), (vector(1),), "Invalid offset"),
        (
            addsub(outputs=(RequestedOutput("OUTPUT0", RegionSlice("@0", 4064, 64)),)),
            (vector(1), vector(1)),
            "Invalid offset",
        ),
        (
            addsub(outputs=(RequestedOutput("OUTPUT0", RegionSlice("@0", 0, 8)),)),
            (vector(1), vector(1)),
            "should be at least",
        ),
        (addsub(1 << 62), (vector(1), vector(1)), "at most"),
        (PreparedRequest("addsub", 0, (PreparedTensor("INPUT0", "FP32", (1,) * 100),)), (vector(1),), "100 dimensions"),
        (PreparedRequest("addsub", 0, (PreparedTensor("INPUT0", "NONE", (1, 16)),) * 2), (b"", b""), "already exists"),
        (PreparedRequest("nothing"), (), "nothing"),
        (PreparedRequest("addsub", 99), (), "99"),
        (addsub(outputs=(RequestedOutput("OUTPUT0", None, 1 << 60),)), (vector(1), vector(1)), ""),
    ],
)
@pytest.mark.parametrize("by_number", [False, True])
def test_what_is_wrong_with_a_request_is_its_answer(
    loop: WorkerLoop,
    lane: RawLane,
    prepared: PreparedRequest,
    contents: tuple[bytes | Slice, ...],
    sentence: str,
    by_number: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    lane.open_segment(0, 4096)
    if by_number:
        lane.prepare(0, prepared)
    for request_id in (1, 2, 3):
        lane.send(RequestRecord(request_id, 0 if by_number else prepared, contents))
        (answer,) = loop.client_answers(lane, 1)
        assert sentence in answer.message
        assert bool(answer.code) is bool(sentence)
    assert not [record for record in caplog.records if record.exc_info]
    lane.last_id = 3
    add(loop, lane)


def test_what_nobody_asked_is_ignored(loop: WorkerLoop, lane: RawLane) -> None:
    lane.send(Cancel(5), Cancel(-1), Taken(7, 100), SegmentClosed(9), SegmentRefused(3), Release(()))
    add(loop, lane)


def repeat(count: int) -> tuple[PreparedRequest, bytes, bytes]:
    """Returns a request for so many responses of 64 bytes, and its inputs."""
    tensors = PreparedTensor("base", "FP32", (16,)), PreparedTensor("count", "INT32", (1,))
    return PreparedRequest("repeat", 0, tensors), vector(0), np.int32(count).tobytes()


def test_responses_come_in_order_and_the_last_says_how_long_it_took(loop: WorkerLoop, lane: RawLane) -> None:
    lane.ask(*repeat(50), trace=TIMING)
    answers = loop.client_answers(lane, 51)
    values = [float(np.frombuffer(answer.contents[0], np.float32)[0]) for answer in answers[:50]]  # type: ignore[arg-type]
    assert values == list(range(50))
    assert [lane.kind(answer).final for answer in answers] == [False] * 50 + [True]
    assert [answer.timing is not None for answer in answers] == [False] * 50 + [True]


def test_the_log_does_not_grow_with_each_lane_that_ends(
    loop: WorkerLoop, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_ns = time.monotonic_ns()
    monkeypatch.setattr(loop.worker, "_refusals", LineRate(10, lambda: now_ns))
    for number in range(40):
        lane = loop.open_client(CLIENT + number)
        lane.send_bytes(b"\x01\xc1")
        for _ in range(3):
            loop.worker.iterate()
        lane.close()
    assert len(loop.closed()) == 40
    assert len(caplog.records) == 10
    now_ns += 1_000_000_000
    lane = loop.open_client(CLIENT)
    lane.send_bytes(b"\x01\xc1")
    for _ in range(3):
        loop.worker.iterate()
    lane.close()
    assert loop.closed() == [CLIENT]
    assert "(30 such lines before it were left out)" in caplog.text


def test_more_may_not_be_taken_than_was_sent(loop: WorkerLoop, lane: RawLane, caplog: pytest.LogCaptureFixture) -> None:
    """Otherwise the model would run for ever, and the worker would keep all that a slow client does not read."""
    enemy = loop.open_client(CLIENT + 1)
    enemy.ask(*repeat(1_000_000))
    loop.client_answers(enemy, 100)
    enemy.send(Taken(1, 100 * 320))
    loop.client_answers(enemy, 100)
    enemy.send(Taken(1, 1 << 40))
    assert ended(loop, enemy)
    assert loop.closed() == [CLIENT + 1]
    assert "bytes of responses are said to be taken" in caplog.text
    add(loop, lane)
    enemy.close()


def test_limits_are_each_lanes_own(loop: WorkerLoop, lane: RawLane) -> None:
    narrow = loop.open_client(CLIENT + 1, limits=LaneLimits(1, 1, 4096, 1 << 20))
    narrow.send(*[RequestRecord(n, addsub(), (vector(n), vector(1))) for n in (1, 2)])
    answers = {answer.request_id: answer for answer in loop.client_answers(narrow, 2)}
    assert sums(narrow, answers[1]) == (2, 0)
    assert answers[2].message == "1 requests are in flight on this lane, at most 1 may be"
    narrow.close()
    assert ended(loop, narrow)
    assert loop.closed() == [CLIENT + 1]
