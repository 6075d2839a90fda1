"""ModelInfer: one request, one answer. Nothing here waits."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial

from tensord.daemon.grpc import response_codec
from tensord.daemon.grpc.call import Call, kept
from tensord.daemon.grpc.call_requests import CallRequest, FormedCallRequest
from tensord.daemon.grpc.codes import CANCELLED, INTERNAL, number
from tensord.daemon.grpc.infer_calls import InferCalls, Message, Sent
from tensord.daemon.grpc.reception import Reception
from tensord.daemon.grpc.request_fields import RefusedRequest
from tensord.daemon.grpc.step_order import Sequence, sequence_of
from tensord.daemon.grpc.stream import Stream
from tensord.daemon.submit.accounts import Account
from tensord.daemon.submit.inference import begin
from tensord.shm.errors import DEFECT, ServingError, Unsupported
from tensord.shm.lane import SubmitterLane
from tensord.shm.messages import AnswerRecord, Buffer, PreparedAnswer

_log = logging.getLogger(__name__)
#: What who asks such a model here is told: Triton's words.
DECOUPLED = "ModelInfer RPC doesn't support models with decoupled transaction policy; ask ModelStreamInfer"


class UnaryInfer(Call):
    """One call."""

    __slots__ = ("_arriving", "_asked", "_calls", "_message", "_sequence", "_stream", "_waits_since")

    def __init__(self, calls: InferCalls, stream: Stream) -> None:
        self._calls = calls
        self._stream = stream
        self._message: Message | None = None
        #: Who takes it, where it is large.
        self._arriving: Reception | None = None
        #: Of how much of it the sequence was looked for, and what was found.
        self._sequence: tuple[int, Sequence | None] = 0, None
        self._asked: CallRequest | FormedCallRequest | None = None
        #: CLOCK_MONOTONIC ns, if it may be traced.
        self._waits_since = time.monotonic_ns() if calls.tracer.on else 0

    @property
    def account(self) -> Account | None:
        return self._stream.connection.account

    def reception(self, byte_size: int) -> Reception:
        connection = self._stream.connection
        connection.steps.enter(self)
        self._arriving = self._calls.reception(byte_size, connection.account)
        return self._arriving

    def message(self, content: Buffer, start: int, end: int) -> None:
        if self._message is not None:
            self._stream.refuse(INTERNAL, "a unary call has one request message")
        else:
            self._message = kept(content, start, end)

    def received(self, message: Reception) -> None:
        if self._message is not None:
            message.drop()
            self._stream.refuse(INTERNAL, "a unary call has one request message")
        else:
            self._message = message

    def half_closed(self) -> None:
        if self._message is None:
            self._stream.finish(INTERNAL, "a unary call has one request message")
            return
        steps = self._stream.connection.steps
        if not steps.unsent:
            self._begin()
        elif not steps.waits(self):
            self._begin_in_turn()

    @property
    def sequence(self) -> Sequence | None:
        message = self._arriving if self._message is None else self._message
        said = message.head if isinstance(message, Reception) else message
        size, found = self._sequence
        if found is None and said is not None and len(said) != size:
            found = sequence_of(said)
            self._sequence = len(said), found
        return found

    def resume(self) -> None:
        try:
            self._begin_in_turn()
        except Exception:
            _log.exception("a step that had waited met a defect of the server")
            self._stream.refuse(INTERNAL, DEFECT)

    def miss(self, sequence: Sequence) -> None:
        if isinstance(self._message, Reception):
            self._message.drop()
        self._message = None
        self._stream.finish(CANCELLED, f"a request of sequence {sequence[1]} before this one did not run")

    def _begin_in_turn(self) -> None:
        """Others may wait for it, while it is not sent."""
        try:
            self._begin()
        finally:
            asked = self._asked
            if not isinstance(asked, CallRequest) or asked.inference is None or not asked.inference.waits_for_room:
                self._left()

    def _left(self) -> None:
        self._stream.connection.steps.leave(self, self._asked is not None)

    def _begin(self) -> None:
        message, self._message = self._message, None
        assert message is not None
        calls, stream = self._calls, self._stream
        try:
            if self._waits_since:
                self._ask(message)
                return
            if type(message) is Reception:
                self._asked = calls.ask_received(self, message, stream.deadline_ns, False)
            else:
                self._asked = calls.ask_formed(self, message, 0, len(message), stream.deadline_ns, False)  # type: ignore[arg-type]
            if self._asked is None:
                self._ask(message)
        except RefusedRequest as refused:
            self._refuse(number(refused.error), refused.error.message)
        except ServingError as error:
            self._refuse(number(error), error.message)
        except BaseException:
            if isinstance(message, Reception):
                message.drop()
            raise

    @property
    def idle(self) -> bool:
        return self._message is None and self._asked is None

    @property
    def answers(self) -> bool:
        return self._asked is not None

    def stop(self) -> None:
        if self._stream.idle:
            self._stream.stopped()

    def abandoned(self) -> None:
        self._stream.connection.steps.leave(self, False)
        if isinstance(self._message, Reception):
            self._message.drop()
        if self._asked is not None:
            self._asked.cancel(self._calls.submitter)

    # ------------------------------------------------------------------------------------------------- request

    def _ask(self, message: Message) -> None:
        """Raises: RefusedRequest: it is no request.  ServingError: it cannot be begun."""
        calls, stream = self._calls, self._stream
        read_ns = time.monotonic_ns() if self._waits_since else 0
        decoded, request, state = calls.read(stream, message)
        try:
            if state.streams:
                raise Unsupported(DECOUPLED)
            asked = self._asked = CallRequest(self, decoded, request, False)
            if read_ns:
                calls.sample(request, self._waits_since, read_ns)
            request.deadline_ns = stream.deadline_ns
            inference = asked.inference = begin(calls.submitter, request, asked.completed)
            if inference.waits_for_room and request.scheduling.sequence_id:
                self._sequence = 0, (request.model, request.scheduling.sequence_id)
                stream.connection.steps.enter(self)
                inference.on_room = self._left
        except BaseException:
            calls.drop(request)
            raise

    # -------------------------------------------------------------------------------------------------- answer

    def completed(
        self,
        asked: CallRequest | FormedCallRequest,
        prepared: PreparedAnswer,
        own: AnswerRecord,
        lane: SubmitterLane | None,
    ) -> None:
        if own.code:
            self._refuse(number(own.code), own.message)
            return
        if not prepared.final:
            # It came while its model was being loaded, and nobody knew that this one answers with several responses.
            asked.cancel(self._calls.submitter)
            error = Unsupported(DECOUPLED)
            self._refuse(number(error), error.message)
            return
        # Each refers to the other, and calls shall leave the garbage collector nothing to do.
        self._asked = None
        assert lane is not None
        release: Callable[[], None] | None
        if type(own.prepared) is int and type(asked) is FormedCallRequest:
            release = None if own.lease is None else partial(self._calls.submitter.release, lane, own.lease)
            form = asked.message_form.answer_form(prepared, False)
            self._stream.answer(form.pieces(asked.id, own.contents, lane.view), release)
            return
        release = self._calls.releaser(prepared, own, lane, asked.trace)
        try:
            parts = response_codec.encode(prepared, own.contents, asked.model, asked.client_id, lane.view)
        except Exception:
            _log.exception("an answer of model '%s' could not be written", asked.model)
            if release is not None:
                release()
            self._stream.finish(INTERNAL, DEFECT)
            return
        self._stream.answer(parts, release)

    def _refuse(self, code: int, message: str) -> None:
        asked, self._asked = self._asked, None
        if asked is not None and asked.trace is not None:
            self._stream.send_later(Sent(asked.trace, None))
        self._stream.finish(code, message)
