"""Requests over HTTP that wait for a connection on an event loop, when the client is closed in another thread."""

from __future__ import annotations

import asyncio

import pytest
from tensord_client.errors import Cancelled
from tensord_client.http_channel import Address
from tensord_client.http_pending import Exchange, HttpPending, Pool, Waiter


def queued(pool: Pool) -> HttpPending:
    return HttpPending(pool, Exchange([b"x"], None, True), Waiter, 1.0)


@pytest.fixture
def pool() -> Pool:
    """Provides a pool that has no connection, so that all requests wait for one."""
    return Pool(Address("none"), limit=0)


def test_a_loop_that_was_closed_holds_up_no_close(pool: Pool) -> None:
    first, second = queued(pool), queued(pool)
    loop = asyncio.new_event_loop()
    loop.set_exception_handler(lambda *_: None)  # which is told of the task that is left
    task = loop.create_task(first.arrived())
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    pool.close()
    for pending in (first, second):
        with pytest.raises(Cancelled, match=r"^the client was closed$"):
            pending.waited()
    assert not task.done()


def test_a_close_just_before_a_task_sleeps_wakes_it(pool: Pool) -> None:
    pending = queued(pool)

    class Loop(asyncio.SelectorEventLoop):
        """Closes the pool when the task has looked at its request, and before it sleeps, as another thread may do."""

        def create_future(self) -> asyncio.Future[None]:
            pool.close()
            return super().create_future()

    loop = Loop()
    try:
        loop.run_until_complete(pending.arrived())
    finally:
        loop.close()
    with pytest.raises(Cancelled, match=r"^the client was closed$"):
        pending.waited()
