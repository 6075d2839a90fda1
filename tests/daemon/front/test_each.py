"""A call that fails is logged, and the others are made all the same."""

from __future__ import annotations

import pytest

from tensord.daemon.front.each import call_each


def test_one_that_fails(caplog: pytest.LogCaptureFixture) -> None:
    called: list[int] = []

    def fail() -> None:
        raise ValueError("no")

    call_each([lambda: called.append(1), fail, lambda: called.append(2)], "an errand")
    assert called == [1, 2]
    assert [record.message for record in caplog.records] == ["an errand failed"]
