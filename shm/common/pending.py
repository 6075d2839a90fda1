"""Defines ``Pending``, a request that was sent. A thread, a callback or a task on an event loop can wait for its answer.

There is a subclass for requests over a lane, one for requests over HTTP, and one for requests to models in this process. A
subclass sends the request. It calls ``add`` with each response that it receives, and ``end`` after the last response. It calls
``notify`` to wake the thread or task that waits, and ``call_back`` to call the callbacks of an ended request.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import queue
import sys
import threading
import time
import types
import weakref
from _thread import RLock  # that of threading is a function in Python, which costs more than the lock
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from .call import FOREVER
from .errors import FORKED, Cancelled, DeadlineExceeded, Internal, ServingError, Unavailable

if TYPE_CHECKING:
    import asyncio

#: The type of a request's answer.
T = TypeVar("T")


class WaitEnded(TimeoutError):
    """Raised when a wait has lasted until its time limit."""


class Pending(Generic[T]):
    """A request that was sent. ``result``, or ``await`` on an event loop, waits for its answer.

    The request ends once: with its last response, with an error, or because the caller cancels it. A child process cannot
    use it after a fork.
    """

    def __init__(self, model: str, deadline: float | None, deadlines: Deadlines) -> None:
        """Starts without a response.

        Args:
          model: the name of the model that is asked.
          deadline: the time of ``time.monotonic()`` in seconds at which the caller stops waiting, or None for no deadline.
          deadlines: a thread that ends the request at its deadline. It learns of the request when a callback is added.
        """
        self.model = model
        self.deadline = deadline
        self._deadlines = deadlines
        # The garbage collector may end a stream of this request in a thread that has the lock.
        self._lock = RLock()
        #: False once a response has come or the request has ended.
        self.waiting = True
        #: Wakes the thread that waits for it.
        self.waiter: queue.SimpleQueue[None] | None = None
        #: True if the transport is through with it: nothing more comes, and nobody uses its arrays.
        self._ended = False
        #: True if its caller does not wait any more: what still comes is dropped.
        self._given_up = False
        #: Responses that have come and were not taken yet, and the error that ends the request.
        self._arrived: list[Any] = []
        self._result: T | ServingError | None = None
        self._callbacks: Sequence[Callable[[Any], object]] = ()
        #: The future, and its event loop, that are told when something comes; None: no task waits.
        self._awaited: tuple[asyncio.Future[None], asyncio.AbstractEventLoop] | None = None

    # ----------------------------------------------------------------------------------------------- what a transport does

    def wait(self, until: float | None) -> None:
        """Waits in the calling thread until a response has come or the request has ended. It may also return earlier.

        ``until`` is a time of ``time.monotonic()`` in seconds, or None for no limit.

        Raises: WaitEnded: ``until`` has passed.  ServingError: the request fails with this error.
        """
        waiter: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.waiter = waiter
        try:
            if self.waiting:
                waiter.get(timeout=None if until is None else max(0.0, until - time.monotonic()))
        except queue.Empty:
            raise WaitEnded from None
        finally:
            self.waiter = None

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Prepares the running event loop ``loop`` to receive the request's responses. This base class does nothing."""

    def watch(self) -> None:
        """Makes a thread receive responses and call the callbacks of ``add_done_callback``. This base class does nothing."""

    def withdraw(self) -> None:
        """Tells the server that nobody waits for the answer any more. It is called once, in any thread.

        This base class does nothing.
        """

    def settle(self, until: float | None) -> None:
        """Waits until neither client nor server uses the arrays of this cancelled request. This base class does not wait.

        Raises DeadlineExceeded or another ServingError if the arrays are still in use at the time ``until``, in seconds of
        ``time.monotonic()``. None means no limit.
        """

    def made(self, arrived: Any) -> T | ServingError:
        """Converts the response ``arrived`` to an answer, or to an error if that fails. This base class returns ``arrived``."""
        answer: T = arrived
        return answer

    def late(self) -> ServingError:
        """Returns the error for a request whose deadline has passed."""
        return DeadlineExceeded()

    def explained(self, error: ServingError) -> ServingError:
        """Returns the error that the caller gets if ``error`` ends a stream of responses. This base class returns ``error``."""
        return error

    # --------------------------------------------------------------------------------------------------- from a transport

    def add(self, response: Any) -> None:
        """Stores a response, or the ServingError that ends the request. It does nothing if the request was cancelled."""
        if not self._given_up:
            self._arrived.append(response)

    def end(self) -> bool:
        """Ends the request, so that no further response comes. Returns False if it had already ended."""
        with self._lock:
            ended, self._ended = self._ended, True
        return not ended

    def fail(self, error: ServingError) -> None:
        """Ends the request with an error, and calls its callbacks. Any thread may call it."""
        self.add(error)
        self.end()
        self.notify()
        self.call_back()

    def notify(self, running: Any = None) -> None:
        """Wakes the thread or task that waits for this request.

        ``running`` is the event loop that runs in the calling thread. None is always allowed, but slower.
        """
        self.waiting = False
        waiter = self.waiter
        if waiter is not None:
            waiter.put(None)
        awaited = self._awaited
        if awaited is not None:
            future, loop = awaited
            if running is loop or sys.modules["asyncio"]._get_running_loop() is loop:
                if not future.done():
                    future.set_result(None)
            else:
                with contextlib.suppress(RuntimeError):  # the loop is closed
                    loop.call_soon_threadsafe(end_wait, future)

    def call_back(self) -> None:
        """Calls each callback of ``add_done_callback`` once. It does nothing if the request has not ended."""
        with self._lock:
            if not self.done():
                return
            callbacks, self._callbacks = self._callbacks, ()
        for callback in callbacks:
            try:
                callback(self)
            except BaseException:  # of the program: the thread has other requests to end
                import logging

                logging.getLogger(__name__).exception("a callback of a request failed")

    # ------------------------------------------------------------------------------------------------------ the end

    def done(self) -> bool:
        """Returns whether the request has ended. ``result`` then returns or raises at once."""
        return self._ended or self._given_up

    def expire(self) -> None:
        """Ends the request because its deadline has passed, and tells the server that nobody waits for an answer any more."""
        self._give_up(self.late())

    def cancel(self) -> None:
        """Ends the request with Cancelled, and tells the server that nobody waits any more.

        Any thread may call it. Idempotent.
        """
        self._give_up(Cancelled("the request was cancelled"))

    def _give_up(self, error: ServingError) -> None:
        with self._lock:
            if self._given_up or self._ended:
                return
            self._arrived.clear()
            self._arrived.append(error)
            self._given_up = True
        self.withdraw()
        self.notify()
        self.call_back()

    def forget(self) -> None:
        """Ends a child process's copy of the request after a fork. No callback is called, and ``result`` raises Unavailable."""
        self._lock = RLock()
        self._callbacks, self._awaited, self.waiter = (), None, None
        self.waiting = False
        self._arrived, self._ended = [Unavailable(FORKED)], True

    # ------------------------------------------------------------------------------------------------- from a thread

    def result(self, timeout: float | None = None) -> T:
        """Waits for the answer and returns it.

        The request is cancelled if no answer comes in time, or if a signal's handler ends the wait by an exception.

        ``timeout`` is the seconds to wait, or None to wait until the request's deadline. Raises: ServingError: the answer is
        an error.  DeadlineExceeded: no answer came in time.
        """
        if self._result is None:
            try:
                self._result = self._only(self._next(self._until(timeout)))
            except BaseException:
                self.cancel()
                raise
        if isinstance(self._result, ServingError):
            raise self._result
        return self._result

    def _only(self, response: T | ServingError | None) -> T | ServingError:
        return Internal(f"model '{self.model}' has answered with no response") if response is None else response

    def responses(self, timeout: float | None = None) -> Iterator[T]:
        """Returns an iterator over the responses. Closing or dropping the iterator early cancels the request.

        A wait for a response ends after ``timeout`` seconds, and at the latest at the request's deadline. Raises:
        ServingError: a response is an error.  DeadlineExceeded: a wait ended without a response.
        """
        responses = self._responses(timeout)
        # So that its ``finally`` runs also if it is dropped before anybody iterates.
        next(responses)
        return responses

    def _responses(self, timeout: float | None) -> Generator[Any, None, None]:
        try:
            yield
            while True:
                response = self._next(self._until(timeout))
                if response is None:
                    return
                if isinstance(response, ServingError):
                    raise self.explained(response)
                yield response
        finally:
            self.cancel()

    def add_done_callback(self, callback: Callable[[Any], object]) -> None:
        """Calls ``callback`` with this request when the request ends. If the request has already ended, calls it at once.

        The call may come in any thread.
        """
        with self._lock:
            done = self.done()
            if not done:
                self._callbacks = (*self._callbacks, callback)
        if done:
            callback(self)
            return
        if self.deadline is not None:
            self._deadlines.add(self, self.deadline)
        self.watch()
        if self.done():
            self.call_back()

    def _until(self, timeout: float | None) -> float | None:
        if timeout is None or timeout >= FOREVER:
            return self.deadline
        until = time.monotonic() + timeout
        return until if self.deadline is None else min(until, self.deadline)

    def _next(self, until: float | None) -> T | ServingError | None:
        while not self._arrived:
            # In this order: what has come is there before its end is seen.
            if self.done():
                if self._arrived:
                    break
                return None
            self.waiting = True
            if self._arrived or self.done():
                continue
            try:
                self.wait(until)
            except WaitEnded:
                self.expire()
            except ServingError as error:
                self.fail(error)
        return self._taken()

    def _taken(self) -> T | ServingError:
        arrived = self._arrived.pop(0)
        return arrived if isinstance(arrived, ServingError) else self.made(arrived)

    # -------------------------------------------------------------------------------------------- from an event loop

    def __await__(self) -> Generator[Any, None, T]:
        """Waits for the answer on the running event loop and returns it. Cancelling the waiting task cancels the request.

        Raises: ServingError: the answer is an error.
        """
        result = self._result
        if result is None:
            result = yield from self._next_async(None)
            result = self._result = self._only(result) if result is None else result
        if isinstance(result, ServingError):
            raise result
        return result

    def async_responses(self, timeout: float | None = None) -> AsyncIterator[T]:
        """Returns an asynchronous iterator over the responses. Ends, ``timeout`` and errors are the same as for ``responses``."""
        responses = self._async_responses(timeout)
        with contextlib.suppress(StopIteration):  # as in ``responses``; it awaits nothing before
            responses.asend(None).send(None)
        return responses

    async def _async_responses(self, timeout: float | None) -> AsyncGenerator[Any, None]:
        try:
            yield
            while True:
                response = await self._next_async(timeout)
                if response is None:
                    return
                if isinstance(response, ServingError):
                    raise self.explained(response)
                yield response
        finally:
            self.cancel()

    @types.coroutine
    def _next_async(self, timeout: float | None) -> Generator[Any, None, T | ServingError | None]:
        """Waits for the next response and returns it. Returns None after the last response.

        If the request fails, returns the error. The request fails if no response comes within ``timeout`` seconds, and at the
        latest at the deadline of the request. If ``timeout`` is None, only the deadline counts.
        """
        arrived = self._arrived
        until: float | None = None
        loop: asyncio.AbstractEventLoop | None = None
        while not arrived:
            if self._ended or self._given_up:
                if arrived:
                    break
                return None
            if loop is None:
                # Whoever awaits has imported it, and a statement that imports costs more here than all the rest.
                loop = sys.modules["asyncio"].get_running_loop()
                until = self.deadline if timeout is None else self._until(timeout)
            future = loop.create_future()
            self._awaited = future, loop
            timer = None if until is None else loop.call_at(loop.time() + until - time.monotonic(), self.expire)
            try:
                self.attach(loop)
                if not (arrived or self._ended or self._given_up):
                    yield from future
            except BaseException:  # the task was cancelled, or dropped with its loop
                self.cancel()
                raise
            finally:
                if timer is not None:
                    timer.cancel()
                self._awaited = None
        return self._taken()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.model}{' done' if self.done() else ''}>"


class Deadlines:
    """A thread that ends requests at their deadlines. It serves requests for which no thread waits. Thread-safe."""

    def __init__(self) -> None:
        #: A heap of deadlines in seconds of ``time.monotonic()``, each with a number and a request, which others hold.
        self._due: list[tuple[float, int, weakref.ref[Pending[Any]]]] = []
        self._numbers = itertools.count()
        # The garbage collector may end a request in a thread that has the lock.
        self._changed = threading.Condition(threading.RLock())
        #: True: there is a thread, which ends when no request is left.
        self._runs = False

    def add(self, pending: Pending[Any], deadline: float) -> None:
        """Has a thread end the request ``pending`` with an error at ``deadline``, if the request has not ended by then.

        ``deadline`` is a time of ``time.monotonic()`` in seconds.
        """
        with self._changed:
            self._drop_ended()
            due = deadline, next(self._numbers), weakref.ref(pending)
            heapq.heappush(self._due, due)
            if not self._runs:
                threading.Thread(target=self._main, name="tensord-deadlines", daemon=True).start()
                self._runs = True
            elif self._due[0] is due:
                self._changed.notify()

    def _drop_ended(self) -> None:
        while self._due and ((first := self._due[0][2]()) is None or first.done()):
            heapq.heappop(self._due)

    def _main(self) -> None:
        while True:
            with self._changed:
                self._drop_ended()
                if not self._due:
                    self._runs = False
                    return
                left = self._due[0][0] - time.monotonic()
                if left > 0:
                    self._changed.wait(left)
                    continue
                pending = heapq.heappop(self._due)[2]()
            if pending is not None:
                pending.expire()
                del pending

    def close(self) -> None:
        """Forgets all requests that were passed to ``add``. None of them is ended at its deadline any more."""
        with self._changed:
            self._due.clear()
            self._changed.notify()


def end_wait(future: asyncio.Future[None]) -> None:
    """Gives a future its result, unless it is done. Call it in the thread of the future's event loop."""
    if not future.done():
        future.set_result(None)
