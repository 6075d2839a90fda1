"""How the operator's tables show numbers of bytes."""

from __future__ import annotations

import pytest

from tensord.daemon import tables


@pytest.mark.parametrize(
    ("byte_size", "shown"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1003, "1003 B"),
        (1536, "1.5 KiB"),
        (1023 << 20, "1023 MiB"),
        (3 << 30, "3 GiB"),
        (2000 << 40, "2000 TiB"),
    ],
)
def test_sizes_have_no_exponent(byte_size: int, shown: str) -> None:
    assert tables.scaled(byte_size) == shown
