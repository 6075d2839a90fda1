"""What ModelInfer and ModelStreamInfer have in common: messages into requests, and what is due when an answer has left."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from time import monotonic_ns

from daemon import request_id
from daemon.forwarding import Forwarding
from daemon.grpc.asked import Asking, KnownAsked
from daemon.grpc.call import Buffer
from daemon.grpc.placed_message import PlacedMessage
from daemon.grpc.reception import Reception
from daemon.grpc.recognised import Known, Recognised
from daemon.grpc.request_codec import DecodedHead
from daemon.grpc.request_fields import RefusedRequest
from daemon.grpc.stream import Stream
from daemon.inference import InferenceRequest
from daemon.submit import Submitter
from daemon.tracer import Trace, Tracer
from shm.control_records import ModelState
from shm.errors import ServingError
from shm.lane import SubmitterLane
from shm.messages import Completion, FormSubmit

#: Whole; one that is no buffer has a lease.
Message = Buffer | Reception | PlacedMessage


class Inferring:
    """What both kinds of call need."""

    def __init__(
        self,
        submitter: Submitter,
        recognised: Recognised,
        max_stream_requests: int,
        forwarding: Forwarding | None,
        tracer: Tracer,
        makes_ids: bool = False,
    ) -> None:
        self._makes_ids = makes_ids
        self.submitter = submitter
        self.recognised = recognised
        self.max_stream_requests = max_stream_requests
        self._forwarding = forwarding
        self.tracer = tracer

    def reception(self, byte_size: int, began: Buffer) -> Reception | PlacedMessage:
        """Who takes a large message of that size, which begins so."""
        return self.recognised.placed(self.submitter, byte_size, began) or Reception(self.submitter, byte_size)

    def decode(self, stream: Stream, message: Message) -> tuple[DecodedHead, InferenceRequest, ModelState]:
        """A message as a request, with the caller's headers that are parameters. Raises RefusedRequest: nothing stays on loan."""
        if isinstance(message, Reception | PlacedMessage):
            understood = self.recognised.decode_received(message)
        else:
            understood = self.recognised.decode(message)
        if self._makes_ids and not understood[1].id:
            understood[1].id = request_id.made()
        if self._forwarding is not None:
            request = understood[1]
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
            trace.stamp("GRPC_WAITREAD_START", waited_ns)
            trace.stamp("GRPC_WAITREAD_END", read_ns)

    def _identified(self, client_id: bytes, text: str) -> tuple[bytes, str]:
        """The id of a known message, as it is written and as text."""
        if self._makes_ids and not client_id:
            text = request_id.made()
            client_id = text.encode()
        return client_id, text

    def ask_known(self, call: Asking, known: Known, deadline_ns: int) -> KnownAsked:
        """Sends a known message. Raises Unavailable: too many requests are in flight."""
        layout, client_id, text, contents = known
        client_id, text = self._identified(client_id, text)
        submitter, form = self.submitter, layout.form
        assert form is not None
        record = FormSubmit(submitter.next_id(), form.number, contents, text, deadline_ns, monotonic_ns())
        asked = KnownAsked(call=call, layout=layout, id=client_id, record=record, form=form)
        submitter.send(asked)
        return asked

    def ask_placed(self, call: Asking, message: PlacedMessage, deadline_ns: int) -> KnownAsked:
        """The same of one whose layout has a form. Its lease is the request's, or given back. Raises as that."""
        submitter, layout = self.submitter, message.layout
        form = layout.form
        assert form is not None
        client_id, text = self._identified(message.client_id, message.text)
        record = FormSubmit(submitter.next_id(), form.number, message.contents(), text, deadline_ns, monotonic_ns())
        asked = KnownAsked(call=call, layout=layout, id=client_id, record=record, form=form)
        asked.leases = (message.take_lease(),)
        submitter.send(asked)
        return asked

    def releaser(
        self, completion: Completion, lane: SubmitterLane | None, trace: Trace | None
    ) -> Callable[[], None] | None:
        """What is due when an answer has left: its lease is given back and, with the last, the trace ends. None: nothing."""
        release = None
        if completion.lease is not None and lane is not None:
            release = partial(self.submitter.release, lane, completion.lease)
        return release if trace is None or not completion.final else Sent(trace, release)


class Sent:
    """Ends a trace."""

    __slots__ = ("_release", "_trace")

    def __init__(self, trace: Trace, release: Callable[[], None] | None) -> None:
        self._trace, self._release = trace, release
        trace.stamp("GRPC_SEND_START")

    def __call__(self) -> None:
        if self._release is not None:
            self._release()
        self._trace.stamp("GRPC_SEND_END")
        self._trace.end()
