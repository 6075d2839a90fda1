"""Tests what small responses of a model with several cost the thread that sends them, and the worker's loop that queues them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import numpy as np
import pytest

from tensord.config.model_config import parse_pbtxt
from tensord.config.options import Arenas
from tensord.shm.channel import pair
from tensord.shm.lane import WorkerLane
from tensord.workers.dispatch.outbox import Outbox
from tensord.workers.dispatch.responses import Responses
from tensord.workers.models.model_version import AgendaPart
from tensord.workers.models.statistics import VersionStatistics
from tensord.workers.requests.response_sender import ResponseSender
from tensord.workers.requests.submitter_link import SubmitterLink
from tensord.workers.scheduling.agenda import Agenda
from tensord.workers.tensors.signature import signature
from tests.work.baseline import Baseline, counts
from tests.work.counter import Work
from tests.workers.dispatch.test_outbox import MEBIBYTE, Version
from tests.workers.made_requests import request_of

ARENAS = Arenas(byte_size=MEBIBYTE, max_byte_size=MEBIBYTE)
CONFIG = parse_pbtxt('name: "m" output { name: "y" data_type: TYPE_FP32 dims: [ 16 ] }', "m")
COUNTED = 16


class Loop:
    """The parts of a worker's loop that handle the responses of one request.

    A response is gathered an hour after it came.
    """

    def __init__(self) -> None:
        ours, theirs = pair()
        self.front = ours
        self.lane = WorkerLane(theirs, MEBIBYTE, MEBIBYTE, 0)
        self.now_ns = 1
        self.agenda: Agenda[AgendaPart] = Agenda()
        outbox = Outbox(ARENAS, self.agenda, lambda request: None)
        self.responses = Responses(
            *(ARENAS, outbox, lambda call: call(), lambda: self.now_ns, MEBIBYTE), lambda request: None, self.agenda
        )
        version = Version(
            name="m", version=1, statistics=VersionStatistics("m", 1), signature=signature(CONFIG, {}, {}), senders={}
        )
        submitter: SubmitterLink[Any] = SubmitterLink(1, self.lane)
        request = request_of({}, version=cast(Any, version), submitter=submitter, request_id=1)
        self.responses.open([request], self.now_ns)
        self.sender: ResponseSender = version.senders[request]

    def send(self, work: Work) -> None:
        made = {"y": np.zeros(16, np.float32)}
        with work.counting():
            self.sender.send(made)

    def turn(self, work: Work) -> None:
        self.now_ns += 3_600_000_000_000
        # Asked by the loop, as whatever is due.
        for part in self.agenda.take(self.now_ns):
            with work.counting():
                cast(Any, part)(self.now_ns)

    def close(self) -> None:
        self.front.close()
        self.lane.close()


@pytest.fixture
def loop() -> Iterator[Loop]:
    made = Loop()
    # The first one tells of its kind, the second that its request has others; those behind them do not wake the loop.
    made.send(Work())
    made.send(Work())
    made.turn(Work())
    yield made
    made.close()


@counts
@pytest.mark.parametrize("together", [1, COUNTED])
def test_instructions(loop: Loop, together: int, baseline: Baseline) -> None:
    sends, queues = Work(), Work()
    for _ in range(COUNTED // together):
        for _ in range(together):
            loop.send(sends)
        loop.turn(queues)
    assert loop.sender.count == 2 + COUNTED
    baseline.check(f"responses sent-{together}", sends.instructions / COUNTED)
    baseline.check(f"responses queued-{together}", queues.instructions / COUNTED)
