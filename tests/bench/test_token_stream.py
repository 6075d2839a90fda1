"""Marks are counted once, wherever a read ends."""

from __future__ import annotations

import pytest

from bench.token_stream import Count


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 100])
def test_a_mark_is_counted_once_however_it_comes(size: int) -> None:
    text = b"abcabc-ab-abcab" + b"c" + b"abc" * 3
    count = Count(b"abc")
    assert sum(count.add(text[at : at + size]) for at in range(0, len(text), size)) == text.count(b"abc") == 7
