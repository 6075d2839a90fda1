"""Requests over HTTP that wait for a connection, while others are closed, by other threads or by the garbage collector."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import gc
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest
from tensord_client.errors import Cancelled
from tensord_client.http_channel import Address, HttpChannel
from tensord_client.http_request import HttpExchange, HttpRequest, Pool, Waiter


def queued(pool: Pool) -> HttpRequest:
    return HttpRequest(pool, HttpExchange([b"x"], lambda response: None), Waiter, 1.0)


async def answer(pending: HttpRequest) -> object:
    return await pending


@pytest.fixture
def pool() -> Pool:
    """Provides a pool that has no connection, so that all requests wait for one."""
    return Pool(Address("none"), limit=0)


def test_a_loop_that_was_closed_holds_up_no_close(pool: Pool) -> None:
    first, second = queued(pool), queued(pool)
    loop = asyncio.new_event_loop()
    loop.set_exception_handler(lambda *_: None)  # which is told of the task that is left
    task = loop.create_task(answer(first))
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    pool.close()
    for pending in (first, second):
        with pytest.raises(Cancelled, match=r"^the client was closed$"):
            pending.result()
    assert not task.done()


def test_a_close_just_before_a_task_sleeps_wakes_it(pool: Pool) -> None:
    pending = queued(pool)

    class Loop(asyncio.SelectorEventLoop):
        """Closes the pool when the task has looked at its request, and before it sleeps, as another thread may do."""

        def create_future(self) -> asyncio.Future[None]:
            pool.close()
            return super().create_future()

    with contextlib.closing(Loop()) as loop, pytest.raises(Cancelled, match=r"^the client was closed$"):
        loop.run_until_complete(answer(pending))


def test_a_stream_is_collected_in_a_thread_that_has_the_lock() -> None:
    """The garbage collector ends a stream while its thread gives out connections: the thread goes on, the connection is free."""
    pool = Pool(Address("none"), limit=1)
    first = queued(pool)

    def stream() -> Iterator[None]:
        try:
            yield
        finally:
            first.cancel()

    cycle: list[object] = [stream()]
    next(cycle[0])  # type: ignore[call-overload]
    cycle.append(cycle)
    with pool._lock:
        del cycle
        gc.collect()
    assert queued(pool)._granted


def test_a_connection_that_is_given_back_before_a_request_is_in_the_queue_is_its_own() -> None:
    pool = Pool(Address("none"), limit=1)
    first = queued(pool)

    class Line(collections.deque[HttpRequest]):
        """Ends the first request before another one is in the queue, as the garbage collector may."""

        def append(self, pending: HttpRequest) -> None:
            first.cancel()
            super().append(pending)

    pool._line = Line()
    assert queued(pool)._granted


def test_a_request_that_ends_while_a_connection_is_looked_for_leaves_its_own_to_the_queue() -> None:
    """The garbage collector ends a request while its thread looks at an idle connection for another one, and finds it closed."""
    pool = Pool(Address("none"), limit=2)
    first = queued(pool)

    class Idle:
        """An idle connection that the server has closed."""

        is_closed = False

        @property
        def is_readable(self) -> bool:
            first.cancel()
            return True

        def close(self) -> None:
            self.is_closed = True

    idle = Idle()
    pool._idle.append((cast(HttpChannel, idle), time.monotonic()))
    assert [queued(pool)._granted for _ in range(3)] == [True, True, False]
    assert idle.is_closed


def test_a_callback_that_comes_after_the_end_of_the_waiter_is_called() -> None:
    """A request may be sent before ``close``, and get its callback when the waiter's thread, and its pipe, have gone."""
    pool, waiter = Pool(Address("none"), limit=0), Waiter()
    pending = HttpRequest(pool, HttpExchange([b"x"], lambda response: None), lambda: waiter, 1.0)
    pool.close()
    waiter.close()
    waiter._thread.join(10)
    # Whoever opens a file gets the numbers of the pipe.
    read, write = os.pipe()
    try:
        called: list[HttpRequest] = []
        pending.add_done_callback(called.append)
        waiter.close()
        pending.cancel()
        assert called == [pending]
        os.set_blocking(read, False)
        with pytest.raises(BlockingIOError):
            os.read(read, 1)
    finally:
        os.close(read)
        os.close(write)
    with pytest.raises(Cancelled, match=r"^the client was closed$"):
        pending.result()


@pytest.fixture
def server() -> Iterator[socket.socket]:
    """Provides a socket to which clients can connect. Nobody answers them."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


def pool_of(server: socket.socket) -> Pool:
    return Pool(Address("", *server.getsockname()), limit=1)


def test_a_thread_that_waits_for_the_server_is_woken_by_who_cancels(server: socket.socket) -> None:
    pending = queued(pool_of(server))
    found: list[BaseException] = []

    def wait() -> None:
        try:
            pending.result()
        except Cancelled as error:
            found.append(error)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    with server.accept()[0]:
        # Long enough that it is not Python that it waits for.
        states = ""
        while not states.endswith("S" * 20):
            time.sleep(0.001)
            states += Path(f"/proc/self/task/{thread.native_id}/stat").read_text().rpartition(") ")[2][0]
        pending.cancel()
        thread.join(20)
    assert [str(error) for error in found] == ["the request was cancelled"]


def test_a_request_that_is_cancelled_while_it_connects_leaves_no_connection(
    server: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[HttpChannel] = []

    class Channel(HttpChannel):
        """A connection that is just opened when another thread cancels the request."""

        def __init__(self, address: Address) -> None:
            super().__init__(address)
            opened.append(self)
            thread = threading.Thread(target=pending[0].cancel)
            thread.start()
            thread.join()

    pool = pool_of(server)
    first = queued(pool)
    pending = [queued(pool)]
    monkeypatch.setattr("tensord_client.http_request.HttpChannel", Channel)
    first.cancel()
    pending[0]._step()
    assert [channel.fileno() for channel in opened] == [-1]
    last = queued(pool)
    assert last._granted
    last.cancel()
