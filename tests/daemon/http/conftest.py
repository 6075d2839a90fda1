"""A front that a module's tests share, named ``served`` there: its worker, and a connection that leaves nothing behind."""

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
    """At its end it is still served, and nothing is left at the worker."""
    front, worker = served
    with front.client() as client:
        yield client
        in_service(front, worker, client)
    assert worker.idle(0.05)
    until(lambda: worker.leases == 0)
