"""One inference request and its answer, on the short way past ASGI: no task, no queue, no event.

    head complete ─▶ body arrives (body.py) ─▶ decode (request_codec) ─▶ submit ─▶ completion ─▶ encode (response_codec) ─▶ socket

Each arrow is a call from the connection's or the lane's callback. The connection (protocol.py) keeps exchanges in the order in
which their requests came, so an answer is written only by the exchange whose turn it is.
"""

from __future__ import annotations

import enum
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from config.options import Options
from daemon.http import request_codec, response_codec
from daemon.http.body import CollectedBody, PlacedBody
from daemon.http.decoded_request import DecodedRequest, Part
from daemon.http.request_codec import Recognised
from daemon.model_table import ModelTable
from daemon.status import http_status
from daemon.submit import Submitter
from shm.arena import Lease
from shm.errors import InvalidArgument, ServingError
from shm.lane import SubmitterLane
from shm.messages import Completion, Inline, Place, RegionSlice, Slice, Submit, Tensor

_log = logging.getLogger(__name__)

#: Bodies up to this size are collected; larger binary ones go straight into the arena.
COLLECT_BYTE_SIZE = 4096


class Phase(enum.Enum):
    """Where an exchange stands."""

    #: The body is arriving.
    RECEIVING = "receiving"
    #: The body is whole, and it is not this exchange's turn, or its tensors wait for room.
    RECEIVED = "received"
    #: A worker has it.
    SUBMITTED = "submitted"
    #: The answer is written; a part of it may still be in the transport's buffer.
    ANSWERED = "answered"


@dataclass(slots=True)
class InferHead:
    """What the request line and headers said."""

    model: str
    version: int
    #: None: chunked.
    content_length: int | None
    #: Value of Inference-Header-Content-Length; None: the body is JSON alone.
    json_size: int | None
    keep_alive: bool
    #: What is wrong with it already.
    error: ServingError | None = None
    #: The header line of the answer that says that the connection stays, where that is not understood.
    keep_alive_line: bytes = b""


@dataclass(slots=True)
class Serving:
    """What every exchange of a front needs."""

    options: Options
    table: ModelTable
    submitter: Submitter
    recognised: Recognised = field(default_factory=Recognised)
    #: Every answer is the last of its connection.
    stopping: bool = False


class Exchange:
    """One inference request and its answer.

    Args:
      write: takes the pieces of an answer; returns whether they are all out (else ``written`` is called later).
      done: the answer was handed over: the connection's next exchange may answer.
      pause: stop (True) and go on (False) reading from the socket.
    """

    def __init__(
        self,
        serving: Serving,
        head: InferHead,
        write: Callable[[list[response_codec.Buffer]], bool],
        done: Callable[[], None],
        pause: Callable[[bool], None],
    ) -> None:
        self._serving = serving
        self._head = head
        self._write = write
        self._done = done
        self._pause = pause
        self.keep_alive = head.keep_alive
        self.phase = Phase.RECEIVING
        self._my_turn = False
        self._gone = False
        self._whole = False
        self.body: CollectedBody | PlacedBody = CollectedBody()
        self._leases: list[Lease] = []
        self._request_id = 0
        self._decoded: DecodedRequest | None = None
        #: The response lease whose bytes the transport still holds.
        self._unwritten: tuple[SubmitterLane, tuple[int, int, int]] | None = None
        #: Answered with this as soon as it is our turn and the body is consumed.
        self._error: ServingError | None = None

    # -------------------------------------------------------------------------------------------------- body

    def begin(self) -> None:
        """The head is complete: prepare a place for the body."""
        length, json_size = self._head.content_length, self._head.json_size
        try:
            if self._head.error is not None:
                raise self._head.error
            self._serving.table.find(self._head.model, self._head.version)
            if json_size is not None and length is not None and not 0 <= json_size <= length:
                raise InvalidArgument(f"inference header size should be in range (0, {length}), got: {json_size}")
            if json_size is not None and length is not None and length > COLLECT_BYTE_SIZE:
                self._borrow(length, json_size)
        except ServingError as error:
            self._error = error

    def _borrow(self, length: int, json_size: int) -> None:
        submitter = self._serving.submitter
        size = PlacedBody.lease_size(length)
        lease = submitter.loan(size)
        if lease is not None:
            self._leases.append(lease)
            self.body = PlacedBody(lease, length, json_size)
            return
        self._pause(True)

        def granted(lease: Lease | ServingError) -> None:
            if isinstance(lease, ServingError):
                self._error = lease
            elif self._gone:
                submitter.give_back(lease)
                return
            else:
                self._leases.append(lease)
                placed = PlacedBody(lease, length, json_size)
                placed.write(self.body.whole() if isinstance(self.body, CollectedBody) else b"")
                self.body = placed
            self._pause(False)
            self._go_on()

        submitter.wait_for_room(size, granted)

    @property
    def refused(self) -> bool:
        """Whether the answer is an error already, so that the rest of the body need not come."""
        return self._error is not None

    def receive(self, chunk: bytes) -> None:
        """A piece of the body; of a refused request it is only counted."""
        if self._error is None:
            self.body.write(chunk)
        else:
            self.body.received += len(chunk)

    def complete(self) -> None:
        """The body is whole."""
        self._whole = True
        self.phase = Phase.RECEIVED
        self._go_on()

    def take_turn(self) -> None:
        """Every earlier exchange of this connection is answered."""
        self._my_turn = True
        self._go_on()

    # ------------------------------------------------------------------------------------------------ submit

    def _go_on(self) -> None:
        """Submits once the body is whole and placed and it is our turn."""
        if self._gone or not (self._my_turn and self.phase is Phase.RECEIVED):
            return
        if self._error is None and isinstance(self.body, CollectedBody) and self._needs_lease():
            return  # still waiting for room for the body
        try:
            if self._error is not None:
                raise self._error
            self._submit(self._decode())
        except ServingError as error:
            self._answer_error(http_status(error), error.message)
        except Exception:
            self._answer_defect()

    def _needs_lease(self) -> bool:
        head = self._head
        return head.json_size is not None and (head.content_length or 0) > COLLECT_BYTE_SIZE and not self._leases

    def _decode(self) -> DecodedRequest:
        json_size = self._head.json_size
        if isinstance(self.body, PlacedBody):
            assert json_size is not None
            if json_size == 0:
                return self._raw(self.body.received)
            return self._serving.recognised.decode(
                self.body.head(json_size), self.body.received - json_size, self._head.model
            )
        body = self.body.whole()
        if json_size is None:
            return self._serving.recognised.decode(body, 0, self._head.model)
        if json_size > len(body):
            raise InvalidArgument(f"inference header size should be in range (0, {len(body)}), got: {json_size}")
        if json_size == 0:
            return self._raw(len(body))
        return self._serving.recognised.decode(body[:json_size], len(body) - json_size, self._head.model)

    def _raw(self, byte_size: int) -> DecodedRequest:
        state = self._serving.table.find(self._head.model, self._head.version)
        return request_codec.decode_raw(state.metadata, state.config, byte_size)

    def _submit(self, decoded: DecodedRequest) -> None:
        inline = self._serving.options.arenas.inline_byte_size
        # Tensors that came as JSON, or in a collected body, and are too large to travel in the record.
        size = 0
        for _, _, _, source in decoded.inputs:
            content_size = len(source) if type(source) is bytes else source.byte_size if type(source) is Part else 0
            if content_size > inline and (type(source) is bytes or isinstance(self.body, CollectedBody)):
                size += -(-content_size // 64) * 64
        self._decoded = decoded
        if size == 0:
            self._send(decoded, None)
            return
        lease = self._serving.submitter.loan(size)
        if lease is not None:
            self._send(decoded, lease)
            return

        def granted(lease: Lease | ServingError) -> None:
            if isinstance(lease, ServingError):
                if not self._gone:
                    self._answer_error(http_status(lease), lease.message)
            elif self._gone:
                self._serving.submitter.give_back(lease)
            else:
                try:
                    self._send(decoded, lease)
                except ServingError as error:
                    self._answer_error(http_status(error), error.message)

        self._serving.submitter.wait_for_room(size, granted)

    def _send(self, decoded: DecodedRequest, lease: Lease | None) -> None:
        if lease is not None:
            self._leases.append(lease)
        inputs = self._place(decoded, lease)
        submitter = self._serving.submitter
        self._request_id = submitter.next_id()
        record = Submit(
            self._request_id,
            self._head.model,
            self._head.version,
            inputs,
            decoded.outputs,
            decoded.parameters,
            decoded.id,
            received_ns=time.monotonic_ns(),
            priority=decoded.priority,
            timeout_us=decoded.timeout_us,
            sequence_id=decoded.sequence_id,
            sequence_start=decoded.sequence_start,
            sequence_end=decoded.sequence_end,
        )
        submitter.submit(record, self._leases, self._completed)
        self._leases = []
        self.phase = Phase.SUBMITTED

    def _place(self, decoded: DecodedRequest, lease: Lease | None) -> tuple[Tensor, ...]:
        inline = self._serving.options.arenas.inline_byte_size
        json_size = self._head.json_size or 0
        body = self.body
        tail = memoryview(body.whole())[json_size:] if isinstance(body, CollectedBody) else memoryview(b"")
        used = 0
        tensors: list[Tensor] = []
        for name, datatype, shape, source in decoded.inputs:
            place: Place
            if isinstance(source, RegionSlice):
                place = source
            elif isinstance(source, Part) and isinstance(body, PlacedBody):
                place = body.place(json_size, source, inline)
            else:
                content = (
                    source if isinstance(source, bytes) else tail[source.offset : source.offset + source.byte_size]
                )
                if len(content) <= inline:
                    place = Inline(bytes(content))
                else:
                    assert lease is not None
                    lease.view[used : used + len(content)] = content
                    place = Slice(lease.place.segment, lease.place.offset + used, len(content))
                    used += -(-len(content) // 64) * 64
            tensors.append(Tensor(name, datatype, shape, place))
        return tuple(tensors)

    # ------------------------------------------------------------------------------------------------ answer

    def _completed(self, completion: Completion, lane: SubmitterLane | None) -> None:
        self._request_id = 0
        if completion.code:
            self._answer_error(http_status(completion.code), completion.message)
            return
        assert lane is not None
        assert self._decoded is not None
        decoded = self._decoded
        try:
            head, parts = response_codec.encode(
                completion, self._head.model, decoded.id, decoded.binary, decoded.all_binary, lane.view
            )
        except Exception as error:
            if completion.lease is not None:
                self._serving.submitter.release(lane, completion.lease)
            if isinstance(error, ServingError):
                self._answer_error(http_status(error), error.message)
            else:
                self._answer_defect()
            return
        line = response_codec.response_head(len(head), parts, self._connection_line())
        if completion.lease is not None:
            self._unwritten = (lane, completion.lease)
        self.phase = Phase.ANSWERED
        # Small pieces are cheaper joined; slices of the arena go to the socket as they lie.
        pieces: list[response_codec.Buffer] = [line + head, *parts]
        if completion.lease is None:
            pieces = [b"".join(pieces)]
        if self._write(pieces):
            self.written()
        self._done()

    def _answer_error(self, status: int, message: str) -> None:
        self._give_back()
        self.phase = Phase.ANSWERED
        self._write([response_codec.error_response(status, message, self._connection_line())])
        self._done()

    def _connection_line(self) -> bytes:
        return self._head.keep_alive_line if self.keep_alive else response_codec.CLOSE

    def _answer_defect(self) -> None:
        """Ours or a worker's, and no reason to leave a client without its answer."""
        _log.exception("a request for model '%s' met a defect of the server", self._head.model)
        self._answer_error(500, "internal error; the server's log has the details")

    def written(self) -> None:
        """The transport holds nothing of the answer any more."""
        unwritten, self._unwritten = self._unwritten, None
        if unwritten is not None:
            self._serving.submitter.release(*unwritten)

    def abandon(self) -> None:
        """The client is gone."""
        self._gone = True
        if self._request_id:
            self._serving.submitter.cancel(self._request_id)
        self._give_back()
        self.written()

    def _give_back(self) -> None:
        leases, self._leases = self._leases, []
        for lease in leases:
            self._serving.submitter.give_back(lease)
