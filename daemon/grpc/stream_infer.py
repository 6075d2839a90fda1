"""ModelStreamInfer: many requests in flight, answered in the order they complete. Nothing here waits.

An error of one request is an answer like others (``error_message``) and the stream goes on, unless its caller asked with the
header ``triton_grpc_error: true`` for the gRPC status, which ends it.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from functools import partial

from tensord.daemon.front.each import call_each
from tensord.daemon.grpc import response_codec
from tensord.daemon.grpc.call import Call, kept
from tensord.daemon.grpc.call_requests import CallRequest, FormedCallRequest
from tensord.daemon.grpc.codes import INTERNAL, OK, number
from tensord.daemon.grpc.infer_calls import InferCalls, Message, Sent
from tensord.daemon.grpc.reception import Reception
from tensord.daemon.grpc.request_fields import RefusedRequest, client_id_of
from tensord.daemon.grpc.stream import Stream
from tensord.daemon.submit.accounts import Account
from tensord.daemon.submit.inference import InferenceRequest, begin
from tensord.daemon.tracing.tracer import Trace
from tensord.shm.errors import DEFECT, ServingError
from tensord.shm.lane import SubmitterLane
from tensord.shm.messages import AnswerRecord, Buffer, PreparedAnswer, is_mark

_log = logging.getLogger(__name__)
#: Answers of a stream that its client has not taken; beyond, no more requests are taken.
_MAX_UNSENT = 4 << 20


class StreamInfer(Call):
    """One call."""

    def __init__(self, calls: InferCalls, stream: Stream) -> None:
        self._calls = calls
        self._stream = stream
        self._in_flight: set[CallRequest | FormedCallRequest] = set()
        #: Messages that came before there was room for them; bounded by the stream's window.
        self._waiting: deque[Message] = deque()
        #: Its last request waits for room: what comes later is sent later.
        self._placing = False
        self._half_closed = False
        #: Nothing more is taken.
        self._stopping = False
        #: For its next message, CLOCK_MONOTONIC ns; 0: none was traced so far.
        self._waits_since = time.monotonic_ns() if calls.tracer.on else 0
        self._grpc_errors = ("triton_grpc_error", "true") in stream.head.metadata

    @property
    def account(self) -> Account | None:
        return self._stream.connection.account

    def reception(self, byte_size: int) -> Reception:
        return self._calls.reception(byte_size, self._stream.connection.account)

    def message(self, content: Buffer, start: int, end: int) -> None:
        calls = self._calls
        if self._stream.held or len(self._in_flight) >= calls.max_stream_requests:
            self._wait(kept(content, start, end))
            return
        asked = None
        if not calls.tracer.on:
            try:
                asked = calls.ask_formed(self, content, start, end, self._stream.deadline_ns, True)
            except Exception as error:
                self._not_sent(error, client_id_of(content[start:end]))
                return
        if asked is None:
            self._ask(content[start:end])
        else:
            self._in_flight.add(asked)

    def received(self, message: Reception) -> None:
        calls = self._calls
        if self._stream.held or not self._has_room():
            self._wait(message)
            return
        asked = None
        if not calls.tracer.on:
            try:
                asked = calls.ask_received(self, message, self._stream.deadline_ns, True)
            except Exception as error:
                message.drop()
                self._not_sent(error, message.client_id)
                return
        if asked is None:
            self._ask(message)
        else:
            self._in_flight.add(asked)

    def half_closed(self) -> None:
        self._half_closed = True
        self._end_if_done()

    @property
    def idle(self) -> bool:
        return not self._in_flight and not self._waiting

    def stop(self) -> None:
        # Whatever comes from now on takes the way of what has to wait.
        self._stopping = self._stream.held = True
        self._end_if_done()

    def abandoned(self) -> None:
        waiting, self._waiting = self._waiting, deque()
        in_flight, self._in_flight = self._in_flight, set()
        placed = [message for message in waiting if isinstance(message, Reception)]
        call_each([message.drop for message in placed], "leaving a message")
        call_each([partial(asked.cancel, self._calls.submitter) for asked in in_flight], "leaving a request")

    # ------------------------------------------------------------------------------------------------- requests

    def _has_room(self) -> bool:
        if self._placing:
            return False
        return len(self._in_flight) < self._calls.max_stream_requests and self._stream.unsent_size < _MAX_UNSENT

    def _wait(self, message: Message) -> None:
        if self._stopping:
            if isinstance(message, Reception):
                message.drop()
            return
        self._stream.held = True
        self._waiting.append(message)

    def _ask(self, message: Message) -> None:
        waited_ns, read_ns = self._waits_since, 0
        if self._calls.tracer.on:
            read_ns = self._waits_since = time.monotonic_ns()
        request: InferenceRequest | None = None
        client_id = ""
        try:
            decoded, request, state = self._calls.read(self._stream, message)
            client_id = request.id
            request.deadline_ns = self._stream.deadline_ns
            asked = CallRequest(self, decoded, request, state.streams, not state.metadata)
            if read_ns:
                self._calls.sample(request, waited_ns or read_ns, read_ns)
            asked.inference = begin(self._calls.submitter, request, asked.completed)
            self._in_flight.add(asked)
            if asked.inference.waits_for_room:
                self._placing = self._stream.held = True
                asked.inference.on_room = self._placed
        except RefusedRequest as refused:
            self._not_sent(refused.error, refused.client_id)
        except Exception as error:
            if request is not None:
                self._calls.drop(request)
            self._not_sent(error, client_id, None if request is None else request.trace)

    def _not_sent(self, error: Exception, client_id: str, trace: Trace | None = None) -> None:
        """One of the stream's requests could not be begun; the others go on."""
        sent = None if trace is None else Sent(trace, None)
        if isinstance(error, ServingError):
            self._refused(number(error), error.message, client_id, sent=sent)
        else:
            _log.error("a request of a stream met a defect of the server", exc_info=error)
            self._refused(INTERNAL, DEFECT, client_id, sent=sent)

    def _placed(self) -> None:
        self._placing = False
        self._go_on()

    def _go_on(self) -> None:
        """Takes what waited, now that there may be room, and lets the client send more."""
        while self._waiting and self._has_room():
            self._ask(self._waiting.popleft())
        if self._stream.held and not self._stopping and not self._waiting and self._has_room():
            self._stream.held = False
            self._stream.http2.grant(self._stream)
        self._end_if_done()

    def _end_if_done(self) -> None:
        if self.idle:
            if self._half_closed:
                self._stream.finish(OK)
            elif self._stopping:
                self._stream.stopped()

    # -------------------------------------------------------------------------------------------------- answers

    def completed(
        self,
        asked: CallRequest | FormedCallRequest,
        prepared: PreparedAnswer,
        own: AnswerRecord,
        lane: SubmitterLane | None,
    ) -> None:
        if prepared.final:
            self._in_flight.discard(asked)
        if own.code:
            self._refused(
                number(own.code),
                own.message,
                asked.client_id,
                # Only what a version has answered is an error of the model.
                asked.model if prepared.version else "",
                (not asked.decoupled or prepared.final) if prepared.version else None,
                self._calls.releaser(prepared, own, lane, asked.trace),
            )
        else:
            assert lane is not None
            if type(own.prepared) is int and type(asked) is FormedCallRequest:
                self._answer_known(asked, prepared, own, lane)
            else:
                self._answer(asked, prepared, own, lane)
        if self._waiting or self._half_closed or self._stream.held:
            self._go_on()

    def _answer_known(
        self, asked: FormedCallRequest, prepared: PreparedAnswer, own: AnswerRecord, lane: SubmitterLane
    ) -> None:
        release, submitter = None, self._calls.submitter
        if not prepared.final:
            release = partial(submitter.taken, lane, own)
        elif own.lease is not None:
            release = partial(submitter.release, lane, own.lease)
        form = asked.message_form.answer_form(prepared, True)
        self._send(response_codec.streamed(form.pieces(asked.id, own.contents, lane.view)), release)

    def _answer(
        self,
        asked: CallRequest | FormedCallRequest,
        prepared: PreparedAnswer,
        own: AnswerRecord,
        lane: SubmitterLane,
    ) -> None:
        sent = self._calls.releaser(prepared, own, lane, asked.trace)
        if asked.decoupled and is_mark(prepared, own):
            if asked.empty_final:
                empty = response_codec.empty_final(asked.model, asked.client_id)
                self._send([empty], sent)
            elif sent is not None:
                sent()
            return
        try:
            parts = response_codec.encode(
                prepared, own.contents, asked.model, asked.client_id, lane.view, prepared.final
            )
        except Exception:
            _log.exception("an answer of model '%s' could not be written", asked.model)
            self._refused(INTERNAL, DEFECT, asked.client_id, sent=sent)
            return
        self._send(response_codec.streamed(parts), sent)

    def _refused(
        self,
        code: int,
        message: str,
        client_id: str,
        model: str = "",
        final: bool | None = None,
        sent: Callable[[], None] | None = None,
    ) -> None:
        if self._grpc_errors:
            if sent is not None:
                self._stream.send_later(sent)
            self._stream.refuse(code, message)
            return
        self._send([response_codec.streamed_error(message, client_id, model, final)], sent)

    def _send(self, parts: list[Buffer], sent: Callable[[], None] | None = None) -> None:
        self._stream.send(parts, sent)
        # A client that does not read gets no more window until it has.
        if self._stream.unsent_size >= _MAX_UNSENT and not self._stream.held:
            self._stream.held = True
            self._stream.send_later(self._go_on)
