"""Handles HTTP requests to the endpoints generate, generate_stream and infer_stream.

A model may give several responses to one such request.

    generate           sends the client one JSON object: the only response, or all responses joined if the model declares
                       gather = "concat". Any other number of responses than one is an error if the model does not.
    generate_stream    sends the client a server-sent event for each response, as soon as the worker has sent the response
    infer_stream       sends the client each response in binary form: its JSON and the bytes of its tensors

If a client reads slowly, the worker waits before it sends more responses. If a client disconnects, its request is cancelled.
Source: Triton docs/protocol/extension_generate.md; WHATWG HTML, "Server-sent events".
"""

from __future__ import annotations

import asyncio
import logging
import struct
import uuid
from collections import deque
from typing import Any, ClassVar

import msgspec

from tensord.daemon.front.status import BodyTooLarge, http_status
from tensord.daemon.http import generate_codec, request_codec, response_codec
from tensord.daemon.http.body import Body, PlacedBody, located
from tensord.daemon.http.decoded_request import DecodedRequest
from tensord.daemon.http.exchange import ModelRequest
from tensord.daemon.http.json_text import ResponseLayout, View
from tensord.daemon.http.prepared import PreparedKind
from tensord.daemon.http.reception import Reception
from tensord.daemon.http.response_codec import CLOSE, status_line
from tensord.daemon.submit.placement import UnsentRequest, begin
from tensord.shm import trace_stamps
from tensord.shm.control_records import ModelState
from tensord.shm.errors import DEFECT, Internal, InvalidArgument, ServingError, Unavailable, Unsupported, from_code
from tensord.shm.lane import SubmitterLane
from tensord.shm.messages import AnswerRecord, Buffer, Content, PreparedAnswer, is_mark

_log = logging.getLogger(__name__)
_NOT_ONE = (
    "generate expects model to produce exactly 1 response, "
    "use generate stream for model that generates various number of responses"
)
_JSON, _EVENTS = b"application/json", b"text/event-stream; charset=utf-8"
#: The most bytes of JSON of an infer_stream request: it is read at once, on the loop.
_MAX_JSON = 256 << 10
_SIZES = struct.Struct("<IQ")
#: Bytes of an error that are logged.
_MAX_SAID = 1000
_encode = msgspec.json.Encoder().encode


class Generation(ModelRequest):
    """One request to generate, generate_stream or infer_stream, until its answer is complete."""

    #: Bytes of the body that have come, counted here from when ``_reception`` ends.
    _received: int = 0
    _my_turn: bool = False
    _answered: bool = False
    #: The request was submitted or refused.
    _decided: bool = False
    #: The request was submitted, and its last response has not come.
    _running: bool = False
    #: The head of the answer, and perhaps more, was written.
    begun: bool = False
    #: The client has not taken all that was written.
    _blocked: bool = False
    #: The body, until the request is submitted or refused.
    _reception: Reception | None = None
    #: The model, once the request was let in.
    _state: ModelState | None = None
    #: Waits until the model is loaded.
    _loading: asyncio.Task[None] | None = None
    #: The decoded request, once it was read.
    _decoded: DecodedRequest | None = None
    #: The error to refuse the request with; None: nothing is wrong so far.
    _error: ServingError | None = None
    #: Responses that came while the client did not take what was written, each with its lane and what shows its tensors. Both are
    #: None if the response is an error of this process.
    _held: deque[tuple[PreparedAnswer, AnswerRecord, SubmitterLane | None, View | None]] = msgspec.field(
        default_factory=deque
    )

    def __post_init__(self) -> None:
        serving, head, order = self._serving, self._head, self._order
        self._error = head.error
        limit = serving.options.http.max_body_byte_size
        if not head.coding and (head.content_length or 0) <= limit:
            self._reception = Reception(serving, head, order.pause_body, self._go_on, order.account)
            try:
                self._reception.begin()
            except ServingError as error:
                self._reception.refuse(error)

    # -------------------------------------------------------------------------------------------------- body

    def receive(self, chunk: bytes) -> None:
        """Receives ``chunk``, a piece of the body. After the request was submitted or refused, the piece is only counted."""
        if self._reception is not None:
            self._reception.receive(chunk)
        else:
            self._received += len(chunk)

    @property
    def received(self) -> int:
        return self._received if self._reception is None else self._reception.received

    @property
    def body(self) -> Body | None:
        """Returns the request's body, which may still be arriving. Returns None once the request is submitted or refused."""
        return None if self._reception is None else self._reception.body

    def complete(self) -> None:
        """Notes that the whole body has arrived, so that the request can be submitted."""
        if self._reception is not None:
            self._reception.complete()
        self._go_on()

    def take_turn(self) -> None:
        self._my_turn = True
        self._go_on()

    def abandon(self) -> None:
        """Cancels the request and frees its memory, because the client has disconnected."""
        self._gone = True
        if self._loading is not None:
            self._loading.cancel()
        self._let_go()

    # ------------------------------------------------------------------------------------------------ submit

    def _go_on(self) -> None:
        if not self._my_turn or self._gone or self._decided or self._loading is not None:
            return
        head, submitter = self._head, self._serving.submitter
        try:
            if self._error is not None:
                self._refuse(self._error)
                return
            if self._state is None:
                if submitter.is_loading(head.model, head.version):
                    self._loading = asyncio.create_task(self._wait_for_model())
                    return
                self._state = self._admit()
            reception, limit = self._reception, self._serving.options.http.max_body_byte_size
            if reception is None:
                self._refuse(BodyTooLarge(f"has more than {limit} bytes", limit))
            elif reception.error is not None:
                self._refuse(reception.error)
            elif reception.ready:
                self._submit(reception, self._state)
            else:
                self._order.ask_for_body(self)
        except ServingError as error:
            self._refuse(error)
        except Exception:
            self._meet_defect()

    async def _wait_for_model(self) -> None:
        try:
            await self._serving.submitter.loaded(self._head.model, self._head.version)
        except ServingError as error:
            self._error = error.with_traceback(None)
        self._loading = None
        self._go_on()

    def _admit(self) -> ModelState:
        """Begins a trace if the request is sampled, and returns the state of its model."""
        head, table = self._head, self._serving.table
        self._sample()
        state = table.find(head.model, head.version)
        if head.coding:
            raise InvalidArgument("Unsupported content-encoding, only 'identity' is supported.")
        return state

    def _submit(self, reception: Reception, state: ModelState) -> None:
        head, serving = self._head, self._serving
        if self._trace is not None:
            self._trace.stamp(trace_stamps.HTTP_RECV_END)
        body = reception.body
        decoded = self._decoded = self._read(body, state)
        client_id = self._client_id = decoded.id or (str(uuid.uuid4()) if serving.makes_ids else "")
        sources = [source for _, _, _, source in decoded.inputs]
        # Texts that are read at once have no data that are converted later.
        contents: Any = located(sources, body, head.json_size or 0, serving.submitter.inline_byte_size)
        asked = UnsentRequest(PreparedKind(head, decoded).record, contents, client_id, decoded.scheduling)
        asked.lease, asked.trace = reception.take_lease(), self._trace
        self._drop_body()
        self._decided = True
        begin(serving.submitter, self, asked)
        self._running = True

    def _read(self, body: Body, state: ModelState) -> DecodedRequest:
        """Decodes the complete body to an inference request for the model of ``state``."""
        assert not isinstance(body, PlacedBody)  # which a body of JSON alone never is
        return generate_codec.decode(bytes(body.whole()), state.metadata)

    # ----------------------------------------------------------------------------------------------- answers

    def completed(self, prepared: PreparedAnswer, record: AnswerRecord, lane: SubmitterLane | None) -> None:
        if self._trace is not None and not self.waits_for_room:
            if prepared.final:
                self._trace.completed(prepared.version, record.trace)
            else:
                self._trace.responded(prepared.version)
        self._take(prepared, record, lane, None if lane is None else lane.view)

    def _take(
        self, prepared: PreparedAnswer, record: AnswerRecord, lane: SubmitterLane | None, view: View | None
    ) -> None:
        if self._blocked:
            # Its worker may be gone before the client reads on, and the lane closed.
            self._held.append((prepared, record, lane, None if lane is None else lane.pinned(record.contents)))
            return
        if prepared.final:
            self._running = False
        try:
            if record.code:
                self._fail(from_code(record.code, record.message), prepared.final)
            elif view is not None and not (prepared.final and is_mark(prepared, record)):
                self._answer(prepared, record.contents, view)
            if prepared.final and not (self._answered or self._gone):
                self._end()
        except ServingError as error:
            self._fail(error, True)
            if not self._answered:
                self._end()
        except Exception:
            self._meet_defect()
        self._release(prepared, record, lane)

    def written(self) -> None:
        """Writes the queued responses to the client's connection. Call it when the connection's write buffer has room again."""
        self._blocked = False
        while self._held and not self._blocked:
            self._take(*self._held.popleft())

    def _release(self, prepared: PreparedAnswer, record: AnswerRecord, lane: SubmitterLane | None) -> None:
        if lane is None:
            return
        if not prepared.final:
            self._serving.submitter.taken(lane, record)
        elif record.lease is not None:
            self._serving.submitter.release(lane, record.lease)

    def _answer(self, prepared: PreparedAnswer, contents: tuple[Content, ...], view: View) -> None:
        raise NotImplementedError

    def _fail(self, error: ServingError, final: bool) -> None:
        """Sends the client an error. ``final``: whether no response follows."""
        raise NotImplementedError

    def _end(self) -> None:
        """Ends the answer after the last response."""
        raise NotImplementedError

    # ------------------------------------------------------------------------------------------------- bytes

    def _write(self, part: bytes) -> None:
        self.begun = True
        self._blocked = not self._order.answer_part(part)

    def _write_whole(self, status: int, body: bytes, media_type: bytes = _JSON) -> None:
        if self._order.stop_direct(self):
            self.keep_alive = False
        self._write(self._response_head(status, b"content-length: %d\r\n" % len(body), media_type) + body)
        self._finish(status, body)

    def _response_head(self, status: int, length: bytes, media_type: bytes, framing: bytes = b"") -> bytes:
        head = self._head
        return b"%b%b%bcontent-type: %b\r\n%b%b%b\r\n" % (
            status_line(status),
            head.keep_alive_line.lower() if self.keep_alive else b"",
            length,
            media_type,
            head.origin_lines,
            b"" if self.keep_alive else CLOSE.lower(),
            framing,
        )

    def _refuse(self, error: ServingError) -> None:
        # No part of an answer may have been written.
        status = http_status(error)
        if self._trace is not None:
            self._trace.failed(str(status), error.message)
            self._trace.end()
        self._write_whole(status, _encode({"error": error.message}))

    def _meet_defect(self) -> None:
        """Logs the current exception, and answers 500. If the answer has begun already, aborts the connection instead."""
        _log.exception("request '%s' for model '%s' met a defect of the server", self._client_id, self._head.model)
        if self.begun:
            self._gone = True
            self._let_go()
            self._order.transport.abort()
        else:
            self._write_whole(500, _encode({"error": DEFECT}))

    def _sending(self) -> None:
        if self._trace is not None:
            self._trace.stamp(trace_stamps.HTTP_SEND_START)

    def _sent(self) -> None:
        if self._trace is not None:
            self._trace.stamp(trace_stamps.HTTP_SEND_END)
            self._trace.end()

    def _finish(self, status: int, body: bytes = b"") -> None:
        if status == 200:
            self._serving.answered.good(self, 0 if self._state is None else self._state.version, body)
        else:
            self._serving.answered.failed(str(status), body[:_MAX_SAID].decode(errors="replace"), self)
        self._decided = self._answered = True
        self._order.forgo_body(self)
        self._let_go()
        self._order.answered()

    def _let_go(self) -> None:
        """Frees all memory of the request, and cancels the request if its model still runs."""
        self._drop_body()
        if self._running:
            self._running = False
            self._serving.submitter.cancel(self)
        while self._held:
            self._release(*self._held.popleft()[:3])

    def _drop_body(self) -> None:
        reception, self._reception = self._reception, None
        if reception is not None:
            self._received = reception.received
            reception.drop()


class Generate(Generation):
    """One request to generate, which is answered with one JSON object.

    An error of the model is answered with status 400, or with 501 or 503 if that is the status of the error.
    """

    #: The object, once the response came.
    _object: bytes | None = None
    #: All responses, where the model wants them joined.
    _joined: generate_codec.JoinedAnswers | None = None

    def _submit(self, reception: Reception, state: ModelState) -> None:
        if state.joins:
            self._joined = generate_codec.JoinedAnswers(state, self._serving.options.http.max_body_byte_size)
        super()._submit(reception, state)

    def _answer(self, prepared: PreparedAnswer, contents: tuple[Content, ...], view: View) -> None:
        if self._joined is not None:
            self._joined.add(prepared, contents, view)
        elif self._object is None:
            self._object = ResponseLayout(prepared, self._head.model, self._client_id).encode(contents, view)
        else:
            raise InvalidArgument(_NOT_ONE)

    def _fail(self, error: ServingError, final: bool) -> None:
        self._refuse(error if isinstance(error, Unavailable | Unsupported) else InvalidArgument(error.message))

    def _end(self) -> None:
        found = self._object
        if self._joined is not None:
            prepared, contents = self._joined.whole()
            found = ResponseLayout(prepared, self._head.model, self._client_id).encode(contents)
        if found is None:
            raise InvalidArgument(_NOT_ONE)
        self._sending()
        self._write_whole(200, found)
        self._sent()


class GenerateStream(Generation):
    """One request to generate_stream, which is answered with one server-sent event for each response.

    An event is ``data: <JSON>`` and an empty line. An error is an event too. But if the whole answer is a single error and
    its code is not Internal, the client gets an HTTP error status instead.
    """

    _media_type: ClassVar[bytes] = _EVENTS
    #: The HTTP status of the answer, which the first event decides; 0: there was no event.
    _status: int = 0
    #: How the last response was written, as the next one will be that has as much in common with it.
    _layout: ResponseLayout | None = None
    #: All events so far for a client of HTTP/1.0, which has no chunks: it gets them with their length.
    _kept: bytearray | None = None

    def _answer(self, prepared: PreparedAnswer, contents: tuple[Content, ...], view: View) -> None:
        layout = self._layout
        if layout is None or layout.prepared is not prepared:
            layout = self._layout = ResponseLayout(prepared, self._head.model, self._client_id)
        self._say(b"data: %b\n\n" % layout.encode(contents, view), 200)

    def _fail(self, error: ServingError, final: bool) -> None:
        if not self._status and final and not isinstance(error, Internal):
            # It was wrong with the request before the model ran: no event.
            self._refuse(error)
            return
        self._say(b"data: %b\n\n" % _encode({"error": error.message}), 400)

    def _say(self, event: bytes, status: int) -> None:
        head = b"" if self._status else self._begin(status)
        if self._kept is None:
            self._write(b"%b%x\r\n%b\r\n" % (head, len(event), event))
            return
        self._kept += event
        size, most = len(self._kept), self._serving.options.http.max_body_byte_size
        if size > most:
            kept = f"at most {most} are kept for an answer of HTTP/1.0"
            self._refuse(InvalidArgument(f"the events have {size} bytes so far, {kept}"))

    def _begin(self, status: int) -> bytes:
        self._sending()
        self._status = status
        if self._head.keep_alive_line:
            self._kept = bytearray()
            return b""
        if not self.keep_alive:
            self._order.discard_rest()
        return self._response_head(status, b"", self._media_type, b"transfer-encoding: chunked\r\n")

    def _end(self) -> None:
        head = b"" if self._status else self._begin(200)
        if self._kept is not None:
            self._write_whole(self._status, bytes(self._kept), self._media_type)
        else:
            self._write(head + b"0\r\n\r\n")
            self._finish(self._status)
        self._sent()


class InferStream(GenerateStream):
    """One request to infer_stream, written like one to ``infer``. The HTTP body of the answer has a message for each response:

      | u32 size of the JSON | u64 size of the tensors that follow | JSON | tensor | tensor | ...      little-endian

    An error is also sent as a message, whose JSON has the keys ``error`` and ``code``. But if an error ends the request before
    any message was sent, the client gets an HTTP error status instead.
    """

    _media_type: ClassVar[bytes] = b"application/octet-stream"

    def _read(self, body: Body, state: ModelState) -> DecodedRequest:
        head, size = self._head, body.received
        json_size = size if head.json_size is None else head.json_size
        if not 0 < json_size <= size:
            raise InvalidArgument(f"inference header size should be in range (1, {size}), got: {json_size}")
        if json_size > _MAX_JSON:
            raise InvalidArgument(
                f"the JSON of a request for infer_stream has {json_size} bytes, at most {_MAX_JSON} are read: "
                "send large tensors as binary data"
            )
        text = bytes(body.head(json_size) if isinstance(body, PlacedBody) else body.whole()[:json_size])
        return request_codec.decode(text, size - json_size, head.model)

    def _answer(self, prepared: PreparedAnswer, contents: tuple[Content, ...], view: View) -> None:
        decoded = self._decoded
        assert decoded is not None
        said, parts = response_codec.encode(prepared, contents, self._head.model, self._client_id, decoded, view)
        self._say(_response(said, parts), 200)

    def _fail(self, error: ServingError, final: bool) -> None:
        if not self._status and final:
            self._refuse(error)
        else:
            self._say(_response(_encode({"error": error.message, "code": error.code}), []), 200)


def _response(said: bytes, parts: list[Buffer]) -> bytes:
    return b"".join([_SIZES.pack(len(said), sum(map(len, parts))), said, *parts])
