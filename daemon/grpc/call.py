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
    """Base class of gRPC calls: takes messages from a stream, and sends responses there. ``abandoned`` is called last."""

    __slots__ = ()

    def arriving(self, byte_size: int, on_room: Callable[[], None]) -> ArrivingMessage | None:
        """Returns a receiver for a large message that begins to arrive; None: the stream buffers it and calls ``message``.

        The call must drop a message that was placed (``drop``), or take over its parts and the lease of its arena memory
        (``take``). One that is complete and was not placed is passed to ``message``.
        ``on_room``: the receiver calls it once its wait for arena memory has ended, with memory or with a refusal.
        Raises CallRefused: the call takes no further message.
        """
        return None

    @abstractmethod
    def message(self, content: Buffer, start: int, end: int) -> None:
        """Handles a complete message of the client, ``content[start:end]``, now, or stores it for later.

        A call that stores the message must store what the function ``kept`` makes of it: an object without the bytes around it.
        """

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

    #: Whether the call may get several responses.
    streams: ClassVar[bool]
    infer: Infer
    stream: Stream

    @abstractmethod
    def completed(
        self,
        asked: CallRequest,
        prepared: PreparedAnswer,
        own: AnswerRecord,
        parts: list[Buffer],
        sent: Callable[[], None] | None,
    ) -> None:
        """Sends the client an answer to ``asked``, one of the call's requests; the answer may be an error.

        Args:
          parts: the answer as pieces of a ModelInferResponse; empty: it is an error, the mark that no further response comes, or
            one of several responses to a call that takes one.
          sent: must be called once the answer was written to the client; None: nothing is to be done then.
        """

    @abstractmethod
    def placed(self) -> None:
        """Is called when a request of the call no longer waits for arena (shared) memory, because it was sent or answered."""

    def several(self, asked: CallRequest) -> None:
        """Is called when the first of several responses to ``asked`` has come, of which it was not known that it has several."""

    def holds_up(self, asked: CallRequest) -> bool:
        """Returns whether answers to later requests of the call wait for the answer to ``asked``."""
        return False
