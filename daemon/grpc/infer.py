"""Inference over gRPC: messages become requests, sent by their number where they are known, and answers become messages.

    message ─▶ ask ─▶ known: walk ─▶ PreparedMessage ─▶ KnownRequest ─┐
                 ╰──▶ read exactly ──────────────────▶ ReadRequest ───┴▶ Submitter ─▶ InferCall.completed ─▶ written

What a call does with its requests and answers is its own affair (``unary_infer``, ``stream_infer``). Nothing here waits.
"""

from __future__ import annotations

import logging
import uuid
from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from time import monotonic_ns
from typing import ClassVar

from tensord.daemon.front.forwarding import Forwarding
from tensord.daemon.grpc import response_codec
from tensord.daemon.grpc.call import Call
from tensord.daemon.grpc.prepared import PreparedMessage, PreparedMessages, Understood
from tensord.daemon.grpc.reception import Reception
from tensord.daemon.grpc.request_codec import DecodedHead
from tensord.daemon.grpc.request_fields import RefusedRequest
from tensord.daemon.grpc.stream import Stream
from tensord.daemon.grpc.walk import walk
from tensord.daemon.submit.accounts import Account
from tensord.daemon.submit.in_flight import InFlight
from tensord.daemon.submit.model_table import ModelTable
from tensord.daemon.submit.placement import InferenceRequest, begin, place
from tensord.daemon.submit.scheduling import UNSCHEDULED, Scheduling
from tensord.daemon.submit.submitter import Submitter
from tensord.daemon.tracing.tracer import Trace, Tracer
from tensord.shm import trace_stamps
from tensord.shm.arena import Lease
from tensord.shm.errors import DEFECT, Internal, ServingError, Unsupported
from tensord.shm.lane import SubmitterLane
from tensord.shm.messages import AnswerRecord, Buffer, Content, PreparedAnswer, RequestRecord, is_mark
from tensord.shm.prepared import MAX_NUMBERS

_log = logging.getLogger(__name__)
#: Whole; one that is no buffer has a lease.
Message = Buffer | Reception
#: Tells who asks such a model with ModelInfer: Triton's words.
DECOUPLED = "ModelInfer RPC doesn't support models with decoupled transaction policy; ask ModelStreamInfer"


class InferCall(Call):
    """A call whose messages are inference requests."""

    __slots__ = ()

    stream: Stream

    @abstractmethod
    def completed(self, asked: Asked, prepared: PreparedAnswer, own: AnswerRecord, lane: SubmitterLane | None) -> None:
        """Takes an answer to a request of its own."""

    @abstractmethod
    def placed(self) -> None:
        """Hears that its request that waited for room does so no longer."""


# ----------------------------------------------------------------------------------------------------- requests of a call


class ReadRequest(InFlight):
    """A request that was read exactly."""

    call: InferCall
    _decoded: DecodedHead
    _request: InferenceRequest
    decoupled: bool
    #: Its model is not there yet, so whether it is ``decoupled`` is seen by its answers.
    _loading: bool

    @property
    def account(self) -> Account | None:
        return self.call.stream.connection.account

    @property
    def model(self) -> str:
        return self._decoded.model

    @property
    def client_id(self) -> str:
        return self._request.id

    @property
    def sequence_of(self) -> tuple[str, int | str] | None:
        """Its model and sequence, if it is of one."""
        sequence_id = self._request.scheduling.sequence_id
        return (self._request.model, sequence_id) if sequence_id else None

    @property
    def trace(self) -> Trace | None:
        return self._request.trace

    @property
    def empty_final(self) -> bool:
        """Whether a last, empty response is wanted where the model's last one does not say that it is."""
        return self._decoded.empty_final

    def left_line(self) -> None:
        self.call.placed()

    def completed(self, prepared: PreparedAnswer, own: AnswerRecord, lane: SubmitterLane | None) -> None:
        if self._loading and (not prepared.final or is_mark(prepared, own)):
            self.decoupled = True
        trace = self._request.trace
        if prepared.final and trace is not None and not self.waits_for_room:
            trace.completed(prepared.version, own.trace)
        self.call.completed(self, prepared, own, lane)


class KnownRequest(InFlight):
    """A request by its number."""

    call: InferCall
    message: PreparedMessage
    #: The client's, as it came.
    id: bytes
    #: What is traced is read exactly.
    trace: ClassVar[Trace | None] = None

    @property
    def model(self) -> str:
        return self.message.decoded.model

    @property
    def client_id(self) -> str:
        return self.record.client_id

    @property
    def account(self) -> Account | None:
        return self.call.stream.connection.account

    @property
    def decoupled(self) -> bool:
        return self.message.decoupled

    @property
    def empty_final(self) -> bool:
        return self.message.decoded.empty_final

    def completed(self, prepared: PreparedAnswer, own: AnswerRecord, lane: SubmitterLane | None) -> None:
        self.call.completed(self, prepared, own, lane)


Asked = ReadRequest | KnownRequest


# ------------------------------------------------------------------------------------------------------------- both calls


class Infer:
    """Sends the requests of a front's calls and writes their answers."""

    def __init__(
        self,
        submitter: Submitter,
        table: ModelTable,
        max_stream_requests: int,
        forwarding: Forwarding | None,
        tracer: Tracer,
        makes_ids: bool = False,
        max_prepared: int = MAX_NUMBERS,
    ) -> None:
        self.submitter = submitter
        self.max_stream_requests = max_stream_requests
        self.tracer = tracer
        self._makes_ids = makes_ids
        self._prepared = PreparedMessages(table, submitter, max_prepared)
        self._inline = submitter.inline_byte_size
        #: Adds something to each request, so that none is sent by a number.
        self._forwarding = forwarding

    def reception(self, byte_size: int, account: Account | None) -> Reception:
        """Returns who takes a large message of that size. ``account``: whose memory it takes."""
        return Reception(self.submitter, byte_size, account)

    def ask(
        self,
        call: InferCall,
        message: Message,
        start: int,
        end: int,
        streamed: bool,
        waited_ns: int = 0,
        read_ns: int = 0,
    ) -> Asked:
        """Sends a message, those bytes of it where it is a buffer.

        Args:
          streamed: whether it may be for a decoupled model.
          waited_ns, read_ns: since when its call waited for it, and when it was whole, CLOCK_MONOTONIC, where it may be traced.
        Raises: RefusedRequest: it is no request, or cannot be begun.  Unavailable: too many requests are in flight.
          Nothing stays on loan.
        """
        asked = None
        by_number = not waited_ns and self._forwarding is None
        if not isinstance(message, Reception):
            if by_number:
                asked = self._ask_known(call, message, start, end, streamed)
            return asked or self._ask_read(call, self._prepared.read(message[start:end]), streamed, waited_ns, read_ns)
        try:
            if by_number:
                asked = self._ask_received(call, message, streamed)
            return asked or self._ask_read(call, self._prepared.read_received(message), streamed, waited_ns, read_ns)
        except BaseException:
            message.drop()
            raise

    def _ask_known(self, call: InferCall, content: Buffer, start: int, end: int, streamed: bool) -> KnownRequest | None:
        """Sends a message that came whole, if it is known. None: it is to be read."""
        walked = walk(content, start, end, self._inline)
        if walked is None:
            return None
        rest, client_id, parameters, raws, lent = walked
        known = self._prepared.find(rest, len(raws))
        if known is None or (known.decoupled and not streamed):
            return None
        scheduling = self._prepared.scheduling(parameters) if parameters else UNSCHEDULED
        if scheduling is None:
            return None
        try:
            text = client_id.decode()
            lease = self.submitter.loan(lent, call.stream.connection.account) if lent else None
        except (UnicodeDecodeError, ServingError):
            # Whoever reads it says what is wrong.
            return None
        if lease is not None:
            try:
                contents = place(raws, lease, self._inline)
            except BaseException:
                self.submitter.give_back(lease)
                raise
            return self._send(call, known, client_id, text, scheduling, contents, (lease,))
        if lent:
            # Whoever reads it waits for room.
            return None
        return self._send(call, known, client_id, text, scheduling, raws, ())  # type: ignore[arg-type]

    def _ask_received(self, call: InferCall, message: Reception, streamed: bool) -> KnownRequest | None:
        """Sends a message that was placed while it arrived, if it is known. Its lease is the request's then."""
        try:
            head, client_id, contents = message.fields()
            text = client_id.decode()
        except (RefusedRequest, UnicodeDecodeError):
            return None
        walked = walk(head, 0, len(head), 0)
        if walked is None:
            return None
        rest, _, parameters, _, _ = walked
        known, scheduling = self._prepared.find(rest, len(contents)), self._prepared.scheduling(parameters)
        if known is None or scheduling is None or (known.decoupled and not streamed):
            return None
        lease = message.take_lease()
        assert lease is not None
        self.submitter.arrived(lease)
        return self._send(call, known, client_id, text, scheduling, tuple(contents), (lease,))

    def _send(
        self,
        call: InferCall,
        known: PreparedMessage,
        client_id: bytes,
        text: str,
        scheduling: Scheduling,
        contents: tuple[Content, ...],
        leases: tuple[Lease, ...],
    ) -> KnownRequest:
        submitter, numbered, deadline_ns = self.submitter, known.numbered, call.stream.deadline_ns
        assert numbered is not None
        if not client_id and self._makes_ids:
            text = str(uuid.uuid4())
            client_id = text.encode()
        number = numbered.number
        # Most say nothing of their scheduling, and to unpack that costs more than all else here.
        record = (
            RequestRecord(submitter.next_id(), number, contents, text, deadline_ns, monotonic_ns())
            if scheduling is UNSCHEDULED
            else RequestRecord(submitter.next_id(), number, contents, text, deadline_ns, monotonic_ns(), *scheduling)
        )
        asked = KnownRequest(call=call, message=known, id=client_id, record=record, numbered=numbered, leases=leases)
        submitter.send(asked)
        return asked

    def _ask_read(
        self, call: InferCall, understood: Understood, streamed: bool, waited_ns: int, read_ns: int
    ) -> ReadRequest:
        """Sends a request that was read exactly, with the caller's headers that are parameters."""
        decoded, request, state = understood
        stream = call.stream
        request.deadline_ns = stream.deadline_ns
        try:
            if request.lease is not None:
                self.submitter.arrived(request.lease)
            if self._makes_ids and not request.id:
                request.id = str(uuid.uuid4())
            if self._forwarding is not None:
                headers = [(name.encode(), value.encode("latin-1")) for name, value in stream.head.metadata]
                # The request's own may be shared with others of the same kind.
                request.parameters = {**request.parameters, **self._forwarding.parameters(headers)}
            if state.streams and not streamed:
                raise Unsupported(DECOUPLED)
            asked = ReadRequest(call, decoded, request, state.streams, streamed and not state.metadata)
            if waited_ns:
                self._sample(request, waited_ns, read_ns)
            begin(self.submitter, asked, request)
            return asked
        except BaseException as error:
            if request.lease is not None:
                self.submitter.give_back(request.lease)
            if not isinstance(error, Exception):
                raise
            if not isinstance(error, ServingError):
                _log.exception("a request of %s met a defect of the server", stream.head.path)
                error = Internal(DEFECT)
            raise RefusedRequest(error, request.id, request.trace) from None

    def _sample(self, request: InferenceRequest, waited_ns: int, read_ns: int) -> None:
        """Traces the request if it is one of those. ``read_ns``: when its message was whole."""
        trace = request.trace = self.tracer.sample(request.model)
        if trace is not None:
            trace.client_id = request.id
            trace.stamp(trace_stamps.GRPC_WAITREAD_START, waited_ns)
            trace.stamp(trace_stamps.GRPC_WAITREAD_END, read_ns)

    # --------------------------------------------------------------------------------------------------------- answers

    def written(
        self, asked: Asked, prepared: PreparedAnswer, own: AnswerRecord, lane: SubmitterLane, streamed: bool
    ) -> list[Buffer]:
        """Returns a good answer as the pieces of a ModelInferResponse; what lies in the response arena as it lies."""
        if type(own.prepared) is int and type(asked) is KnownRequest:
            layout = asked.message.answer_layout(prepared, streamed)
            return layout.pieces(asked.id, own.contents, lane.view)
        final = prepared.final if streamed else None
        return response_codec.encode(prepared, own.contents, asked.model, asked.client_id, lane.view, final)

    def releaser(
        self, prepared: PreparedAnswer, own: AnswerRecord, lane: SubmitterLane | None, trace: Trace | None
    ) -> Callable[[], None] | None:
        """Returns what is due when an answer has left. None: nothing.

        Its lease is given back, or its bytes are taken, and with the last one the trace ends.
        """
        if lane is not None and not prepared.final:
            return partial(self.submitter.taken, lane, own)
        release = None
        if own.lease is not None and lane is not None:
            release = partial(self.submitter.release, lane, own.lease)
        return release if trace is None else Sent(trace, release)


class Sent:
    """Ends the trace of an answer when that has left."""

    __slots__ = ("_release", "_trace")

    def __init__(self, trace: Trace, release: Callable[[], None] | None) -> None:
        self._trace, self._release = trace, release
        trace.stamp(trace_stamps.GRPC_SEND_START)

    def __call__(self) -> None:
        if self._release is not None:
            self._release()
        self._trace.stamp(trace_stamps.GRPC_SEND_END)
        self._trace.end()
