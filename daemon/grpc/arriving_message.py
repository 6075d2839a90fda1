"""One message of a client: while it arrives in pieces, where its bytes go, and what it was before it was compressed.

    | compressed 8 | length 32 | message: length bytes |

Its length is known from its first five bytes. A large one may be taken by a ``Reception``, which puts most of it where a worker
reads it; any other is collected in memory of its own, whose pages take nothing until they are written.
Source: gRPC's PROTOCOL-HTTP2.md.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable

import numpy as np

from tensord.daemon.grpc.codes import INTERNAL, RESOURCE_EXHAUSTED, UNIMPLEMENTED
from tensord.daemon.grpc.reception import Phase, Reception
from tensord.shm.messages import Buffer

#: Before each message, either way: whether it is compressed, and its length.
PREFIX = struct.Struct(">BI")
read_prefix = PREFIX.unpack_from


class ArrivingMessage:
    """Collects one message, or gives it to a reception. Owned by its stream.

    Args:
      flag: whether it is compressed.
      on_room: the reception has waited for room, and waits no more.
    """

    __slots__ = ("_content", "_on_room", "_received", "byte_size", "flag", "is_granted", "reception")

    def __init__(self, flag: int, byte_size: int, reception: Reception | None, on_room: Callable[[], None]) -> None:
        self.flag = flag
        self.byte_size = byte_size
        self.reception = reception
        #: Whether the client was told that all of it may come.
        self.is_granted = False
        self._on_room = on_room
        self._received = 0
        self._content: memoryview | None = None

    @property
    def left(self) -> int:
        """Returns how many bytes are still to come."""
        return self.byte_size - self._received

    @property
    def received_byte_size(self) -> int:
        """Returns how many bytes have come."""
        return self._received

    @property
    def kept_byte_size(self) -> int:
        """Returns how many bytes it has in ordinary memory."""
        kept = 0 if self._content is None else self._received
        return kept if self.reception is None else kept + self.reception.kept_byte_size

    @property
    def is_placed(self) -> bool:
        """Says whether what still comes needs no ordinary memory."""
        return self.reception is not None and self.reception.phase in (Phase.PLACED, Phase.REFUSED)

    @property
    def received(self) -> Reception | None:
        """Returns what the call gets, once everything came. None: ``content``."""
        return self.reception if self.is_placed else None

    @property
    def waits(self) -> bool:
        """Says whether there is no room for it now."""
        return self.reception is not None and self.reception.phase is Phase.WAITING

    def feed(self, piece: memoryview) -> None:
        """Takes the next piece, nothing beyond the message."""
        reception = self.reception
        if reception is not None:
            reception.feed(piece, self._caught_up)
            if self.is_placed:
                self._content = None
                self._received += len(piece)
                return
            if reception.phase is Phase.DECLINED:
                self.reception = None
        if self._content is None:
            self._content = np.empty(self.byte_size, np.uint8).data
        self._content[self._received : self._received + len(piece)] = piece
        self._received += len(piece)

    def rest(self) -> memoryview:
        """Returns where its next bytes may be written; empty: they have to be fed."""
        return memoryview(b"") if self.reception is None else self.reception.rest()

    def advance(self, byte_size: int) -> None:
        """Takes note that so many bytes were written into ``rest``."""
        assert self.reception is not None
        self.reception.advance(byte_size)
        self._received += byte_size

    def _caught_up(self) -> None:
        assert self.reception is not None
        if self._content is not None:
            self.reception.catch_up(self._content[: self._received])
            self._content = None
        self._on_room()

    def content(self) -> Buffer:
        """Returns all of it, where no reception took it."""
        return b"" if self._content is None else self._content

    def drop(self) -> None:
        """Gives up what it holds: nobody wants it any more."""
        self._content = None
        if self.reception is not None:
            self.reception.drop()


class Refused(Exception):
    """Says that a message is not taken, with the status that ends its call."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


def inflated(content: Buffer, encoding: str, limit: int) -> bytes:
    """Returns the message behind gzip or deflate, of at most ``limit`` bytes. Raises Refused."""
    if encoding not in ("gzip", "deflate"):
        raise Refused(
            UNIMPLEMENTED, f"message encoding '{encoding[:32]}' is not supported; identity, deflate and gzip are"
        )
    inflate = zlib.decompressobj(31 if encoding == "gzip" else 15)
    try:
        whole = inflate.decompress(content, limit + 1)
    except zlib.error:
        whole = b""
    if len(whole) > limit:
        raise Refused(
            RESOURCE_EXHAUSTED, f"Received message larger than max ({len(whole)} vs. {limit}) after decompression"
        )
    if not inflate.eof or inflate.unused_data:
        raise Refused(INTERNAL, f"a message is not valid {encoding} data")
    return whole
