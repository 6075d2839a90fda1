"""Answers ModelStreamInfer calls, each of which may have many requests in flight. Nothing here blocks.

Responses of decoupled models are sent at once. Responses of all other models are sent in the order of their requests.

If a request fails, the client gets a response with ``error_message`` and the stream goes on. A client that sent the header
``triton_grpc_error: true`` gets the error as the gRPC status instead, which ends the stream.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from functools import partial

from tensord.daemon.front.each import call_each
from tensord.daemon.front.status import INTERNAL, NAMES, OK, grpc_number
from tensord.daemon.grpc import response_codec
from tensord.daemon.grpc.arriving_message import ArrivingMessage
from tensord.daemon.grpc.call import InferCall, OnSent, kept
from tensord.daemon.grpc.infer import CallRequest, Infer, Message, ending
from tensord.daemon.grpc.request_fields import RefusedRequest, client_id_of
from tensord.daemon.grpc.stream import Stream
from tensord.shm.errors import DEFECT, ServingError
from tensord.shm.messages import AnswerRecord, Buffer, PreparedAnswer
from tensord.shm.response_order import ResponseOrder
from tensord.shm.tracer import Trace

_log = logging.getLogger(__name__)
#: An answer that waits for its turn: its bytes, what sends it, and what is called instead where it will not be sent.
_Waiting = tuple[int, Callable[[], None], OnSent]
#: Bytes of answers that a stream's client has not taken, or that wait for earlier ones; beyond, no more requests are taken.
_MAX_UNSENT = 4 << 20


class StreamInfer(InferCall):
    """Answers the requests of one ModelStreamInfer call, several of which may be with workers at the same time."""

    streams = True

    def __init__(self, infer: Infer, stream: Stream) -> None:
        self.infer = infer
        self.stream = stream
        #: Requests whose last answer was not sent; an object for a request of which nothing is known.
        self._in_flight: dict[object, None] = {}
        #: Requests with one response, in their order, and answers that wait for earlier ones.
        self._order: ResponseOrder[object, _Waiting] = ResponseOrder()
        #: Bytes of the answers that wait there.
        self._kept_size = 0
        #: Messages that came before there was room for them; bounded by the stream's window.
        self._waiting: deque[Message] = deque()
        #: True while the last request waits for room: what comes later is sent later.
        self._placing = False
        #: True until the client has taken all that was unsent when it was too much.
        self._is_behind = False
        self._half_closed = False
        #: Nothing more is taken.
        self._stopping = False
        self._is_new = True
        #: The time since which it waits for its next message, CLOCK_MONOTONIC ns; 0: none was traced so far.
        self._waits_since = time.monotonic_ns() if infer.tracer.on else 0
        self._grpc_errors = ("triton_grpc_error", "true") in stream.head.metadata

    def arriving(self, byte_size: int, on_room: Callable[[], None]) -> ArrivingMessage:
        account = self.stream.connection.account
        return ArrivingMessage(0, byte_size, self.infer.submitter, account, on_room, self._placed_message)

    def message(self, content: Buffer, start: int, end: int) -> None:
        if self.stream.held or len(self._in_flight) >= self.infer.max_stream_requests:
            self._wait(kept(content, start, end))
        else:
            self._ask(content, start, end)

    def _placed_message(self, message: ArrivingMessage) -> None:
        if self.stream.held or not self._has_room():
            self._wait(message)
        else:
            self._ask(message, 0, 0)

    def half_closed(self) -> None:
        self._half_closed = True
        self._end_if_done()

    @property
    def idle(self) -> bool:
        return not self._in_flight and not self._waiting

    @property
    def is_new(self) -> bool:
        return self._is_new

    def stop(self) -> None:
        # Whatever comes from now on takes the way of what has to wait.
        self._stopping = self.stream.held = True
        self._end_if_done()

    def abandoned(self) -> None:
        waiting, self._waiting = self._waiting, deque()
        in_flight, self._in_flight = self._in_flight, {}
        call_each([each.drop for each in waiting if isinstance(each, ArrivingMessage)], "leaving a message")
        asked = [each for each in in_flight if isinstance(each, CallRequest)]
        call_each([partial(self.infer.submitter.cancel, each) for each in asked], "leaving a request")
        call_each([sent for *_, sent in self._order.drop() if sent is not None], "leaving an answer")

    # ------------------------------------------------------------------------------------------------- requests

    def _has_room(self) -> bool:
        if self._placing or len(self._in_flight) >= self.infer.max_stream_requests:
            return False
        return self.stream.unsent_size + self._kept_size < _MAX_UNSENT

    def _wait(self, message: Message) -> None:
        self._is_new = False
        if self._stopping:
            if isinstance(message, ArrivingMessage):
                message.drop()
            return
        self.stream.held = True
        self._waiting.append(message)

    def _ask(self, message: Message, start: int, end: int) -> None:
        self._is_new = False
        waited_ns = read_ns = 0
        if self.infer.tracer.on:
            read_ns = time.monotonic_ns()
            waited_ns, self._waits_since = self._waits_since or read_ns, read_ns
        try:
            asked = self.infer.ask(self, message, start, end, waited_ns, read_ns)
        except RefusedRequest as refused:
            self._not_sent(refused.error, refused.client_id, refused.trace, CallRequest.refused(self, refused))
            return
        except Exception as error:
            known = message.client_id if isinstance(message, ArrivingMessage) else client_id_of(message[start:end])
            self._not_sent(error, known)
            return
        self._in_flight[asked] = None
        if not asked.decoupled:
            self._order.taken(asked)
        if not asked.record.request_id:
            # It waits for arena memory.
            self._placing = self.stream.held = True

    def _not_sent(
        self, error: Exception, client_id: str, trace: Trace | None = None, asked: CallRequest | None = None
    ) -> None:
        code, message, sent = INTERNAL, DEFECT, None
        if isinstance(error, ServingError):
            code, message = grpc_number(error), error.message
        else:
            _log.error("a request of a stream met a defect of the server", exc_info=error)
            asked = None
        if trace is not None:
            trace.failed(NAMES[code], message)
            sent = ending(trace)
        if not len(self._order):
            self._refused(code, message, client_id, sent=sent, asked=asked)
            return
        place = asked or object()
        self._in_flight[place] = None
        self._order.taken(place)
        self._keep(place, len(message), partial(self._refused, code, message, client_id, sent=sent, asked=asked), sent)

    def placed(self) -> None:
        self._placing = False
        self._go_on()

    def _go_on(self) -> None:
        """Sends as many waiting requests to workers as may be in flight. If none is left, lets the client send more."""
        while self._waiting and self._has_room():
            message = self._waiting.popleft()
            self._ask(message, 0, 0 if isinstance(message, ArrivingMessage) else len(message))
        if self.stream.held and not self._stopping and not self._waiting and self._has_room():
            self.stream.release()
        self._end_if_done()

    def _end_if_done(self) -> None:
        if self.idle:
            if self._half_closed:
                self.stream.finish(OK)
            elif self._stopping:
                self.stream.stopped()

    # -------------------------------------------------------------------------------------------------- answers

    def completed(
        self, asked: CallRequest, prepared: PreparedAnswer, record: AnswerRecord, parts: list[Buffer], sent: OnSent
    ) -> None:
        # One that is not in flight was sent in part: what comes now says so.
        if asked.decoupled or self._order.passes(asked) or asked not in self._in_flight:
            self._deliver(asked, prepared, record, parts, sent)
        else:
            size = sum(map(len, parts)) + len(record.message)
            self._keep(asked, size, partial(self._deliver, asked, prepared, record, parts, sent), sent)
        if self._waiting or self._half_closed or self.stream.held:
            self._go_on()

    def several(self, asked: CallRequest) -> None:
        self._leave(self._order.withdrawn(asked))

    def holds_up(self, asked: CallRequest) -> bool:
        return self._order.holds_up(asked)

    def _keep(self, asked: object, size: int, send: Callable[[], None], sent: OnSent) -> None:
        self._kept_size += size
        if self._kept_size >= _MAX_UNSENT:
            self.stream.held = True
        self._leave(self._order.done(asked, (size, send, sent)))

    def _leave(self, leaving: list[tuple[object, _Waiting]]) -> None:
        for asked, (size, send, sent) in leaving:
            self._kept_size -= size
            try:
                # An error before it may have ended the call.
                if asked in self._in_flight:
                    del self._in_flight[asked]
                    send()
                    continue
            except Exception:
                # The client pairs answers with requests by their order: it cannot go on without this one.
                self.stream.meet_defect()
            if sent is not None:
                sent()

    def _deliver(
        self, asked: CallRequest, prepared: PreparedAnswer, record: AnswerRecord, parts: list[Buffer], sent: OnSent
    ) -> None:
        if prepared.final:
            self._in_flight.pop(asked, None)
        if record.code:
            self._refused(
                grpc_number(record.code),
                record.message,
                asked.client_id,
                # Only what a version has answered is an error of the model.
                asked.head.model if prepared.version else "",
                (not asked.decoupled or prepared.final) if prepared.version else None,
                sent,
                asked,
            )
            return
        answered = self.stream.http2.serving.answered
        if not parts:
            answered.good(asked, prepared.version, b"")
            if asked.head.empty_final:
                self._send([response_codec.empty_final(asked.head.model, asked.client_id)], sent)
            elif sent is not None:
                sent()
            return
        if prepared.final:
            answered.good(asked, prepared.version, parts)
        self._send(response_codec.streamed(parts), sent)

    def _refused(
        self,
        code: int,
        message: str,
        client_id: str,
        model: str = "",
        final: bool | None = None,
        sent: OnSent = None,
        asked: CallRequest | None = None,
    ) -> None:
        if self._grpc_errors:
            if sent is not None:
                self.stream.send_later(sent)
            self.stream.refuse(code, message)
            return
        if final is not False:
            stream = self.stream
            stream.http2.serving.answered.failed(NAMES[code], message, asked, stream.connection.account)
        self._send([response_codec.streamed_error(message, client_id, model, final)], sent)

    def _send(self, parts: list[Buffer], sent: OnSent = None) -> None:
        self.stream.send(parts, sent)
        # A client that does not read gets no more window until it has, whatever else the stream waits for.
        if self.stream.unsent_size >= _MAX_UNSENT and not self._is_behind:
            self._is_behind = self.stream.held = True
            self.stream.send_later(self._caught_up)

    def _caught_up(self) -> None:
        self._is_behind = False
        self._go_on()
