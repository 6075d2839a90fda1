"""The part of one DATA frame that is a part of one tensor: read from the socket straight to where the tensor lies."""

from __future__ import annotations

from collections.abc import Callable


class FramePayload:
    """What ``tensord.daemon.front.body_reader`` reads for a connection.

    Args:
      place: where it goes; of both the frame and the tensor at least so much is still to come.
      heard: called whenever some of it has come.
    """

    __slots__ = ("_heard", "_rest", "byte_size")

    def __init__(self, place: memoryview, heard: Callable[[], None]) -> None:
        self.byte_size = len(place)
        self._rest = place
        self._heard = heard

    @property
    def taken(self) -> int:
        """How many bytes have come."""
        return self.byte_size - len(self._rest)

    def rest(self) -> memoryview:
        return self._rest

    def advance(self, byte_size: int) -> None:
        self._rest = self._rest[byte_size:]
        self._heard()
