"""Provides the endpoint that the tests of metrics share."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tensord.daemon.metrics import endpoint
from tests.daemon.metrics.served import Served
from tests.daemon_process import PATIENCE


@pytest.fixture
async def served(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Served]:
    # However busy the machine is; a test of the limit sets it.
    monkeypatch.setattr(endpoint, "_TIMEOUT", PATIENCE)
    made = Served()
    made.endpoint.listen()
    await made.endpoint.open()
    yield made
    made.endpoint.close()
