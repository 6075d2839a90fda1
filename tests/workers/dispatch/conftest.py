"""Provides a worker's loop in this process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.workers.worker_loop import WorkerLoop


@pytest.fixture
def loop(leaves_nothing: None) -> Iterator[WorkerLoop]:
    made = WorkerLoop()
    yield made
    made.close()
