"""Sends the inference requests in gRPC messages to workers, and encodes the workers' answers as gRPC messages.

    gRPC message ─▶ Infer.ask: decodes the request ─▶ CallRequest ─▶ Submitter ─▶ worker
    worker ─▶ Submitter ─▶ CallRequest.completed: encodes the answer ─▶ InferCall.completed

The calls that use this module are in ``unary_infer`` and ``stream_infer``. No function here blocks.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable
from functools import partial
from time import monotonic_ns
from typing import cast

import msgspec

from tensord.config.options import Options
from tensord.daemon.front.forwarding import Forwarding
from tensord.daemon.front.status import grpc_status
from tensord.daemon.grpc.arriving_message import ArrivingMessage
from tensord.daemon.grpc.call import InferCall, OnSent
from tensord.daemon.grpc.header_blocks import CallHead
from tensord.daemon.grpc.prepared import PreparedMessage, PreparedMessages, Understood
from tensord.daemon.grpc.request_codec import DecodedHead
from tensord.daemon.grpc.request_fields import RefusedRequest
from tensord.daemon.grpc.response_codec import AnswerLayout
from tensord.daemon.grpc.walk import Walked, walk
from tensord.daemon.submit.in_flight import InFlight
from tensord.daemon.submit.model_states import ModelStates
from tensord.daemon.submit.placement import UnsentRequest, begin, place
from tensord.daemon.submit.submitter import Submitter
from tensord.shm import trace_stamps
from tensord.shm.arena import Lease
from tensord.shm.common.scheduling import UNSCHEDULED, Scheduling
from tensord.shm.control_records import ModelState
from tensord.shm.errors import DEFECT, Internal, ServingError, Unsupported
from tensord.shm.lane import SubmitterLane
from tensord.shm.messages import AnswerRecord, Buffer, Content, PreparedAnswer, RequestRecord, is_mark
from tensord.shm.tracer import Trace, Tracer

_log = logging.getLogger(__name__)
#: Whole; one that is no buffer was placed while it arrived.
Message = Buffer | ArrivingMessage
#: Tells who asks such a model with ModelInfer: Triton's words.
DECOUPLED = "ModelInfer RPC doesn't support models with decoupled transaction policy; ask ModelStreamInfer"


class Infer:
    """Sends the inference requests of a gRPC front to workers, and encodes the answers."""

    def __init__(self, submitter: Submitter, table: ModelStates, options: Options, tracer: Tracer) -> None:
        self.submitter = submitter
        self.max_stream_requests = options.grpc.max_stream_requests
        self.tracer = tracer
        self._makes_ids = options.requests.make_ids
        self._prepared = PreparedMessages(table, submitter, options.expert.max_prepared)
        self._inline = submitter.inline_byte_size
        pattern = options.grpc.header_forward_pattern
        #: Adds something to each request, so that none is sent by a number.
        self._forwarding = Forwarding(pattern) if pattern else None

    def ask(
        self,
        call: InferCall,
        message: Message,
        start: int,
        end: int,
        waited_ns: int = 0,
        read_ns: int = 0,
    ) -> CallRequest:
        """Sends the inference request in a message to a worker, and returns the request. The answers go to ``call.completed``.

        If the request needs arena memory and none is free, this method returns at once. The request is then sent later.
        If this method raises an error, the request holds no arena memory.
        Args:
          message: a buffer with the request in ``message[start:end]``, or an ``ArrivingMessage``. For an ``ArrivingMessage``,
            ``start`` and ``end`` are ignored.
          waited_ns: when the call began to wait for the message, CLOCK_MONOTONIC. If it is 0, the request is not traced.
          read_ns: when the message was complete, CLOCK_MONOTONIC. If it is 0, the message was complete just now.
        Raises RefusedRequest if the message is no valid request, or cannot be sent, such as if too many requests are in flight.
        """
        sampled = lease = None
        if isinstance(message, ArrivingMessage):
            head, client_id, contents, lease = message.take()
        try:
            if not isinstance(message, ArrivingMessage):
                walked = walk(message, start, end, self._inline)
            elif (walked := walk(head, 0, len(head), 0)) is not None:
                walked = walked[0], client_id, walked[2], contents, 0
            known = None if walked is None else self._prepared[walked[0]]
            if known is not None and walked is not None and self._forwarding is None:
                if waited_ns:
                    sampled, waited_ns = self._sample(known.decoded.model, call.stream.head, waited_ns, read_ns), 0
                asked = self._ask_known(call, walked, known, sampled, lease)
                if asked is not None:
                    return asked
            if not isinstance(message, ArrivingMessage):
                understood = self._prepared.read(message, start, end, walked, known)
            else:
                understood = self._prepared.understand(head, client_id, contents, walked, known)
        except BaseException as error:
            if lease is not None:
                self.submitter.give_back(lease)
            if isinstance(error, RefusedRequest):
                self._trace_refused(error, call, waited_ns, read_ns, sampled)
            raise
        return self._ask_read(call, understood, waited_ns, read_ns, sampled, lease)

    def _ask_known(
        self, call: InferCall, walked: Walked, known: PreparedMessage, trace: Trace | None, lease: Lease | None
    ) -> CallRequest | None:
        _, client_id, parameters, raws, room = walked
        if not self._prepared.is_usable(known, len(raws)) or (known.decoupled and not call.streams):
            return None
        scheduling = self._prepared.scheduling(parameters) if parameters else UNSCHEDULED
        if scheduling is None:
            return None
        try:
            text = client_id.decode()
            if room:
                lease = self.submitter.loan(room, call.stream.connection.account)
        except (UnicodeDecodeError, ServingError):
            # Whoever reads it says what is wrong.
            return None
        if room:
            if lease is None:
                # Whoever reads it waits for room.
                return None
            try:
                raws = place(raws, lease, self._inline)
            except BaseException:
                self.submitter.give_back(lease)
                raise
        leases = () if lease is None else (lease,)
        return self._send(call, known, client_id, text, scheduling, raws, leases, trace)  # type: ignore[arg-type]

    def _send(
        self,
        call: InferCall,
        known: PreparedMessage,
        client_id: bytes,
        text: str,
        scheduling: Scheduling,
        contents: tuple[Content, ...],
        leases: tuple[Lease, ...],
        trace: Trace | None,
        state: ModelState | None = None,
    ) -> CallRequest:
        # As soon as this is called, the submitter owns the leases, even if it raises.
        submitter, numbered, deadline_ns = self.submitter, known.numbered, call.stream.deadline_ns
        if not client_id and self._makes_ids:
            text = str(uuid.uuid4())
            client_id = text.encode()
        prepared = known.decoded.prepared if numbered is None else numbered.number
        # Most say nothing of their scheduling, and to unpack that costs more than all else here.
        if scheduling is UNSCHEDULED and trace is None:
            record = RequestRecord(submitter.next_id(), prepared, contents, text, deadline_ns, monotonic_ns())
        else:
            level, number = 0 if trace is None else trace.level, submitter.next_id()
            record = RequestRecord.scheduled(
                scheduling, number, prepared, contents, text, deadline_ns, monotonic_ns(), level
            )
        asked = CallRequest(
            call,
            known.decoded,
            text,
            known.decoupled,
            known,
            client_id,
            record=record,
            numbered=numbered,
            account=call.stream.connection.account,
            leases=leases,
        )
        if trace is not None:
            asked.trace, asked.context = trace, trace.context
            trace.sent(record)
        try:
            submitter.send(asked, state)
        except ServingError as error:
            raise RefusedRequest(error, text, trace, known.decoded.model) from None
        return asked

    def _ask_read(
        self,
        call: InferCall,
        understood: Understood,
        waited_ns: int,
        read_ns: int,
        sampled: Trace | None = None,
        lease: Lease | None = None,
    ) -> CallRequest:
        head, client_id, scheduling, contents, state, learned = understood
        trace, stream = sampled, call.stream
        if self._makes_ids and not client_id:
            client_id = str(uuid.uuid4())
        try:
            if state.streams and not call.streams:
                raise Unsupported(DECOUPLED)
            if waited_ns:
                trace = self._sample(head.model, stream.head, waited_ns, read_ns)
            if learned is not None and self._forwarding is None:
                placed = cast("tuple[Content, ...]", contents)
                leases = () if lease is None else (lease,)
                return self._send(
                    call, learned, client_id.encode(), client_id, scheduling, placed, leases, trace, state
                )
            prepared = head.prepared
            if self._forwarding is not None:
                headers = [(name.encode(), value.encode("latin-1")) for name, value in stream.head.metadata]
                parameters = {**head.parameters, **self._forwarding.parameters(headers)}
                prepared = msgspec.structs.replace(prepared, parameters=parameters)
            inputs, deadline_ns = head.with_raws(contents), stream.deadline_ns
            request = UnsentRequest(prepared, inputs, client_id, scheduling, deadline_ns, trace, lease)
            if trace is not None:
                trace.client_id = client_id
            asked = CallRequest(
                call,
                head,
                client_id,
                state.streams,
                loading=call.streams and not state.metadata,
                scheduling=scheduling,
                trace=trace,
                context=None if trace is None else trace.context,
                account=stream.connection.account,
            )
            begin(self.submitter, asked, request)
            return asked
        except BaseException as error:
            if lease is not None:
                self.submitter.give_back(lease)
            if isinstance(error, RefusedRequest) or not isinstance(error, Exception):
                raise
            if not isinstance(error, ServingError):
                _log.exception("a request of %s met a defect of the server", stream.head.path)
                error = Internal(DEFECT)
            raise RefusedRequest(error, client_id, trace, head.model) from None

    def _trace_refused(
        self, refused: RefusedRequest, call: InferCall, waited_ns: int, read_ns: int, sampled: Trace | None
    ) -> None:
        if sampled is None and waited_ns and refused.model:
            sampled = self._sample(refused.model, call.stream.head, waited_ns, read_ns)
        if sampled is not None:
            sampled.client_id = refused.client_id
            refused.trace = sampled

    def _sample(self, model: str, head: CallHead, waited_ns: int, read_ns: int) -> Trace | None:
        metadata = head.metadata
        parent = dict(metadata).get("traceparent", "") if metadata and self.tracer.joins else ""
        trace = self.tracer.sample(model, parent, waited_ns)
        if trace is not None:
            trace.stamp(trace_stamps.GRPC_WAITREAD_START, waited_ns)
            trace.stamp(trace_stamps.GRPC_WAITREAD_END, read_ns)
        return trace


# ------------------------------------------------------------------------------------------------------------- answers


class CallRequest(InFlight):
    """Tracks one inference request of a gRPC call until its final answer."""

    call: InferCall
    #: The request's fields but for its id and its tensors.
    head: DecodedHead
    #: The request's id as the client gave it, or one that was made here.
    client_id: str
    #: True if the model may give several responses, so that an empty last one only marks their end.
    decoupled: bool
    #: The cached part of the message, which others of its kind have in common; None: the message was decoded as a whole.
    message: PreparedMessage | None = None
    #: The id's bytes as they came, if ``message`` is not None.
    id: bytes = b""
    #: True if the model was being loaded when the request was sent; then only its answers show whether it is ``decoupled``.
    loading: bool = False
    scheduling: Scheduling = UNSCHEDULED
    trace: Trace | None = None

    @classmethod
    def refused(cls, call: InferCall, refused: RefusedRequest) -> CallRequest | None:
        """Makes a record of a refused request for the logs. Returns None if the request's model is unknown."""
        if not refused.model:
            return None
        context = None if refused.trace is None else refused.trace.context
        account = call.stream.connection.account
        return cls(call, DecodedHead(refused.model, 0), refused.client_id, False, context=context, account=account)

    @property
    def names(self) -> tuple[str, str]:
        return self.head.model, self.client_id

    @property
    def holds_up(self) -> bool:
        return self.call.holds_up(self)

    def left_line(self) -> None:
        self.call.placed()

    def completed(self, prepared: PreparedAnswer, record: AnswerRecord, lane: SubmitterLane | None) -> None:
        if self.loading and not self.decoupled and is_mark(prepared, record):
            self._several()
        trace = self.trace
        if trace is not None:
            if prepared.final:
                if record.code:
                    trace.failed(grpc_status(record.code), record.message)
                if not self.waits_for_room:
                    trace.completed(prepared.version, record.trace)
            else:
                trace.responded(prepared.version)
        # Called once the answer was written to the client: it gives the answer's memory back and ends the trace.
        sent: OnSent = None
        submitter = self.call.infer.submitter
        if lane is not None and not prepared.final:
            if not self.decoupled:
                self._several()
            sent = partial(submitter.taken, lane, record)
        elif lane is not None and record.lease is not None:
            sent = partial(submitter.release, lane, record.lease)
        if trace is not None and prepared.final:
            sent = ending(trace, sent)
        parts: list[Buffer] = []
        if not record.code and lane is not None and (prepared.final or self.call.streams):
            try:
                parts = self._written(prepared, record, lane)
            except Exception:
                _log.exception("an answer of model '%s' could not be written", self.head.model)
                # It is the front's error, and no version's.
                prepared = msgspec.structs.replace(prepared, version=0)
                record = msgspec.structs.replace(record, code=Internal.code, message=DEFECT)
                if trace is not None:
                    trace.failed(grpc_status(Internal.code), DEFECT)
        self.call.completed(self, prepared, record, parts, sent)

    def _several(self) -> None:
        self.decoupled = True
        self.call.several(self)

    def _written(self, prepared: PreparedAnswer, record: AnswerRecord, lane: SubmitterLane) -> list[Buffer]:
        streamed = self.call.streams
        if self.decoupled and is_mark(prepared, record):
            return []
        if self.message is not None and type(record.prepared) is int:
            layout = self.message.answer_layout(prepared, streamed)
            return layout.pieces(self.id, record.contents, lane.view)
        layout = AnswerLayout(prepared, self.head.model, prepared.final if streamed else None)
        return layout.pieces(self.client_id.encode(), record.contents, lane.view)


def ending(trace: Trace, release: OnSent = None) -> Callable[[], None]:
    """Returns a function to be called once an answer was written to the client. It calls ``release``, and ends ``trace``."""
    trace.stamp(trace_stamps.GRPC_SEND_START)

    def sent() -> None:
        if release is not None:
            release()
        trace.stamp(trace_stamps.GRPC_SEND_END)
        trace.end()

    return sent
