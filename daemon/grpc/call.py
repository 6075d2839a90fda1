"""A call is what a method does with one stream, and knows no HTTP/2."""

from __future__ import annotations

from abc import ABC, abstractmethod

from tensord.daemon.grpc.reception import Reception
from tensord.shm.messages import Buffer


class Call(ABC):
    """Answers one stream. Nothing is called any more after ``abandoned``."""

    __slots__ = ()

    def reception(self, byte_size: int) -> Reception | None:
        """Returns who takes a large message of that size. None: it is wanted in one piece."""
        return None

    @abstractmethod
    def message(self, content: Buffer, start: int, end: int) -> None:
        """Takes a whole message from the client: those bytes of ``content``. Whoever keeps it takes ``kept``."""

    def received(self, message: Reception) -> None:
        """Takes a whole message that lies in its place; the call drops it, or takes its lease."""
        raise NotImplementedError("a call that has receptions takes them")

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

    @abstractmethod
    def stop(self) -> None:
        """Ends for the server's stop: what was taken is answered, nothing more is taken. May be called again."""

    @abstractmethod
    def abandoned(self) -> None:
        """Gives up: nobody waits for an answer, because the client went away, or the deadline passed."""


def kept(content: Buffer, start: int, end: int) -> Buffer:
    """Returns a message alone: a view of it would keep everything that came with it."""
    return content if end - start == len(content) else bytes(content[start:end])
