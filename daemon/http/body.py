"""Holds the body of an inference request while it arrives: in ordinary memory, or in the arena for requests.

An uncompressed body of known length goes into the arena if it has more than 4096 bytes and the request has the header
Inference-Header-Content-Length. Any other body is collected in ordinary memory. A block of the arena holds one body:

    | 0 to 63 unused bytes | JSON | tensor | tensor | ...      the first tensor starts at a multiple of 64 bytes
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable

import numpy as np

from tensord.daemon.http.decoded_request import BinaryPart, Source
from tensord.daemon.submit.placement import InputContent, Unconverted
from tensord.shm.arena import ALIGNMENT, Lease
from tensord.shm.messages import Content, Slice

#: Bodies up to this size are collected; larger binary ones of known length go straight into the arena.
COLLECT_BYTE_SIZE = 4096
#: A collected body that becomes larger gets pages of its own.
_SMALL = 64 << 10
#: Where what is thrown away is read to.
_THROWN_AWAY = 64 << 10


class CollectedBody:
    """Collects a request body that is small, or of unknown length, in ordinary memory.

    ``limit``: the most bytes that the body may have. The caller may pass 0 if the body has at most 64 KiB.
    """

    __slots__ = ("_first", "_limit", "_more", "_pages", "received")

    def __init__(self, limit: int = 0) -> None:
        self._limit = limit
        self._first = b""
        #: All but the first chunk, which is mostly the only one. Not a list: a chunk of two bytes would cost forty.
        self._more: bytearray | None = None
        self._pages: memoryview | None = None
        self.received = 0

    @classmethod
    def of(cls, content: bytes) -> CollectedBody:
        body = cls()
        body.write(content)
        return body

    def write(self, chunk: bytes) -> None:
        start, self.received = self.received, self.received + len(chunk)
        if self._pages is not None:
            self._pages[start : self.received] = chunk
        elif not start:
            self._first = chunk
        elif self.received > _SMALL and self._limit:
            before = self.whole()
            pages = self._pages = memoryview(mmap.mmap(-1, self._limit, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
            pages[:start] = before
            pages[start : self.received] = chunk
            self._first = b""
        elif self._more is None:
            self._more = bytearray(chunk)
        else:
            self._more += chunk

    def whole(self) -> bytes | memoryview:
        """Returns all bytes received so far."""
        if self._pages is not None:
            return self._pages[: self.received]
        if self._more is not None:
            self._first, self._more = self._first + self._more, None
        return self._first


class TextBody:
    """Collects a large JSON body of known length in ordinary memory.

    Args:
      byte_size: the length of the body.
      grown: called with the number of bytes that have arrived since its last call. If it returns False, the body is dropped.
    """

    __slots__ = ("_byte_size", "_grown", "_kept", "_memory", "received")

    def __init__(self, byte_size: int, grown: Callable[[int], bool]) -> None:
        self._byte_size = byte_size
        self._memory: memoryview = np.empty(byte_size, np.uint8).data
        self._grown = grown
        self._kept = True
        self.received = 0

    def write(self, chunk: bytes) -> None:
        if self._kept:
            self._memory[self.received : self.received + len(chunk)] = chunk
        self.advance(len(chunk))

    def rest(self) -> memoryview:
        """Returns the memory into which the rest of the body is to be read."""
        if self._kept:
            return self._memory[self.received :]
        return self._memory[: self._byte_size - self.received]

    def advance(self, byte_size: int) -> None:
        """Notes that the caller has written the next ``byte_size`` bytes of the body to the memory that ``rest`` returned."""
        self.received += byte_size
        if self._kept and not self._grown(byte_size):
            self.drop()

    def drop(self) -> None:
        """Frees the memory of the body. Bytes of the body that still arrive are discarded."""
        self._kept = False
        self._memory = memoryview(bytearray(min(_THROWN_AWAY, self._byte_size - self.received)))

    def whole(self) -> memoryview:
        """Returns a view of all bytes received so far. Must not be called after ``drop``."""
        return self._memory[: self.received]


class PlacedBody:
    """Stores a large HTTP body of known length in a block of the request arena while the body arrives.

    Args:
      lease: the lease of the block, which has at least ``lease_size(byte_size)`` bytes.
      byte_size: the length of the body, which consists of JSON and then the tensors' data.
      head_size: the length of the JSON. The body starts at such an address that the tensors' data are aligned.
    """

    __slots__ = ("_end", "_start", "lease", "received")

    def __init__(self, lease: Lease, byte_size: int, head_size: int) -> None:
        self.lease = lease
        self._start = -head_size % ALIGNMENT
        self._end = self._start + byte_size
        self.received = 0

    @staticmethod
    def lease_size(byte_size: int) -> int:
        """Returns how many bytes of the arena to reserve for a body of ``byte_size`` bytes."""
        return byte_size + ALIGNMENT

    def write(self, chunk: bytes | memoryview) -> None:
        at = self._start + self.received
        self.lease.view[at : at + len(chunk)] = chunk
        self.received += len(chunk)

    def rest(self) -> memoryview:
        """Returns the memory for the bytes that are still to come."""
        return self.lease.view[self._start + self.received : self._end]

    def advance(self, byte_size: int) -> None:
        self.received += byte_size

    def head(self, head_size: int) -> memoryview:
        return self.lease.view[self._start : self._start + head_size]

    def places(self, head_size: int, parts: list[BinaryPart]) -> tuple[Slice, ...]:
        """Returns where each of ``parts``, the binary tensors of the body, lies in the arena.

        ``head_size``: the number of bytes of JSON before the tensors.
        """
        slice_ = self.lease.place
        segment, start = slice_.segment, slice_.offset + self._start + head_size
        return tuple([Slice(segment, start + part.offset, part.byte_size) for part in parts])

    def place(self, head_size: int, part: BinaryPart, most: int) -> Content:
        """Returns where ``part``, a binary tensor of the body, lies in the arena.

        Returns a copy of the tensor instead if it has at most ``most`` bytes.
        ``head_size``: the number of bytes of JSON before the first tensor.
        """
        start = self._start + head_size + part.offset
        if part.byte_size <= most:
            return bytes(self.lease.view[start : start + part.byte_size])
        slice_ = self.lease.place
        return Slice(slice_.segment, slice_.offset + start, part.byte_size)


#: Where the bytes of a request's body go.
Body = CollectedBody | TextBody | PlacedBody


def located(
    sources: Iterable[Source], body: Body, json_size: int, inline_byte_size: int
) -> list[InputContent | Unconverted]:
    """Returns the content of each input tensor of a request, in the order of ``sources``.

    If ``body`` is a ``PlacedBody``, a ``BinaryPart`` becomes a ``Slice`` of the arena, or a copy of its bytes if the tensor is
    small. If ``body`` is of another type, a ``BinaryPart`` becomes a view of its bytes. Other sources are returned unchanged.
    Args:
      sources: for each tensor, where the tensor's data are, as the JSON of the request says.
      json_size: the number of bytes of JSON in the body before its binary tensors.
      inline_byte_size: a tensor is small if the tensor and all copies before it have together at most so many bytes.
    """
    found: list[InputContent | Unconverted] = []
    left = inline_byte_size
    for source in sources:
        if type(source) is not BinaryPart:
            found.append(source)  # type: ignore[arg-type]
        elif type(body) is PlacedBody:
            found.append(body.place(json_size, source, left))
            left -= source.byte_size if source.byte_size <= left else 0
        else:
            start = json_size + source.offset
            found.append(memoryview(body.whole())[start : start + source.byte_size])  # type: ignore[union-attr]
    return found
