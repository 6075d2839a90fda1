"""Sends one HTTP request and waits for its answer: in the calling thread, on an event loop, or in a thread of the client's.

    HttpPending() ─▶ Pool.take ─▶ Channel ─▶ result() │ await arrived() │ add_done_callback(...) ─▶ Waiter
                        ╰─ all channels are in use: wait in line       each calls step() until the request has ended

A request is sent again as long as ``patience`` lasts if it did not leave completely, or if the server says that it is stopping. A
pure request is sent again once even after it has left. In all other cases the failure is raised.
"""

from __future__ import annotations

import collections
import contextlib
import os
import select
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from tensord_client.call import MAX_WAITING
from tensord_client.errors import (
    CLOSED,
    FORKED,
    Cancelled,
    DeadlineExceeded,
    Internal,
    ServingError,
    Unavailable,
    too_many_waiting,
)
from tensord_client.http_channel import Address, Buffer, Channel, Malformed, Response

#: A server closes connections that are idle for 75 seconds where nothing else is configured.
_IDLE = 60.0
_PAUSE = 0.05
_LONGEST_PAUSE = 1.0
_STOPPING = b"erver is stopping"
_CUT = "the server at {} ended in the middle of the responses"


class Unreached(Unavailable):
    """No server answers at the address."""


class Pool:
    """A client's connections (channels) to one server, at most ``limit`` of them, and a queue of requests that wait for one."""

    def __init__(self, address: Address, limit: int, max_waiting: int = MAX_WAITING) -> None:
        """Opens no channel yet. ``limit``: the most channels; ``max_waiting``: the most requests in the queue for one."""
        self.address = address
        self.is_closed = False
        self._limit = limit
        self._max_waiting = max_waiting
        # The garbage collector may end a stream, and so give its channel back, in a thread that has the lock.
        self._lock = threading.RLock()
        self._idle: list[tuple[Channel, float]] = []
        #: How many requests have a channel, or may open one.
        self._in_use = 0
        self._line: collections.deque[HttpPending] = collections.deque()
        #: Requests that have a channel, or may open one, until nobody refers to them.
        self._granted: weakref.WeakSet[HttpPending] = weakref.WeakSet()

    def take(self, pending: HttpPending) -> None:
        """Assigns an idle channel (connection) to a request, or lets it open one, or queues it if all channels are in use.

        Raises: Unavailable: the pool was closed, or the queue is as long as it may be.
        """
        with self._lock:
            if self.is_closed:
                raise Unavailable(CLOSED)
            if self._in_use >= self._limit and len(self._line) >= self._max_waiting:
                raise too_many_waiting(len(self._line), self._max_waiting)
            self._line.append(pending)
            self._serve()

    def _serve(self) -> None:
        """Assigns channels (connections) to queued requests until ``limit`` channels are in use. The caller holds the lock.

        A request leaves the queue before a channel is looked for: the garbage collector may run meanwhile and end another request
        in this thread, which comes here too.
        """
        while self._line and self._in_use < self._limit:
            self._in_use += 1
            pending = self._line.popleft()
            channel = self._usable()
            self._granted.add(pending)
            pending.grant(channel)

    def _usable(self) -> Channel | None:
        """Removes a usable idle channel from the pool and returns it; None: there is none. Closes idle ones that are unusable."""
        while self._idle:
            channel, since = self._idle.pop()
            if time.monotonic() - since < _IDLE and not channel.is_stale:
                return channel
            channel.close()
        return None

    def give(self, pending: HttpPending, channel: Channel | None) -> None:
        """Puts a request's channel (connection) back into the pool, for the first queued request; it is idle if none is queued.

        ``channel`` None: the channel was closed; the first queued request may then open another one in its place.
        """
        with self._lock:
            self._granted.discard(pending)
            if self.is_closed:
                if channel is not None:
                    channel.close()
                return
            self._in_use -= 1
            if channel is not None:
                self._idle.append((channel, time.monotonic()))
            self._serve()

    def leave_line(self, pending: HttpPending) -> bool:
        """Removes a request from the queue for a channel (connection). Returns whether it was in the queue."""
        with self._lock:
            if pending in self._line:
                self._line.remove(pending)
                return True
            return False

    def close(self) -> None:
        """Closes the idle channels, and ends all requests with Cancelled: those in the queue, and those that are under way.

        Idempotent.
        """
        with self._lock:
            self.is_closed = True
            idle, self._idle = self._idle, []
            line, self._line = self._line, collections.deque()
            under_way = list(self._granted)
        for channel, _ in idle:
            channel.close()
        for pending in line:
            pending.fail(Cancelled(CLOSED))
        for pending in under_way:
            pending.interrupt()

    def abandon(self) -> None:
        """Closes this process's copies of the channels after a fork; the parent process goes on using its own."""
        for channel, _ in self._idle:
            channel.close()
        for pending in [*self._granted, *self._line]:
            pending.forget()


class Exchange:
    """Base class of requests over HTTP: holds the bytes to send (``pieces``), and parses the answer.

    ``deadline``: seconds of ``time.monotonic()``; None: none; ``pure``: whether running the request twice does no harm.
    """

    #: True: any number of results may come, and each is returned as soon as it has come.
    streams = False

    def __init__(self, pieces: Sequence[Buffer], deadline: float | None, pure: bool) -> None:
        self.pieces = pieces
        self.deadline = deadline
        self.pure = pure

    def read(self, response: Response) -> Any:
        """Returns the result of a complete answer, or raises it if it is an error (ServingError)."""
        raise NotImplementedError

    def read_next(self, response: Response) -> Any:
        """Returns the next result of a stream, or raises it if it is an error (ServingError); None: not all of it has arrived."""
        raise NotImplementedError


class HttpPending:
    """A request that was sent over HTTP, or waits for a channel (connection) of the pool.

    ``step`` sends and receives what is possible. The thread or event loop that waits for the answer calls it, or the client's
    thread ``Waiter``.
    """

    def __init__(self, pool: Pool, exchange: Exchange, waiter: Callable[[], Waiter], patience: float) -> None:
        """Sends the request as far as that is possible at once. Raises Unavailable: the pool takes no further request."""
        self._pool = pool
        self._exchange = exchange
        self._waiter = waiter
        self._patience = patience
        self._deadline = exchange.deadline
        self._channel: Channel | None = None
        self._granted = False
        self._asked = False
        #: When the request is tried again, in monotonic seconds; 0: no retry is due.
        self._again_at = 0.0
        self._pause = _PAUSE
        self._failing_since = 0.0
        self._deaths = 0
        self._result: Any = None
        self._error: ServingError | None = None
        self._over = False
        #: The thread that calls ``step``; None: the thread or event loop that waits calls it.
        self._driver: Waiter | None = None
        #: Wakes the thread or task that waits for a channel.
        self._wake: Callable[[], None] = _nothing
        pool.take(self)
        self.step()

    def keep(self) -> None:
        """Copies the request's bytes, unless the request has ended: its caller may write to the input arrays from now on.

        The bytes are needed until they are sent, and if the request is sent again after a failure.
        """
        # What is small is one piece of ours already.
        if not self.is_ready and len(self._exchange.pieces) > 1:
            content = b"".join(self._exchange.pieces)
            self._exchange.pieces = [content]
            if self._channel is not None:
                self._channel.keep(content)

    # ---------------------------------------------------------------------------------------------------------- progress

    def grant(self, channel: Channel | None) -> None:
        """Gives this request a channel (connection) of the pool to be sent on; None: the request may open a new one."""
        self._channel, self._granted = channel, True
        self._wake()

    def interrupt(self) -> None:
        """Wakes whoever waits for this request, who then calls ``step``, which ends the request, as the pool was closed.

        May be called in any thread.
        """
        channel = self._channel
        if channel is not None:
            channel.shut_down()
        self._wake()

    def fail(self, error: ServingError) -> None:
        """Ends this request with an error, which ``waited`` and ``next`` then raise."""
        self._error, self._over = error, True
        self._wake()

    @property
    def is_ready(self) -> bool:
        """Returns whether ``waited`` and ``next`` would return or raise at once."""
        return self._over or self._result is not None

    def step(self) -> int:
        """Connects, sends and receives as far as possible without waiting.

        Returns the poll events to wait for on ``fileno()``; 0: the request is ready (``is_ready``), waits for a channel, or is
        tried again at ``wake_at``.
        """
        if self.is_ready:
            return 0
        if self._pool.is_closed:
            self._end(Cancelled(CLOSED))
            return 0
        if self._deadline is not None and time.monotonic() >= self._deadline:
            self._end(DeadlineExceeded())
            return 0
        if not self._granted or (self._again_at and time.monotonic() < self._again_at):
            return 0
        try:
            if self._channel is None:
                self._again_at, self._asked = 0.0, False
                self._channel = Channel(self._pool.address)
                if self._pool.is_closed:  # since the look above: nobody has shut this channel down
                    self._end(Cancelled(CLOSED))
                    return 0
            if not self._asked:
                self._channel.send(self._exchange.pieces, self._exchange.streams)
                self._asked = True
            mask = self._channel.advance()
            self._look(self._channel.response)
            return 0 if self.is_ready else mask
        except Malformed as error:
            self._end(Unreached(f"{self._pool.address}: {error}"))
        except OSError as error:
            self._broke(error)
        except ServingError as error:
            self._finish(error)
        except Exception as error:  # such as no memory for the answer: the thread has other requests to end
            self._end(Internal(f"the server's answer cannot be read: {error!r}"))
        return 0

    def _look(self, response: Response) -> None:
        """Parses what has arrived of the answer, and ends this request if the answer is complete.

        If the answer says that the server is stopping, the request is sent again instead.

        Raises: ServingError: the answer is an error.
        """
        if self._exchange.streams and response.status == 200:
            self._result = self._exchange.read_next(response)
            if self._result is None and response.whole:
                self._finish(Unavailable(_CUT.format(self._pool.address)) if response.stream else None)
        elif response.whole:
            if response.status == 503 and _STOPPING in response.text:
                assert self._channel is not None
                self._channel.close()
                self._channel = None
                self._try_again(Unavailable(bytes(response.text).decode("utf-8", "replace")))
                return
            self._result = self._exchange.read(response)
            self._finish(None)

    def _finish(self, error: ServingError | None) -> None:
        """Ends this request after its complete answer, which may be an error, and gives the channel back to the pool."""
        channel, self._channel = self._channel, None
        self._error, self._over = error, True
        if channel is not None and not channel.may_be_kept:
            channel.close()
            channel = None
        self._pool.give(self, channel)

    def _end(self, error: ServingError) -> None:
        """Ends this request with an error and without its answer: removes it from the queue for a channel, or closes its channel.

        A server cancels a request whose connection is closed.
        """
        self._error, self._over = error, True
        if not self._granted and self._pool.leave_line(self):
            return
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()
        self._pool.give(self, None)

    def _broke(self, error: OSError) -> None:
        """Handles a failed channel (connection): sends this request again if that does no harm, else ends it with an error."""
        channel, self._channel = self._channel, None
        why = error.strerror or str(error)
        if channel is None or not channel.sent:
            if channel is not None:
                channel.close()
            self._try_again(Unreached(f"no server answers at {self._pool.address}: {why}"))
            return
        channel.close()
        self._deaths += 1
        if self._exchange.streams and channel.response.begun:
            self._end(Unavailable(_CUT.format(self._pool.address)))
        elif not self._exchange.pure:
            said = "before it answered; the request may have run, and is not sent again"
            self._end(Unavailable(f"the server at {self._pool.address} ended {said}"))
        elif self._deaths > 1:
            self._end(Unavailable(f"the server at {self._pool.address} ended twice before it answered"))
        else:
            self._try_again(Unavailable(f"the server at {self._pool.address} ended before it answered"))

    def _try_again(self, otherwise: ServingError) -> None:
        now = time.monotonic()
        self._failing_since = self._failing_since or now
        if now - self._failing_since >= self._patience:
            self._end(otherwise)
            return
        self._again_at = now + self._pause
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)

    @property
    def wake_at(self) -> float | None:
        """Returns when ``step`` must be called at the latest, in seconds of ``time.monotonic()``; None: there is no such time."""
        times = [each for each in (self._again_at, self._deadline) if each]
        return min(times) if times else None

    # ----------------------------------------------------------------------------------------------------------- waiting

    def fileno(self) -> int:
        """Returns the file descriptor on which to wait for the events that ``step`` returned. Call it only if there were any."""
        assert self._channel is not None
        return self._channel.fileno()

    def _wait(self) -> None:
        """Waits, in the calling thread, until this request is ready; if a signal's handler ends the wait, cancels the request."""
        try:
            self._wait_ready()
        except BaseException:
            self.cancel()
            raise

    def _wait_ready(self) -> None:
        """Calls ``step`` and waits, in the calling thread, until this request is ready."""
        while True:
            mask = self.step()
            if self.is_ready:
                return
            wake_at = self.wake_at
            seconds = None if wake_at is None else max(0.0, wake_at - time.monotonic())
            if mask:
                poll = select.poll()
                poll.register(self, mask)
                poll.poll(None if seconds is None else seconds * 1e3 + 1)
            elif self._granted:
                time.sleep(seconds or 0.0)
            else:
                came = threading.Event()
                self._wake = came.set
                if not (self._granted or self._over):
                    came.wait(seconds)
                self._wake = _nothing

    def hurry(self, timeout: float | None) -> None:
        """Sets this request's deadline to ``timeout`` seconds from now; None: leaves the deadline as it is."""
        if timeout is not None:
            self._deadline = time.monotonic() + timeout

    def done(self) -> bool:
        """Returns whether this request has ended: no further result will come."""
        return self._over

    def waited(self) -> Any:
        """Waits in the calling thread for the result and returns it, or raises it if it is an error (ServingError)."""
        self._wait()
        if self._error is not None:
            raise self._error
        return self._result

    def next(self) -> Any:
        """Waits in this thread for a stream's next response; returns it, or raises it if it is an error; None: no more come."""
        self._wait()
        if self._result is None:
            if self._error is not None:
                raise self._error
            return None
        found, self._result = self._result, None
        return found

    async def arrived(self) -> None:
        """Waits on the running event loop until this request is ready. Cancelling the task cancels the request."""
        import asyncio

        loop = asyncio.get_running_loop()
        try:
            while True:
                mask = self.step()
                if self.is_ready:
                    return
                await self._something(loop, mask)
        except BaseException:  # the task was cancelled, or dropped with its loop
            self.cancel()
            raise

    async def _something(self, loop: Any, mask: int) -> None:
        """Waits on an event loop for the first of: poll events ``mask``, a channel granted by the pool, the time ``wake_at``."""
        came = loop.create_future()

        def wake() -> None:
            if not came.done():
                came.set_result(None)

        def wake_soon() -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(wake)

        self._wake = wake_soon
        wake_at = self.wake_at
        timer = None if wake_at is None else loop.call_later(max(0.0, wake_at - time.monotonic()) + 1e-3, wake)
        fd = self.fileno() if mask else -1
        if mask & select.POLLIN:
            loop.add_reader(fd, wake)
        if mask & select.POLLOUT:
            loop.add_writer(fd, wake)
        try:
            # Another thread may have ended it since ``step``, when there was nothing to wake yet.
            if not self._over and (mask or not self._granted or self._again_at):
                await came
        finally:
            self._wake = _nothing
            if timer is not None:
                timer.cancel()
            if mask & select.POLLIN:
                loop.remove_reader(fd)
            if mask & select.POLLOUT:
                loop.remove_writer(fd)

    def add_done_callback(self, called: Callable[[HttpPending], object]) -> None:
        """Registers ``called`` to be called with this request by the client's thread (``Waiter``), which waits for the answer."""
        self._driver = self._waiter()
        self._driver.add(self, called)

    def cancel(self) -> None:
        """Ends this request with Cancelled unless it has ended; closes its connection, so the server cancels it. Idempotent."""
        if self._driver is not None and not self._driver.is_current:
            self._driver.cancel(self)
        elif not self._over:
            self._end(Cancelled("the request was cancelled"))

    def forget(self) -> None:
        """Ends this request in a process that was forked off: nobody is called back; who waits for the answer gets an error."""
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()
        self._driver, self._wake, self._result = None, _nothing, None
        self._error, self._over = Unavailable(FORKED), True


def _nothing() -> None:
    pass


class Waiter:
    """A thread that waits for the answers of requests with callbacks and futures, and calls their callbacks.

    The thread ends after ``close``, when no request is left.
    """

    def __init__(self) -> None:
        #: Without a lock, which the garbage collector may find this very thread to have when it ends a stream.
        self._new: collections.deque[tuple[HttpPending, Callable[[HttpPending], object]]] = collections.deque()
        self._wakes, self._wake_end = os.pipe()
        os.set_blocking(self._wakes, False)
        os.set_blocking(self._wake_end, False)
        self._closed = False
        #: Held to write to the pipe or close it. The garbage collector may cancel a request in a thread that has the lock.
        self._lock = threading.RLock()
        self._ended = False
        self._thread = threading.Thread(target=self._main, name="tensord-client", daemon=True)
        self._thread.start()

    def add(self, pending: HttpPending, called: Callable[[HttpPending], object]) -> None:
        """Tells the thread to wait for a request's answer from now on, and to call ``called`` with the request when it has come.

        If the thread has ended already, because the client was closed, ``called`` is called before this returns.
        """
        with self._lock:
            ended = self._ended
            if not ended:
                pending._wake = self._wake
                self._new.append((pending, called))
                self._wake()
        if ended:
            pending.step()
            _call(called, pending)

    def cancel(self, pending: HttpPending) -> None:
        """Tells the thread to cancel a request that was given to ``add``."""
        self._new.append((pending, HttpPending.cancel))
        self._wake()

    @property
    def is_current(self) -> bool:
        """Returns whether the calling thread is this waiter's thread."""
        return threading.current_thread() is self._thread

    def _wake(self) -> None:
        with self._lock, contextlib.suppress(BlockingIOError):
            if not self._ended:
                os.write(self._wake_end, b"\0")

    def close(self) -> None:
        """Tells the thread to end once it waits for no request any more. Idempotent."""
        self._closed = True
        self._wake()

    def abandon(self) -> None:
        """Closes the waiter's file descriptors, after a fork in the child process, or when the thread ends."""
        self._ended = True
        os.close(self._wakes)
        os.close(self._wake_end)

    def _main(self) -> None:
        under_way: dict[HttpPending, Callable[[HttpPending], object]] = {}
        while under_way or not self._ends():
            while self._new:
                pending, called = self._new.popleft()
                if called is HttpPending.cancel:
                    pending.cancel()
                else:
                    under_way[pending] = called
            poll = select.poll()
            poll.register(self._wakes, select.POLLIN)
            wake_at: float | None = None
            for pending in list(under_way):
                mask = pending.step()
                if pending.is_ready:
                    _call(under_way.pop(pending), pending)
                    continue
                if mask:
                    poll.register(pending, mask)
                at = pending.wake_at
                if at is not None:
                    wake_at = at if wake_at is None else min(at, wake_at)
            if self._closed and not under_way:
                continue
            poll.poll(None if wake_at is None else max(0.0, wake_at - time.monotonic()) * 1e3 + 1)
            with contextlib.suppress(BlockingIOError):
                os.read(self._wakes, 4096)

    def _ends(self) -> bool:
        """Returns whether the thread is to end, because ``close`` was called and no request is left; closes the pipe then."""
        with self._lock:
            if self._new or not self._closed:
                return False
            self.abandon()
            return True


def _call(called: Callable[[HttpPending], object], pending: HttpPending) -> None:
    try:
        called(pending)
    except Exception:
        import logging

        logging.getLogger(__name__).exception("a callback of a request failed")
