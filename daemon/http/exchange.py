"""Handles one inference request over HTTP, from its body to its answer.

    the body arrives    ─▶ its JSON is parsed       ─▶ the request is sent to a worker
    the worker answers  ─▶ the answer is encoded    ─▶ the HTTP response is written to the client's socket

A request is sent to a worker only after all earlier requests of the same connection are answered.
Large JSON is decoded and encoded in steps. Responses are compressed in steps. Between two steps, other clients are served.
"""

from __future__ import annotations

import enum
import logging
import uuid
from collections.abc import Callable, Generator
from functools import partial
from time import monotonic_ns
from typing import TYPE_CHECKING, Any

import msgspec

from tensord.daemon.front import load_report
from tensord.daemon.front.status import BodyTooLarge, http_status
from tensord.daemon.http import json_cut, request_codec, response_codec
from tensord.daemon.http.body import Body, CollectedBody, PlacedBody, located
from tensord.daemon.http.compression import DEFLATE_IN, deflated
from tensord.daemon.http.conversions import Job, at_once
from tensord.daemon.http.json_steps import PIECE_BYTE_SIZE
from tensord.daemon.http.message_head import InferHead
from tensord.daemon.http.prepared import ParsedRequest, PreparedKind
from tensord.daemon.http.reception import Reception
from tensord.daemon.http.serving import HttpServing
from tensord.daemon.submit import placement
from tensord.daemon.submit.in_flight import InFlight
from tensord.daemon.submit.placement import InputContent, Unconverted
from tensord.shm import trace_stamps
from tensord.shm.arena import Lease
from tensord.shm.common.scheduling import UNSCHEDULED, Scheduling
from tensord.shm.errors import DEFECT, InvalidArgument, ServingError, Unavailable, Unsupported
from tensord.shm.lane import SubmitterLane
from tensord.shm.messages import AnswerRecord, Buffer, Content, PreparedAnswer, RequestRecord, is_one_of_several
from tensord.shm.tracer import Trace

if TYPE_CHECKING:
    from tensord.daemon.http.answer_order import AnswerOrder

_log = logging.getLogger(__name__)
#: The error for a request to a model with several responses, in Triton's words.
DECOUPLED = "HTTP end point doesn't support models with decoupled transaction policy; ask generate_stream, or a stream over gRPC"
#: Header lines about timing and the connection are inserted before this one.
_LENGTH = b"\r\nContent-Length: "


class ExchangePhase(enum.Enum):
    """Names the phases of an inference request over HTTP."""

    #: The body is arriving.
    RECEIVING = "receiving"
    #: The body is complete; an earlier request is not answered yet, or the tensors wait for room in the arena.
    RECEIVED = "received"
    #: The request was sent to a worker.
    SUBMITTED = "submitted"
    #: The answer is written; a part of it may still be in the transport's buffer.
    ANSWERED = "answered"


# A member of an enum is found slowly.
_RECEIVING, _RECEIVED, _SUBMITTED = ExchangePhase.RECEIVING, ExchangePhase.RECEIVED, ExchangePhase.SUBMITTED


class ModelRequest(InFlight):
    """Base class of requests over HTTP to a model. ``keep_alive``: whether the connection stays open after the answer."""

    _serving: HttpServing
    _head: InferHead
    _order: AnswerOrder
    keep_alive: bool
    #: The request's id: the client's, or one that was made here; "": it has none.
    _client_id: str = ""
    #: The client has disconnected.
    _gone: bool = False
    #: The trace of the request; None: it is not sampled.
    _trace: Trace | None = None

    @property
    def names(self) -> tuple[str, str]:
        return self._head.model, self._client_id

    def _sample(self) -> None:
        """Begins a trace if the request is sampled."""
        trace = self._serving.tracer.sample(self._head.model, self._head.trace_parent)
        if trace is not None:
            self._trace, self.context = trace, trace.context
            trace.stamp(trace_stamps.HTTP_RECV_START)


class Exchange(ModelRequest):
    """One inference request over HTTP, from its body to its answer."""

    #: The kind of this request, with the fields that all requests of the kind share; None until the JSON is parsed.
    _asked: PreparedKind | None = None
    phase: ExchangePhase = ExchangePhase.RECEIVING
    #: The model version that has answered; 0 if the answer was written from the cache.
    _version: int = 0
    _job: Job | None = None
    #: The response lease whose bytes the transport still holds.
    _unwritten: tuple[SubmitterLane, tuple[int, int, int]] | None = None
    #: Receives the body, from ``begin`` until the request is sent (each refers to the other, and requests shall leave the garbage
    #: collector nothing to do). None: the body is small, and kept here.
    _reception: Reception | None = None
    _small_body: bytes = b""
    #: The header line that says how long the request took, if the client asked for it.
    _timing_line: bytes = b""
    #: Every earlier request of this connection is answered.
    my_turn: bool = False
    #: Leases of tensors that do not lie in the body's lease, until the request is sent.
    _leases: tuple[Lease, ...] = ()

    # -------------------------------------------------------------------------------------------------- body

    def begin(self) -> None:
        """Checks whether this request can be served, and prepares to receive the request's body in pieces.

        If the request cannot be served, ``refused`` becomes True. The client gets the error after ``complete`` was called.
        The caller may skip this method for a body of known length that has at most ``COLLECT_BYTE_SIZE`` bytes, is not
        compressed and contains JSON.
        The caller may not skip this method if the client waits for ``100 Continue`` before it sends the body.
        """
        reception = self._reception = Reception(
            self._serving, self._head, self._order.pause_body, self._go_on, self.account
        )
        try:
            self._admit()
            reception.begin()
        except ServingError as error:
            reception.refuse(error)

    def _admit(self) -> None:
        # First: what is refused is traced as well.
        self._sample()
        self._check()

    def _check(self) -> None:
        # The model must accept requests over HTTP: it serves or is being loaded, and gives one response.
        head, table = self._head, self._serving.table
        if head.error is not None:
            # It may be remembered with its target; what an error was raised through must not be.
            raise head.error.with_traceback(None)
        if head.edition != table.edition:
            # Of one that is being loaded it is not known yet: see ``_answer_anew``.
            if table.expect(head.model, head.version).streams:
                raise Unsupported(DECOUPLED)
            head.edition = table.edition

    def receive(self, chunk: bytes) -> None:
        """Receives ``chunk``, a piece of the body. Raises BodyTooLarge if the body exceeds ``http.max_body_byte_size``."""
        reception = self._reception
        if reception is None:
            self._small_body += chunk
            return
        limit = self._serving.options.http.max_body_byte_size
        if reception.received + len(chunk) > limit:
            raise BodyTooLarge(f"has more than {limit} bytes", limit)
        reception.receive(chunk)

    @property
    def body(self) -> Body | None:
        """Returns the body as far as it has arrived.

        Returns None if the body is so small that this object itself holds the bytes.
        """
        return None if self._reception is None else self._reception.body

    @property
    def received(self) -> int:
        """Returns how many bytes of the body have been received. A compressed body counts in compressed bytes."""
        return len(self._small_body) if self._reception is None else self._reception.received

    @property
    def refused(self) -> bool:
        """Returns whether the request will be answered with an error."""
        return self._reception is not None and self._reception.error is not None

    def complete(self) -> None:
        """Notes that the whole body has arrived, and submits the request if all earlier requests are answered."""
        if self.phase is not _RECEIVING:
            return
        if self._trace is not None:
            self._trace.stamp(trace_stamps.HTTP_RECV_END)
        self.phase = _RECEIVED
        if self._reception is not None:
            self._reception.complete()
        self._go_on()

    def take_turn(self) -> None:
        """Notes that all earlier requests are answered, and submits this request if it is complete.

        Sends ``100 Continue`` if the client waits for it.
        """
        self.my_turn = True
        if self.phase is _RECEIVING:
            self._order.ask_for_body(self)
        self._go_on()

    def take(self, data: bytes, begins: int) -> None:
        """Sends the request's body to a worker as one inference request. If that fails, answers the client with the error.

        ``data``: received bytes, in which the request's body begins at the index ``begins``. Call this method only if the body
        is small and not compressed, and if all earlier requests are answered.
        """
        serving, head = self._serving, self._head
        passes = serving.tracer.passes
        try:
            if head.edition != serving.table.edition:
                self._admit()
            elif passes.left and not head.trace_parent:
                passes.left -= 1
            else:
                self._sample()
            if self._trace is not None:
                self._trace.stamp(trace_stamps.HTTP_RECV_END)
            ends = begins + head.text_size
            text = data[begins:ends]
            known = serving.prepared
            if head.key is None:
                request = known.read(head, text, head.tail_size)
            else:
                key = head.key, text
                request = known.texts[key] or known.meet(head, key)
            prepared, client_id, scheduling = request.prepared, request.id, request.scheduling
            if prepared.unpack is None:
                self._submit(request, CollectedBody.of(data[begins:]))
                return
            if not client_id and serving.makes_ids:
                client_id = str(uuid.uuid4())
            self._asked, self._client_id = prepared, client_id
            contents, numbered = prepared.unpack(data, ends), prepared.numbered
            if numbered is None or self._trace is not None:
                self._send(scheduling, contents)
                return
            self.numbered = numbered
            submitter, number = serving.submitter, numbered.number
            # Most say nothing of their scheduling, and to unpack that costs more than all else here.
            self.record = (
                RequestRecord(submitter.next_id(), number, contents, client_id, 0, monotonic_ns())
                if scheduling is UNSCHEDULED and not head.trace
                else RequestRecord.scheduled(
                    scheduling, submitter.next_id(), number, contents, client_id, 0, monotonic_ns(), head.trace
                )
            )
            submitter.send(self)
        except Exception as error:
            self._refused(error)

    def begin_now(self) -> PlacedBody | None:
        """Reserves memory in the front's arena for a large binary body. Returns the object that writes the body to this memory.

        Call it only if the head gives the lengths of body and JSON, and all earlier requests of the connection are answered.
        Returns None if the arena has no room now or this request cannot be served. No error is sent to the client then.
        """
        reception = Reception(self._serving, self._head, self._order.pause_body, self._go_on, self.account)
        try:
            body = reception.begin_now()
            if body is None:
                return None
            self._check()
            self._sample()
        except ServingError:
            reception.drop()
            return None
        except Exception:
            _log.exception("a large request for model '%s' goes the ordinary way", self._head.model)
            reception.drop()
            return None
        self._reception = reception
        self.my_turn = True
        return body

    # ------------------------------------------------------------------------------------------------ submit

    def _go_on(self) -> None:
        if self.phase is not _RECEIVED or not self.my_turn or self._gone or self._job is not None:
            return
        reception = self._reception
        if reception is None:
            self.phase, body = _SUBMITTED, self._small_body
            self.take(body, 0)
            return
        if not reception.ready:
            return
        if reception.error is not None:
            self._refused(reception.error)
        else:
            self._answer_if_refused(self._read, reception.body)

    def _read(self, body: Body) -> None:
        """Decodes the JSON of a complete body, in steps if it is long, and submits the request."""
        json_size = self._head.json_size
        text: bytes | memoryview
        if isinstance(body, PlacedBody):
            size = body.received
            text = body.head(json_size or size)
        else:
            text = body.whole()
            size = len(text)
            if json_size is not None:
                if json_size > size:
                    raise InvalidArgument(f"inference header size should be in range (0, {size}), got: {json_size}")
                text = text[: json_size or size]
        if json_size == 0:
            state = self._serving.table.expect(self._head.model, self._head.version)
            if not state.metadata:
                raise Unavailable(f"model '{state.name}' is being loaded, and what its raw input is is not known yet")
            raw = request_codec.decode_raw(state, text)
            self._submit(self._serving.prepared.prepare(self._head, raw), body)
            return
        if len(text) <= PIECE_BYTE_SIZE:
            apart = at_once(json_cut.steps(text)) if len(text) > request_codec.MAX_UNCUT else None
            self._decode(text, apart, body, size)
        else:
            self._convert(json_cut.steps(text), lambda apart: self._decode(text, apart, body, size))

    def _decode(self, text: bytes | memoryview, apart: json_cut.Cut | None, body: Body, size: int) -> None:
        request = self._serving.prepared.read(self._head, text, size - len(text), apart)
        prepared = request.prepared
        if prepared.placed is None or type(body) is not PlacedBody or self._serving.makes_ids:
            self._submit(request, body)
            return
        self._asked, self._client_id = prepared, request.id
        self._send(request.scheduling, body.places(len(text), prepared.placed))

    def _submit(self, request: ParsedRequest, body: Body) -> None:
        if self._serving.makes_ids and not request.id:
            request = msgspec.structs.replace(request, id=str(uuid.uuid4()))
        self._asked, self._client_id = request.prepared, request.id
        inline = self._serving.submitter.inline_byte_size
        inputs = located(request.sources, body, self._head.json_size or 0, inline)
        size = placement.room(inputs, inline)
        if size == 0:
            self._send(request.scheduling, placement.place(inputs, None, inline))
            return
        lease = self._serving.submitter.loan(size, self.account)
        if lease is not None:
            self._place(request.scheduling, inputs, lease)
            return

        def granted(lease: Lease | ServingError) -> None:
            if not isinstance(lease, ServingError) and self._gone:
                self._serving.submitter.give_back(lease)
            elif not self._gone:
                self._answer_if_refused(self._place, request.scheduling, inputs, lease)

        self._serving.submitter.wait_for_room(size, granted, self._head.model, self.account)

    def _place(
        self, scheduling: Scheduling, inputs: list[InputContent | Unconverted], lease: Lease | ServingError
    ) -> None:
        """Copies ``inputs`` to the leased memory and sends the request to a worker. If ``lease`` is an error, raises it."""
        if isinstance(lease, ServingError):
            raise lease
        self._leases = (lease,)
        placed = placement.place(inputs, lease, self._serving.submitter.inline_byte_size)
        if all(isinstance(content, InputContent) for content in inputs):
            self._send(scheduling, placed)
        else:
            self._convert(placement.fill(inputs, placed, lease), lambda contents: self._send(scheduling, contents))

    def _send(self, scheduling: Scheduling, contents: tuple[Content, ...]) -> None:
        asked: PreparedKind = self._asked  # type: ignore[assignment]
        reception, self._reception = self._reception, None
        leases = self._leases
        if leases:
            self._leases = ()
        if reception is not None:
            leases = reception.leave() + leases
        submitter, trace, noted = self._serving.submitter, self._trace, self._head.trace
        numbered = asked.numbered or asked.on_lane(submitter.numbers)
        if trace is not None:
            noted |= trace.level
        prepared = asked.record if numbered is None else numbered.number
        self.record = RequestRecord.scheduled(
            scheduling, submitter.next_id(), prepared, contents, self._client_id, 0, monotonic_ns(), noted
        )
        if trace is not None:
            trace.sent(self.record)
        self.numbered, self.leases = numbered, leases
        submitter.send(self)
        self.phase = _SUBMITTED

    # ----------------------------------------------------------------------------------------------- answer

    def completed(self, prepared: PreparedAnswer, record: AnswerRecord, lane: SubmitterLane | None) -> None:
        if self._trace is not None:
            self._trace.completed(prepared.version, record.trace)
        if type(record.prepared) is not int or not prepared.final or not self._head.is_plain:
            self._answer_anew(prepared, record, lane)
            return
        if record.timing is not None:
            self._timing_line = response_codec.timing_line(record.timing)
        asked: PreparedKind = self._asked  # type: ignore[assignment]
        text, lease = asked.last_answer, record.lease
        pieces: list[Buffer] | None = None
        if lease is None:
            if text is None or text.prepared is not prepared:
                text = asked.answer(prepared, record, lane.view)  # type: ignore[union-attr]
            answer = text.whole(self._client_id, record)
            if answer is not None:
                if self.keep_alive and self._trace is None:
                    if self._timing_line:
                        answer = answer.replace(_LENGTH, b"\r\n" + self._timing_line + _LENGTH[2:], 1)
                    self._serving.answered.good(self, prepared.version, answer)
                    self._order.answer_whole(answer)
                    return
                pieces = [answer]
        else:
            assert lane is not None
            try:
                if text is None or text.prepared is not prepared:
                    text = asked.answer(prepared, record, lane.view)
                pieces = text.pieces(self._client_id, record, lane.view)
            except Exception:
                pieces = None  # the ordinary way says what is wrong
            if pieces is not None:
                self._unwritten = lane, lease
        if pieces is None:
            self._answer_anew(prepared, record, lane)
            return
        lines = self._timing_line if self.keep_alive else self._timing_line + response_codec.CLOSE
        if lines:
            pieces[0] = bytes(pieces[0]).replace(_LENGTH, b"\r\n" + lines + _LENGTH[2:], 1)
        self._serving.answered.good(self, prepared.version, pieces)
        self.phase = ExchangePhase.ANSWERED
        self._hand_over(pieces)

    def _answer_anew(self, prepared: PreparedAnswer, record: AnswerRecord, lane: SubmitterLane | None) -> None:
        if record.lease is not None and lane is not None:
            self._unwritten = (lane, record.lease)
        if record.code:
            self._answer_error(http_status(record.code), record.message)
            return
        if record.timing is not None:
            self._timing_line = response_codec.timing_line(record.timing)
        if is_one_of_several(prepared, record):
            # It came while its model was being loaded, and nobody knew it.
            self._serving.submitter.cancel(self)
            self._refused(Unsupported(DECOUPLED))
            return
        assert lane is not None
        assert self._asked is not None
        asked = self._asked.asked
        self._version = prepared.version
        answer = prepared, record.contents, self._head.model, self._client_id, asked
        if record.lease is not None and response_codec.large_texts(prepared, record.contents, asked):
            # Its worker may be gone before the last step, and the lane closed.
            steps = response_codec.encode_in_steps(*answer, lane.pinned(record.contents))
            self._convert(steps, self._answer_converted)
            return
        try:
            head, parts = response_codec.encode(*answer, lane.view)
        except Exception as error:
            self._refused(error)
            return
        self._answer([head], parts)

    def undelivered(self) -> None:
        order = self._order
        if self.phase is ExchangePhase.ANSWERED or self._gone or not (order.requests and order.requests[0] is self):
            # Some of the answer may have left: nothing else can follow it.
            order.transport.abort()
        else:
            self._answer_error(500, DEFECT)

    def _answer_converted(self, answer: tuple[list[Buffer], list[Buffer]]) -> None:
        head, parts = answer
        if not parts:
            self.written()  # the tensors are text now, and the transport holds that
        self._answer(head, parts)

    def _answer(self, head: list[Buffer], parts: list[Buffer]) -> None:
        json_size = len(head[0]) if len(head) == 1 else sum(map(len, head))
        tail_size = sum(map(len, parts))
        if self._head.accepts:
            steps = deflated(self._head.accepts, self._serving.compression, (*head, *parts))
            if json_size + tail_size <= DEFLATE_IN:
                self._answer_compressed(json_size, tail_size, at_once(steps))
            else:
                self._convert(steps, lambda body: self._answer_compressed(json_size, tail_size, body))
            return
        line = response_codec.response_head(json_size, tail_size, self._connection_line())
        self.phase = ExchangePhase.ANSWERED
        pieces: list[Buffer] = [line, *head, *parts]
        if self._unwritten is None:
            # Small pieces are cheaper joined; slices of the arena go to the socket as they lie.
            answer = b"".join(pieces)
            if self.keep_alive and self._trace is None:
                self._serving.answered.good(self, self._version, answer)
                self._order.answer_whole(answer)
                return
            pieces = [answer]
        self._serving.answered.good(self, self._version, pieces)
        self._hand_over(pieces)

    def _hand_over(self, pieces: list[Buffer]) -> None:
        if self._trace is not None:
            self._trace.stamp(trace_stamps.HTTP_SEND_START)
        if self._order.answer_pieces(pieces):
            self.written()

    def _answer_compressed(self, json_size: int, tail_size: int, body: bytes) -> None:
        """Sends the client the compressed ``body``, which was ``json_size`` bytes of JSON, and then ``tail_size`` of tensors."""
        self.written()
        self.phase = ExchangePhase.ANSWERED
        lines = b"Content-Encoding: %b\r\n%b" % (self._head.accepts.encode(), self._connection_line())
        answer = response_codec.response_head(json_size, tail_size, lines, len(body)) + body
        self._serving.answered.good(self, self._version, answer)
        self._hand_over([answer])

    def _answer_error(self, status: int, message: str) -> None:
        if self._trace is not None:
            self._trace.failed(str(status), message)
        self._give_back()
        self.written()
        self.phase = ExchangePhase.ANSWERED
        self._serving.answered.failed(str(status), message, self)
        self._hand_over([response_codec.error_response(status, message, self._connection_line())])

    def _connection_line(self) -> bytes:
        lines = self._head.keep_alive_line if self.keep_alive else response_codec.CLOSE
        if self._head.load_format:
            lines = b"%b: %b\r\n%b" % (*load_report.header(self._serving.submitter, self._head.load_format), lines)
        return self._head.origin_lines + self._timing_line + lines

    def written(self) -> None:
        """Releases the shared memory of the answer. Ends the trace of the request if the answer was written to the transport.

        Call this method when the transport no longer needs that memory.
        """
        unwritten, self._unwritten = self._unwritten, None
        if unwritten is not None:
            self._serving.submitter.release(*unwritten)
        if self._trace is not None and self.phase is ExchangePhase.ANSWERED:
            self._trace.stamp(trace_stamps.HTTP_SEND_END)
            self._trace.end()
            self._trace = None

    def _convert(self, steps: Generator[None, None, Any], done: Callable[[Any], None]) -> None:
        """Runs ``steps``, and then calls ``done`` with their result. Sends the client the error that any of them raises."""

        def ended(step: Callable[..., None], result: Any) -> None:
            self._job = None
            self._answer_if_refused(step, result)

        self._job = self._serving.conversions.run(steps, partial(ended, done), partial(ended, self._refused))

    def _answer_if_refused(self, step: Callable[..., None], *arguments: object) -> None:
        """Calls ``step`` with ``arguments``, and sends the client the error that it raises."""
        try:
            step(*arguments)
        except Exception as error:
            self._refused(error)

    def _refused(self, error: Exception) -> None:
        """Answers the request with ``error``. If ``error`` is no ServingError, it is also logged as a defect of the server."""
        if isinstance(error, ServingError):
            self._answer_error(http_status(error), error.message)
        else:
            names = self._client_id, self._head.model
            _log.error("request '%s' for model '%s' met a defect of the server", *names, exc_info=error)
            self.undelivered()

    # ------------------------------------------------------------------------------------------------ the end

    def abandon(self) -> None:
        """Cancels the request and frees its memory, because the client has disconnected."""
        self._gone = True
        if self._job is not None:
            self._job.cancel()
            self._job = None
        self._serving.submitter.cancel(self)
        self._give_back()
        self.written()

    def _give_back(self) -> None:
        reception, self._reception = self._reception, None
        if reception is not None:
            reception.drop()
        leases, self._leases = self._leases, ()
        for lease in leases:
            self._serving.submitter.give_back(lease)
