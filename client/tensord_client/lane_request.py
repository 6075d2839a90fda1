"""A request over lanes, and those of them that have no lane: they are sent again, or fail.

on a lane ─▶ it ends, or its worker refuses the request ─▶ astray ─▶ sent again by who waits, or by a thread ─▶ on a lane
                                                              ╰─▶ fails: it may not be run twice, or no worker comes
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any

from tensord_client.answer_memory import AnswerLease, HeldResults, made_answer
from tensord_client.common.call import Call
from tensord_client.common.pending import Deadlines, Pending, WaitEnded
from tensord_client.common.results import Answer
from tensord_client.common.submission import Submission
from tensord_client.errors import (
    CLOSED,
    Cancelled,
    DeadlineExceeded,
    Internal,
    ServingError,
    Unavailable,
)
from tensord_client.native import wire
from tensord_client.worker_lane import ClientLane, OpenedModel

if TYPE_CHECKING:
    from tensord_client._lane import AnswerRecord

#: Bytes of responses that are read before the worker is told; it lets a model be at least four times as far ahead.
_ACKNOWLEDGED = 1024
#: Seconds between two looks at a request that another thread sends again.
_ASIDE = 0.005


class LaneRequest(Submission, Pending[Answer]):
    """A request over a lane. If the lane ends or the worker refuses it, the request has no lane until it is sent again."""

    # What most requests neither read nor change is an attribute of the class.
    refusal: ServingError | None = None
    #: When it went astray, in seconds of ``time.monotonic()``.
    astray_at = 0.0
    #: True: a worker has refused it once.
    _was_refused = False
    strikes = 0
    answered = False

    def __init__(self, connection: Sender, call: Call, placed: wire.Placed, own: bytes) -> None:
        super().__init__(call.model, call.deadline, connection.deadlines)
        self._connection = connection
        self.call = call
        self.placed = placed
        #: The request's other fields, encoded.
        self.own = own
        self.lane: ClientLane | None = None
        self.request_id = 0
        #: True: its lane ended or its worker refused it, and the thread that waits for the answer has to send it again.
        self.astray = False
        #: Bytes of responses that were read and not acknowledged to the worker yet.
        self._read = 0

    # ------------------------------------------------------------------------------------------- from whoever reads

    def take(self, lane: ClientLane, answer: AnswerRecord) -> None:
        """Stores one answer that ``lane`` has received, and wakes whoever waits for the answer. Called in any thread.

        If the worker has refused the request, and another worker may serve the model, the answer is dropped instead, and the
        request will be sent again.
        """
        prepared = answer.prepared
        arrived: tuple[AnswerRecord, AnswerLease | None] | ServingError = (answer, None)
        if answer.code or answer.lease is not None:
            arrived = lane.answers.judged(answer)
            if prepared.final and isinstance(arrived, ServingError) and self._asks_again(arrived):
                # It was not executed. Perhaps the model is elsewhere by now.
                self._was_refused = True
                self.refusal = arrived
                self._stray()
                return
        if not prepared.is_mark or answer.code:
            self.answered = True
            self.add(arrived)
        if prepared.final:
            self.finish(lane)
        else:
            self.notify(lane.loop)

    def finish(self, lane: ClientLane, answer: Answer | None = None) -> None:
        """Ends this request, whose last answer ``lane`` has received, and wakes whoever waits. Called in any thread.

        ``answer``: the last answer, if the C extension has made it already; None: it was stored.
        """
        # What has come is there before its end is seen.
        if answer is not None and not self._given_up:
            self._arrived.append(answer)
        self.end()
        self.notify(lane.loop)
        if self._callbacks:
            # A callback may wait for another answer on this lane, which this thread reads.
            lane.call_back(self)

    def end(self) -> bool:
        """Ends this request: no further answer comes, and a later request may use the memory of its inputs' copies.

        Returns whether this call ended it; False: it had ended already.
        """
        if not super().end():
            return False
        lane, slot = self.lane, self.placed.slot
        if lane is not None and lane.watched:
            lane.watched.discard(self.request_id)
        if slot is not None:
            slot.give_back()
        return True

    # --------------------------------------------------------------------------------------------- sent once more

    @property
    def cancelled(self) -> bool:
        return self._given_up

    def _asks_again(self, refusal: ServingError) -> bool:
        if self._was_refused or self._connection.is_closed:
            return False
        known = self._connection.known(self.call)
        return known is not None and self.may_be_elsewhere(refusal.code, refusal.message, known.is_told)

    def lane_ended(self, left: bool, error: ServingError) -> None:
        """Has this request sent again, or ends it with an error, because its lane ended before its last answer had come.

        The request is sent again if the worker cannot have run it, or if running it twice does no harm.

        Args:
          left: True: the request had been sent, so that the worker may have run it; False: it had not.
          error: why the lane ended.
        """
        reason: ServingError | None = error
        if self._connection.is_closed:
            reason = Cancelled(CLOSED)
        elif not self._given_up:
            known = self._connection.known(self.call)
            is_pure = known is not None and known.description.pure and not self.call.scheduling.sequence_id
            reason = self.after_end(error.message, left, is_pure)
        if reason is None:
            self._stray()
        else:
            self.fail(reason)

    def _stray(self) -> None:
        """Marks this request as one without a lane, and arranges that it is sent again.

        The thread that waits for the answer sends the request. If none waits, because the answer goes to a callback or an event
        loop, a background thread of the connection sends it.
        """
        self.mark_astray()
        if self.lane is not None:
            self.lane.watched.discard(self.request_id)
        with self._lock:
            by_itself = self._awaited is not None or bool(self._callbacks)
        if by_itself:
            self._connection.send_again_soon(self)
        else:
            self.notify()

    def mark_astray(self) -> None:
        """Stores that this request has no lane: the thread that waits for the answer has to send the request."""
        self.astray_at = time.monotonic()
        # In this order, so that whoever claims it counts it no more.
        self._connection.laneless.add(self)
        self.astray = True

    def claim(self) -> bool:
        """Returns True to the one thread that must send this request again; False to others, or if the request has a lane."""
        with self._lock:
            astray, self.astray = self.astray, False
        if astray:
            self._connection.claimed.add(self)
            self._connection.laneless.discard(self)
        return astray

    def watch_again(self) -> None:
        """Arranges that somebody reads the new lane on which this request was sent again.

        If callbacks wait for the answer, the lane's thread reads the lane; if a task waits, the task's event loop does. If
        the request was cancelled meanwhile, tells the new worker so.
        """
        lane = self.lane
        if lane is None:
            return
        if self._given_up:
            lane.cancel(self.request_id)
        with self._lock:
            called, awaited = bool(self._callbacks), self._awaited
        if called:
            self.watch()
        if awaited is not None:
            with contextlib.suppress(RuntimeError):  # closed
                awaited[1].call_soon_threadsafe(lane.attach, awaited[1])

    # ------------------------------------------------------------------------------------------------ from whoever waits

    def wait(self, until: float | None) -> None:
        """Waits for an answer: reads the lane, or sleeps while another thread reads it. It may return before an answer has come.

        If the request has no lane, it is first sent again. ``until``: seconds of ``time.monotonic()``; None: without limit.

        Raises: WaitEnded: ``until`` has passed.  ServingError: the request could not be sent again.
        """
        if self.astray:
            self._connection.send_again(self, until)
        self._acknowledge()
        self.waiting = True
        if self._arrived or self.done() or self.astray:
            return
        lane = self.lane
        if lane is not None and not lane.ended:
            lane.wait(self, until)
            return
        # A thread of the connection's is sending it again.
        if until is not None and time.monotonic() >= until:
            raise WaitEnded
        time.sleep(_ASIDE)

    def settle(self, until: float | None) -> None:
        """Waits until the worker has sent the last answer to this request, which its caller has cancelled, or the lane has ended.

        ``until``: seconds of ``time.monotonic()``; None: without limit.

        Raises: DeadlineExceeded: ``until`` has passed.  ResultsHeld: ``until`` has passed, and the worker has no room for the
          answer because this process holds too many answers.
        """
        try:
            while not self._ended and self.lane is not None and not self.lane.ended:
                self.waiting = True
                if not self._ended:
                    self.lane.wait(self, until)
        except WaitEnded:
            raise self.late() from None

    def attach(self, loop: Any) -> None:
        """Asks an event loop to read this request's lane. Without a lane, a background thread sends the request again."""
        if self._read:
            self._acknowledge()
        lane = self.lane
        if self.astray:
            self._connection.send_again_soon(self)
        elif lane is not None and loop not in lane.socket.loops:
            lane.attach(loop)

    def watch(self) -> None:
        """Asks the lane's thread to read the lane. If this request has no lane, a background thread sends it again instead."""
        lane = self.lane
        if self.astray:
            self._connection.send_again_soon(self)
        elif lane is not None:
            lane.watch(self.request_id)
            if self.request_id not in lane.in_flight:
                lane.watched.discard(self.request_id)
            if self.done():
                self.call_back()

    def withdraw(self) -> None:
        """Cancels this request: it is not sent again, and its worker, if it has one, is told that nobody waits for the answer."""
        with self._lock:
            astray, self.astray = self.astray, False
        if astray:
            self._connection.laneless.discard(self)
        if self.lane is not None:
            self.lane.cancel(self.request_id)

    def _acknowledge(self) -> None:
        """Tells the worker how many bytes of responses were read, if 1024 or more, so that the worker may send more."""
        if self._read >= _ACKNOWLEDGED and self.lane is not None:
            read, self._read = self._read, 0
            self.lane.say(wire.record("T", self.request_id, read))

    def made(self, arrived: Answer | tuple[AnswerRecord, AnswerLease | None]) -> Answer | ServingError:
        """Converts a received record to an answer; returns an error if the record cannot be read.

        ``arrived``: the record, and the lease of the worker's memory that its outputs lie in, or None. If the C extension
        has already made an answer of the record, ``arrived`` is that answer, and the method returns it unchanged.
        """
        if type(arrived) is Answer:
            return arrived
        answer, lease = arrived
        if not answer.prepared.final:
            self._read += answer.byte_size
        try:
            return made_answer(answer, lease, self.call.places)
        except ServingError as error:
            return error
        except (LookupError, TypeError, ValueError) as error:
            return Internal(f"the worker's answer is malformed: {error}")

    def late(self) -> ServingError:
        """Returns the error of a late answer: ResultsHeld if held answers leave the worker no room, else DeadlineExceeded."""
        error = DeadlineExceeded()
        return error if self.lane is None else self.lane.answers.explained(error)

    def explained(self, error: ServingError) -> ServingError:
        """Returns ResultsHeld if ``error`` ended a stream because this process holds too many answers, else ``error``."""
        held = self._connection.held.too_many() if isinstance(error, (DeadlineExceeded, Unavailable)) else None
        return held or error

    def forget(self) -> None:
        """Ends a child process's copy of this request after a fork."""
        super().forget()
        self.astray = False


class Sender:
    """Base class of ``LaneConnection``: stores the requests that have no lane, and sends each of them again or fails it."""

    is_closed = False
    held: HeldResults

    def begin(self) -> None:
        """Resets this object: no requests, no opened models. Called by the constructor, and in a child process after a fork."""
        #: Requests that are to be sent again and that no thread waits for, by model; each has a thread while there are any.
        self._astray: dict[tuple[str, int], deque[LaneRequest]] = {}
        self._astray_lock = threading.Lock()
        #: All requests that have no lane and that no thread is sending now, until nobody refers to them. The lock is only held by
        #: who compares their number with the limit: a garbage collection, which may begin in there, may give a request up.
        self.laneless: weakref.WeakSet[LaneRequest] = weakref.WeakSet()
        self.laneless_lock = threading.Lock()
        #: The requests that a thread is sending again.
        self.claimed: set[LaneRequest] = set()
        self.deadlines = Deadlines()
        #: Opened models by name and version; version 0 stands for the newest.
        self.models: dict[tuple[str, int], OpenedModel] = {}

    def known(self, call: Call) -> OpenedModel | None:
        """Returns what the daemon said of a call's model: its description and lanes; None: the daemon was not asked yet."""
        return self.models.get((call.model, call.version))

    def send_claimed(self, pending: LaneRequest, until: float | None) -> None:
        """Sends the request ``pending`` again. Call it only in the thread for which the request's ``claim`` returned True.

        ``until``: seconds of ``time.monotonic()`` to wait for a lane; None: no deadline.

        Raises: ServingError: the request may not be sent again, or no lane was found.  WaitEnded: ``until`` has passed.
        """
        raise NotImplementedError

    def send_again(self, pending: LaneRequest, until: float | None) -> None:
        """Sends the request ``pending`` again, whose lane ended or whose worker refused it. Does nothing if another thread does.

        ``until``: seconds of ``time.monotonic()`` to wait for a lane; None: no deadline.

        Raises: ServingError: the request may not be sent again, or no lane was found.  WaitEnded: ``until`` has passed.
        """
        if not pending.claim():
            return
        try:
            self.send_claimed(pending, until)
        except Unavailable:
            if self.is_closed:
                raise Cancelled(CLOSED) from None
            raise
        finally:
            self.claimed.discard(pending)

    def send_again_soon(self, pending: LaneRequest) -> None:
        """Has a background thread (one for each model) send ``pending`` again or fail it, as no thread waits for this request."""
        model = pending.call.model, pending.call.version
        with self._astray_lock:
            waiting = self._astray.get(model)
            if waiting is not None:
                waiting.append(pending)
                return
            threading.Thread(target=self._send_astray, args=model, name="tensord-again", daemon=True).start()
            self._astray[model] = deque((pending,))

    def _send_astray(self, model: str, version: int) -> None:
        while True:
            with self._astray_lock:
                waiting = self._astray[model, version]
                if not waiting:
                    del self._astray[model, version]
                    return
                pending = waiting.popleft()
            try:
                self.send_again(pending, pending.deadline)
            except WaitEnded:
                pending.expire()
            except ServingError as error:
                pending.fail(error)
            except Exception as error:  # such as too many open files: the thread has other requests to send
                pending.fail(Internal(f"the request could not be sent again: {error!r}"))
