"""Tests who waits for whom, so that requests that are stuck are told from those that only wait."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensord.workers.dispatch.call_circles import is_stuck


@pytest.mark.parametrize(
    ("waits", "stuck"),
    [
        ({0: []}, False),
        ({0: [1], 1: []}, False),
        ({0: [0]}, True),
        ({0: [1], 1: [0]}, True),
        # Either of two is enough.
        ({0: [1, 2], 1: [0], 2: []}, False),
        ({0: [1, 2], 1: [0], 2: [1]}, True),
    ],
)
def test_rows(waits: dict[int, list[int]], stuck: bool) -> None:
    assert is_stuck(0, waits.__getitem__) is stuck


@given(st.lists(st.lists(st.integers(0, 9), max_size=3), min_size=10, max_size=10))
def test_what_is_stuck_stays_when_all_others_have_gone_on(waits: list[list[int]]) -> None:
    """An item that waits for nobody, or for one that has gone on, goes on, as long as there are any."""
    left = set(range(10))
    while gone := {each for each in left if not waits[each] or set(waits[each]) - left}:
        left -= gone
    assert {each for each in range(10) if is_stuck(each, waits.__getitem__)} == left
