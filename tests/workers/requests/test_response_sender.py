"""A sender by itself: in order, one final mark, and whoever sends waits for its client and for nothing else."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import numpy as np
import pytest

from tensord.shm.errors import Internal, ServingError, Unavailable
from tensord.workers.requests.response_sender import NOT_COMPLETED, ResponseReceiver, ResponseSender, SenderClosed, Sent
from tensord.workers.requests.result import Result
from tests.workers.made_requests import request_of

#: What a response of ``HUNDRED`` counts.
SIZE = 356
HUNDRED = 100


class Taker(ResponseReceiver):
    """Keeps what was sent. ``max_ahead``: three responses of a hundred bytes."""

    max_ahead = 3 * SIZE

    def __init__(self) -> None:
        self.sent: list[tuple[Sent, bool]] = []

    def put(self, sender: Any, result: Sent, final: bool, byte_size: int, wake: bool = True) -> None:
        self.sent.append((result, final))


@pytest.fixture
def taker() -> Taker:
    return Taker()


@pytest.fixture
def sender(taker: Taker) -> ResponseSender:
    return ResponseSender(request_of({}), taker, 0)


def response(value: int = 0) -> Result:
    return {"y": np.full(HUNDRED, value, np.uint8)}


def fill(sender: ResponseSender) -> None:
    for number in range(3):
        sender.send(response(number))
    assert sender.is_full


def test_exactly_one_final_mark(sender: ResponseSender, taker: Taker) -> None:
    sender.send(response())
    sender.send(None, final=True)
    for call in (lambda: sender.send(response()), lambda: sender.send(None, final=True)):
        with pytest.raises(SenderClosed):
            call()
    sender.fail(Internal("late"))
    sender.hold()
    sender.let_go()
    sender.finish(wake=True)
    assert [final for _, final in taker.sent] == [False, True]


def test_one_that_is_given_up_says_so(sender: ResponseSender, taker: Taker) -> None:
    for _ in range(2):
        sender.hold()
    sender.let_go()
    assert not taker.sent, "another one may still answer"
    sender.let_go()
    ((error, final),) = taker.sent
    assert isinstance(error, ServingError)
    assert (error.message, final) == (NOT_COMPLETED, True)


def test_one_of_a_request_that_goes_round_again_is_given_up_by_its_last_round(
    sender: ResponseSender, taker: Taker
) -> None:
    sender.hold()
    assert sender.released(again=True)
    sender.let_go()
    assert not taker.sent
    assert not sender.released(again=False), "whoever runs the last round has to answer"
    sender.hold()
    sender.let_go()
    assert [final for _, final in taker.sent] == [True]


def test_a_single_one_is_closed_by_its_response(taker: Taker) -> None:
    single = ResponseSender(request_of({}), taker, 0, single=True)
    single.send(response())
    with pytest.raises(SenderClosed):
        single.send(response())
    assert [final for _, final in taker.sent] == [True]


def test_memory_that_may_be_written_to_is_copied(sender: ResponseSender, taker: Taker) -> None:
    buffer = np.zeros(4, np.uint8)
    fixed = np.zeros(4, np.uint8)
    fixed.flags.writeable = False
    sender.send({"buffer": buffer, "view": buffer[:2], "fixed": fixed})
    buffer[:] = 7
    sent = taker.sent[0][0]
    assert isinstance(sent, dict)
    assert (sent["buffer"].tolist(), sent["view"].tolist()) == ([0] * 4, [0] * 2)
    assert sent["fixed"] is fixed


def test_who_ends_the_request_does_not_wait_for_its_client(sender: ResponseSender, taker: Taker) -> None:
    """The model's function fails, or returns, while a thread of the model's waits to send; a third one has to wait behind it."""
    fill(sender)
    refused: list[SenderClosed] = []

    def send() -> None:
        try:
            sender.send(response(3))
        except SenderClosed as error:
            refused.append(error)

    threads = [threading.Thread(target=send, daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    while not sender.is_waited_for:
        pass

    def end() -> None:
        sender.hold()
        sender.released(again=False)
        sender.fail(Internal("no more"))

    ending = threading.Thread(target=end, daemon=True)
    ending.start()
    ending.join(600)
    assert [final for _, final in taker.sent] == [False] * 3 + [True]
    sender.end()
    for thread in threads:
        thread.join()
    assert (len(refused), len(taker.sent)) == (2, 4)


@pytest.mark.parametrize("how", ["taken", "cancelled", "ended"])
def test_who_sends_waits(sender: ResponseSender, taker: Taker, how: str) -> None:
    fill(sender)
    thread = threading.Thread(target=sender.send, args=(response(3),))
    thread.start()
    thread.join(0.05)
    assert thread.is_alive()
    if how == "taken":
        # Woken when half of it is free, so that it does not wake for each.
        sender.settle(SIZE)
        thread.join(0.05)
        assert thread.is_alive()
        sender.settle(SIZE)
    elif how == "cancelled":
        sender.request.cancelled = True
        sender.wake()
    else:
        sender.end()
    thread.join()
    assert len(taker.sent) == 4


def test_who_may_not_wait_does_not(sender: ResponseSender, taker: Taker) -> None:
    """A coroutine, or whoever says so: sixteen times as much, then the request ends."""
    fill(sender)

    async def go_on() -> None:
        for _ in range(1000):
            sender.send(response())

    with pytest.raises(SenderClosed):
        asyncio.run(go_on())
    assert len(taker.sent) == 3 * 16 + 1
    error, final = taker.sent[-1]
    assert isinstance(error, Unavailable)
    ahead = 3 * 16 * SIZE
    assert error.message == (
        f"the client has not taken {ahead} bytes of the responses to its request, at most {ahead} may wait for it"
    )
    assert final


def test_who_rests_is_called_once(sender: ResponseSender) -> None:
    called: list[str] = []
    assert not sender.when_room(lambda: called.append("not full"))
    fill(sender)
    assert sender.when_room(lambda: called.append("room"))
    sender.settle(3 * SIZE)
    sender.wake()
    assert called == ["room"]
    assert not sender.is_full


def test_a_sample_has_one_that_drops() -> None:
    sender = ResponseSender(request_of({}), ResponseReceiver(), 0)
    for _ in range(5):
        sender.send(response())
    with pytest.raises(Internal, match="bad"):
        sender.send(Internal("bad"))
