"""Sends any number of responses to one request, in order, from any thread.

    model's code: send, send, ..., send(final) ──▶ the worker's event loop ──▶ lane ──▶ submitter

If the client still has to take ``max_ahead`` or more bytes of sent responses, ``send`` waits until at most half of
``max_ahead`` is left. ``send`` does not wait if its parameter ``wait`` is False, or if ``wait`` is None and the calling thread
runs an event loop.

Each request ends exactly once: when the model sends the last response, says that no response follows, or fails, when a response
cannot be sent, or when the request is cancelled. If the model's code can no longer send responses and the request has not
ended, the request fails with Internal. If nobody waits for the responses to a request any more, they are dropped, and
``is_cancelled`` is True.

A ``ResponseKind`` encodes small responses to one submitter with the same outputs, datatypes and shapes. The worker's event loop
makes the ``ResponseKind`` at the first such response. The thread that calls ``send`` then encodes later ones that are neither
the first nor the last response to their request, if ``alike`` returns the ``ResponseKind``.
"""

from __future__ import annotations

import asyncio
import math
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING

import numpy as np

from tensord.shm.arrays import DTYPES, Array, byte_content, datatype_of
from tensord.shm.errors import Internal, ServingError, Unavailable
from tensord.shm.lane import response_byte_size
from tensord.shm.messages import PreparedAnswer
from tensord.shm.prepared import Numbered
from tensord.workers.requests.preparation import answers
from tensord.workers.requests.result import Result

if TYPE_CHECKING:
    from tensord.workers.requests.request import Request

#: Where a thread must not wait, because it answers other requests as well: so many times ``max_ahead`` may be ahead.
_UNWAITED = 16
#: The bytes that a response counts besides its tensors until its size on the lane is known.
_BYTE_SIZE = 256
NOT_COMPLETED = "the model ended without completing its response"

#: Name, datatype and shape of each output.
Described = tuple[tuple[str, str, tuple[int, ...]], ...]


# ------------------------------------------------------------------------------------------------ responses that are alike


def describe(
    result: Mapping[str, Array], wanted: Collection[str], most: int, strings: bool
) -> tuple[Described, tuple[bytes, ...]] | None:
    """Returns two tuples: (name, datatype, shape) of each requested output of a response, and the bytes of each one.

    Returns None if the requested outputs have more than ``most`` bytes in all, if the dtype of one has no datatype in the Open
    Inference Protocol, or if ``strings`` is False and one has the datatype BYTES.
    ``result``: the response's outputs by name. ``wanted``: names of the requested outputs; empty: all outputs are requested.
    """
    described: list[tuple[str, str, tuple[int, ...]]] = []
    contents: list[bytes] = []
    left = most
    for name, array in result.items():
        if wanted and name not in wanted:
            continue
        datatype = datatype_of(array.dtype)
        if datatype is None or array.nbytes > left or (datatype == "BYTES" and not strings):
            return None
        contents.append(byte_content(array) if datatype == "BYTES" else array.tobytes())
        left -= len(contents[-1])
        if left < 0:
            return None
        described.append((name, datatype, array.shape))
    return tuple(described), tuple(contents)


class ResponseKind:
    """Encodes small responses from one model version to one submitter, with the same names, datatypes and shapes of outputs."""

    __slots__ = ("_number", "_parts", "_sizes", "byte_size", "numbered")

    def __init__(self, numbered: Numbered[PreparedAnswer], described: Described) -> None:
        self.numbered = numbered
        self._number = numbered.number
        self._parts = [(name, DTYPES[datatype], shape) for name, datatype, shape in described]
        #: The bytes of each output, where none is BYTES, and those that each response counts for until its client has taken it.
        self._sizes = tuple([math.prod(shape) * dtype.itemsize for _, dtype, shape in self._parts])
        self.byte_size = response_byte_size(()) + sum(self._sizes)

    def encode(self, request_id: int, contents: Iterable[bytes]) -> bytes:
        """Encodes a response to ``request_id`` as a record. ``contents``: the bytes of each output, in the order of outputs."""
        return answers(self._number, [request_id], self._sizes, b"".join(contents))[0]

    def record(self, request: Request, result: Mapping[str, Array]) -> bytes | None:
        """Returns the record that sends a response with the values ``result`` to the submitter. Any thread may call this method.

        Returns None if ``result`` has other outputs, datatypes or shapes than responses of this kind.
        """
        if len(result) != len(self._parts) and not request.outputs:
            return None
        contents: list[bytes] = []
        for name, dtype, shape in self._parts:
            array = result.get(name)
            if array is None or array.shape != shape or array.dtype != dtype:
                return None
            contents.append(array.tobytes())
        return answers(self._number, [request.request_id], self._sizes, b"".join(contents))[0]

    def __repr__(self) -> str:
        return f"<ResponseKind {self.numbered.number} {self._parts}>"


class EncodedResponses:
    """Encoded responses to one request. The model's thread adds them, and the worker's event loop takes and sends them."""

    __slots__ = ("_records", "kind", "taken")

    def __init__(self, kind: ResponseKind, record: bytes) -> None:
        self.kind = kind
        self._records = [record]
        #: The loop has come for them, or is about to.
        self.taken = False

    def add(self, record: bytes) -> bool:
        """Stores ``record``, an encoded response that the worker's event loop sends. Only the model's thread calls this method.

        Returns True if ``take`` is sure to be called after this. If False, the caller must make the event loop call ``take``.
        """
        self._records.append(record)
        return not self.taken

    def take(self) -> list[bytes]:
        """Returns the responses that no earlier call has returned. Only the worker's event loop calls this method."""
        # Said before it looks: whoever adds one looks afterwards.
        self.taken = True
        records = self._records[:]
        del self._records[: len(records)]
        return records


# --------------------------------------------------------------------------------------------------------------- senders


class SenderClosed(Exception):
    """Raised if a model sends a response after the last response."""


class GivenUp(Unavailable):
    """Ends a request in place of a response that cannot be sent, while its model may still work on it."""


#: A response on its way; None: only the mark that there is no further one.
Sent = Result | EncodedResponses | None


class ResponseReceiver:
    """Takes the responses that a model sends. This base class drops them, for warmup. ``Responses`` sends them to clients."""

    max_ahead = 1

    def alike(self, sender: ResponseSender, result: dict[str, Array]) -> ResponseKind | None:
        """Returns an encoder of responses that have the same outputs, datatypes and shapes as ``result``.

        Any thread may use the encoder. Returns None if the worker's event loop must encode ``result``, as always in this class.
        ``sender``: the sender of ``result``.
        """
        return None

    def put(self, sender: ResponseSender, result: Sent, final: bool, byte_size: int, wake: bool = True) -> None:
        """Receives a model's response to a request. This class drops it, or raises it if it is an error. Thread-safe.

        Args:
          sender: counts the bytes of the request's responses that the client has not read.
          result: the response or an error. It is None if the model ends the responses without another response.
          final: True if this call is the last for the request.
          byte_size: the size of the response in bytes.
          wake: whether to wake the worker's event loop, which sends the response.
        """
        sender.settle(byte_size)
        if isinstance(result, ServingError):
            raise result


class ResponseSender:
    """Sends a model's responses to one request, and counts the bytes that the client has not taken yet.

    Any thread may use the properties and the methods from ``begin`` to ``when_room``. Only the thread of the worker's loop may
    call the other methods.
    """

    __slots__ = (
        *("_again", "_closed", "_encoded", "_holders", "_kind", "_lock", "_max_ahead", "_on_room"),
        *("_posted", "_receiver", "_settled", "_waits"),
        *("began_ns", "begun", "count", "counted", "ended", "failed", "last_ns"),
        *("plain", "request", "returned", "single", "thread"),
    )

    def __init__(
        self,
        request: Request,
        receiver: ResponseReceiver,
        began_ns: int,
        single: bool = False,
        max_ahead: int | None = None,
    ) -> None:
        """Opens the sender.

        Args:
          request: the request that is answered.
          receiver: gets the responses.
          began_ns: when the request began to run.
          single: whether the first response is the last one.
          max_ahead: how many bytes may be sent before the client has taken them; None: as many as the receiver allows.
        """
        self.request = request
        self.single = single
        self._receiver = receiver
        self._max_ahead = receiver.max_ahead if max_ahead is None else max_ahead
        self._lock = threading.Lock()
        #: Held by the thread that waits for its client: the others that would wait come one after the other.
        self._waits = threading.Lock()
        self._closed = False
        #: How many have it to answer the request: one for each round of the model that asked for it.
        self._holders = 0
        #: The request goes round again.
        self._again = False
        #: Bytes that were sent, and of them those that were taken or dropped. Each is written by one side.
        self._posted = self._settled = 0
        #: Functions of those who wait for room: whoever takes one out of here, the thread or the loop, decides.
        self._on_room: deque[Callable[[], None]] = deque()
        #: The final mark is on its way to the client: nothing of it is looked at any more.
        self.ended = False
        #: The model's function has returned, and may have left others to answer.
        self.returned = False
        #: The thread with the event loop of the coroutine that answers, if one does.
        self.thread = 0
        #: True if its outputs go into the record or the arena, as they are, and with nothing beside them.
        self.plain = not (
            request.tells or any(wanted.region or wanted.classification for wanted in request.outputs.values())
        )
        #: The kind of the last response that was encoded. Belongs to whoever sends.
        self._kind: ResponseKind | None = None
        #: The encoded responses that the last one was put with.
        self._encoded: EncodedResponses | None = None
        #: Responses that were placed, and whether the first of them was an error.
        self.count = 0
        self.failed = False
        #: Where responses leave without being noted here one by one: notes those that did.
        self.counted: Callable[[], None] | None = None
        #: Its model has it; before that it was only given to its thread.
        self.begun = False
        #: When the request began to run, and when the last response was placed.
        self.began_ns = self.last_ns = began_ns

    @property
    def is_cancelled(self) -> bool:
        """True once nobody waits for responses to the request any more."""
        return self.ended or self.request.cancelled

    @property
    def is_full(self) -> bool:
        """True while ``send`` would wait until the client has taken more of the responses that were sent."""
        return self._posted - self._settled >= self._max_ahead and not self.is_cancelled

    @property
    def is_waited_for(self) -> bool:
        """True while the model waits, in ``send`` or by ``when_room``, for the client to take responses."""
        return bool(self._on_room)

    def begin(self, now_ns: int) -> None:
        """Records when the model began to work on the request. Only the first call counts."""
        if not self.begun:
            self.begun = True
            self.began_ns = self.last_ns = now_ns

    def send(self, result: Result | None, final: bool = False, wait: bool | None = None) -> None:
        """Sends a response to the request, or only says that no further response follows.

        Args:
          result: the outputs by name, in the shapes that the client gets. The caller must not use this dict any more. Or an
            error: more responses may follow the error. Or None to send no response: ``final`` must then be True.
          final: whether no further response follows.
          wait: whether to wait if the client still has to take ``max_ahead`` or more bytes of earlier responses. ``max_ahead``
            is an argument of ``__init__``. None: wait, unless the calling thread runs an asyncio event loop. If ``send`` does
            not wait and the client still has to take 16 x ``max_ahead`` or more bytes, the request ends with Unavailable.
        Raises SenderClosed: the responses to the request have ended.
        """
        if result is not None and self._posted - self._settled >= self._max_ahead:
            # Not under the lock: who ends the request must not wait for its client.
            late = self._wait(wait)
            if late is not None:
                result, final = late, True
        with self._lock:
            if self._closed:
                raise SenderClosed
            size = 0
            record: bytes | None = None
            if result is not None:
                # What its model computed is let go of here, where it was made, and the loop has little to do with it. Not the
                # first: who sends no other would find out for nothing what others are like.
                several = self._posted > 0 and not (final or self.single)
                if several and type(result) is dict and (record := self._record(result)) and self._kind:
                    size = self._kind.byte_size
                else:
                    size = _BYTE_SIZE + (0 if isinstance(result, ServingError) else _own(result))
            self._closed = final or (self.single and result is not None)
            self._posted += size
            if record is not None:
                self._put_encoded(record, size)
                return
            self._encoded = None
            self._receiver.put(self, result, self._closed, size)

    def fail(self, error: ServingError) -> None:
        """Ends the request with an error. Does nothing if the request has ended."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._receiver.put(self, error, True, 0)

    def finish(self, wake: bool) -> None:
        """Records that no further response to the request follows. Does nothing if this is recorded already.

        ``wake``: whether this call wakes the worker's event loop; False: the caller ensures that the event loop wakes soon.
        """
        with self._lock:
            if not self._closed:
                self._closed = True
                self._receiver.put(self, None, True, 0, wake)

    def hold(self) -> None:
        """Counts one more object that may still send responses to the request. That object must call ``let_go`` at its end."""
        with self._lock:
            self._holders += 1

    def let_go(self) -> None:
        """Undoes one ``hold``. If no ``hold`` is left, an unfinished request that will not run again fails with Internal."""
        with self._lock:
            self._holders -= 1
            given_up = not (self._holders or self._again or self._closed)
        if given_up:
            self.fail(Internal(NOT_COMPLETED))

    def released(self, again: bool) -> bool:
        """Records that the model's function has returned. Returns whether the model's code may still send responses.

        ``again``: whether the model will run on the request once more.
        """
        with self._lock:
            self._again = again
            return self._holders > 0

    def _put_encoded(self, record: bytes, size: int) -> None:
        encoded = self._encoded
        if encoded is not None and encoded.kind is self._kind and not encoded.taken:
            if encoded.add(record):
                return
        else:
            assert self._kind is not None
            encoded = self._encoded = EncodedResponses(self._kind, record)
        self._receiver.put(self, encoded, False, size)

    def _record(self, result: dict[str, Array]) -> bytes | None:
        kind = self._kind
        record = None if kind is None else kind.record(self.request, result)
        if record is None:
            kind = self._kind = self._receiver.alike(self, result)
            record = None if kind is None else kind.record(self.request, result)
        return record

    def _wait(self, wait: bool | None) -> GivenUp | None:
        most = self._max_ahead
        if wait or (wait is None and asyncio._get_running_loop() is None):
            with self._waits:
                while not self._closed and self.when_room((room := threading.Event()).set):
                    room.wait()
            return None
        ahead = self._posted - self._settled
        if ahead < most * _UNWAITED or self.is_cancelled:
            return None
        return GivenUp(
            f"the client has not taken {ahead} bytes of the responses to its request, at most {most * _UNWAITED} may wait for it"
        )

    def when_room(self, call: Callable[[], None]) -> bool:
        """Registers ``call`` for the worker's event loop if ``is_full`` is True. Returns whether ``call`` is registered.

        The event loop calls ``call`` once: when the client has at most ``max_ahead / 2`` bytes left to take, when the request
        ends, or when it is cancelled. That may happen before this method returns.
        """
        self._on_room.append(call)
        if self.is_full:
            return True
        try:
            self._on_room.pop()
        except IndexError:  # the loop was faster, and has called
            return True
        return False

    # ------------------------------------------------------------------------------------------------------------ the loop's

    @property
    def leaves_as_it_is(self) -> bool:
        """Returns whether a response only has to be sent over the request's lane, without any other work.

        Returns False if, for example, outputs go into regions, the request is traced, or a model in this worker made the request.
        """
        return self.plain and self.request.timeline is None and self.request.sink is None

    def respond_small(self, described: Described, contents: Iterable[bytes], now_ns: int) -> bool:
        """Sends a response whose outputs have few bytes. Returns True if the response was sent.

        Returns False if nothing was sent. Then the caller has to send the response with ``Responses.respond``. The response
        must not be the last one to the request. No earlier response to the request may wait for room in the response arena.
        ``described``: names, datatypes and shapes of the outputs. All calls for one request must give the same ``described``.
        ``contents``: the bytes of each output, in the order of ``described``.
        """
        request, kind = self.request, self._kind
        if not self.count or request.cancelled:
            return False
        if kind is None:
            if request.outputs or not self.leaves_as_it_is:
                return False
            kind = self._kind = request.submitter.response_kind(request.version.version, described, False)
        self.respond_encoded(kind, [kind.encode(request.request_id, contents)], now_ns)
        self.ahead(kind.byte_size)
        return True

    def respond_encoded(self, kind: ResponseKind, records: list[bytes], now_ns: int) -> None:
        """Sends further responses to the request, encoded as ``records`` by ``kind``. The lane must have room for them."""
        request = self.request
        request.submitter.lane.complete_encoded(kind.numbered, records)
        request.submitter.flush_soon()
        request.version.statistics.responded_more(self, len(records), now_ns)

    def ahead(self, byte_size: int) -> None:
        """Adds ``byte_size`` to the bytes that were sent and that the client has not taken yet."""
        self._posted += byte_size

    @property
    def room(self) -> int:
        """How many more bytes can be sent before ``send`` would wait. It may be negative."""
        return self._max_ahead - (self._posted - self._settled)

    def posted(self, result: Result | None, final: bool) -> int:
        """Counts the bytes of a response as sent. Returns the number of these bytes; 0 if ``result`` is None.

        ``final``: whether no further response to the request follows. ``send`` then raises SenderClosed from now on.
        """
        size = 0 if result is None else _BYTE_SIZE
        if result is not None and not isinstance(result, ServingError):
            for array in result.values():
                size += array.nbytes
        self._closed |= final
        self._posted += size
        return size

    @property
    def outstanding(self) -> int:
        """The number of bytes that were sent and that the client has not taken yet."""
        return self._posted - self._settled

    def catch_up(self) -> None:
        """Counts in the statistics all responses that this request has sent and that are not counted yet."""
        if self.counted is not None:
            self.counted()

    def settle(self, byte_size: int) -> None:
        """Records that the client has taken ``byte_size`` more bytes of responses, or that so many bytes were dropped.

        A ``send`` that waits for the client continues once the client has at most ``max_ahead / 2`` bytes still to take.
        """
        self._settled += byte_size
        if self._on_room and 2 * (self._posted - self._settled) <= self._max_ahead:
            self.wake()

    def wake(self) -> None:
        """Calls the function that ``when_room`` registered. Does nothing if no function is registered."""
        try:
            call = self._on_room.pop()
        except IndexError:
            return
        call()

    def end(self) -> None:
        """Records that the client gets no further response. A thread that waits in ``send`` for the client waits no longer."""
        self.ended = True
        self.wake()

    def __repr__(self) -> str:
        ahead = self._posted - self._settled
        return f"<ResponseSender of {self.request!r}: {self.count} sent, {ahead} bytes ahead{', closed' if self._closed else ''}>"


def _own(result: dict[str, Array]) -> int:
    """Replaces arrays that the model may still change by copies. Returns how many bytes all arrays have."""
    size = 0
    for name, array in result.items():
        size += array.nbytes
        # A read-only array may be a view of memory that the model can write to.
        if isinstance(array, np.ndarray) and (array.flags.writeable or isinstance(array.base, np.ndarray)):
            result[name] = array.copy()
    return size
