"""Responses on the loop: in order where the arena is full, given up in time, and dropped where nobody waits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import numpy as np
import pytest

from config.model_config import parse_pbtxt
from config.options import Arenas
from shm.errors import Internal
from tests.workers.dispatch.test_outbox import MEBIBYTE, ALane, Version
from tests.workers.made_requests import request_of
from workers.dispatch.outbox import Outbox
from workers.dispatch.responses import Responses
from workers.models.execution import Execution
from workers.models.statistics import ModelStatistics
from workers.requests.request import Request
from workers.requests.response_sender import NOT_COMPLETED, ResponseSender
from workers.requests.result import STREAMED
from workers.requests.submitter import Submitter
from workers.tensors.signature import signature

ARENAS = Arenas(byte_size=MEBIBYTE, max_byte_size=MEBIBYTE, inline_byte_size=0, wait=1.0)
#: Of the arena there is room for four.
LARGE = 200_000


class Bench:
    """Responses of one request, on a loop whose turns and time are the test's."""

    def __init__(self) -> None:
        config = parse_pbtxt('name: "m" output { name: "y" data_type: TYPE_UINT8 dims: [ -1 ] }', "m")
        self.version = Version(
            name="m",
            version=1,
            statistics=ModelStatistics("m", 1),
            signature=signature(config, {}, {}),
            senders={},
        )
        self.now_ns = 0
        self.posted: list[Any] = []
        self.lane = ALane()
        self.submitter: Submitter[Request] = Submitter(1, cast(Any, self.lane))
        self.responses = Responses(ARENAS, Outbox(ARENAS), self.posted.append, lambda: self.now_ns, 100 * MEBIBYTE)

    def ask(self, request_id: int = 1) -> ResponseSender[Request]:
        request = request_of({}, version=self.version, submitter=self.submitter, request_id=request_id)
        self.submitter.in_flight[request_id] = request
        self.responses.open([request], 0)
        return self.version.senders[request]

    def turn(self) -> None:
        posted, self.posted[:] = list(self.posted), []
        for call in posted:
            call()

    def returned(self, sender: ResponseSender[Request], result: Any = STREAMED) -> Execution:
        execution = Execution([sender.request], 0)
        execution.results = [result]
        self.responses.returned(execution)
        return execution

    def sent(self) -> list[tuple[int, str, bool]]:
        """First byte, code and final mark of each."""
        found = []
        for completion in self.lane.sent:
            value = -1
            if completion.lease is not None:
                place = cast(Any, completion.outputs[0].place)
                value = self.lane.arena.segments[place.segment].view[place.offset]
            found.append((value, completion.code, completion.final))
        return found


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.lane.arena.close()


def large(value: int) -> dict[str, np.ndarray]:
    return {"y": np.full(LARGE, value, np.uint8)}


def test_what_finds_no_room_waits_in_its_order(bench: Bench) -> None:
    sender = bench.ask()
    for value in range(6):
        sender.send(large(value))
    sender.send({"y": np.full(4, 9, np.uint8)}, final=True)
    bench.turn()
    assert bench.sent() == [(value, "", False) for value in range(4)]
    assert bench.responses.blocked
    bench.lane.take()
    assert bench.responses.retry(bench.now_ns) is not None
    assert [value for value, _, _ in bench.sent()] == [1, 2, 3, 4]
    bench.lane.take()
    bench.lane.take()
    assert bench.responses.retry(bench.now_ns) is None
    assert bench.sent() == [(3, "", False), (4, "", False), (5, "", False), (9, "", True)]
    assert (bench.version.senders, bench.submitter.in_flight) == ({}, {})


def test_what_waits_too_long_ends_its_request(bench: Bench) -> None:
    sender = bench.ask()
    for value in range(6):
        sender.send(large(value))
    bench.turn()
    bench.now_ns = 2_000_000_000
    assert bench.responses.retry(bench.now_ns) is None
    assert bench.sent()[4:] == [(-1, "UNAVAILABLE", True)]
    assert sender.is_cancelled
    sender.send(large(5))
    bench.turn()
    assert len(bench.sent()) == 5
    assert bench.version.statistics.fail.count == 0  # its first responses were good


def test_one_wake_up_for_all_that_came(bench: Bench) -> None:
    sender = bench.ask()
    for _ in range(5):
        sender.send({"y": np.zeros(4, np.uint8)})
    assert len(bench.posted) == 1
    bench.turn()
    # Others are looked for in a moment, a last one wakes at once.
    sender.send({"y": np.zeros(4, np.uint8)})
    assert (bench.posted, bench.responses.gathering) == ([], True)
    bench.now_ns = 1 << 40
    bench.responses.gather(bench.now_ns)
    assert len(bench.lane.sent) == 6
    sender.send(None, final=True)
    assert len(bench.posted) == 1
    bench.turn()
    assert bench.lane.sent[-1].is_mark


def test_nobody_waits_any_more(bench: Bench) -> None:
    """While the model runs it is told; once it has returned the request is over, whether it says so or not."""
    sender, other = bench.ask(1), bench.ask(2)
    for each in (sender, other):
        each.request.cancelled = True
        bench.responses.cancelled(each.request)
        assert each.is_cancelled
        assert not each.ended
    sender.send({"y": np.zeros(4, np.uint8)}, final=True)
    bench.turn()
    bench.returned(other)
    assert [(completion.request_id, completion.code) for completion in bench.lane.sent] == [
        (1, "CANCELLED"),
        (2, "CANCELLED"),
    ]
    assert bench.version.statistics.fail.count == 2


@pytest.mark.parametrize(("result", "message"), [(Internal("bad"), "bad"), ({}, NOT_COMPLETED)])
def test_what_a_model_returns_for_one_it_should_have_answered(bench: Bench, result: Any, message: str) -> None:
    sender = bench.ask()
    execution = bench.returned(sender, result)
    assert (execution.requests, execution.streamed) == ([], [sender.request])
    (completion,) = bench.lane.sent
    assert (completion.message, completion.final) == (message, True)


def test_a_response_that_cannot_be_placed_is_an_error_and_others_follow(bench: Bench) -> None:
    sender = bench.ask()
    sender.send({"y": np.zeros(2, np.complex128)})
    sender.send({"y": np.ones(4, np.uint8)}, final=True)
    bench.turn()
    assert [(value, code != "", final) for value, code, final in bench.sent()] == [(-1, True, False), (1, False, True)]
    assert bench.version.statistics.to_dict()["response_stats"]["0"]["fail"]["count"] == 1
