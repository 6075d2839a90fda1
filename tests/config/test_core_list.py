"""Lists of cores as Linux writes them, read, written and shared out."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from config.core_list import MAX_CORE, describe, parse, share


@pytest.mark.parametrize(
    ("text", "cores"), [("0", (0,)), ("0-3,8", (0, 1, 2, 3, 8)), ("5, 1-2,2", (1, 2, 5)), (f"{MAX_CORE}", (MAX_CORE,))]
)
def test_lists(text: str, cores: tuple[int, ...]) -> None:
    assert parse(text) == cores


@pytest.mark.parametrize("text", ["", "x", "3-1", "-1", "1-", "1,,2", "0-9000", "99999", "1;2", "\u0661"])
def test_what_is_no_list_is_refused_with_what_was_given(text: str) -> None:
    with pytest.raises(ValueError, match="expected cores such as"):
        parse(text)


@given(st.sets(st.integers(0, MAX_CORE), min_size=1, max_size=50))
def test_there_and_back(cores: set[int]) -> None:
    assert set(parse(describe(cores))) == cores


@given(st.integers(1, 64), st.integers(1, 64))
def test_shares_are_whole_and_even_and_nobody_is_left_without(cores: int, sharers: int) -> None:
    everything = list(range(100, 100 + cores))
    shares = [share(everything, index, sharers) for index in range(sharers)]
    assert all(shares)
    if sharers <= cores:
        assert sorted(core for each in shares for core in each) == everything
        assert max(map(len, shares)) - min(map(len, shares)) <= 1
    else:
        assert {core for each in shares for core in each} == set(everything)
