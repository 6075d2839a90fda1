"""Defines the interface of a call: what a gRPC method does with one stream, without knowing HTTP/2."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar

from tensord.daemon.grpc.arriving_message import ArrivingMessage
from tensord.daemon.submit.in_flight import InFlight
from tensord.shm.messages import AnswerRecord, Buffer, PreparedAnswer

if TYPE_CHECKING:
    from tensord.daemon.grpc.infer import CallRequest, Infer
    from tensord.daemon.grpc.stream import Stream


class Call(ABC):
    """A gRPC call: takes messages from a stream, sends responses on that stream. No method is called after ``abandoned``."""

    __slots__ = ()

    def arriving(self, byte_size: int, on_room: Callable[[], None]) -> ArrivingMessage | None:
        """Called when a large message begins to arrive. Returns an object that receives the message into the arena, or None.

        If None was returned, or if the object did not put the message into the arena, the stream passes the buffered message to
        ``message``. Otherwise the call must call ``take`` of the object, which returns the tensors and the lease of their memory,
        or ``drop``. ``on_room``: the object calls it once it waits for arena memory no more: it got the memory, or was refused.
        Raises CallRefused: the call accepts no further message.
        """
        return None

    @abstractmethod
    def message(self, content: Buffer, start: int, end: int) -> None:
        """Handles the client's message ``content[start:end]``, or stores it (copied, unless it is all of ``content``)."""

    @abstractmethod
    def half_closed(self) -> None:
        """Called once the client has ended its sending side, so that no further message follows."""

    @property
    @abstractmethod
    def idle(self) -> bool:
        """Returns whether every request of the call that has arrived is answered."""

    @property
    def answers(self) -> bool:
        """Returns whether the call needs nothing more from the client, and only the server's response is missing."""
        return not self.idle

    @property
    def asked(self) -> InFlight | None:
        """Returns the call's inference request. Returns None if the request is not decoded yet, or the call may have several."""
        return None

    @abstractmethod
    def stop(self) -> None:
        """Ends the call because the server stops. Accepted requests are answered, new ones are not accepted. Idempotent."""

    @abstractmethod
    def abandoned(self) -> None:
        """Cancels the call's requests, because the client went away, the deadline passed or the call was refused."""


def kept(content: Buffer, start: int, end: int) -> Buffer:
    """Returns ``content[start:end]`` for a cache. A part is copied, because a view would keep all of ``content`` in memory."""
    return content if end - start == len(content) else bytes(content[start:end])


# --------------------------------------------------------------------------------------------------------------- inference


class InferCall(Call):
    """Base class of the calls of ModelInfer and ModelStreamInfer, whose messages are inference requests."""

    __slots__ = ()

    #: True if the call may get several responses.
    streams: ClassVar[bool]
    infer: Infer
    stream: Stream

    @abstractmethod
    def completed(
        self,
        asked: CallRequest,
        prepared: PreparedAnswer,
        record: AnswerRecord,
        parts: list[Buffer],
        sent: Callable[[], None] | None,
    ) -> None:
        """Sends the client an answer to ``asked``, one of the call's requests. The answer may be an error.

        Args:
          prepared: the part of the answer that repeats, such as the outputs' names and shapes.
          record: the rest of the answer; it has the error's code and text, if the answer is an error.
          parts: the answer as pieces of a ModelInferResponse. Empty for an error, for an answer which only says that no further
            response comes, and for each of several responses to a call that accepts a single one.
          sent: must be called once the answer was written to the client; None: nothing must be called.
        """

    @abstractmethod
    def placed(self) -> None:
        """Called when a request of the call no longer waits for arena memory, because it was sent to a worker or refused."""

    def several(self, asked: CallRequest) -> None:
        """Makes later answers wait no longer for ``asked``, whose first response shows that the model gives several responses."""

    def holds_up(self, asked: CallRequest) -> bool:
        """Returns whether answers to later requests of the call wait for the answer to ``asked``."""
        return False
