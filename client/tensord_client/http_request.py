"""Sends HTTP requests and waits for the answers, in the calling thread, on an event loop, or in a thread of the client.

If the server cannot be reached or answers that it is stopping, or if the connection fails before a request was sent completely,
the request is sent again until the seconds of its ``patience`` are over. If the connection fails later, the request is sent
again at most once, and only if running it twice does no harm and no response of a stream has begun to arrive.
"""

from __future__ import annotations

import collections
import contextlib
import os
import select
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from tensord_client.common.call import MAX_WAITING
from tensord_client.common.pending import Deadlines, Pending, WaitEnded
from tensord_client.errors import CLOSED, Cancelled, Internal, ServingError, Unavailable, too_many_waiting
from tensord_client.http_channel import Address, Buffer, HttpChannel, HttpResponse, MalformedResponse

#: A server closes connections that are idle for 75 seconds where nothing else is configured.
_IDLE = 60.0
_PAUSE = 0.05
_LONGEST_PAUSE = 1.0
_STOPPING = b"erver is stopping"
_CUT = "the server at {} ended in the middle of the responses"


class Unreached(Unavailable):
    """Raised if the server cannot be reached, ends the connection without an answer, or sends what is not valid HTTP."""


class Pool:
    """A client's HTTP connections to one server, and a queue of requests that wait for a free connection."""

    def __init__(self, address: Address, limit: int, max_waiting: int = MAX_WAITING) -> None:
        """Starts without connections. At most ``limit`` are in use at a time, and ``max_waiting`` requests may be queued."""
        self.address = address
        self.is_closed = False
        self._limit = limit
        self._max_waiting = max_waiting
        # The garbage collector may end a stream, and so give its channel back, in a thread that has the lock.
        self._lock = threading.RLock()
        self._idle: list[tuple[HttpChannel, float]] = []
        #: How many requests have a channel, or may open one.
        self._in_use = 0
        self._line: collections.deque[HttpRequest] = collections.deque()
        #: Requests that have a channel, or may open one, until nobody refers to them.
        self._granted: weakref.WeakSet[HttpRequest] = weakref.WeakSet()
        self.deadlines = Deadlines()

    def take(self, pending: HttpRequest) -> None:
        """Gives a request an idle connection, or lets it open a new one. Queues it if ``limit`` connections are in use.

        Raises Unavailable if ``close`` was called or the queue is full.
        """
        with self._lock:
            if self.is_closed:
                raise Unavailable(CLOSED)
            if self._in_use >= self._limit and len(self._line) >= self._max_waiting:
                raise too_many_waiting(len(self._line), self._max_waiting)
            self._line.append(pending)
            self._serve()

    def _serve(self) -> None:
        """Gives connections to queued requests. The caller has the lock."""
        while self._line and self._in_use < self._limit:
            self._in_use += 1
            # First: a garbage collection below may end another request and call this method again.
            pending = self._line.popleft()
            channel = self._usable()
            self._granted.add(pending)
            pending.grant(channel)

    def _usable(self) -> HttpChannel | None:
        """Takes a usable idle connection out of the pool and returns it. Returns None if the pool has no such connection."""
        while self._idle:
            channel, since = self._idle.pop()
            if time.monotonic() - since < _IDLE and not channel.is_readable:
                return channel
            channel.close()
        return None

    def give(self, pending: HttpRequest, channel: HttpChannel | None) -> None:
        """Takes back a request's connection. Gives it to the first queued request, or keeps it idle.

        ``channel`` is None if the connection is closed. The first queued request may then open another one.
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

    def leave_line(self, pending: HttpRequest) -> bool:
        """Removes a request from the queue for a connection. Returns whether it was in the queue."""
        with self._lock:
            if pending in self._line:
                self._line.remove(pending)
                return True
            return False

    def close(self) -> None:
        """Closes the idle connections, and ends all requests, whether queued or in flight, with Cancelled. Idempotent."""
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
        self.deadlines.close()

    def abandon(self) -> None:
        """Ends a child process's copies of requests and sockets after a fork. The parent goes on with its own."""
        for channel, _ in self._idle:
            channel.close()
        for pending in [*self._granted, *self._line]:
            pending.forget()


class HttpExchange(NamedTuple):
    """The parts of an HTTP request to send, as ``pieces``, and functions that decode the response."""

    pieces: Sequence[Buffer]
    #: Returns the result of a complete answer. Raises ServingError if the answer is an error.
    read: Callable[[HttpResponse], Any]
    #: The time of ``time.monotonic()`` in seconds at which to stop waiting, or None for no limit.
    deadline: float | None = None
    #: True if running the request twice does no harm. A request that may have run can then be sent again.
    pure: bool = True
    #: The name of the model that the request is for, or "".
    model: str = ""
    #: Returns the next of any number of results, or None if it is incomplete. Raises ServingError if an error came. None: one
    #: result is expected.
    read_next: Callable[[HttpResponse], Any] | None = None


class HttpRequest(Pending[Any]):
    """A request over HTTP, which has one of the client's HTTP connections or waits for one.

    The thread or event loop that waits for the answer sends and receives. For requests with callbacks, the client's thread
    ``Waiter`` does so.
    """

    _channel: HttpChannel | None = None
    #: True if it has a channel, or may open one.
    _granted = False
    _asked = False
    #: When the request is tried again, in monotonic seconds; 0: no retry is due.
    _again_at = 0.0
    _pause = _PAUSE
    _failing_since = 0.0
    _deaths = 0
    #: The thread that sends and receives; None: the thread or event loop that waits does.
    _driver: Waiter | None = None
    #: The event loop that watches the channel, with a descriptor and poll events; None: none does.
    _watching: tuple[Any, int, int] | None = None
    #: The loop's timer for the next try.
    _timer: Any = None

    def __init__(self, pool: Pool, exchange: HttpExchange, waiter: Callable[[], Waiter], patience: float) -> None:
        """Starts to send the request, without waiting. Queues the request if all connections of ``pool`` are in use.

        Args:
          pool: the client's HTTP connections.
          exchange: the bytes to send, and how to read the answer.
          waiter: returns the client's thread for requests with callbacks. Called only if this request gets a callback.
          patience: the seconds that the request waits for a server that cannot be reached or is stopping.

        Raises: Unavailable: too many requests are queued, or the client was closed.
        """
        super().__init__(exchange.model, exchange.deadline, pool.deadlines)
        self._pool = pool
        self._exchange = exchange
        self._waiter = waiter
        self._patience = patience
        pool.take(self)
        self._step()

    def keep(self) -> None:
        """Copies the request's bytes, so that the caller may change the input arrays. Does nothing if the request has ended."""
        # What is small is one piece of ours already.
        if not self.done() and len(self._exchange.pieces) > 1:
            content = b"".join(self._exchange.pieces)
            self._exchange = self._exchange._replace(pieces=[content])
            if self._channel is not None:
                self._channel.keep(content)

    # ---------------------------------------------------------------------------------------------------------- progress

    def grant(self, channel: HttpChannel | None) -> None:
        """Tells this request to use ``channel``. If ``channel`` is None, the request opens a new connection itself."""
        self._channel, self._granted = channel, True
        self._wake()

    def _wake(self) -> None:
        if self._driver is not None:
            self._driver.wake()
        self.notify()

    def interrupt(self) -> None:
        """Ends this request with Cancelled, because the client is closed. Thread-safe."""
        channel = self._channel
        if channel is not None:
            channel.shut_down()
        self._wake()

    def _step(self) -> int:
        if self._arrived or self.done():
            return 0
        if self._pool.is_closed:
            self._finish(Cancelled(CLOSED), keeps=False)
            return 0
        if not self._granted or (self._again_at and time.monotonic() < self._again_at):
            return 0
        try:
            if self._channel is None:
                self._again_at, self._asked = 0.0, False
                self._channel = channel = HttpChannel(self._pool.address)
                if self._pool.is_closed or self.done():  # since the look above: nobody may have shut this channel down
                    self._finish(Cancelled(CLOSED), keeps=False)
                    channel.close()
                    return 0
            if not self._asked:
                self._channel.send(self._exchange.pieces, self._exchange.read_next is not None)
                self._asked = True
            mask = self._channel.advance()
            self._look(self._channel.response)
            return 0 if self._arrived or self.done() else mask
        except MalformedResponse as error:
            self._finish(Unreached(f"{self._pool.address}: {error}"), keeps=False)
        except OSError as error:
            self._broke(error)
        except ServingError as error:
            self._finish(error)
        except Exception as error:  # such as no memory for the answer: the thread has other requests to end
            self._finish(Internal(f"the server's answer cannot be read: {error!r}"), keeps=False)
        return 0

    def _look(self, response: HttpResponse) -> None:
        """Takes the next result out of ``response`` and stores it, if all of it has come. Ends this request after the last one.

        If the server answers that it is stopping, tries again later. Raises ServingError: the answer is an error.
        """
        read_next = self._exchange.read_next
        if read_next is not None and response.status == 200:
            found = read_next(response)
            if found is not None:
                self.add(found)
                self.notify()
            elif response.whole:
                self._finish(Unavailable(_CUT.format(self._pool.address)) if response.stream else None)
        elif response.whole:
            if response.status == 503 and _STOPPING in response.text:
                assert self._channel is not None
                self._channel.close()
                self._channel = None
                self._try_again(Unavailable(bytes(response.text).decode("utf-8", "replace")))
                return
            self.add(self._exchange.read(response))
            self._finish(None)

    def _finish(self, error: ServingError | None, keeps: bool = True) -> None:
        if error is not None:
            self.add(error)
        self._release(keeps)
        self.notify()

    def _release(self, keeps: bool = False) -> None:
        """Ends this request. Gives its connection back if ``keeps`` is True and it can be used again, else closes it."""
        self._unwatch()
        if not self.end() or (not self._granted and self._pool.leave_line(self)):
            return
        channel, self._channel = self._channel, None
        if channel is not None and not (keeps and channel.may_be_kept):
            # Another thread may sleep until the server answers: it would not notice a close alone.
            channel.shut_down()
            channel.close()
            channel = None
        self._pool.give(self, channel)

    def _broke(self, error: OSError) -> None:
        """Closes the connection, which failed with ``error``. Sends the request again later, or ends it with Unavailable.

        A completely sent request is sent again only once, and only if running it twice does no harm.
        """
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()
        if channel is None or not channel.sent:
            why = error.strerror or str(error)
            self._try_again(Unreached(f"no server answers at {self._pool.address}: {why}"))
            return
        self._deaths += 1
        if self._exchange.read_next is not None and channel.response.begun:
            self._finish(Unavailable(_CUT.format(self._pool.address)), keeps=False)
        elif not self._exchange.pure:
            said = "before it answered; the request may have run, and is not sent again"
            self._finish(Unavailable(f"the server at {self._pool.address} ended {said}"), keeps=False)
        elif self._deaths > 1:
            self._finish(Unavailable(f"the server at {self._pool.address} ended twice before it answered"), keeps=False)
        else:
            self._try_again(Unreached(f"the server at {self._pool.address} ended before it answered"))

    def _try_again(self, otherwise: ServingError) -> None:
        now = time.monotonic()
        self._failing_since = self._failing_since or now
        if now - self._failing_since >= self._patience:
            self._finish(otherwise, keeps=False)
            return
        self._again_at = now + self._pause
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)

    # ----------------------------------------------------------------------------------------------------------- waiting

    def fileno(self) -> int:
        """Returns the file descriptor of this request's connection. Call it only while this request has a connection."""
        assert self._channel is not None
        return self._channel.fileno()

    def wait(self, until: float | None) -> None:
        """Sends and receives what is possible. If no result has arrived, waits until more can be sent or received.

        ``until`` is a time of ``time.monotonic()`` in seconds, or None for no limit. Raises WaitEnded if it has passed.
        """
        self.waiting = True
        mask = self._step()
        if self._arrived or self.done():
            return
        if not (mask or self._granted):
            super().wait(until)
            return
        times = [each for each in (self._again_at, until) if each]
        left = min(times) - time.monotonic() if times else None
        if until is not None and left is not None and left <= 0 and until <= min(times):
            raise WaitEnded
        if mask:
            poll = select.poll()
            poll.register(self, mask)
            poll.poll(None if left is None else max(0.0, left) * 1e3 + 1)
        else:
            time.sleep(max(0.0, left or 0.0))

    def attach(self, loop: Any) -> None:
        """Sends and receives what is possible now. The event loop ``loop`` then watches the connection for more."""
        self._unwatch()
        mask = self._step()
        if mask:
            fd = self.fileno()
            self._watching = loop, fd, mask
            if mask & select.POLLIN:
                loop.add_reader(fd, self._ready)
            if mask & select.POLLOUT:
                loop.add_writer(fd, self._ready)
        elif self._again_at and not self.done():
            self._timer = loop.call_later(max(0.0, self._again_at - time.monotonic()) + 1e-3, self._ready)

    def _ready(self) -> None:
        self._unwatch()
        self.notify()

    def _unwatch(self) -> None:
        """Tells the event loop to stop watching the connection. Called in the loop's thread."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._watching is not None:
            (loop, fd, mask), self._watching = self._watching, None
            if not loop.is_closed():
                if mask & select.POLLIN:
                    loop.remove_reader(fd)
                if mask & select.POLLOUT:
                    loop.remove_writer(fd)

    def watch(self) -> None:
        self._driver = self._waiter()
        self._driver.add(self)

    def withdraw(self) -> None:
        """Cancels this request by closing its connection. If the request still waits for a connection, the request gets none.

        The connection may still be open when this method returns: the thread or event loop that waits for the answer closes it.
        """
        watching, driver = self._watching, self._driver
        if driver is not None and not driver.is_current:
            driver.drop(self)
        elif watching is not None and sys.modules["asyncio"]._get_running_loop() is not watching[0]:
            try:
                watching[0].call_soon_threadsafe(self._release)
            except RuntimeError:  # the loop is closed
                self._release()
        else:
            self._release()

    def forget(self) -> None:
        """Ends a child process's copy of this request after a fork, and closes the child's copy of the connection."""
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()
        self._driver = self._watching = self._timer = None
        super().forget()


class Waiter:
    """A thread that sends and receives for requests with callbacks and futures, and calls their callbacks.

    The thread ends once ``close`` was called and no request is left.
    """

    def __init__(self) -> None:
        #: New requests. No lock guards them: the garbage collector may find this very thread to have it when it ends a stream.
        self._new: collections.deque[HttpRequest] = collections.deque()
        self._dropped: collections.deque[HttpRequest] = collections.deque()
        self._wakes, self._wake_end = os.pipe()
        os.set_blocking(self._wakes, False)
        os.set_blocking(self._wake_end, False)
        self._closed = False
        #: Held to write to the pipe or close it. The garbage collector may cancel a request in a thread that has the lock.
        self._lock = threading.RLock()
        self._ended = False
        self._thread = threading.Thread(target=self._main, name="tensord-client", daemon=True)
        self._thread.start()

    def add(self, request: HttpRequest) -> None:
        """Makes this object's thread send the request, receive the answer and call the request's callbacks.

        If this object's thread has already ended after ``close``, the request fails with Cancelled.
        """
        self._tell(self._new, request, request._step)

    def drop(self, request: HttpRequest) -> None:
        """Makes this object's thread close the connection of a request, because nobody waits for the answer any more."""
        self._tell(self._dropped, request, request._release)

    def _tell(
        self, told: collections.deque[HttpRequest], request: HttpRequest, otherwise: Callable[[], object]
    ) -> None:
        with self._lock:
            ended = self._ended
            if not ended:
                told.append(request)
                self.wake()
        if ended:
            otherwise()

    @property
    def is_current(self) -> bool:
        """Returns whether the calling thread is this waiter's thread."""
        return threading.current_thread() is self._thread

    def wake(self) -> None:
        """Wakes this object's thread, which then sends and receives for the requests that were given to this object."""
        with self._lock, contextlib.suppress(BlockingIOError):
            if not self._ended:
                os.write(self._wake_end, b"\0")

    def close(self) -> None:
        """Tells this object's thread to end when all requests of this object have ended. Does not wait. Idempotent."""
        self._closed = True
        self.wake()

    def abandon(self) -> None:
        """Closes this object's file descriptors. After that, ``wake`` does nothing."""
        self._ended = True
        os.close(self._wakes)
        os.close(self._wake_end)

    def _main(self) -> None:
        under_way: dict[HttpRequest, None] = {}
        while under_way or not self._ends():
            while self._new:
                under_way[self._new.popleft()] = None
            while self._dropped:
                self._dropped.popleft()._release()
            poll = select.poll()
            poll.register(self._wakes, select.POLLIN)
            again_at: float | None = None
            for request in list(under_way):
                mask = request._step()
                if request.done():
                    del under_way[request]
                    request.call_back()
                elif mask:
                    poll.register(request, mask)
                elif request._again_at:
                    again_at = request._again_at if again_at is None else min(request._again_at, again_at)
            if self._closed and not under_way:
                continue
            poll.poll(None if again_at is None else max(0.0, again_at - time.monotonic()) * 1e3 + 1)
            with contextlib.suppress(BlockingIOError):
                os.read(self._wakes, 4096)

    def _ends(self) -> bool:
        with self._lock:
            if self._new or self._dropped or not self._closed:
                return False
            self.abandon()
            return True
