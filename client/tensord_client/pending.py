"""A request that was sent over a lane.

A thread, a callback, or a task on an event loop waits for its answer.
"""

from __future__ import annotations

import contextlib
import math
import queue
import sys
import threading
import time
import types
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tensord_client import native, wire
from tensord_client.answer_memory import Lease
from tensord_client.call import Call, begun, begun_async
from tensord_client.common.arrays import decode_strings, dtype_of, typestr
from tensord_client.errors import (
    CLOSED,
    FORKED,
    Cancelled,
    DeadlineExceeded,
    Internal,
    NotFound,
    ServingError,
    Unavailable,
)
from tensord_client.lane_socket import WaitEnded
from tensord_client.placement import Placed, own_fields
from tensord_client.results import Answer, Array, check_place, written
from tensord_client.wire import AnswerRecord, OutputTensor
from tensord_client.worker_lane import WorkerLane

if TYPE_CHECKING:
    import asyncio

    from tensord_client.lane import LaneConnection

#: Bytes of responses that are taken before the worker is told; it lets a model be at least four times as far ahead.
_TAKEN = 1024
#: The most times that a request is sent, if its workers end while they have it.
_SENDINGS = 2
#: Seconds between two looks at a request that another thread sends again.
_ASIDE = 0.005
#: Describes an output whose bytes come in the answer's record: name, shape, dtype, byte size.
Plan = tuple[str, tuple[int, ...], np.dtype, int]


class Pending:
    """A request that was sent over a lane. ``await`` on it returns its answer, as ``result`` does."""

    # What most requests never change is an attribute of the class.
    lane: WorkerLane | None = None
    request_id = 0
    waiting = True
    waiter: queue.SimpleQueue[None] | None = None
    #: True: its lane ended or its worker refused it, and the thread that waits for the answer has to send it again.
    astray = False
    refusal: ServingError | None = None
    #: When it went astray, in seconds of ``time.monotonic()``.
    astray_at = 0.0
    #: True until a worker has refused it once.
    _may_be_elsewhere = True
    #: How often the request was sent.
    sent = 0
    _ended = False
    _given_up = False
    _had_response = False
    #: Bytes of responses that were read and not acknowledged to the worker yet.
    _taken = 0
    _result: Answer | ServingError | None = None
    _callbacks: Sequence[Callable[[Pending], object]] = ()
    #: The future, and its event loop, that are told when something comes; None: no task waits.
    _awaited: tuple[asyncio.Future[None], asyncio.AbstractEventLoop] | None = None

    def __init__(self, connection: LaneConnection, call: Call, placed: Placed) -> None:
        #: Responses that were received and not read yet: an answer with its lease and its lane, or an error.
        self._arrived: deque[tuple[AnswerRecord, Lease | None] | ServingError] = deque()
        self._connection = connection
        self.call = call
        self.placed = placed
        self.own = own_fields(call)
        # The garbage collector may end a stream of this request in a thread that has the lock.
        self._lock = threading.RLock()

    # ------------------------------------------------------------------------------------------- from whoever reads

    def take(self, lane: WorkerLane, answer: AnswerRecord) -> None:
        """Stores one answer to this request, and wakes the thread or event loop that waits for it. Called in any thread.

        If the worker refused the request, the request may be sent again instead, to another worker. ``lane``: the socket that
        received the answer.
        """
        prepared = answer.prepared
        arrived: tuple[AnswerRecord, Lease | None] | ServingError = (answer, None)
        if answer.code or answer.lease is not None:
            arrived = _judged(lane, answer)
            if (
                prepared.final
                and self._may_be_elsewhere
                and isinstance(arrived, (NotFound, Unavailable))
                and self._asks_again(arrived)
            ):
                # It was not executed. Perhaps the model is elsewhere by now.
                self._may_be_elsewhere = False
                self.refusal = arrived
                self._stray()
                return
        # What has come is there before its end is seen.
        if not self._given_up and (not prepared.is_mark or answer.code):
            self._had_response = True
            self._arrived.append(arrived)
        if prepared.final:
            self._end(lane)
        self._notify()
        if self._callbacks and self.done():
            # A callback may wait for another answer on this lane, which this thread reads.
            lane.call_back(self)

    def _asks_again(self, refusal: ServingError) -> bool:
        return not (self._had_response or self._given_up) and self._connection.may_ask_again(self, refusal)

    def lane_ended(self, left: bool, error: ServingError) -> None:
        """Arranges to send the request again, or fails it, because its lane ended before the last answer.

        ``left``: whether the request had been sent. ``error``: why the lane ended.
        """
        reason = self._why_not_again(left, error)
        if reason is None:
            self._stray()
        else:
            self.fail(reason)

    def _why_not_again(self, left: bool, error: ServingError) -> ServingError | None:
        """Returns why the request may not be sent again after its lane ended, as an error; None: it may be.

        ``left``: whether the request had been sent. ``error``: why the lane ended.
        """
        if self._connection.is_closed:
            return Cancelled(CLOSED)
        if self._given_up:
            return error
        if not left:
            self.sent -= 1
            return None
        if self._had_response:
            return Internal(f"{error.message} before the last response of the request")
        if not self._connection.is_pure(self.call):
            return Internal(f"{error.message} while it had the request, which may not be run twice")
        if self.sent >= _SENDINGS:
            return Internal(f"the request was given up: {self.sent} worker processes ended while they had it")
        return None

    def _stray(self) -> None:
        """Arranges that the thread that waits for the answer sends the request again, or else a thread of the connection's."""
        self.mark_astray()
        if self.lane is not None:
            self.lane.watched.discard(self.request_id)
        with self._lock:
            by_itself = self._awaited is not None or bool(self._callbacks)
        if by_itself:
            self._connection.send_again_soon(self)
        else:
            self._notify()

    def mark_astray(self) -> None:
        """Notes that the request has no lane: whoever waits for its answer has to send it."""
        self.astray_at = time.monotonic()
        # In this order, so that whoever claims it counts it no more.
        self._connection.laneless.add(self)
        self.astray = True

    def claim(self) -> bool:
        """Returns whether the calling thread must send the request again; of several threads only one gets True."""
        with self._lock:
            astray, self.astray = self.astray, False
        if astray:
            self._connection.claimed.add(self)
            self._connection.laneless.discard(self)
        return astray

    def fail(self, error: ServingError) -> None:
        """Ends the request with an error, and calls its callbacks. May be called in any thread."""
        self._arrived.append(error)
        self._end(self.lane)
        self._notify()
        self.call_back()

    def expire(self) -> None:
        """Ends the request with DeadlineExceeded, and tells the worker that nobody waits for its answer any more."""
        self._give_up(deadline_error(self.lane))

    def _give_up(self, error: ServingError) -> None:
        """Ends the request with an error for its caller.

        The worker is told that nobody waits for the answer any more; the answer, which still comes, is dropped.
        """
        with self._lock:
            if self._given_up or self._ended:
                return
            astray, self.astray = self.astray, False
            self._drop()
            self._arrived.append(error)
            self._given_up = True
        if astray:
            self._connection.laneless.discard(self)
        lane = self.lane
        if lane is not None:
            lane.cancel(self.request_id)
        self._notify()
        self.call_back()

    def _end(self, lane: WorkerLane | None) -> None:
        with self._lock:
            if self._ended:
                return
            self._ended = True
        if lane is not None and lane.watched:
            lane.watched.discard(self.request_id)
        if self.placed.slot is not None:
            self.placed.slot.give_back()

    def _drop(self) -> None:
        """Discards the answers that have come and were not returned, and gives the memory that they lie in back to the worker."""
        with contextlib.suppress(IndexError):
            while self._arrived:
                arrived = self._arrived.popleft()
                if isinstance(arrived, tuple) and arrived[1] is not None:
                    arrived[1].release()

    def _notify(self) -> None:
        self.waiting = False
        waiter = self.waiter
        if waiter is not None:
            waiter.put(None)
        awaited = self._awaited
        if awaited is not None:
            future, loop = awaited
            if sys.modules["asyncio"]._get_running_loop() is loop:
                _set(future)
            else:
                with contextlib.suppress(RuntimeError):  # the loop is closed
                    loop.call_soon_threadsafe(_set, future)

    # ------------------------------------------------------------------------------------------------- from a thread

    def result(self, timeout: float | None = None) -> Answer:
        """Waits for the answer and returns it, or raises its error. ``timeout`` and Raises: as ``connection.Pending.result``.

        The request is also cancelled if a signal's handler ends the wait.
        """
        if self._result is None:
            try:
                self._result = self._next(self._until(timeout)) or _nothing(self.call)
            except BaseException:
                self.cancel()
                raise
        if isinstance(self._result, ServingError):
            raise self._result
        return self._result

    def responses(self, timeout: float | None = None) -> Iterator[Answer]:
        """Iterates over the responses. ``timeout`` and Raises: as ``connection.Pending.responses``."""
        return begun(self._responses(timeout))

    def _responses(self, timeout: float | None) -> Generator[Any, None, None]:
        try:
            yield
            while True:
                response = self._next(self._until(timeout))
                if response is None:
                    return
                if isinstance(response, ServingError):
                    raise self._explained(response)
                yield response
        finally:
            self.cancel()

    def _explained(self, error: ServingError) -> ServingError:
        """Returns ResultsHeld if a stream failed because the program holds too many answers; else returns ``error``."""
        held = self._connection.held.too_many() if isinstance(error, (DeadlineExceeded, Unavailable)) else None
        return held or error

    def done(self) -> bool:
        """Returns whether the request has ended, so that ``result`` does not wait."""
        return self._ended or self._given_up

    def cancel(self) -> None:
        """Ends the request with Cancelled, and tells the worker that nobody waits for its answer any more. Idempotent."""
        self._give_up(Cancelled("the request was cancelled"))

    def add_done_callback(self, callback: Callable[[Pending], object]) -> None:
        """Registers ``callback`` to be called with this request when it ends: in any thread, at once if it has ended already."""
        with self._lock:
            done = self.done()
            if not done:
                self._callbacks = (*self._callbacks, callback)
        if done:
            callback(self)
            return
        if self.call.deadline is not None:
            self._connection.deadlines.add(self, self.call.deadline)
        if self.astray:
            self._connection.send_again_soon(self)
        elif self.lane is not None:
            self._watch(self.lane)

    def call_back(self) -> None:
        """Calls the callbacks that ``add_done_callback`` took, each once, if the request has ended; else does nothing."""
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

    def watch_again(self) -> None:
        """Watches the new lane of a request that was sent again: for its callbacks, or by the event loop that waits.

        If the request was given up while it was sent, tells the worker so.
        """
        lane = self.lane
        if lane is None:
            return
        if self._given_up:
            lane.cancel(self.request_id)
        with self._lock:
            called, awaited = bool(self._callbacks), self._awaited
        if called:
            self._watch(lane)
        if awaited is not None:
            with contextlib.suppress(RuntimeError):  # closed
                awaited[1].call_soon_threadsafe(lane.attach, awaited[1])

    def _watch(self, lane: WorkerLane) -> None:
        lane.watch(self.request_id)
        if self.request_id not in lane.in_flight:
            lane.watched.discard(self.request_id)
        if self.done():
            self.call_back()

    def _until(self, timeout: float | None) -> float | None:
        deadline = self.call.deadline
        if timeout is None:
            return deadline
        until = time.monotonic() + timeout
        return until if deadline is None else min(until, deadline)

    def _next(self, until: float | None) -> Answer | ServingError | None:
        """Waits for the next response and returns it, or returns the error that ended the request.

        Returns None: there are no more.

        ``until``: seconds of ``time.monotonic()``; None: no deadline.
        """
        while True:
            while self._arrived:
                taken = self._take_arrived()
                if taken is not None:
                    return taken
            if self.done():
                if self._arrived:
                    continue
                return None
            try:
                if self.astray:
                    self._connection.send_again(self, until)
                self._acknowledge()
                self.waiting = True
                if self._arrived or self.done() or self.astray:
                    continue
                lane = self.lane
                if lane is None or lane.ended:
                    # A thread of the connection's is sending it again.
                    if until is not None and time.monotonic() >= until:
                        raise WaitEnded
                    time.sleep(_ASIDE)
                else:
                    lane.wait(self, until)
            except WaitEnded:
                self.expire()
            except ServingError as error:
                self.fail(error)

    def _take_arrived(self) -> Answer | ServingError | None:
        arrived = self._arrived.popleft()
        if not isinstance(arrived, tuple):
            return arrived
        answer, lease = arrived
        if not answer.prepared.final:
            self._taken += answer.byte_size
        try:
            return made_answer(answer, lease, self.call.places)
        except ServingError as error:
            return error
        except (LookupError, TypeError, ValueError) as error:
            return Internal(f"the worker's answer is malformed: {error}")

    def _acknowledge(self) -> None:
        """Tells the worker how many bytes of responses were read, once these are at least 1024, so that it may send more."""
        if self._taken >= _TAKEN and self.lane is not None:
            taken, self._taken = self._taken, 0
            self.lane.say(wire.taken(self.request_id, taken))

    # -------------------------------------------------------------------------------------------- from an event loop

    def __await__(self) -> Generator[Any, None, Answer]:
        """Waits for the answer on the running event loop, and returns or raises it. Cancelling the task cancels the request."""
        if self._result is None:
            self._result = (yield from self._next_async(None)) or _nothing(self.call)
        if isinstance(self._result, ServingError):
            raise self._result
        return self._result

    def async_responses(self, timeout: float | None = None) -> AsyncIterator[Answer]:
        """Iterates over the responses on the running event loop. ``timeout`` and Raises: as in ``connection.Pending``."""
        return begun_async(self._async_responses(timeout))

    async def _async_responses(self, timeout: float | None) -> AsyncGenerator[Any, None]:
        try:
            yield
            while True:
                response = await self._next_async(timeout)
                if response is None:
                    return
                if isinstance(response, ServingError):
                    raise self._explained(response)
                yield response
        finally:
            self.cancel()

    @types.coroutine
    def _next_async(self, timeout: float | None) -> Generator[Any, None, Answer | ServingError | None]:
        """Awaits and returns the next response, or the error; None: no more come. ``timeout``: seconds; None: to the deadline."""
        arrived = self._arrived
        until: float | None = None
        loop: asyncio.AbstractEventLoop | None = None
        while True:
            while arrived:
                taken = self._take_arrived()
                if taken is not None:
                    return taken
            if self._ended or self._given_up:
                if arrived:
                    continue
                return None
            if loop is None:
                # Whoever awaits has imported it, and a statement that imports costs more here than all the rest.
                loop = sys.modules["asyncio"].get_running_loop()
                until = self._until(timeout)
            if self._taken:
                self._acknowledge()
            future = loop.create_future()
            self._awaited = future, loop
            timer = None if until is None else loop.call_at(loop.time() + until - time.monotonic(), self.expire)
            try:
                if self.astray:
                    self._connection.send_again_soon(self)
                elif self.lane is not None:
                    self.lane.attach(loop)
                if not (arrived or self._ended or self._given_up):
                    yield from future
            except BaseException:  # the task was cancelled, or dropped with its loop
                self.cancel()
                raise
            finally:
                if timer is not None:
                    timer.cancel()
                self._awaited = None

    def forget(self) -> None:
        """Ends the request in a process that was forked off: nobody is called back, and who asks for its answer gets an error."""
        self._lock = threading.RLock()
        self._callbacks, self._awaited, self.waiter = (), None, None
        self.astray = self.waiting = False
        self._arrived, self._ended = deque((Unavailable(FORKED),)), True

    def __repr__(self) -> str:
        return f"<Pending {self.call.model} {self.request_id}{' done' if self.done() else ''}>"

    def __del__(self) -> None:
        # Nobody can take what comes for it any more: neither a thread that waits, nor a callback, as those refer to it.
        if self._arrived:
            self._drop()


def made_answer(record: AnswerRecord, lease: Lease | None, places: Any) -> Answer:
    """Converts a worker's message to an ``Answer``: its arrays are views of the worker's memory, the caller's own, or copies.

    Args:
      lease: the lease of the worker's memory, which the answer then holds; None: there is none.
      places: output name -> the array that the output is in, or is copied to here where workers do not reach it.

    Raises: ValueError, LookupError, TypeError: the record is malformed.  InvalidArgument: an output differs from its place.
    """
    answer = Answer()
    prepared = record.prepared
    answer.version = prepared.version
    if prepared.parameters:
        answer.parameters = prepared.parameters
    answer.times = record.timing
    if prepared.plan is None:
        prepared.plan = _plan(prepared.outputs)
    if prepared.plan and not places and arrays(answer, prepared.plan, record.contents):
        return answer
    contents = iter(record.contents)
    views: list[Array] = []
    for output in prepared.outputs:
        if output.placed:
            answer[output.name] = place = places[output.name]
            check_place(output.name, output.shape, dtype_of(output.datatype), place)
            continue
        content = next(contents)
        if type(content) is bytes:
            answer[output.name] = _array(content, output)
        elif lease is None:
            raise ValueError(f"output '{output.name}' lies in no lease")
        elif output.datatype == "BYTES":
            answer[output.name] = decode_strings(lease.content(content), output.shape)
        else:
            dtype = dtype_of(output.datatype)
            name, viewed = typestr(dtype)
            array = lease.view(content, output.shape, name, dtype)
            answer[output.name] = array.view(dtype) if viewed else array
            if output.name not in places:
                views.append(array)
    written(answer, places)
    if views and lease is not None:
        lease.hold(sum([array.nbytes for array in views]))
        answer.lease = lease
    return answer


def _array(content: bytes, output: OutputTensor) -> Array:
    if output.datatype == "BYTES":
        return decode_strings(content, output.shape)
    return np.frombuffer(bytearray(content), dtype_of(output.datatype)).reshape(output.shape)


def _plan(outputs: Sequence[OutputTensor]) -> tuple[Plan, ...]:
    """Returns (name, shape, dtype, byte size) of each output; empty if an output is BYTES or lies in an array of the caller's."""
    if any(output.placed or output.datatype == "BYTES" for output in outputs):
        return ()
    planned = [(output.name, output.shape, dtype_of(output.datatype)) for output in outputs]
    return tuple([(name, shape, dtype, math.prod(shape) * dtype.itemsize) for name, shape, dtype in planned])


def arrays(answer: Answer, outputs: tuple[Plan, ...], contents: list[Any]) -> bool:
    """Adds an array for each output to an answer. Returns False if bytes are not in the record or do not fit; else True.

    Args:
      outputs: (name, shape, dtype, byte size) of each output.
      contents: for each output its bytes in the answer's record, or their place in the worker's memory.
    """
    if native.arrays is not None:
        return native.arrays(answer, outputs, contents, np.ndarray)
    for (name, shape, dtype, byte_size), content in zip(outputs, contents):
        if type(content) is not bytes or len(content) != byte_size:
            return False
        answer[name] = np.ndarray(shape, dtype, bytearray(content))
    return True


def _nothing(call: Call) -> ServingError:
    return Internal(f"model '{call.model}' has answered with no response")


def deadline_error(lane: WorkerLane | None) -> ServingError:
    """Returns the error of a request whose deadline has passed: ResultsHeld if the answers that the program holds are the cause.

    ``lane``: the one that the request was sent on; None: it was sent on none.
    """
    error = DeadlineExceeded()
    return error if lane is None else lane.answers.explained(error)


def _judged(lane: WorkerLane, answer: AnswerRecord) -> tuple[AnswerRecord, Lease | None] | ServingError:
    """Returns (answer, lease of its memory or None); if the answer is an error or cannot be read, the error to raise."""
    lease = None
    error: ServingError | None = None
    try:
        lease = lane.answers.lease(answer)
    except ServingError as failed:
        error = failed
    except ValueError as failed:
        error = Internal(f"the worker's answer is malformed: {failed}")
    if answer.code:
        error = lane.answers.error(answer)
    return (answer, lease) if error is None else error


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
