"""What a connection may send, as totals, second by second: ordinary clients go on for ever, floods end."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

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
    floods = Floods()
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
    floods = Floods()
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
    floods = Floods()
    for answers in range(100_000):
        floods.reset(answers)
    floods = Floods()
    for _ in range(1_000):
        floods.reset(0)
    with pytest.raises(Violation) as caught:
        floods.reset(0)
    assert caught.value.code == ENHANCE_YOUR_CALM
    floods = Floods()
    for _ in range(1_000):
        floods.second(1.0)
        for _ in range(100):
            floods.reset(0)
