"""Tests what a connection may send, as totals, second by second: ordinary clients go on for ever, floods end; and its pings."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensord.config.options import Grpc
from tensord.daemon.grpc.floods import Floods
from tensord.daemon.grpc.frames import ENHANCE_YOUR_CALM, Violation

#: Frames, answers and bytes of one call of an ordinary client.
SMALL = (6, 1, 300)
UPLOAD = (80, 1, 1 << 20)
#: A large answer, granted again in pieces of a default window.
DOWNLOAD = (2 + 2 * 512, 1, 16 << 20)
SLOW = (3, 0, 0)


@given(st.lists(st.tuples(st.sampled_from([SMALL, UPLOAD, DOWNLOAD, SLOW]), st.integers(0, 300)), max_size=100))
def test_ordinary_clients_never_notice(seconds: list[tuple[tuple[int, int, int], int]]) -> None:
    floods = Floods(Grpc())
    frames = answers = byte_size = 0
    for call, count in seconds:
        floods.second(1.0)
        frames, answers, byte_size = (
            total + count * each for total, each in zip((frames, answers, byte_size), call, strict=True)
        )
        floods.look(frames, answers, byte_size)


@pytest.mark.parametrize("answers", [0, 1_000_000])
@pytest.mark.parametrize("a_second", [2_000, 1_500_000])
def test_floods_end(a_second: int, answers: int) -> None:
    """However much its client did before."""
    floods = Floods(Grpc())
    floods.look(answers, answers, 0)
    frames = answers

    def flood() -> None:
        nonlocal frames
        for _ in range(10_000):
            floods.second(1.0)
            frames += a_second
            floods.look(frames, answers, 0)

    with pytest.raises(Violation) as caught:
        flood()
    assert caught.value.code == ENHANCE_YOUR_CALM
    assert frames - answers <= 100_000 + 2 * a_second * 100


def test_calls_taken_back() -> None:
    """One for each answer, some without any; never thousands a second."""
    floods = Floods(Grpc())
    for answers in range(100_000):
        floods.reset(answers)
    floods = Floods(Grpc())
    for _ in range(1_000):
        floods.reset(0)
    with pytest.raises(Violation) as caught:
        floods.reset(0)
    assert caught.value.code == ENHANCE_YOUR_CALM
    floods = Floods(Grpc())
    for _ in range(1_000):
        floods.second(1.0)
        for _ in range(100):
            floods.reset(0)


PINGS = Grpc(min_ping_interval=10.0, max_ping_strikes=2)


def pinged(floods: Floods, *moments: float, busy: bool = False, answers: int = 0) -> None:
    for now in moments:
        floods.ping(now, busy, answers)


def test_too_many_pings() -> None:
    floods = Floods(PINGS)
    pinged(floods, 100, 101, 102)
    with pytest.raises(Violation, match="too_many_pings") as caught:
        pinged(floods, 103)
    assert caught.value.code == ENHANCE_YOUR_CALM


def test_any_number_of_pings_while_there_is_something_to_ask_for() -> None:
    """In their time, with calls under way, or after an answer; each of these forgives what was before."""
    floods = Floods(PINGS)
    pinged(floods, *range(100, 200, 11))
    pinged(floods, *range(200, 220), busy=True)
    for answers in range(1, 20):
        pinged(floods, 220 + answers, answers=answers)
    pinged(floods, 240, 241, answers=19)
    pinged(floods, 242, answers=20)
    pinged(floods, 243, 244, answers=20)


def test_pings_without_a_limit() -> None:
    pinged(Floods(Grpc(min_ping_interval=10.0, max_ping_strikes=0)), *range(100))
