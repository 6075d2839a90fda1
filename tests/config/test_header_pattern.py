"""Patterns of headers are RE2's: any case, linear time, and a sentence for what RE2 does not know."""

from __future__ import annotations

import pytest

from tensord.config import header_pattern, layers
from tensord.config.layers import ConfigurationError, Setting


def test_any_case_and_anywhere() -> None:
    pattern = header_pattern.compiled("(x-fwd-.*)")
    assert pattern.search(b"X-FWD-A")
    assert pattern.search(b"my-x-fwd-")
    assert not pattern.search(b"x-other")


@pytest.mark.parametrize("pattern", ["(", "[a", r"(a)\1", "a(?=b)"])
def test_no_pattern(pattern: str) -> None:
    with pytest.raises(ValueError, match="is no RE2 pattern: "):
        header_pattern.compiled(pattern)
    with pytest.raises(ConfigurationError, match=r"http\.header_forward_pattern: "):
        layers.merge([Setting("http.header_forward_pattern", pattern, "x")])


def test_what_would_take_forever_elsewhere() -> None:
    """A backtracking matcher needs 2^60 steps for this."""
    assert not header_pattern.compiled("^(a+)+$").search(b"a" * 60 + b"!")
