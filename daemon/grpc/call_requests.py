"""A request of a call from when it is sent until its last answer: what its answers need to know of it."""

from __future__ import annotations

from typing import Protocol

from tensord.daemon.grpc.message_forms import MessageForm
from tensord.daemon.grpc.request_codec import DecodedHead
from tensord.daemon.submit.accounts import Account
from tensord.daemon.submit.inference import Inference, InferenceRequest
from tensord.daemon.submit.pending import Pending
from tensord.daemon.submit.submitter import Submitter
from tensord.daemon.tracing.tracer import Trace
from tensord.shm.lane import SubmitterLane
from tensord.shm.messages import AnswerRecord, PreparedAnswer, is_mark


class Caller(Protocol):
    """A call, as its requests see it."""

    @property
    def account(self) -> Account | None:
        """Whose memory its requests and answers take."""

    def completed(
        self,
        asked: CallRequest | FormedCallRequest,
        prepared: PreparedAnswer,
        own: AnswerRecord,
        lane: SubmitterLane | None,
    ) -> None:
        """Takes an answer to it."""


class CallRequest:
    """One that was decoded."""

    __slots__ = ("_call", "_decoded", "_loading", "_request", "decoupled", "inference")

    def __init__(
        self,
        call: Caller,
        decoded: DecodedHead,
        request: InferenceRequest,
        decoupled: bool,
        loading: bool = False,
    ) -> None:
        """``loading``: its model is not there yet, so whether it is ``decoupled`` is seen by its answers."""
        self._call = call
        self._decoded = decoded
        self._request = request
        self._loading = loading
        self.decoupled = decoupled
        #: None: not begun, or ended.
        self.inference: Inference | None = None

    @property
    def model(self) -> str:
        return self._decoded.model

    @property
    def client_id(self) -> str:
        return self._request.id

    @property
    def trace(self) -> Trace | None:
        return self._request.trace

    @property
    def empty_final(self) -> bool:
        """Whether a last, empty response is wanted where the model's last one does not say that it is."""
        return self._decoded.empty_final

    def completed(self, prepared: PreparedAnswer, own: AnswerRecord, lane: SubmitterLane | None) -> None:
        """Takes an answer."""
        if self._loading and (not prepared.final or is_mark(prepared, own)):
            self.decoupled = True
        if prepared.final:
            # Each refers to the other, and requests shall leave the garbage collector nothing to do.
            self.inference = None
        self._call.completed(self, prepared, own, lane)

    def cancel(self, submitter: Submitter) -> None:
        """Nobody waits for it any more."""
        if self.inference is not None:
            self.inference.cancel()


class FormedCallRequest(Pending):
    """One of a form: it is what the submitter keeps of it, too."""

    call: Caller
    message_form: MessageForm
    #: The client's, as it came.
    id: bytes

    @property
    def model(self) -> str:
        return self.message_form.decoded.model

    @property
    def client_id(self) -> str:
        return self.record.client_id

    @property
    def account(self) -> Account | None:
        return self.call.account

    @property
    def trace(self) -> Trace | None:
        """What is traced is decoded."""
        return None

    @property
    def decoupled(self) -> bool:
        return self.message_form.decoupled

    @property
    def empty_final(self) -> bool:
        return self.message_form.decoded.empty_final

    def completed(self, prepared: PreparedAnswer, own: AnswerRecord, lane: SubmitterLane | None) -> None:
        self.call.completed(self, prepared, own, lane)

    def cancel(self, submitter: Submitter) -> None:
        """Nobody waits for it any more."""
        submitter.cancel(self.record.request_id)
