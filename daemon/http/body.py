"""The body of an inference request while it arrives: bytes kept aside, or written straight into the request arena.

JSON never goes into the arena: its tensors will need room there, and whoever waits for room must not hold any.

lease    | pad | JSON head | part | part | ...      pad = -head size mod 64, so the first part is 64-byte aligned,
                                                     which is what an executable needs to use it in place
"""

from __future__ import annotations

import mmap
from collections.abc import Callable

import numpy as np

from tensord.daemon.http.decoded_request import BinaryPart
from tensord.shm.arena import ALIGNMENT, Lease
from tensord.shm.messages import Content, Slice

#: Bodies up to this size are collected; larger binary ones of known length go straight into the arena.
COLLECT_BYTE_SIZE = 4096
#: A collected body that becomes larger gets pages of its own.
_SMALL = 64 << 10
#: Where what is thrown away is read to.
_THROWN_AWAY = 64 << 10


class CollectedBody:
    """Collects a body that is small, or of unknown length, in ordinary memory.

    A large one lies in pages of its own, which take nothing until they are written and are the kernel's again when it is dropped:
    memory that grows bit by bit would be copied again and again, and the allocator would keep it.

    Args:
      limit: bytes that it may have. 0: it stays small.
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
        """Makes a body of content that is complete."""
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
        """Returns everything received."""
        if self._pages is not None:
            return self._pages[: self.received]
        if self._more is not None:
            self._first, self._more = self._first + self._more, None
        return self._first


class TextBody:
    """Keeps a large JSON body of known length in ordinary memory until it is read. Pages that have not arrived take none.

    Args:
      grown: called with how much more came. False: nothing of it is kept any more, and what comes is thrown away.
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
        """Does as in ``PlacedBody``."""
        if self._kept:
            return self._memory[self.received :]
        return self._memory[: self._byte_size - self.received]

    def advance(self, byte_size: int) -> None:
        """Does as in ``PlacedBody``."""
        self.received += byte_size
        if self._kept and not self._grown(byte_size):
            self.drop()

    def drop(self) -> None:
        """Frees the memory of the body; bytes that still arrive are discarded."""
        self._kept = False
        self._memory = memoryview(bytearray(min(_THROWN_AWAY, self._byte_size - self.received)))

    def whole(self) -> memoryview:
        """Returns everything received, while it is kept."""
        return self._memory[: self.received]


class PlacedBody:
    """Writes a large binary body of known length into a lease of the request arena."""

    __slots__ = ("_end", "_start", "lease", "received")

    def __init__(self, lease: Lease, byte_size: int, head_size: int) -> None:
        self.lease = lease
        self._start = -head_size % ALIGNMENT
        self._end = self._start + byte_size
        self.received = 0

    @staticmethod
    def start(head_size: int) -> int:
        """Returns the offset in the lease at which a body with a JSON head of that size begins, so that tensors are aligned."""
        return -head_size % ALIGNMENT

    @staticmethod
    def lease_size(byte_size: int) -> int:
        """Returns how many bytes to borrow for a body of that size."""
        return byte_size + ALIGNMENT

    def write(self, chunk: bytes | memoryview) -> None:
        at = self._start + self.received
        self.lease.view[at : at + len(chunk)] = chunk
        self.received += len(chunk)

    def rest(self) -> memoryview:
        """Returns the memory for the rest of the body, into which the socket may be read directly."""
        return self.lease.view[self._start + self.received : self._end]

    def advance(self, byte_size: int) -> None:
        """Counts bytes that were written into ``rest``."""
        self.received += byte_size

    def head(self, head_size: int) -> memoryview:
        """Returns the JSON head of the body."""
        return self.lease.view[self._start : self._start + head_size]

    def places(self, head_size: int, parts: list[BinaryPart]) -> tuple[Slice, ...]:
        """Returns the places of binary parts, none of which travels in the record."""
        slice_ = self.lease.place
        segment, start = slice_.segment, slice_.offset + self._start + head_size
        return tuple([Slice(segment, start + part.offset, part.byte_size) for part in parts])

    def place(self, head_size: int, part: BinaryPart, inline_byte_size: int) -> Content:
        """Returns the place of a binary part, or its bytes if it is small enough for the record."""
        start = self._start + head_size + part.offset
        if part.byte_size <= inline_byte_size:
            return bytes(self.lease.view[start : start + part.byte_size])
        slice_ = self.lease.place
        return Slice(slice_.segment, slice_.offset + start, part.byte_size)


#: Where the bytes of a request's body go.
Body = CollectedBody | TextBody | PlacedBody
