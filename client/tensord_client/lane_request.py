"""Requests that a client sends over lanes. A request that loses its lane is sent again over another lane, or fails.

    sent on a lane ─▶ the lane ends, or the worker refuses the request ─▶ ``astray``: it has no lane ─▶ sent on another lane
                                                                             ╰─▶ fails: it may not run twice, or no worker comes

A thread that waits for the answer sends the request again. If a callback or an event loop waits, a background thread does so.
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
    """A client's request over a lane. If the lane ends or the worker lacks the model, the request may be sent again."""

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
        #: The lane whose worker has it; None: it was not sent yet, or is to be sent again.
        self.lane: ClientLane | None = None
        #: The lane that ended, or whose worker refused it, before it went astray.
        self.former: ClientLane | None = None
        self.request_id = 0
        #: True: its lane ended or its worker refused it, and the thread that waits for the answer has to send it again.
        self.astray = False
        #: Bytes of responses that were read and not acknowledged to the worker yet.
        self._read = 0

    # ------------------------------------------------------------------------------------------- from whoever reads

    def take(self, lane: ClientLane, answer: AnswerRecord) -> None:
        """Stores an answer that ``lane`` has received, and wakes whoever waits for the answer. Called in any thread.

        If the worker refuses to run the request, the client may send the request to another worker, and store no answer.
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
        """Ends this request, whose last answer ``lane`` has received. Called in any thread.

        If ``answer`` is not None, first adds ``answer`` to the answers that the request's caller gets.
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
        """Records that this request has ended. Returns False, and changes nothing, if the request had already ended.

        Shared memory with copies of the request's inputs may then be used for later requests.
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

    def lane_ended(self, left: bool, error: ServingError, untaken: bool = False) -> None:
        """Has this request sent on another lane, or ends it with an error. Call it if the lane ended before the last answer.

        A request that the worker may have run is sent again at most once, and only if running it twice does no harm.

        Args:
          left: whether the worker may have run this request.
          error: why the lane ended.
          untaken: whether the worker closed the lane without sending a message. The request is then sent again at most once.
        """
        reason: ServingError | None = error
        if self._connection.is_closed:
            reason = Cancelled(CLOSED)
        elif not (self._given_up or (self._was_refused and untaken)):
            # As after a worker's refusal, it is sent once more.
            self._was_refused |= untaken
            known = self._connection.known(self.call)
            is_pure = known is not None and known.description.pure and not self.call.scheduling.sequence_id
            reason = self.after_end(error.message, left, is_pure)
        if reason is None:
            self._stray()
        else:
            self.fail(reason)

    def _stray(self) -> None:
        if self.lane is not None:
            self.lane.watched.discard(self.request_id)
        self.mark_astray()
        with self._lock:
            by_itself = self._awaited is not None or bool(self._callbacks)
        if by_itself:
            self._connection.send_again_soon(self)
        else:
            self.notify()
        if self._given_up:  # since whoever called this has looked
            self.withdraw()

    def mark_astray(self) -> None:
        """Records that this request must be sent again over another lane. The next call of ``claim`` returns True."""
        self.astray_at = time.monotonic()
        self.former, self.lane = self.lane, None
        # In this order, so that whoever claims it counts it no more.
        self._connection.laneless.add(self)
        self.astray = True

    def claim(self) -> bool:
        """Returns whether the calling thread must send this request again. If several threads call, at most one gets True."""
        with self._lock:
            astray, self.astray = self.astray, False
        if astray:
            self._connection.claimed.add(self)
            self._connection.laneless.discard(self)
        return astray

    def watch_again(self) -> None:
        """Makes callbacks and event loops receive the answer from ``self.lane``. Call it after the request was sent again.

        If the request was cancelled in the meantime, cancels the request on ``self.lane``.
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
        """Waits until a response has come or this request has ended. Call it in a loop, because it may return earlier.

        If the request has lost its lane, this method first sends the request again over another lane.
        ``until`` is a time of ``time.monotonic()`` in seconds, or None for no limit.
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
        """Waits until the worker has sent the last answer to this cancelled request, or this request's lane has ended.

        ``until`` is a time of ``time.monotonic()`` in seconds, or None for no limit.

        Raises: ResultsHeld: ``until`` has passed, and older answers that this process has not released leave no room in the
          worker's memory.  DeadlineExceeded: ``until`` has passed for any other reason.
        """
        try:
            while not self._ended and (lane := self.lane) is not None and not lane.ended:
                self.waiting = True
                if not self._ended:
                    lane.wait(self, until)
        except WaitEnded:
            raise self.late() from None

    def attach(self, loop: Any) -> None:
        """Makes ``loop``, the event loop that runs in the calling thread, receive this request's answer. Does not wait.

        If the request has lost its lane, a background thread sends the request again over another lane.
        """
        if self._read:
            self._acknowledge()
        lane = self.lane
        if self.astray:
            self._connection.send_again_soon(self)
        elif lane is not None and loop not in lane.socket.loops:
            lane.attach(loop)

    def watch(self) -> None:
        """Makes a background thread receive the answer. If this request has lost its lane, first has it sent again."""
        lane = self.lane
        if self.astray:
            self._connection.send_again_soon(self)
        elif lane is not None:
            lane.watch(self.request_id)
            if self.done():
                self.call_back()

    def withdraw(self) -> None:
        """Cancels this request. It is not sent again, and its worker is told that nobody waits."""
        with self._lock:
            astray, self.astray = self.astray, False
        if astray:
            self._connection.laneless.discard(self)
        claimed = self in self._connection.claimed  # before its lane is looked at: it may be sent just now
        lane = self.lane
        if lane is not None:
            lane.cancel(self.request_id)
        elif not claimed:
            self.end()  # no worker has it

    def _acknowledge(self) -> None:
        """Tells the worker how many new bytes of this request's responses were read. Does nothing for fewer than 1024 bytes."""
        lane = self.lane
        if self._read >= _ACKNOWLEDGED and lane is not None:
            read, self._read = self._read, 0
            lane.say(wire.record("T", self.request_id, read))

    def made(self, arrived: Answer | tuple[AnswerRecord, AnswerLease | None]) -> Answer | ServingError:
        """Converts a worker's answer to an ``Answer``. If ``arrived`` is an ``Answer``, returns ``arrived`` unchanged.

        In a tuple, the lease is for the block of the worker's arena that has the outputs, or None if no block has outputs.
        Returns an error if the record is malformed, or if an output does not fit the array that the caller gave for the output.
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
        """Returns ResultsHeld if this request is late because this process holds too many answers, else DeadlineExceeded."""
        error, lane = DeadlineExceeded(), self.lane
        return error if lane is None else lane.answers.explained(error)

    def explained(self, error: ServingError) -> ServingError:
        """Returns ResultsHeld if ``error`` came because this process holds too many answers. Else returns ``error``."""
        held = self._connection.held.too_many() if isinstance(error, (DeadlineExceeded, Unavailable)) else None
        return held or error

    def forget(self) -> None:
        super().forget()
        self.astray = False


class Sender:
    """Base class of a client's connection to the daemon. If a request's lane has ended, the request is sent again or fails."""

    is_closed = False
    held: HeldResults

    def begin(self) -> None:
        """Forgets all requests, and all models that were looked up. Also called in a child process after a fork."""
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
        """Returns a call's model with its lanes, or None if the daemon has not been asked for the model yet."""
        return self.models.get((call.model, call.version))

    def send_claimed(self, pending: LaneRequest, until: float | None) -> None:
        """Sends a request over another lane, because the request's lane has ended or the worker has refused the request.

        Call it only in the thread in which ``pending.claim()`` has returned True. ``until``: the time of ``time.monotonic()``
        in seconds at which the search for another lane ends, or None for no limit.
        Sends nothing if the request has ended meanwhile. Raises: WaitEnded: no lane was found until then.  ServingError: no lane
        was found, no other worker can run a refused request, or the worker of the request's sequence has ended.
        """
        raise NotImplementedError

    def send_again(self, pending: LaneRequest, until: float | None) -> None:
        """Sends a request that has lost its lane again. Does nothing if another thread is already sending the request again.

        ``until`` is the time of ``time.monotonic()`` in seconds at which to stop waiting for a lane, or None for no limit.

        Raises: ServingError: the request could not be sent to any worker.  WaitEnded: ``until`` has passed.
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
            if pending.cancelled and pending.lane is None:
                pending.end()

    def send_again_soon(self, pending: LaneRequest) -> None:
        """Makes a background thread send a request whose lane has ended. If that fails, the request's caller gets the error."""
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
