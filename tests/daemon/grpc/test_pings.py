"""Pings: how many a client may send, and how a silent one is found out."""

from __future__ import annotations

import pytest

from tensord.config.options import Grpc
from tensord.daemon.grpc.frames import ENHANCE_YOUR_CALM, Violation
from tensord.daemon.grpc.pings import Pings, Sign

OPTIONS = Grpc(min_ping_interval=10.0, max_ping_strikes=2, keepalive_time=100.0, keepalive_timeout=5.0)


def pinged(pings: Pings, *moments: float, busy: bool = False, answered: bool = False) -> None:
    for now in moments:
        pings.pinged(now, busy, answered)


def test_too_many() -> None:
    pings = Pings(OPTIONS)
    pinged(pings, 100, 101, 102)
    with pytest.raises(Violation, match="too_many_pings") as caught:
        pings.pinged(103, busy=False, answered=False)
    assert caught.value.code == ENHANCE_YOUR_CALM


def test_any_number_while_there_is_something_to_ask_for() -> None:
    """In their time, with calls under way, or after an answer; each of these forgives what was before."""
    pings = Pings(OPTIONS)
    pinged(pings, *range(100, 200, 11))
    pinged(pings, *range(200, 220), busy=True)
    pinged(pings, *range(220, 240), answered=True)
    pinged(pings, 240, 241)
    pinged(pings, 242, answered=True)
    pinged(pings, 243, 244)


def test_without_a_limit() -> None:
    pinged(Pings(Grpc(min_ping_interval=10.0, max_ping_strikes=0)), *range(100))


def test_a_silent_client_is_asked_and_given_up() -> None:
    pings = Pings(OPTIONS)
    assert pings.look(1100, heard_at=1000, busy=True) is Sign.FINE
    assert pings.look(1101, heard_at=1000, busy=False) is Sign.FINE
    assert pings.look(1101, heard_at=1000, busy=True) is Sign.ASK
    assert pings.look(1106, heard_at=1000, busy=True) is Sign.FINE
    assert pings.look(1107, heard_at=1000, busy=True) is Sign.DEAD


@pytest.mark.parametrize("answers", [False, True])
def test_any_sign_of_life_is_one(answers: bool) -> None:
    pings = Pings(OPTIONS)
    assert pings.look(1101, heard_at=1000, busy=True) is Sign.ASK
    if answers:
        pings.answered()
    assert pings.look(1107, heard_at=1102, busy=True) is Sign.FINE
    assert pings.look(1203, heard_at=1102, busy=True) is Sign.ASK


def test_without_calls() -> None:
    pings = Pings(Grpc(keepalive_time=100.0, keepalive_permit_without_calls=True))
    assert pings.look(1101, heard_at=1000, busy=False) is Sign.ASK
