"""Tests what became of each stream, against a model that remembers everything."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tensord.daemon.grpc.stream_numbers import Past, StreamNumbers


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["close", "cut", "reset"])), max_size=200))
def test_every_number(streams: list[tuple[int, str]]) -> None:
    """Streams one after the other, each with so many passed over before it."""
    numbers = StreamNumbers()
    expected = {0: Past.IDLE}
    number = -1
    for skipped, end in streams:
        expected |= {number + 2 + 2 * n: Past.PASSED_OVER for n in range(skipped)}
        number += 2 + 2 * skipped
        if skipped or number % 3:
            numbers.use(number)
        else:
            assert numbers.next == number
            numbers.next = number + 2
        assert numbers.last == number
        expected[number] = {"close": Past.CLOSED, "cut": Past.CUT, "reset": Past.RESET}[end]
        if end != "close":
            numbers.remember(number, expected[number])
    for above in range(1, 6):
        expected.setdefault(number + above, Past.IDLE)
    for each in range(0, number, 2):
        expected[each] = Past.IDLE
    assert {each: numbers.past(each) for each in expected} == expected


def test_what_is_remembered_is_bounded() -> None:
    """Frames for streams that ended long ago are not taken for a client's mistake."""
    numbers = StreamNumbers()
    for number in range(1, 20_000, 4):
        numbers.use(number)
        numbers.remember(number, Past.CUT if number % 3 else Past.RESET)
    assert len(numbers._ended) == len(numbers._gaps) == 256
    assert numbers.past(1) is numbers.past(3) is Past.CUT
    assert numbers.past(numbers.last - 2) is Past.PASSED_OVER
    assert numbers.past(numbers.next) is Past.IDLE


def test_a_reset_stream_that_was_told_so() -> None:
    """A client that goes on sending on a stream that it has reset is told once."""
    numbers = StreamNumbers()
    numbers.use(1)
    numbers.remember(1, Past.RESET)
    numbers.remember(1, Past.CUT)
    assert numbers.past(1) is Past.CUT
