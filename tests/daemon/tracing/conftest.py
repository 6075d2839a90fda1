"""What all tests of tracing have in common."""

from __future__ import annotations

import pytest

from tensord.daemon.tracing import trace_file


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of a front waits two seconds for the thread that writes; a busy disk may take longer."""
    monkeypatch.setattr(trace_file, "_CLOSE_SECONDS", 600.0)
