"""A call is what a method does with one stream, and knows no HTTP/2."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from tensord.daemon.grpc.arriving_message import ArrivingMessage
from tensord.daemon.submit.in_flight import InFlight
from tensord.shm.messages import Buffer


class Call(ABC):
    """Handles one gRPC call: takes its messages and answers on its stream. ``abandoned`` is the last method called."""

    __slots__ = ()

    def arriving(self, byte_size: int, on_room: Callable[[], None]) -> ArrivingMessage | None:
        """Returns a receiver for a large message of that size, or None to get the message in one piece."""
        return None

    @abstractmethod
    def message(self, content: Buffer, start: int, end: int) -> None:
        """Takes a whole message from the client: those bytes of ``content``. Whoever keeps it takes ``kept``."""

    def placed_message(self, message: ArrivingMessage) -> None:
        """Takes a complete message whose tensors lie in the arena; the call must drop it, or take its lease."""
        raise NotImplementedError("a call whose messages are placed takes them")

    @abstractmethod
    def half_closed(self) -> None:
        """Notes that the client has sent its last message."""

    @property
    @abstractmethod
    def idle(self) -> bool:
        """Returns whether no request of the call is waiting for its answer."""

    @property
    def answers(self) -> bool:
        """Returns whether the call waits for the server alone, and expects nothing more from the client."""
        return not self.idle

    @property
    def asked(self) -> InFlight | None:
        """Returns the request that the call is, as far as it was understood. None: it is another kind of call."""
        return None

    @abstractmethod
    def stop(self) -> None:
        """Ends the call because the server stops: accepted requests are still answered, new ones are not accepted. Idempotent."""

    @abstractmethod
    def abandoned(self) -> None:
        """Cancels the call: the client went away, or its deadline passed."""


def kept(content: Buffer, start: int, end: int) -> Buffer:
    """Returns the message as an object of its own, because a view of it would keep alive everything that came with it."""
    return content if end - start == len(content) else bytes(content[start:end])
