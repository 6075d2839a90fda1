"""Provides the worker and a connection of the front that a module's tests share as ``served``."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.fakes import Client, EchoWorker, FrontProcess, in_service, until

Served = tuple[FrontProcess, EchoWorker]


@pytest.fixture
def worker(served: Served) -> EchoWorker:
    return served[1]


@pytest.fixture
def client(served: Served) -> Iterator[Client]:
    """Yields a connection, and checks at its end that the front still serves and that nothing is left at the worker."""
    front, worker = served
    with front.client() as client:
        yield client
        in_service(front, worker, client)
    assert worker.idle(0.05)
    until(lambda: worker.leases == 0)
