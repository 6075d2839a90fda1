"""Tests that entries that are asked for stay, others go, and there are never more than twice the bound."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tensord.daemon.front.bounded_cache import BoundedCache


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 30)), max_size=200), st.integers(1, 6))
def test_the_last_ones_are_there_and_the_bound_holds(steps: list[tuple[bool, int]], count: int) -> None:
    memo: BoundedCache[int, str] = BoundedCache(count)
    used: list[int] = []
    for puts, key in steps:
        if puts:
            memo.put(key, str(key))
        found = memo[key]
        assert found in (None, str(key))
        if found is not None:
            used = [*(other for other in used if other != key), key]
        assert found is not None or key not in used[-count:]
        assert len(memo) + len(memo._old) <= 2 * count
    assert all(memo[key] is not None for key in used[-count:])


def test_what_is_asked_for_stays_among_what_never_comes_again() -> None:
    memo: BoundedCache[int, str] = BoundedCache(4)
    memo.put(-1, "stays")
    for number in range(100):
        memo.put(number, "goes")
        assert memo[-1] == "stays"
    assert all(memo[number] is None for number in range(90))
