"""ModelInfer and ModelStreamInfer: messages into requests, completions into messages. Nothing here waits.

A unary call has one request; a stream has many in flight, answered in the order they complete. An error of one request is an
answer like others there (``error_message``) and the stream goes on, unless its caller asked with the header
``triton_grpc_error: true`` for the gRPC status, which ends it.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable

from daemon.forwarding import Forwarding
from daemon.grpc import response_codec
from daemon.grpc.call import Buffer, Call
from daemon.grpc.codes import INTERNAL, OK, number
from daemon.grpc.reception import Reception
from daemon.grpc.recognised import Recognised
from daemon.grpc.request_codec import DecodedHead
from daemon.grpc.request_fields import RefusedRequest
from daemon.grpc.stream import Stream
from daemon.inference import Inference, InferenceRequest, begin
from daemon.submit import Submitter
from daemon.tracer import Trace, Tracer
from shm.errors import ServingError, Unsupported
from shm.lane import SubmitterLane
from shm.messages import Completion, FormCompletion, ModelState

_log = logging.getLogger(__name__)
_DEFECT = "internal error; the server's log has the details"
#: Answers of a stream that its client has not taken; beyond, no more requests are taken.
_MAX_UNSENT = 4 << 20


class Inferring:
    """What both kinds of call need."""

    def __init__(
        self,
        submitter: Submitter,
        recognised: Recognised,
        max_stream_requests: int,
        forwarding: Forwarding | None,
        tracer: Tracer,
    ) -> None:
        self.submitter = submitter
        self._forwarding = forwarding
        self.tracer = tracer
        self._recognised = recognised
        self.max_stream_requests = max_stream_requests

    def decode(self, stream: Stream, message: Buffer | Reception) -> tuple[DecodedHead, InferenceRequest, ModelState]:
        """A message as a request, with the caller's headers that are parameters. Raises RefusedRequest: nothing stays on loan."""
        if isinstance(message, Reception):
            understood = self._recognised.decode_received(message)
        else:
            understood = self._recognised.decode(message)
        if self._forwarding is not None:
            request = understood[1]
            headers = [(name.encode(), value.encode("latin-1")) for name, value in stream.head.metadata]
            try:
                # The request's own may be shared with others of the same form.
                request.parameters = {**request.parameters, **self._forwarding.parameters(headers)}
            except ServingError as error:
                self.drop(request)
                raise RefusedRequest(error, request.id) from None
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

    def unary(self, stream: Stream) -> Call:
        """A ModelInfer."""
        return _UnaryInfer(self, stream)

    def streamed(self, stream: Stream) -> Call:
        """A ModelStreamInfer."""
        return _StreamInfer(self, stream)

    @staticmethod
    def write_formed(
        decoded: DecodedHead,
        request: InferenceRequest,
        template: Completion,
        answer: FormCompletion,
        final: bool | None,
    ) -> list[Buffer]:
        """A good answer of a form as the pieces of a ModelInferResponse; ``final``: as for ``response_codec.encode``."""
        writer = decoded.writer
        if writer is None or not writer.fits(template, final):
            writer = decoded.writer = response_codec.FormWriter(template, request.model, final)
        return writer.write(request.id, answer.contents)

    def releaser(
        self, completion: Completion, lane: SubmitterLane | None, trace: Trace | None
    ) -> Callable[[], None] | None:
        """What is due when an answer has left: its lease is given back and, with the last, the trace ends. None: nothing."""
        release = None
        if completion.lease is not None and lane is not None:
            release = _Release(self.submitter, lane, completion.lease)
        return release if trace is None or not completion.final else _Sent(trace, release)


class _Release:
    """Gives a lease of the response arena back."""

    __slots__ = ("_key", "_lane", "_submitter")

    def __init__(self, submitter: Submitter, lane: SubmitterLane, key: tuple[int, int, int]) -> None:
        self._submitter, self._lane, self._key = submitter, lane, key

    def __call__(self) -> None:
        self._submitter.release(self._lane, self._key)


class _Sent:
    """Ends a trace."""

    __slots__ = ("_release", "_trace")

    def __init__(self, trace: Trace, release: _Release | None) -> None:
        self._trace, self._release = trace, release
        trace.stamp("GRPC_SEND_START")

    def __call__(self) -> None:
        if self._release is not None:
            self._release()
        self._trace.stamp("GRPC_SEND_END")
        self._trace.end()


class _UnaryInfer(Call):
    """One request, one answer."""

    __slots__ = ("_decoded", "_inference", "_inferring", "_message", "_request", "_stream", "_waits_since")

    def __init__(self, inferring: Inferring, stream: Stream) -> None:
        self._inferring = inferring
        self._stream = stream
        self._message: Buffer | Reception | None = None
        self._decoded: DecodedHead | None = None
        self._request: InferenceRequest | None = None
        self._inference: Inference | None = None
        #: CLOCK_MONOTONIC ns, if it may be traced.
        self._waits_since = time.monotonic_ns() if inferring.tracer.on else 0

    def reception(self, byte_size: int) -> Reception | None:
        return Reception(self._inferring.submitter, byte_size)

    def message(self, content: Buffer | Reception) -> None:
        if self._message is not None:
            if isinstance(content, Reception):
                content.drop()
            self._stream.refuse(INTERNAL, "a unary call has one request message")
            return
        self._message = content

    def received(self, message: Reception) -> None:
        self.message(message)

    def half_closed(self) -> None:
        stream, inferring = self._stream, self._inferring
        message, self._message = self._message, None
        if message is None:
            stream.finish(INTERNAL, "a unary call has one request message")
            return
        read_ns = time.monotonic_ns() if self._waits_since else 0
        try:
            self._decoded, request, state = inferring.decode(stream, message)
            if state.decoupled:
                inferring.drop(request)
                raise Unsupported("ModelInfer RPC doesn't support models with decoupled transaction policy")
            self._request = request
            if read_ns:
                inferring.sample(request, self._waits_since, read_ns)
            request.deadline_ns = stream.deadline_ns
            self._inference = begin(inferring.submitter, request, self._completed, self._formed)
        except RefusedRequest as refused:
            stream.finish(number(refused.error), refused.error.message)
        except ServingError as error:
            self._refuse(number(error), error.message)

    def abandoned(self) -> None:
        if isinstance(self._message, Reception):
            self._message.drop()
        if self._inference is not None:
            self._inference.cancel()

    def _completed(self, completion: Completion, lane: SubmitterLane | None) -> None:
        if completion.code:
            self._refuse(number(completion.code), completion.message)
            return
        assert lane is not None
        assert self._request is not None
        release = self._inferring.releaser(completion, lane, self._request.trace)
        try:
            parts = response_codec.encode(completion, self._request.model, self._request.id, lane.view)
        except Exception:
            _log.exception("an answer of model '%s' could not be written", self._request.model)
            if release is not None:
                release()
            self._stream.finish(INTERNAL, _DEFECT)
            return
        self._stream.answer(parts, release)

    def _formed(self, template: Completion, answer: FormCompletion) -> None:
        assert self._request is not None
        assert self._decoded is not None
        self._stream.answer(self._inferring.write_formed(self._decoded, self._request, template, answer, None))

    def _refuse(self, code: int, message: str) -> None:
        if self._request is not None and self._request.trace is not None:
            self._stream.send_later(_Sent(self._request.trace, None))
        self._stream.finish(code, message)


class _Asked:
    """One request of a stream."""

    __slots__ = ("_call", "decoded", "decoupled", "inference", "request")

    def __init__(self, call: _StreamInfer, decoded: DecodedHead, request: InferenceRequest, decoupled: bool) -> None:
        self._call = call
        self.decoded = decoded
        self.request = request
        self.decoupled = decoupled
        self.inference: Inference | None = None

    def completed(self, completion: Completion, lane: SubmitterLane | None) -> None:
        self._call.completed(self, completion, lane)

    def formed(self, template: Completion, answer: FormCompletion) -> None:
        self._call.formed(self, template, answer)


class _StreamInfer(Call):
    """Many requests, each answered when it is done."""

    def __init__(self, inferring: Inferring, stream: Stream) -> None:
        self._inferring = inferring
        self._stream = stream
        self._in_flight: set[_Asked] = set()
        #: Messages that came before there was room for them; bounded by the stream's window.
        self._waiting: deque[Buffer | Reception] = deque()
        self._half_closed = False
        #: For its next message, CLOCK_MONOTONIC ns; 0: none was traced so far.
        self._waits_since = time.monotonic_ns() if inferring.tracer.on else 0
        self._grpc_errors = ("triton_grpc_error", "true") in stream.head.metadata

    def reception(self, byte_size: int) -> Reception | None:
        return Reception(self._inferring.submitter, byte_size)

    def message(self, content: Buffer | Reception) -> None:
        if self._stream.held or not self._has_room():
            self._stream.held = True
            self._waiting.append(content)
        else:
            self._ask(content)

    def received(self, message: Reception) -> None:
        self.message(message)

    def half_closed(self) -> None:
        self._half_closed = True
        self._end_if_done()

    def abandoned(self) -> None:
        for message in self._waiting:
            if isinstance(message, Reception):
                message.drop()
        self._waiting.clear()
        for asked in self._in_flight:
            if asked.inference is not None:
                asked.inference.cancel()
        self._in_flight.clear()

    def completed(self, asked: _Asked, completion: Completion, lane: SubmitterLane | None) -> None:
        """An answer to one of the requests."""
        if completion.final:
            self._in_flight.discard(asked)
        request = asked.request
        sent = self._inferring.releaser(completion, lane, request.trace)
        if completion.code:
            self._refused(
                number(completion.code),
                completion.message,
                request.id,
                # Only what a version has answered is an error of the model.
                request.model if completion.version else "",
                (not asked.decoupled or completion.final) if completion.version else None,
                sent,
            )
        else:
            assert lane is not None
            self._answered(asked, completion, lane, sent)
        if self._waiting or self._half_closed or self._stream.held:
            self._go_on()

    def formed(self, asked: _Asked, template: Completion, answer: FormCompletion) -> None:
        """A good answer of a form."""
        self._in_flight.discard(asked)
        parts = self._inferring.write_formed(asked.decoded, asked.request, template, answer, True)
        self._send(response_codec.streamed(parts))
        if self._waiting or self._half_closed or self._stream.held:
            self._go_on()

    # ------------------------------------------------------------------------------------------------- requests

    def _has_room(self) -> bool:
        return len(self._in_flight) < self._inferring.max_stream_requests and self._stream.unsent_size < _MAX_UNSENT

    def _ask(self, message: Buffer | Reception) -> None:
        waited_ns, read_ns = self._waits_since, 0
        if self._inferring.tracer.on:
            read_ns = self._waits_since = time.monotonic_ns()
        try:
            decoded, request, state = self._inferring.decode(self._stream, message)
        except RefusedRequest as refused:
            self._refused(number(refused.error), refused.error.message, refused.client_id)
            return
        request.deadline_ns = self._stream.deadline_ns
        asked = _Asked(self, decoded, request, state.decoupled)
        try:
            if read_ns:
                self._inferring.sample(request, waited_ns or read_ns, read_ns)
            asked.inference = begin(self._inferring.submitter, request, asked.completed, asked.formed)
            self._in_flight.add(asked)
        except ServingError as error:
            sent = None if request.trace is None else _Sent(request.trace, None)
            self._refused(number(error), error.message, request.id, sent=sent)

    def _go_on(self) -> None:
        """Takes what waited, now that there may be room, and lets the client send more."""
        while self._waiting and self._has_room():
            self._ask(self._waiting.popleft())
        if self._stream.held and not self._waiting and self._has_room():
            self._stream.held = False
            self._stream.connection.grant(self._stream)
        self._end_if_done()

    def _end_if_done(self) -> None:
        if self._half_closed and not self._in_flight and not self._waiting:
            self._stream.finish(OK)

    # -------------------------------------------------------------------------------------------------- answers

    def _answered(
        self, asked: _Asked, completion: Completion, lane: SubmitterLane, sent: Callable[[], None] | None
    ) -> None:
        request = asked.request
        if asked.decoupled and completion.final and not completion.outputs:
            if asked.decoded.empty_final:
                self._send([response_codec.empty_final(request.model, completion.version, request.id)], sent)
            elif sent is not None:
                sent()
            return
        try:
            parts = response_codec.encode(completion, request.model, request.id, lane.view, completion.final)
        except Exception:
            _log.exception("an answer of model '%s' could not be written", request.model)
            self._refused(INTERNAL, _DEFECT, request.id, sent=sent)
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
