"""Provides what tests of traces need."""

from __future__ import annotations

import pytest

from tensord.shm import trace_file


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raises the two seconds that a front's end waits for the thread that writes traces: a busy disk may take longer."""
    monkeypatch.setattr(trace_file, "_CLOSE_SECONDS", 600.0)
