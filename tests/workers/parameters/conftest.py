"""Provides a worker's loop into which parameters are pushed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from tests.workers.parameters.pushing import PushingLoop


@pytest.fixture
def loop() -> Iterator[PushingLoop]:
    with contextlib.closing(PushingLoop()) as worker:
        yield worker
