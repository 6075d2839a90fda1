"""Counts of several add up field by field, and what a worker says is read as it was written."""

from __future__ import annotations

import msgspec
import pytest

from tensord.shm.figures import Counts, Figures, VersionFigures


def test_sum() -> None:
    count = len(Counts.__struct_fields__) - 1
    one = Counts(*range(count), slow={"large": 1, "new": 2})
    other = Counts(*(100 * n for n in range(count)), slow={"new": 3, "queue": 4})
    assert one + other == Counts(*(101 * n for n in range(count)), slow={"large": 1, "new": 5, "queue": 4})
    assert one + Counts() == one


def test_there_and_back() -> None:
    figures = Figures((VersionFigures("m", 2, 1 << 60, 3, Counts(success=5)),), {"system": 1, "cuda": 0})
    encoded = msgspec.json.encode(figures)
    assert msgspec.json.decode(encoded, type=Figures) == figures
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(encoded[:-1] + b",1]", type=Figures)
