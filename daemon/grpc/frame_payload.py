"""The part of one DATA frame that is a part of one tensor: read from the socket straight to where the tensor lies."""

from __future__ import annotations

from collections.abc import Callable

from daemon.grpc.stream import Stream


class FramePayload:
    """What ``daemon.body_reader`` reads for a connection.

    Args:
      byte_size: of both the frame and the tensor at least so much is still to come.
      taken: told of every so many bytes of the frame.
    """

    __slots__ = ("_left", "_stream", "_taken")

    def __init__(self, stream: Stream, byte_size: int, taken: Callable[[int], None]) -> None:
        self._stream = stream
        self._left = byte_size
        self._taken = taken

    def rest(self) -> memoryview:
        return self._stream.room()[: self._left]

    def advance(self, byte_size: int) -> None:
        self._left -= byte_size
        self._stream.advance(byte_size)
        self._taken(byte_size)
