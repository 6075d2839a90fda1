"""Defines the interface of a call: what a gRPC method does with one stream, without knowing HTTP/2; and a call's requests."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING

from tensord.daemon.grpc.arriving_message import ArrivingMessage
from tensord.daemon.submit.in_flight import InFlight
from tensord.daemon.submit.scheduling import UNSCHEDULED, Scheduling
from tensord.shm.lane import SubmitterLane
from tensord.shm.messages import AnswerRecord, Buffer, PreparedAnswer, is_mark

if TYPE_CHECKING:
    from tensord.daemon.grpc.prepared import PreparedMessage
    from tensord.daemon.grpc.request_codec import DecodedHead
    from tensord.daemon.grpc.stream import Stream
    from tensord.daemon.tracing.tracer import Trace


class Call(ABC):
    """Base class of gRPC calls: takes a call's messages from its stream, and sends the responses there.

    No method is called after ``abandoned``.
    """

    __slots__ = ()

    def arriving(self, byte_size: int, on_room: Callable[[], None]) -> ArrivingMessage | None:
        """Returns a receiver for a large message of ``byte_size`` bytes that begins to arrive; None: buffer it for ``message``.

        ``on_room``: the receiver calls it once its wait for arena memory has ended, with memory or with a refusal.
        """
        return None

    @abstractmethod
    def message(self, content: Buffer, start: int, end: int) -> None:
        """Takes a complete message of the client, ``content[start:end]``, and acts on it now or stores it for later.

        A call that stores the message must store what the function ``kept`` makes of it: an object without the bytes around it.
        """

    def placed_message(self, message: ArrivingMessage) -> None:
        """Takes a complete message whose tensors lie in the arena; ``message`` takes all others.

        The call must drop it (``drop``) or take over its parts and the lease of its arena memory (``take``).
        """
        raise NotImplementedError("a call whose messages are placed takes them")

    @abstractmethod
    def half_closed(self) -> None:
        """Is called once the client has ended its sending side: no further message follows."""

    @property
    @abstractmethod
    def idle(self) -> bool:
        """Returns whether no request of the call is waiting for its answer."""

    @property
    def answers(self) -> bool:
        """Returns whether only the server's response is missing: the call expects nothing more from the client."""
        return not self.idle

    @property
    def asked(self) -> InFlight | None:
        """Returns the call's inference request, once it was decoded; None: the call has none, or may have several."""
        return None

    @abstractmethod
    def stop(self) -> None:
        """Ends the call because the server stops: accepted requests are still answered, new ones are not accepted. Idempotent."""

    @abstractmethod
    def abandoned(self) -> None:
        """Cancels the call, because the client went away, the deadline passed or the call was refused."""


def kept(content: Buffer, start: int, end: int) -> Buffer:
    """Returns ``content[start:end]`` as a separate object, because a view would keep all bytes that arrived with it in memory."""
    return content if end - start == len(content) else bytes(content[start:end])


# --------------------------------------------------------------------------------------------------------------- inference


class InferCall(Call):
    """Answers a gRPC call whose messages are inference requests; base class of ModelInfer's and ModelStreamInfer's calls."""

    __slots__ = ()

    stream: Stream

    @abstractmethod
    def completed(
        self, asked: CallRequest, prepared: PreparedAnswer, own: AnswerRecord, lane: SubmitterLane | None
    ) -> None:
        """Sends the client an answer to ``asked``, one of the call's requests; the answer may be an error.

        Args:
          prepared: the constant part of the answer, which it shares with many others.
          own: the rest of this answer.
          lane: has the response arena that the answer's tensors lie in; None: it is an error without tensors.
        """

    @abstractmethod
    def placed(self) -> None:
        """Is called when a request of the call no longer waits for arena memory, because it was sent or answered."""


class CallRequest(InFlight):
    """Tracks one inference request of a gRPC call until its final answer."""

    call: InferCall
    #: The request's fields but for its id and its tensors.
    head: DecodedHead
    #: The request's id as the client gave it, or one that was made here.
    client_id: str
    #: Whether a last, empty response is to be told from others.
    decoupled: bool
    #: The cached part of the message, which others of its kind have in common; None: the message was decoded as a whole.
    message: PreparedMessage | None = None
    #: The id's bytes as they came, if ``message`` is not None.
    id: bytes = b""
    #: Whether the model is still being loaded: only its answers then show whether it is ``decoupled``.
    loading: bool = False
    scheduling: Scheduling = UNSCHEDULED
    trace: Trace | None = None

    @property
    def names(self) -> tuple[str, str]:
        return self.head.model, self.client_id

    def left_line(self) -> None:
        self.call.placed()

    def completed(self, prepared: PreparedAnswer, own: AnswerRecord, lane: SubmitterLane | None) -> None:
        if self.loading and (not prepared.final or is_mark(prepared, own)):
            self.decoupled = True
        if self.trace is not None and not self.waits_for_room:
            if prepared.final:
                self.trace.error = own.message if own.code else ""
                self.trace.completed(prepared.version, own.trace)
            else:
                self.trace.responded(prepared.version)
        self.call.completed(self, prepared, own, lane)
