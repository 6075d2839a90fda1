"""Lists of cores as Linux writes them, read and written."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensord.config.core_list import MAX_CORE, describe, parse


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
