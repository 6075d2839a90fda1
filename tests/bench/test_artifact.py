"""Tests what bench.artifact makes of its timings."""

from __future__ import annotations

import pytest

from bench import artifact


def test_medians_of_the_ratios_of_each_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """2, 4 and 3, so 3; the ratio of the medians would be 4. Who is first takes turns."""
    timings = iter([(2.0, 1.0), (1.0, 1.0), (5.0, 2.0), (20.0, 2.0), (60.0, 6.0), (20.0, 2.0)])
    called: list[str] = []

    def took(call: object) -> tuple[float, float]:
        called.append(call())  # type: ignore[operator]
        return next(timings)

    monkeypatch.setattr(artifact, "took", took)
    assert artifact.ratios(lambda: "ours", lambda: "theirs", 3, 60) == (3.0, 1.0, 3)
    assert called == ["ours", "theirs", "theirs", "ours", "ours", "theirs"]


def test_a_row_ends_after_its_seconds() -> None:
    """Each round adds its ratio, and of one alone nobody knows who is first."""
    assert artifact.ratios(lambda: sum(range(100)), lambda: sum(range(100)), 1000, 0)[2] == 2


def test_requests_have_padding() -> None:
    given = artifact.request(8, 128)
    assert given["attention_mask"].sum(axis=1).tolist() == [128, 96] * 4
