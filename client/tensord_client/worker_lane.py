"""The client's end of a lane: sends requests to one worker, receives the answers, and lets threads wait for answers.

One of the threads that wait for answers reads the lane's socket, and hands each answer to its request. This thread holds the
lock ``reading`` meanwhile. The other waiting threads sleep. When the reading thread has its own answer, it wakes one of the
sleeping threads, which then reads the socket. If an event loop waits for an answer, the event loop's thread reads the socket in
the same way. If a request has callbacks, a background thread does so.
"""

from __future__ import annotations

import _thread
import contextlib
import os
import queue
import socket
import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from tensord_client.answer_memory import AnswerMemory, HeldResults, PreparedAnswer
from tensord_client.common.descriptors import descriptors_in
from tensord_client.common.pending import WaitEnded
from tensord_client.common.results import Answer, Description
from tensord_client.common.submission import least_busy
from tensord_client.errors import Cancelled, Internal, InvalidArgument, ServingError, Unavailable, too_many_waiting
from tensord_client.lane_socket import AT_ONCE, LaneEnded, LaneSocket, time_left
from tensord_client.memory import Memory
from tensord_client.native import wire

if TYPE_CHECKING:
    from tensord_client._lane import AnswerRecord

# Plain integers: the socket module's flags are enums, whose every operation is a Python call.
_TRUNCATED = int(socket.MSG_TRUNC)
_DESCRIPTORS_LOST = int(socket.MSG_CTRUNC)
#: The most datagrams that an event loop receives in one iteration.
_TURN = 64
#: Seconds in which a worker that refuses requests is not asked about again.
_JUST = 0.25


class ClientLane:
    """The client's end of a lane. It sends requests to one worker, and stores each answer in its request. Thread-safe."""

    def __init__(
        self,
        sock: socket.socket,
        number: int,
        memory: Memory,
        ids: Iterator[int],
        held: HeldResults,
        response_byte_size: int,
        most: int,
        spin_ns: int,
    ) -> None:
        """Takes ownership of a lane's socket, and sends the version of the wire format to the worker.

        Raises nothing if the worker has ended. ``usable`` is False then.

        Args:
          number: the number by which the daemon knows the lane.
          memory: the memory that the connection shares with its workers.
          ids: yields the ids of requests, from 2**32 on. All lanes of the connection share it.
          held: counts the answers in workers' memory that this process still uses, on all lanes.
          response_byte_size: the most bytes of the worker's memory that this lane's answers may have together.
          most: the most requests that the worker takes at a time. Further requests are queued in this object.
          spin_ns: how long a thread that waits for an answer polls at most before it sleeps, in ns.
        """
        self._most = most
        self.socket = LaneSocket(sock, spin_ns)
        self.number = number
        self.memory = memory
        self.ids = ids
        #: The worker's memory that answers on this lane lie in.
        self.answers = AnswerMemory(held, response_byte_size, self._release)
        #: Guards what is sent: ids grow, and what a number stands for is said before it is used.
        self.lock = self.socket.lock
        #: Held by the thread or event loop that reads the socket.
        self.reading = self.socket.reading
        #: ``LaneRequest``s by their ids; None: the part in C waits for the answer, and holds ``reading``.
        self.in_flight: dict[int, Any] = {}
        #: The ids of this connection's open sequences here, by model.
        self.sequences: defaultdict[str, set[int | str]] = defaultdict(set)
        #: True: the lane has ended, and every request in flight has been notified.
        self.ended = False
        #: When it ended, in seconds of ``time.monotonic()``; 0: it has not.
        self.ended_at = 0.0
        self._why: ServingError | None = None

        self._numbers: dict[bytes, bytes] = {}
        self._once: set[bytes] = set()
        self._announced: set[int] = set()
        #: The object in ``memory.closures`` when the worker was last told which segments were closed.
        self.known_closures: list[object] = [memory.closures[0]]
        #: Requests, with their ids, that are sent together when the event loop's iteration ends.
        self._outgoing: list[tuple[bytes, int]] = []
        #: Requests, by their ids, that are more than the worker takes at a time; they count as in flight.
        self.queued: dict[int, bytes] = {}
        #: The trace contexts of requests that are not sent yet, by the requests' ids.
        self._contexts: dict[int, bytes] = {}

        #: The event loop that runs in the thread that reads the socket now; None: none is known.
        self.loop: Any = None
        self._parts = bytearray()
        #: Prepared answers, by the number that the worker has given each; None: the number is not used yet.
        self._prepared: list[PreparedAnswer | None] = [None] * wire.MAX_NUMBERS

        #: Threads that wait while another one reads.
        self.followers: dict[queue.SimpleQueue[None], None] = {}
        #: Ids of requests with callbacks, or that were cancelled; and requests that have ended, whose callbacks are to be called.
        self.watched: set[int] = set()
        self.finished: deque[Any] = deque()
        self._thread: threading.Thread | None = None
        self._thread_waiter: queue.SimpleQueue[None] = queue.SimpleQueue()
        #: Sends requests of threads that wait, and receives their answers. None until the worker has sent its version of the wire
        #: format, and again once the lane has ended.
        self.exchange: wire.Exchange | None = None
        with contextlib.suppress(LaneEnded):
            self.socket.send_record(wire.record("V", wire.WIRE_VERSION))

    # ------------------------------------------------------------------------------------------------------ sending

    @property
    def usable(self) -> bool:
        """Returns whether requests may be sent on this lane."""
        return not (self.socket.closing or self.ended)

    def submit(self, request: Any, loop: Any = None, max_waiting: int | None = None) -> int:
        """Sends a ``LaneRequest``, or queues it if the worker takes no more requests now. Returns the request's id.

        Args:
          loop: the event loop that runs in this thread, or None. With a loop, sending can be put off until the loop's next
            iteration, so that several requests are sent together.
          max_waiting: how many requests may be in the queue before this one, or None for any number.

        Raises: LaneEnded: the worker has ended, and the request was not sent.  InvalidArgument: the request is too large for
          one record.  Unavailable: ``max_waiting`` requests are queued already.
        """
        placed, traceparent, exchange = request.placed, request.call.traceparent, self.exchange
        if exchange is not None and not traceparent:
            request_id = exchange.submit(request, loop)
            if request_id is not None:
                return request_id
        prepared = number = placed.prepared
        with self.lock:
            if self.socket.closing:
                raise LaneEnded
            if placed.segments or self.memory.closures[0] is not self.known_closures[0]:
                self.announce(placed.segments)
            in_turn = not self.queued and len(self.in_flight) < self._most
            if in_turn:  # What is queued may outlive its number.
                number = self._numbers.get(prepared) or self._number(prepared)
            elif max_waiting is not None and len(self.queued) >= max_waiting:
                raise too_many_waiting(len(self.queued), max_waiting)
            request_id = next(self.ids)
            record = wire.request(request_id, number, placed.contents, request.own)
            if len(record) >= wire.MAX_RECORD:
                raise InvalidArgument(f"a request of {len(record)} bytes, at most {wire.MAX_RECORD - 1} are allowed")
            if traceparent:
                self._contexts[request_id] = wire.record("tc", request_id, traceparent[3:35], traceparent[36:52])
            self.in_flight[request_id] = request
            if in_turn:
                try:
                    self._send_now(record, request_id)
                except LaneEnded:
                    self.in_flight.pop(request_id, None)
                    raise
                return request_id
            self.queued[request_id] = record
        self.advance()
        return request_id

    def announce(self, segments: Sequence[int]) -> None:
        """Tells the worker which segments the client has closed, and sends the segments in ``segments`` that the worker lacks.

        ``segments`` are the numbers of the segments that the client's next request uses. The caller must hold ``self.lock``.
        """
        if self.memory.closures[0] is not self.known_closures[0]:
            self.known_closures[0] = self.memory.closures[0]
            for gone in [number for number in self._announced if self.memory.segments.get(number) is None]:
                self._announced.discard(gone)
                self._flush_outgoing()
                self.socket.send_record(wire.record("S-", gone))
        for number in segments:
            if number not in self._announced:
                segment = self.memory.segments.get(number)
                assert segment is not None, "a request holds its arrays, and these their segments"
                self._flush_outgoing()
                self.socket.send(wire.datagram((wire.record("S+", number, segment.byte_size),)), segment.fd)
                self._announced.add(number)

    def _number(self, prepared: bytes) -> bytes:
        # Many are used only once: the number comes at the second use.
        if prepared not in self._once:
            if len(self._once) >= wire.MAX_NUMBERS:
                self._once.clear()
            self._once.add(prepared)
            return prepared
        self._once.discard(prepared)
        if len(self._numbers) >= wire.MAX_NUMBERS:
            self._numbers.clear()
        count = len(self._numbers)
        self._flush_outgoing()
        self.socket.send_record(wire.prepare(count, prepared))
        number = self._numbers[prepared] = wire.integer(count)
        return number

    def _send_now(self, record: bytes, request_id: int) -> None:
        context = self._contexts.pop(request_id, b"") if self._contexts else b""
        self._flush_outgoing()
        before = [each for each in (self.answers.release_record(), context) if each]
        if before and sum(map(len, before)) + len(record) <= wire.ROOM:
            self.socket.send(wire.datagram((*before, record)), -1, (request_id,))
            return
        if before:
            self.socket.send(wire.datagram(before))
        self.socket.send_record(record, (request_id,))

    def _flush_outgoing(self) -> None:
        """Sends the requests that ``submit`` has put off. The caller must hold ``self.lock``."""
        outgoing = self._outgoing
        while outgoing:
            count = size = 0
            for record, _ in outgoing:
                size += len(record)
                if size > wire.ROOM:
                    break
                count += 1
            records, ids = zip(*outgoing[:count])
            del outgoing[:count]
            self.socket.send(wire.datagram(records), -1, ids)

    def flush(self) -> None:
        """Sends the requests that ``submit`` has put off. Does nothing if the worker has ended."""
        if self._outgoing:
            with self.lock, contextlib.suppress(LaneEnded):
                self._flush_outgoing()

    def say(self, record: bytes) -> None:
        """Sends a message other than a request, such as a cancellation. Does nothing if the worker has ended."""
        with self.lock, contextlib.suppress(LaneEnded):
            if not self.socket.closing:
                self._flush_outgoing()
                self.socket.send_record(record)

    def _release(self) -> None:
        # Otherwise the next request gives them back.
        if not self.lock.acquire(False):
            return
        try:
            release = self.answers.release_record()
            if release and not self.socket.closing:
                self._flush_outgoing()
                self.socket.send_record(release)
        except LaneEnded:
            pass
        finally:
            self.lock.release()

    def advance(self) -> None:
        """Sends as many queued requests as the worker takes now. Does nothing if the worker has ended."""
        with self.lock, contextlib.suppress(LaneEnded):
            while self.queued and len(self.in_flight) - len(self.queued) < self._most and not self.socket.closing:
                request_id = next(iter(self.queued))
                self._send_now(self.queued[request_id], request_id)
                del self.queued[request_id]

    def cancel(self, request_id: int) -> None:
        """Cancels a request. If the request was already sent, tells the worker, and reads until the worker's last answer to it.

        Does not wait for that: a background thread reads.
        """
        # The garbage collector ends streams that were left in a cycle, also in a thread that has the lock and sends just now.
        if self.lock.acquire(False):
            self.lock.release()
            self._cancel(request_id)
        else:
            _thread.start_new_thread(self._cancel, (request_id,))

    def _cancel(self, request_id: int) -> None:
        with self.lock:
            request = None if self.queued.pop(request_id, None) is None else self.in_flight.pop(request_id, None)
            if request is not None:
                self._contexts.pop(request_id, None)
        if request is None:
            self.say(wire.record("X", request_id))
            # A worker takes nothing, the cancellation neither, from a lane that has no room for what it has sent before.
            if self._thread is not None:
                self.watch(request_id)
            else:  # another thread starts it: the garbage collector may have been called by who starts a thread
                with contextlib.suppress(RuntimeError):  # there is no thread for it: whoever waits reads it
                    _thread.start_new_thread(self.watch, (request_id,))
        else:
            request.lane_ended(False, Cancelled("the request was cancelled"))

    # ---------------------------------------------------------------------------------------------------- receiving

    def receive(self, flags: int = 0, left_ns: int = 0) -> bool:
        """Receives one datagram, and hands each answer in it to the answer's request. Returns whether a datagram had come.

        The caller has the lock ``reading``. ``flags`` 0 waits for a datagram, for at most ``left_ns`` or less, or without limit
        if that is 0. ``AT_ONCE`` does not wait.
        """
        datagram = self.reading.receive(self.socket.sock.fileno(), self.socket.received, flags, left_ns)
        if datagram is None:
            return False
        self.handle(*datagram)
        return True

    def handle(self, size: int, ancillary: list[tuple[int, int, bytes]], flags: int) -> None:
        """Hands the answers in a received datagram of ``size`` bytes to their requests.

        The caller has the lock ``reading``. A size of 0 means that the worker has ended, and ends the lane. A malformed
        datagram also ends the lane. ``ancillary`` and ``flags`` are the results of ``recvmsg``.
        """
        fds = descriptors_in(ancillary) if ancillary else []
        try:
            if not size:
                untaken = self.exchange is None
                why = "the worker has ended, or could not open another lane" if untaken else "the worker process ended"
                self.end(Unavailable(why), untaken)
                return
            if flags & _TRUNCATED:
                raise ValueError(f"a datagram has more than {wire.MAX_DATAGRAM} bytes")
            for record in self._records(size):
                if type(record) is tuple:
                    self._apply(record, fds, bool(flags & _DESCRIPTORS_LOST))
                elif self.exchange is not None:
                    self._answered(record)
                else:
                    raise ValueError("an answer came before the version of the wire")
            if self.queued:
                self.advance()
        except (ValueError, LookupError, TypeError) as error:
            self.end(Internal(f"the worker sent what is no record of a lane: {error}"))
        finally:
            for fd in fds:
                os.close(fd)

    def _records(self, size: int) -> list[Any]:
        received = self.socket.received
        kind = received[0]
        if kind == 1 and not self._parts:
            if self.exchange is not None:
                return self.exchange.records(size)
            return wire.records(received, 1, size, self._prepared, PreparedAnswer)
        self._parts += received[1:size]
        if kind == 2:
            return []
        if kind != 3:
            raise ValueError(f"a datagram of kind {kind}")
        whole, self._parts = bytes(self._parts), bytearray()
        return wire.records(whole, 0, len(whole), self._prepared, PreparedAnswer)

    def _apply(self, record: tuple[Any, ...], fds: list[int], lost: bool) -> None:
        tag = record[0]
        if self.exchange is None:
            if tag != "V" or record[1] != wire.WIRE_VERSION:
                raise ValueError(f"the worker speaks another edition of the wire than {wire.WIRE_VERSION}")
            fd = self.socket.sock.fileno()
            self.exchange = wire.Exchange(self, PreparedAnswer, Answer, fd, self._most, self.answers.held.most)
        elif tag == "C+":
            pass
        elif tag == "S+":
            if not self.answers.open(record[1], record[2], fds, lost):
                self.say(wire.record("S!", record[1]))
        elif tag == "S-":
            self.answers.close(record[1])
        elif tag == "S!":
            self._announced.discard(record[1])
        else:
            raise ValueError(f"a record with the tag {tag!r}")

    def _answered(self, answer: AnswerRecord) -> None:
        find = self.in_flight.pop if answer.prepared.final else self.in_flight.get
        request = find(answer.request_id, None)
        if request is None:
            self.answers.drop(answer)
            return
        request.take(self, answer)

    # ------------------------------------------------------------------------------------------------------ waiting

    def wait(self, request: Any, until: float | None) -> None:
        """Waits until an answer to a request has come, or the lane has ended.

        ``until`` is a time of ``time.monotonic()`` in seconds, or None for no limit. Raises WaitEnded if ``until`` has passed.
        """
        if self._outgoing:
            self.flush()
        if not self.reading.acquire(False) and self._follow(request, until):
            return  # it has come, or the lane has ended
        try:
            while request.waiting and not self.ended:
                self.read(until)
        finally:
            self.reading.release()
            if self.followers:
                self.promote()

    def greeted(self, until: float | None) -> wire.Exchange | None:
        """Waits for the worker's first message. Returns the C object that sends requests and receives answers.

        Returns None if the lane has ended, or if no message has come. Stops waiting at the time ``until`` of
        ``time.monotonic()`` in seconds; None means no limit. Does not wait at all if another thread reads the lane's socket.
        """
        if self.reading.acquire(False):
            try:
                with contextlib.suppress(WaitEnded):
                    while self.exchange is None and not self.ended:
                        self.read(until)
            finally:
                self.reading.release()
                self.promote()
        return self.exchange

    def _follow(self, request: Any, until: float | None) -> bool:
        waiter: queue.SimpleQueue[None] = queue.SimpleQueue()
        request.waiter = waiter
        self.followers[waiter] = None
        leads = False
        try:
            while request.waiting and not self.ended:
                if self.reading.acquire(False):
                    leads = True
                    return False  # this thread must read now
                try:
                    waiter.get(timeout=None if until is None else max(0.0, until - time.monotonic()))
                except queue.Empty:
                    raise WaitEnded from None
            return True
        finally:
            self.followers.pop(waiter, None)
            request.waiter = None
            if not leads:
                self.promote()

    def promote(self) -> None:
        """Wakes one of the threads that wait for answers, so that it reads the socket for all of them."""
        for waiter in list(self.followers):
            waiter.put(None)
            break

    def read(self, until: float | None) -> None:
        """Waits for a datagram, and hands each answer in it to the answer's request. May return before a datagram has come.

        Also sends datagrams of ``self.socket.backlog`` if the socket has room. The caller must hold ``self.reading``.
        ``until`` is a time of ``time.monotonic()`` in seconds, or None for no limit. Raises WaitEnded if ``until`` has passed.
        """
        if not self.socket.backlog:
            self.receive(0, time_left(until))
        elif self.socket.wait_for_room(until):
            self.receive(AT_ONCE)

    # ------------------------------------------------------------------------------------------- callbacks and loops

    def watch(self, request_id: int) -> None:
        """Makes a background thread receive this lane's answers until the request ``request_id`` has ended. Does not wait."""
        self.watched.add(request_id)
        if request_id not in self.in_flight:  # it has, or has ended just now
            self.watched.discard(request_id)
            return
        if self._thread is None:
            with self.lock:
                if self._thread is None:
                    self._thread = threading.Thread(target=self._serve, name=f"tensord-lane-{self.number}", daemon=True)
                    try:
                        self._thread.start()
                    except RuntimeError:  # there is none left: the next one tries again
                        self._thread = None
                        raise
        self._thread_waiter.put(None)

    def call_back(self, request: Any) -> None:
        """Makes a background thread call the callbacks of ``request``, which has ended. Does not wait for the calls."""
        self.finished.append(request)
        self._thread_waiter.put(None)

    def _call_back(self) -> None:
        with contextlib.suppress(IndexError):
            while True:
                self.finished.popleft().call_back()

    def _serve(self) -> None:
        waiter = self._thread_waiter
        while True:
            # In this order: what came before the end is called back.
            ended = self.ended
            self._call_back()
            if ended:
                return
            if not self.watched:
                self.promote()  # whoever has let it read meant somebody who waits
                waiter.get()
                continue
            self.flush()
            if self.reading.acquire(False):
                try:
                    if not self.ended:
                        self.read(None)
                finally:
                    self.reading.release()
                    self.promote()
                continue
            self.followers[waiter] = None
            try:
                if self.reading.held:
                    waiter.get()
            finally:
                self.followers.pop(waiter, None)

    def attach(self, loop: Any) -> None:
        """Lets an event loop read this lane's socket whenever a datagram has come, until the lane ends.

        Call it in the loop's thread.
        """
        if loop not in self.socket.loops:
            with self.lock:
                if not self.ended:
                    self.socket.loops[loop] = None
                    loop.add_reader(self.socket.sock.fileno(), self._readable, loop)

    def _readable(self, loop: Any) -> None:
        """Hands received answers to their requests. An event loop calls it."""
        if self.ended:  # perhaps of a connection that was dropped: nobody else has the loop leave the socket
            self.socket.leave(loop)
            return
        if not self.reading.acquire(False):
            return
        self.loop = loop
        try:
            for _ in range(_TURN):
                if self.ended or not self.receive(AT_ONCE) or not self.in_flight:
                    break
        finally:
            self.loop = None
            self.reading.release()
            self.promote()

    # ---------------------------------------------------------------------------------------------------------- end

    def end(self, error: ServingError, untaken: bool = False) -> None:
        """Closes the lane, and calls ``lane_ended`` of every request in flight. Idempotent.

        The caller must hold the lock ``reading``. ``lane_ended`` gets ``error``, or the error given to ``close`` before.
        ``untaken``: True if the worker closed the lane without sending a message. The worker has then run no request.
        """
        with self.lock:
            if self.ended:
                return
            # Whoever sees that the lane has ended may ask when.
            self.ended_at = time.monotonic()
            self.ended = self.socket.closing = True
            error = self._why or error
            unsent = self.socket.take_unsent()
            unsent.update([request_id for _, request_id in self._outgoing])
            unsent.update(self.queued)
            self._outgoing.clear()
            self.queued.clear()
            lost, self.in_flight = self.in_flight, {}
            self.watched.clear()
        self.answers.end()
        self.socket.close()
        self._end_exchange()
        for request_id, request in lost.items():
            if request is not None:
                request.lane_ended(not untaken and request_id not in unsent, error, untaken)
        self.promote()
        self._thread_waiter.put(None)

    def _end_exchange(self) -> None:
        # It refers to the lane: in a cycle the memory of the dead worker would stay mapped until the garbage collector runs.
        exchange, self.exchange = self.exchange, None
        if exchange is not None:
            exchange.ended = True

    def close(self, error: ServingError) -> None:
        """Closes the lane, even while another thread reads it. Calls ``lane_ended`` of every request in flight with ``error``."""
        self._why = error
        self.socket.shut_down()
        with self.reading:
            self.end(error)

    def leave(self) -> None:
        """Ends the background threads of a lane whose connection was garbage-collected: they would keep the lane's socket."""
        self.ended = True
        self.socket.shut_down()
        self._thread_waiter.put(None)

    def forget(self) -> list[Any]:
        """Closes the socket in a child process after a fork. Returns the requests that were in flight at the fork."""
        self.ended = True
        self._end_exchange()
        self.socket.forget()
        self.lock, self.reading = self.socket.lock, self.socket.reading
        lost, self.in_flight = self.in_flight, {}
        self.queued.clear()
        return [request for request in lost.values() if request is not None]


class OpenedModel:
    """A model's description and the lanes to the model's workers, as the daemon has sent them to the client."""

    def __init__(
        self, description: Description, lanes: list[ClientLane], coming: int, asked_at: float, opened_at: float
    ) -> None:
        """Stores what the daemon has told this client about a model.

        Args:
          lanes: the lanes to the workers that serve the model now.
          coming: how many further workers will serve the model, but do not yet.
          asked_at: when the daemon was asked, in seconds of ``time.monotonic()``: what ended later it may not have known.
          opened_at: when the daemon told this, or the client began to look for more lanes, on the same clock.
        """
        self.description = description
        self.lanes = lanes
        self.coming = coming
        #: The only lane, if no other is to come.
        self.alone = lanes[0] if len(lanes) == 1 and not coming else None
        self.asked_at, self.opened_at = asked_at, opened_at
        #: Datatypes by name, of the inputs and of the outputs.
        self.datatypes: dict[str, str] = {each["name"]: each["datatype"] for each in description.metadata["inputs"]}
        self.outputs: dict[str, str] = {each["name"]: each["datatype"] for each in description.metadata["outputs"]}
        #: Encoded prepared requests of small tensors alone, by the names, dtypes and shapes of these (``placement``).
        self.small: dict[tuple[Any, ...], bytes] = {}

    @property
    def is_told(self) -> bool:
        """Returns whether the daemon sent the model's description at most 0.25 s ago."""
        return time.monotonic() - self.opened_at <= _JUST

    @property
    def lacks(self) -> bool:
        """Returns whether the client should ask the daemon again for lanes to the workers of this model.

        True if the daemon said that more workers will come, or if there are at least two lanes and one of them has ended.
        """
        if self.coming:
            return True
        lanes = self.lanes
        # One that is alone, and has ended, is missed by the next request.
        return len(lanes) > 1 and not all(lane.usable for lane in lanes)

    def choose(self, model: str = "") -> ClientLane | None:
        """Returns the usable lane with the fewest requests in flight, or None if no lane is usable.

        ``model``: the model's name if the lane is for a request that begins a sequence, else "". If a name is given, only
        those usable lanes are considered that have the fewest open sequences of the model.
        """
        lanes = self.lanes
        if len(lanes) == 1:
            return lanes[0] if lanes[0].usable else None
        usable = [lane for lane in lanes if lane.usable]
        if model:
            fewest = min((len(lane.sequences[model]) for lane in usable), default=0)
            usable = [lane for lane in usable if len(lane.sequences[model]) == fewest]
        return least_busy(usable)
