"""What ModelInfer and ModelStreamInfer have in common: messages into requests, and what is due when an answer has left."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from functools import partial
from time import monotonic_ns

from tensord.daemon.front.forwarding import Forwarding
from tensord.daemon.grpc.call_requests import Caller, FormedCallRequest
from tensord.daemon.grpc.message_forms import MessageForm, MessageForms
from tensord.daemon.grpc.reception import Reception
from tensord.daemon.grpc.request_fields import RefusedRequest
from tensord.daemon.grpc.request_reader import RequestReader, Understood
from tensord.daemon.grpc.stream import Stream
from tensord.daemon.grpc.walk import walk
from tensord.daemon.submit.accounts import Account
from tensord.daemon.submit.inference import InferenceRequest
from tensord.daemon.submit.model_table import ModelTable
from tensord.daemon.submit.scheduling import UNSCHEDULED, Scheduling
from tensord.daemon.submit.submitter import Submitter
from tensord.daemon.tracing.tracer import Trace, Tracer
from tensord.shm import trace_stamps
from tensord.shm.arena import ALIGNMENT, Lease
from tensord.shm.errors import ServingError
from tensord.shm.lane import SubmitterLane
from tensord.shm.messages import AnswerRecord, Buffer, Content, PreparedAnswer, RequestRecord, Slice
from tensord.shm.prepared import MAX_NUMBERS

#: Whole; one that is no buffer has a lease.
Message = Buffer | Reception


class InferCalls:
    """What both kinds of call need."""

    def __init__(
        self,
        submitter: Submitter,
        table: ModelTable,
        max_stream_requests: int,
        forwarding: Forwarding | None,
        tracer: Tracer,
        makes_ids: bool = False,
        max_forms: int = MAX_NUMBERS,
    ) -> None:
        self._makes_ids = makes_ids
        self.submitter = submitter
        self._forms = MessageForms(table, submitter, max_forms)
        self._reader = RequestReader(table, self._forms)
        self.max_stream_requests = max_stream_requests
        self._inline = submitter.inline_byte_size
        self._forwarding = forwarding
        #: Whether no request is of a form, because something is still added to each.
        self._all_read = forwarding is not None
        self.tracer = tracer

    def reception(self, byte_size: int, account: Account | None) -> Reception:
        """Who takes a large message of that size. ``account``: whose memory it takes."""
        return Reception(self.submitter, byte_size, account)

    def read(self, stream: Stream, message: Message) -> Understood:
        """A message as a request, with the caller's headers that are parameters. Raises RefusedRequest: nothing stays on loan."""
        reader = self._reader
        understood = reader.read_received(message) if isinstance(message, Reception) else reader.read(message)
        request = understood[1]
        request.account = stream.connection.account
        if request.lease is not None:
            self.submitter.arrived(request.lease)
        if self._makes_ids and not request.id:
            request.id = str(uuid.uuid4())
        if self._forwarding is not None:
            headers = [(name.encode(), value.encode("latin-1")) for name, value in stream.head.metadata]
            try:
                # The request's own may be shared with others of the same form.
                request.parameters = {**request.parameters, **self._forwarding.parameters(headers)}
            except ServingError as error:
                self.drop(request)
                raise RefusedRequest(error, request.id) from None
            except BaseException:
                self.drop(request)
                raise
        return understood

    def drop(self, request: InferenceRequest) -> None:
        """It will not be begun."""
        if request.lease is not None:
            self.submitter.give_back(request.lease)

    def sample(self, request: InferenceRequest, waited_ns: int, read_ns: int) -> None:
        """Traces the request if it is one of those.

        Args:
          waited_ns: since when its call waited for it, CLOCK_MONOTONIC.
          read_ns: when it was whole.
        """
        trace = request.trace = self.tracer.sample(request.model)
        if trace is not None:
            trace.client_id = request.id
            trace.stamp(trace_stamps.GRPC_WAITREAD_START, waited_ns)
            trace.stamp(trace_stamps.GRPC_WAITREAD_END, read_ns)

    def ask_formed(
        self, call: Caller, content: Buffer, start: int, end: int, deadline_ns: int, decoupled: bool
    ) -> FormedCallRequest | None:
        """Sends a message, those bytes of ``content``, that is of a form. None: it is to be read.

        Args:
          decoupled: whether it may be for a decoupled model.
        Raises: Unavailable: too many requests are in flight.
        """
        walked = None if self._all_read else walk(content, start, end, self._inline)
        if walked is None:
            return None
        rest, client_id, parameters, raws, lent = walked
        form = self._forms.find(rest, len(raws))
        if form is None or (form.decoupled and not decoupled):
            return None
        scheduling = self._forms.scheduling(parameters) if parameters else UNSCHEDULED
        if scheduling is None:
            return None
        try:
            text = client_id.decode()
            lease = self.submitter.loan(lent, call.account) if lent else None
        except (UnicodeDecodeError, ServingError):
            # Whoever reads it says what is wrong.
            return None
        if lease is not None:
            try:
                contents = _placed(raws, lease, self._inline)
            except BaseException:
                self.submitter.give_back(lease)
                raise
            return self._send(call, form, client_id, text, scheduling, contents, (lease,), deadline_ns)
        if lent:
            # Whoever reads it waits for room.
            return None
        return self._send(call, form, client_id, text, scheduling, raws, (), deadline_ns)  # type: ignore[arg-type]

    def ask_received(
        self, call: Caller, message: Reception, deadline_ns: int, decoupled: bool
    ) -> FormedCallRequest | None:
        """Sends a message that was placed while it arrived, if its form is known. Its lease is the request's then."""
        if self._all_read:
            return None
        try:
            head, client_id, contents = message.fields()
            text = client_id.decode()
        except (RefusedRequest, UnicodeDecodeError):
            return None
        walked = walk(head, 0, len(head), 0)
        if walked is None:
            return None
        rest, _, parameters, _, _ = walked
        form, scheduling = self._forms.find(rest, len(contents)), self._forms.scheduling(parameters)
        if form is None or scheduling is None or (form.decoupled and not decoupled):
            return None
        lease = message.take_lease()
        assert lease is not None
        self.submitter.arrived(lease)
        return self._send(call, form, client_id, text, scheduling, tuple(contents), (lease,), deadline_ns)

    def _send(
        self,
        call: Caller,
        form: MessageForm,
        client_id: bytes,
        text: str,
        scheduling: Scheduling,
        contents: tuple[Content, ...],
        leases: tuple[Lease, ...],
        deadline_ns: int,
    ) -> FormedCallRequest:
        submitter, numbered = self.submitter, form.numbered
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
        asked = FormedCallRequest(
            call=call, message_form=form, id=client_id, record=record, numbered=numbered, leases=leases
        )
        submitter.send(asked)
        return asked

    def releaser(
        self, prepared: PreparedAnswer, own: AnswerRecord, lane: SubmitterLane | None, trace: Trace | None
    ) -> Callable[[], None] | None:
        """What is due when an answer has left: its lease is given back and, with the last, the trace ends. None: nothing."""
        if lane is not None and not prepared.final:
            return partial(self.submitter.taken, lane, own)
        release = None
        if own.lease is not None and lane is not None:
            release = partial(self.submitter.release, lane, own.lease)
        return release if trace is None else Sent(trace, release)


def _placed(raws: tuple[Buffer, ...], lease: Lease, inline: int) -> tuple[Content, ...]:
    """The raw tensors as records have them: those that do not travel in one are copied into the lease."""
    contents: list[Content] = []
    used, place = 0, lease.place
    for raw in raws:
        size = len(raw)
        if size <= inline:
            contents.append(bytes(raw))
            continue
        lease.view[used : used + size] = raw
        contents.append(Slice(place.segment, place.offset + used, size))
        used += -(-size // ALIGNMENT) * ALIGNMENT
    return tuple(contents)


class Sent:
    """Ends a trace."""

    __slots__ = ("_release", "_trace")

    def __init__(self, trace: Trace, release: Callable[[], None] | None) -> None:
        self._trace, self._release = trace, release
        trace.stamp(trace_stamps.GRPC_SEND_START)

    def __call__(self) -> None:
        if self._release is not None:
            self._release()
        self._trace.stamp(trace_stamps.GRPC_SEND_END)
        self._trace.end()
