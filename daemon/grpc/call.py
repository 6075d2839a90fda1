"""What a method does with one stream: the side of a call that knows no HTTP/2."""

from __future__ import annotations

from abc import ABC, abstractmethod

from tensord.daemon.grpc.reception import Reception
from tensord.shm.messages import Buffer


class Call(ABC):
    """Nothing is called any more after ``abandoned``."""

    __slots__ = ()

    def reception(self, byte_size: int) -> Reception | None:
        """Who takes a large message of that size. None: it is wanted in one piece."""
        return None

    @abstractmethod
    def message(self, content: Buffer, start: int, end: int) -> None:
        """A whole message from the client: those bytes of ``content``. Whoever keeps it takes ``kept``."""

    def received(self, message: Reception) -> None:
        """A whole message that lies in its place; the call drops it, or takes its lease."""
        raise NotImplementedError("a call that has receptions takes them")

    @abstractmethod
    def half_closed(self) -> None:
        """The client sends no more messages."""

    @property
    @abstractmethod
    def idle(self) -> bool:
        """Whether nothing was asked that is still to be answered."""

    @property
    def answers(self) -> bool:
        """Whether the call is waiting for the server: nothing more is expected from the client."""
        return not self.idle

    @abstractmethod
    def stop(self) -> None:
        """The server stops: what was taken is answered, nothing more is taken, and then the call ends. May be said again."""

    @abstractmethod
    def abandoned(self) -> None:
        """Nobody waits for an answer: the client went away, or the deadline passed."""


def kept(content: Buffer, start: int, end: int) -> Buffer:
    """A message alone: a view of it would keep everything that came with it."""
    return content if end - start == len(content) else bytes(content[start:end])
