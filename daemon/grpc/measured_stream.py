"""A stream whose client has said how much it will send (content-length): then it has to be exactly that.

gRPC's clients do not say it, so ordinary streams need not count.
Source: RFC 9113, section 8.1.1.
"""

from __future__ import annotations

from tensord.daemon.grpc.frames import PROTOCOL_ERROR
from tensord.daemon.grpc.header_blocks import CallHead
from tensord.daemon.grpc.link import Link
from tensord.daemon.grpc.stream import Stream


class MeasuredStream(Stream):
    """Owned by its connection until ``ended``."""

    def __init__(self, connection: Link, number: int, head: CallHead, send_window: int) -> None:
        super().__init__(connection, number, head, send_window)
        assert head.content_length is not None
        #: Bytes that are still to come.
        self._left = head.content_length

    def receive(self, data: bytes, start: int, end: int) -> None:
        if self._counts(end - start):
            super().receive(data, start, end)

    def advance(self, byte_size: int) -> None:
        if self._counts(byte_size):
            super().advance(byte_size)

    def end_receiving(self) -> None:
        if self._left and not self.ended:
            self.connection.reset(self, PROTOCOL_ERROR)
        elif not self.ended:
            super().end_receiving()

    def _counts(self, byte_size: int) -> bool:
        """Whether so much may still come; else the stream is reset."""
        self._left -= byte_size
        if self._left < 0 and not self.ended:
            self.connection.reset(self, PROTOCOL_ERROR)
        return self._left >= 0
