"""Answers ModelInfer calls, each of which has one request and one response. Nothing blocks.

A request of a sequence waits while an earlier large request of the same sequence and connection is still arriving. It also
waits while an earlier request of the same sequence and connection waits for arena memory. Once the earlier request was sent to
a worker, the waiting request is sent. If the earlier request cannot be sent, those behind it are refused with CANCELLED, up to
one that begins the sequence anew.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from google.protobuf.message import DecodeError

from tensord.daemon.front.status import CANCELLED, INTERNAL, grpc_number, grpc_status
from tensord.daemon.grpc.arriving_message import ArrivingMessage, CallRefused
from tensord.daemon.grpc.call import InferCall, OnSent
from tensord.daemon.grpc.infer import DECOUPLED, CallRequest, Infer, Message, ending
from tensord.daemon.grpc.request_fields import RefusedRequest
from tensord.daemon.grpc.stream import Stream
from tensord.daemon.grpc.walk import fields
from tensord.protocol import grpc_service_pb2
from tensord.shm.errors import ServingError, Unsupported, from_code
from tensord.shm.messages import AnswerRecord, Buffer, PreparedAnswer, SequenceId, is_one_of_several
from tensord.shm.tracer import Trace

#: Model and correlation id.
Sequence = tuple[str, SequenceId]
#: A message says before that of which sequence it is; clients write tensors last.
_MAX_BEGINNING = 4096
_MODEL, _PARAMETER = 0x0A, 0x22
_ONE_MESSAGE = "a unary call has one request message"


class UnaryInfer(InferCall):
    """Answers one ModelInfer call. A request of a sequence is sent to a worker after the earlier requests of the sequence."""

    streams = False
    __slots__ = ("_asked", "_message", "_sequence", "_waits_since", "infer", "stream")

    def __init__(self, infer: Infer, stream: Stream) -> None:
        self.infer = infer
        self.stream = stream
        #: The request's message, once it is here or, where it is large, has begun to arrive.
        self._message: Message | None = None
        #: The number of bytes in which the sequence was looked for, and the sequence that was found.
        self._sequence: tuple[int, Sequence | None] = 0, None
        self._asked: CallRequest | None = None
        #: CLOCK_MONOTONIC ns, if it may be traced.
        self._waits_since = 0
        passes = infer.tracer.passes
        if passes.left and not stream.head.metadata:
            passes.left -= 1
        elif infer.tracer.on:
            self._waits_since = time.monotonic_ns()

    def arriving(self, byte_size: int, on_room: Callable[[], None]) -> ArrivingMessage:
        if self._message is not None:
            raise CallRefused(INTERNAL, _ONE_MESSAGE)
        connection = self.stream.connection
        connection.steps.unsent[self] = False
        self._message = message = ArrivingMessage(0, byte_size, self.infer.submitter, connection.account, on_room)
        return message

    def message(self, content: Buffer, start: int, end: int) -> None:
        earlier = self._message
        if earlier is not None and (not isinstance(earlier, ArrivingMessage) or earlier.is_placed):
            self.stream.refuse(INTERNAL, _ONE_MESSAGE)
        else:
            # A view of it would keep alive everything that came with it.
            self._message = content if end - start == len(content) else bytes(content[start:end])

    def half_closed(self) -> None:
        if self._message is None:
            self.stream.finish(INTERNAL, _ONE_MESSAGE)
            return
        steps = self.stream.connection.steps
        if steps.unsent:
            if len(steps.unsent) == 1 and self in steps.unsent:
                # Nobody else's is unsent: nobody waits for this one, whether it is sent now or never.
                del steps.unsent[self]
            elif steps.waits(self):
                return
        self._begin()

    @property
    def sequence(self) -> Sequence | None:
        """Returns the model and the sequence id of the request.

        Returns None if the request has no sequence, or if too little of it has arrived.
        """
        said = self._said
        size, found = self._sequence
        if found is None and said is not None and len(said) != size:
            found = sequence_of(said)
            self._sequence = len(said), found
        return found

    @property
    def begins(self) -> bool:
        """Returns whether the request begins its sequence, as far as it has arrived."""
        said = self._said
        request = None if said is None else _parameters_of(said)
        return request is not None and request.parameters["sequence_start"].bool_param

    @property
    def _said(self) -> Buffer | bytearray | None:
        """Returns the message, without its tensors if it is large. Returns None before it begins, or once it was read."""
        message = self._message
        return message.cutter.head if isinstance(message, ArrivingMessage) else message

    def resume(self) -> None:
        """Sends the request of this call to a worker. If the request cannot be sent, the call ends with an error."""
        try:
            self._begin()
        except Exception:
            self.stream.meet_defect()

    def miss(self, sequence: Sequence) -> None:
        """Answers the request with an error, because an earlier request of the same ``sequence`` did not run."""
        self.stream.refuse(CANCELLED, f"a request of sequence {sequence[1]} before this one did not run")

    def placed(self) -> None:
        self.stream.connection.steps.leave(self, self._asked is not None)

    def _begin(self) -> None:
        message = self._message
        assert message is not None
        infer, waited_ns = self.infer, self._waits_since
        try:
            end = 0 if isinstance(message, ArrivingMessage) else len(message)
            asked = self._asked = infer.ask(self, message, 0, end, waited_ns)
        except RefusedRequest as refused:
            self._asked = CallRequest.refused(self, refused)
            self._refuse(refused.error, refused.trace)
            return
        finally:
            steps, sent = self.stream.connection.steps, self._asked
            if steps.unsent and (sent is None or sent.record.request_id):
                steps.leave(self, sent is not None)
            # Only now: those behind it may have asked of which sequence it was.
            self._message = None
        sequence_id = asked.scheduling.sequence_id
        if sequence_id and asked.waits_for_room:
            self._sequence = 0, (asked.head.model, sequence_id)
            steps.unsent[self] = False

    @property
    def idle(self) -> bool:
        return self._message is None and self._asked is None

    @property
    def answers(self) -> bool:
        return self._asked is not None

    @property
    def asked(self) -> CallRequest | None:
        return self._asked

    def abandoned(self) -> None:
        self.stream.connection.steps.leave(self, False)
        if isinstance(self._message, ArrivingMessage):
            self._message.drop()
        if self._asked is not None:
            self.infer.submitter.cancel(self._asked)

    # -------------------------------------------------------------------------------------------------- answer

    def completed(
        self, asked: CallRequest, prepared: PreparedAnswer, record: AnswerRecord, parts: list[Buffer], sent: OnSent
    ) -> None:
        if is_one_of_several(prepared, record):
            # It came while its model was being loaded, and nobody knew it.
            error = from_code(record.code, record.message) if record.code else Unsupported(DECOUPLED)
            if asked.trace is not None:
                asked.trace.failed(grpc_status(error), error.message)
            if sent is not None:
                sent()
            self.infer.submitter.cancel(asked)
            # A last answer has ended the trace.
            self._refuse(error, None if prepared.final else asked.trace)
            return
        if record.code:
            self._end(grpc_number(record.code), record.message, sent)
            return
        # Each refers to the other, and calls shall leave the garbage collector nothing to do.
        self._asked = None
        self.stream.http2.serving.answered.good(asked, prepared.version, parts)
        self.stream.answer(parts, sent)

    def _refuse(self, error: ServingError, trace: Trace | None = None) -> None:
        """Ends the call with an error, and ends ``trace``."""
        sent = None
        if trace is not None:
            trace.failed(grpc_status(error), error.message)
            sent = ending(trace)
        self._end(grpc_number(error), error.message, sent)

    def _end(self, code: int, message: str, sent: OnSent) -> None:
        """Ends the call with the status ``code`` and ``message``.

        Calls ``sent`` shortly before or after both are sent, or when the client has left.
        """
        if sent is not None:
            self.stream.send_later(sent)
        try:
            self.stream.finish(code, message)
        finally:
            self._asked = None


class StepOrder:
    """Sends the requests of each sequence to workers in order, if the requests came in unary calls on one gRPC connection."""

    __slots__ = ("_due", "_loop", "unsent")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        #: Calls that may be steps and whose requests cannot be sent at once, in order; whether each waits for one before it.
        #: None: it has left without being sent, and those behind it are not sent either.
        self.unsent: dict[UnaryInfer, bool | None] = {}
        self._due = False

    def waits(self, step: UnaryInfer) -> bool:
        """Returns whether the request of ``step`` must wait until an earlier request of the same sequence is sent."""
        if next(iter(self.unsent)) is step or (sequence := step.sequence) is None:
            return False
        for other in self.unsent:
            if other is step:
                return False
            if other.sequence == sequence:
                self.unsent[step] = True
                return True
        return False

    def leave(self, step: UnaryInfer, sent: bool) -> None:
        """Removes the call ``step`` from the connection's queue of calls whose requests were not sent to a worker yet.

        ``sent``: whether the call's request was sent. If it was not, the requests of the same sequence behind it are refused, up
        to one that begins the sequence.
        """
        if self.unsent.get(step) is None:
            return
        if sent or step.sequence is None or len(self.unsent) == 1:
            del self.unsent[step]
        else:
            self.unsent[step] = None
        if self.unsent and not self._due:
            self._due = True
            self._loop.call_soon(self._go_on)

    def _go_on(self) -> None:
        self._due = False  # one that was passed already may leave from within
        ahead: set[Sequence] = set()
        broken: set[Sequence] = set()
        for step in list(self.unsent):
            if step not in self.unsent or (sequence := step.sequence) is None:
                continue
            waits = self.unsent[step]
            if sequence in broken and step.begins:
                broken.remove(sequence)
            if sequence in broken and waits is not None:
                step.miss(sequence)
            elif waits and sequence not in ahead:
                step.resume()
            if step in self.unsent:
                if self.unsent[step] is not None:
                    ahead.add(sequence)
                else:
                    del self.unsent[step]
                    broken.add(sequence)

    def __repr__(self) -> str:
        return f"<StepOrder {len(self.unsent)} are not sent>"


def sequence_of(message: Buffer | bytearray) -> Sequence | None:
    """Returns the model and the sequence id in ``message``, an encoded request or its beginning.

    Returns None if there is no sequence id, or if it has not arrived.
    """
    request = _parameters_of(message)
    if request is None or "sequence_id" not in request.parameters:
        return None
    value = request.parameters["sequence_id"]
    sequence_id: SequenceId = value.string_param or value.uint64_param or value.int64_param % (1 << 64)
    return (request.model_name, sequence_id) if sequence_id else None


def _parameters_of(message: Buffer | bytearray) -> grpc_service_pb2.ModelInferRequest | None:
    """Decodes the model and the parameters in the beginning of ``message``. Returns None if they cannot be decoded."""
    said = b""
    for tag, start, begin, size in fields(message, min(len(message), _MAX_BEGINNING)):
        if tag in (_MODEL, _PARAMETER):
            said += message[start : begin + size]
    try:
        return grpc_service_pb2.ModelInferRequest.FromString(said)
    except DecodeError:
        return None
