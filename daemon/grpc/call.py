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

#: Frees an answer's memory. To be called once the answer was written, or will not be written. None: there is nothing to free.
OnSent = Callable[[], None] | None


class Call(ABC):
    """A gRPC call, which takes messages from a stream and sends responses on that stream.

    Once the method ``abandoned`` was called, no other method of the object is called.
    """

    __slots__ = ()

    def arriving(self, byte_size: int, on_room: Callable[[], None]) -> ArrivingMessage | None:
        """Returns an object that receives a large message into the arena. Returns None if the server must buffer the message.

        Once the whole message is in the arena, the call must use the object's ``take``, or release the memory by ``drop``.
        A buffered message is passed to the call's method ``message`` once it is complete.
        Args:
          byte_size: the length of the message in bytes.
          on_room: a function that the returned object calls once its wait for arena memory has ended.
        Raises CallRefused if the call accepts no further message.
        """
        return None

    @abstractmethod
    def message(self, content: Buffer, start: int, end: int) -> None:
        """Handles one message from the client: the bytes ``start`` to ``end`` of ``content``.

        A call that keeps the message must copy the bytes. If the message is all of ``content``, the call may keep ``content``.
        """

    @abstractmethod
    def half_closed(self) -> None:
        """Notes that the client has ended its sending side, so that no further message follows."""

    @property
    @abstractmethod
    def idle(self) -> bool:
        """Returns whether every request of the call that has arrived is answered."""

    @property
    def answers(self) -> bool:
        """Returns whether the server still owes the client an answer."""
        return not self.idle

    @property
    def asked(self) -> InFlight | None:
        """Returns the inference request of the call.

        Returns None if the request is not decoded yet, or if the call may have several requests.
        """
        return None

    @property
    def is_new(self) -> bool:
        """Returns whether the client has not sent the first request of the call yet."""
        return self.idle

    # Unary calls end by themselves.
    def stop(self) -> None:  # noqa: B027
        """Ends the call once all requests that have arrived are answered. A stopping server may call this several times.

        This method is not called before the client has sent the first request of the call.
        """

    @abstractmethod
    def abandoned(self) -> None:
        """Cancels the call's unanswered requests. The stream calls this when it refuses the call, or when the client gives up."""


def kept(content: Buffer, start: int, end: int) -> Buffer:
    """Returns ``content[start:end]`` for a cache. The bytes are copied unless they are all of ``content``."""
    return content if end - start == len(content) else bytes(content[start:end])


# --------------------------------------------------------------------------------------------------------------- inference


class InferCall(Call):
    """Base class of the calls of ModelInfer and ModelStreamInfer."""

    __slots__ = ()

    #: True if the call may get several responses.
    streams: ClassVar[bool]
    infer: Infer
    stream: Stream

    @abstractmethod
    def completed(
        self, asked: CallRequest, prepared: PreparedAnswer, record: AnswerRecord, parts: list[Buffer], sent: OnSent
    ) -> None:
        """Sends the client an answer to one request of the call. The answer may be an error.

        Args:
          asked: the request.
          prepared: the part of the answer that repeats, such as the names and shapes of the outputs.
          record: the rest of the answer. If the answer is an error, ``record`` has the error's code and text.
          parts: the encoded ModelInferResponse in pieces. The list is empty if the answer is an error or only says that no more
            responses follow, or if it is one of several responses to a call whose ``streams`` is False.
          sent: this method must have it called.
        """

    @abstractmethod
    def placed(self) -> None:
        """Notes that a request of the call no longer waits for arena memory. The request was sent to a worker, or refused."""

    def several(self, asked: CallRequest) -> None:
        """Lets the call send answers to later requests before ``asked`` has ended, because ``asked`` gets several responses."""

    def holds_up(self, asked: CallRequest) -> bool:
        """Returns whether answers to later requests of the call wait for the answer to ``asked``."""
        return False
