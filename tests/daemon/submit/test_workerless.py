"""Requests without a worker keep their order and their time, whoever ends meanwhile."""

from __future__ import annotations

from tensord.daemon.submit.choice import Choice
from tensord.daemon.submit.model_table import ModelTable
from tensord.daemon.submit.pending import Calling, Pending
from tensord.daemon.submit.workerless import Workerless
from tests.records import WholeRequest


def made(count: int) -> tuple[Workerless, dict[int, Pending]]:
    in_flight: dict[int, Pending] = {}
    waiting = Workerless(in_flight, Choice(ModelTable(), 0, in_flight, 1), 10.0)
    for number in range(1, count + 1):
        in_flight[number] = Calling(lambda *_: None, record=WholeRequest(number, "m", 0, ()).record)
        waiting.add(in_flight[number], float(number))
    return waiting, in_flight


def test_those_that_still_find_none_keep_their_time() -> None:
    waiting, in_flight = made(3)
    sent: list[int] = []

    def dispatch(pending: Pending) -> None:
        number = pending.record.request_id
        sent.append(number)
        if number == 2:
            waiting.add(pending, 9.0)

    waiting.retry(dispatch)
    assert sent == [1, 2, 3]
    assert waiting.expired(11.9) == []
    assert waiting.expired(12.0) == [in_flight[2]]
    assert not waiting


def test_those_that_ended_are_passed_over() -> None:
    waiting, in_flight = made(4)
    del in_flight[1], in_flight[3]
    sent: list[Pending] = []
    assert waiting.expired(5.0) == []
    waiting.retry(sent.append)
    assert sent == [in_flight[2], in_flight[4]]


def test_the_refusal() -> None:
    waiting, in_flight = made(1)
    assert waiting.refusal(in_flight[1].prepared).message == "no worker was ready for model 'm' within 10 s"
