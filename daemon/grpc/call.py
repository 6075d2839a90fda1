"""A call is what a method does with one stream, and knows no HTTP/2."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from tensord.daemon.grpc.arriving_message import ArrivingMessage
from tensord.daemon.submit.in_flight import InFlight
from tensord.shm.messages import Buffer


class Call(ABC):
    """Answers one stream. Nothing is called any more after ``abandoned``."""

    __slots__ = ()

    def arriving(self, byte_size: int, on_room: Callable[[], None]) -> ArrivingMessage | None:
        """Returns what places a large message of that size while it arrives. None: it is wanted in one piece."""
        return None

    @abstractmethod
    def message(self, content: Buffer, start: int, end: int) -> None:
        """Takes a whole message from the client: those bytes of ``content``. Whoever keeps it takes ``kept``."""

    def placed_message(self, message: ArrivingMessage) -> None:
        """Takes a whole message that was placed; the call drops it, or takes its lease."""
        raise NotImplementedError("a call whose messages are placed takes them")

    @abstractmethod
    def half_closed(self) -> None:
        """Takes note that the client sends no more messages."""

    @property
    @abstractmethod
    def idle(self) -> bool:
        """Says whether nothing was asked that is still to be answered."""

    @property
    def answers(self) -> bool:
        """Says whether the call is waiting for the server: nothing more is expected from the client."""
        return not self.idle

    @property
    def asked(self) -> InFlight | None:
        """Returns the request that the call is, as far as it was understood. None: it is another kind of call."""
        return None

    @abstractmethod
    def stop(self) -> None:
        """Ends for the server's stop: what was taken is answered, nothing more is taken. May be called again."""

    @abstractmethod
    def abandoned(self) -> None:
        """Gives up: nobody waits for an answer, because the client went away, or the deadline passed."""


def kept(content: Buffer, start: int, end: int) -> Buffer:
    """Returns a message alone: a view of it would keep everything that came with it."""
    return content if end - start == len(content) else bytes(content[start:end])
