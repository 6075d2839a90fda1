"""Memory that this process shares with workers: sealed memfds (segments), and the arrays that are allocated in them.

    segment   a memfd whose size nobody can change   | block | free | block ... |     blocks begin at multiples of 64 bytes

Once an array and all its views have been garbage-collected, the next allocation frees the array's block. Segments
without blocks are then closed, except for at most 64 MiB of such segments.
"""

from __future__ import annotations

import bisect
import errno
import fcntl
import math
import os
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any, Union

import numpy as np

from tensord_client.common.arrays import array_at
from tensord_client.common.mapping import shared
from tensord_client.errors import CLOSED, InvalidArgument, Unavailable

#: (segment, offset, byte size) in this connection's own memory; for a segment's number a region's name stands as well.
Place = tuple[Union[int, str], int, int]
#: Alignment in bytes that XLA on a CPU needs to use an array without copying it.
ALIGNMENT = 64
_PAGE = 4096
#: Bytes of the first segment, and the most bytes of a segment beyond what the array needs.
_FIRST, _LARGEST_STEP = 256 << 10, 64 << 20
#: The most bytes of unused segments that are held in reserve.
_KEPT = 64 << 20
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class ClientSegment:
    """A memfd of fixed size for arrays, mapped in this process and in workers, and the list of its free ranges."""

    def __init__(self, number: int, byte_size: int) -> None:
        """Makes a memfd with all of its pages allocated, and maps it. ``number`` is the segment's number in requests.

        Raises: Unavailable: the host has no memory left for the segment, or this process has no file descriptor left.
        """
        self.number = number
        self.byte_size = byte_size
        self.fd = -1
        try:
            self.fd, view = shared("tensord-client", byte_size, _SEALS)
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise Unavailable(
                    f"no descriptor is left for a segment of {byte_size} bytes: {error.strerror}"
                ) from error
            if error.errno in (errno.ENOSPC, errno.ENOMEM):
                raise Unavailable(f"the host has no {byte_size} bytes of memory for a segment") from error
            raise Unavailable(f"a segment of {byte_size} bytes cannot be made: {error.strerror}") from error
        self._bytes = np.frombuffer(view, np.uint8)
        self.address: int = self._bytes.__array_interface__["data"][0]
        #: Offsets and sizes of the free ranges, in order.
        self.free: list[int] = [0]
        self.sizes: list[int] = [byte_size]

    @property
    def is_unused(self) -> bool:
        """Returns whether no array has memory in this segment."""
        return len(self.free) == 1 and self.sizes[0] == self.byte_size

    def take(self, byte_size: int) -> int | None:
        """Allocates ``byte_size`` bytes, a multiple of 64. Returns the offset in the segment, or None if no free range fits."""
        for at, size in enumerate(self.sizes):
            if size < byte_size:
                continue
            offset = self.free[at]
            if size == byte_size:
                del self.free[at], self.sizes[at]
            else:
                self.free[at] = offset + byte_size
                self.sizes[at] = size - byte_size
            return offset
        return None

    def give(self, offset: int, byte_size: int) -> None:
        """Frees ``byte_size`` bytes at ``offset``, and joins them with free ranges next to them."""
        at = bisect.bisect(self.free, offset)
        if at < len(self.free) and offset + byte_size == self.free[at]:
            byte_size += self.sizes[at]
            del self.free[at], self.sizes[at]
        if at and self.free[at - 1] + self.sizes[at - 1] == offset:
            self.sizes[at - 1] += byte_size
        else:
            self.free.insert(at, offset)
            self.sizes.insert(at, byte_size)

    def close(self) -> None:
        """Closes the memfd's file descriptor. The mapping stays. Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    __del__ = close


class Block:
    """The memory of one array, a range of bytes in a segment of this client.

    The block is freed once the array and all its views are garbage-collected.
    """

    __slots__ = ("__array_interface__", "byte_size", "memory", "offset", "segment")

    def __init__(self, memory: Memory, segment: ClientSegment, offset: int, byte_size: int) -> None:
        self.memory = memory
        self.segment = segment
        self.offset = offset
        #: A multiple of the alignment.
        self.byte_size = byte_size

    def __del__(self) -> None:
        self.memory.returned.append((self.segment, self.offset, self.byte_size))


class Memory:
    """The memory that a connection shares with workers: the client's segments, and the arrays in them. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        #: Segments by number; the number of a closed segment is not used again.
        self.segments: dict[int, ClientSegment] = {}
        self._next = 0
        #: Blocks that were collected: (segment, offset, byte size).
        self.returned: deque[tuple[ClientSegment, int, int]] = deque()
        #: One object, replaced when a segment is closed: whoever keeps it notices that by one comparison.
        self.closures: list[object] = [object()]
        #: The most segments, and the most bytes of all together; None: the daemon has not told yet.
        self.max_count: int | None = None
        self.max_byte_size: int | None = None
        self._is_closed = False

    def limit(self, max_count: int, max_byte_size: int) -> None:
        """Sets how many segments the client may have, and how many bytes they may have together. Open segments stay open."""
        self.max_count = max_count
        self.max_byte_size = max_byte_size

    @property
    def byte_size(self) -> int:
        """Returns the number of bytes of all segments together."""
        return sum([segment.byte_size for segment in list(self.segments.values())])

    def empty(self, shape: int | Sequence[int], dtype: Any) -> np.ndarray:
        """Makes a C-contiguous array with undefined content in shared memory, aligned to 64 bytes.

        ``dtype`` has a fixed size. Raises: InvalidArgument: the array is larger than the daemon allows.  Unavailable: there is
          no room for the array now, or ``close`` was called.
        """
        dtype = np.dtype(dtype)
        shape = (int(shape),) if isinstance(shape, (int, np.integer)) else tuple(int(dim) for dim in shape)
        needed = math.prod(shape) * dtype.itemsize
        block = self._allocate(-(-max(needed, 1) // ALIGNMENT) * ALIGNMENT)
        return array_at(block.segment.address + block.offset, shape, dtype, block)

    def locate(self, array: np.ndarray) -> Place | None:
        """Returns where an array lies: (segment number, offset, size), or (region name, offset, size) if it is on a GPU.

        Offset and size are in bytes. Returns None if the array is not C-contiguous, or not in memory shared with workers.
        """
        base: Any = array.base
        while isinstance(base, np.ndarray):
            base = base.base
        if type(base) is not Block:
            return getattr(array, "place", None)
        if base.memory is not self or not array.flags.c_contiguous:
            return None
        offset = array.__array_interface__["data"][0] - base.segment.address
        return base.segment.number, offset, array.nbytes

    def _allocate(self, byte_size: int) -> Block:
        with self._lock:
            if self._is_closed:
                raise Unavailable(CLOSED)
            self._collect()
            for segment in self.segments.values():
                offset = segment.take(byte_size)
                if offset is not None:
                    return Block(self, segment, offset, byte_size)
            segment = self._grow(byte_size)
            offset = segment.take(byte_size)
            assert offset is not None
            return Block(self, segment, offset, byte_size)

    def _collect(self) -> None:
        """Frees the memory of arrays that Python has collected. Closes unused segments, except for a reserve of 64 MiB."""
        if not self.returned:
            return
        while self.returned:
            segment, offset, byte_size = self.returned.popleft()
            segment.give(offset, byte_size)
        unused = [segment for segment in self.segments.values() if segment.is_unused]
        free = sum([segment.byte_size for segment in unused])
        for segment in unused:
            if free <= _KEPT:
                break
            free -= segment.byte_size
            self._close(segment)

    def _grow(self, byte_size: int) -> ClientSegment:
        needed = -(-byte_size // _PAGE) * _PAGE
        most = self.max_byte_size
        if most is not None and needed > most:
            raise InvalidArgument(
                f"an array of {byte_size} bytes, at most {most} bytes are allowed in a client's segments"
            )
        wanted = max(needed, min(max(self.byte_size, _FIRST), _LARGEST_STEP))
        for segment in [each for each in self.segments.values() if each.is_unused]:
            if self._fits(needed):
                break
            self._close(segment)
        if not self._fits(needed):
            raise Unavailable(
                f"an array of {byte_size} bytes does not fit: {len(self.segments)} segments of {self.byte_size} bytes are used, "
                f"at most {self.max_count} of {most} bytes together are allowed"
            )
        if most is not None:
            wanted = max(needed, min(wanted, (most - self.byte_size) // _PAGE * _PAGE))
        segment = ClientSegment(self._next, wanted)
        self._next += 1
        self.segments[segment.number] = segment
        return segment

    def _fits(self, byte_size: int) -> bool:
        if self.max_count is not None and len(self.segments) >= self.max_count:
            return False
        return self.max_byte_size is None or self.byte_size + byte_size <= self.max_byte_size

    def _close(self, segment: ClientSegment) -> None:
        del self.segments[segment.number]
        segment.close()
        self.closures[0] = object()

    def close(self) -> None:
        """Closes all segments. Later calls of ``empty`` raise Unavailable. Arrays from earlier calls stay valid. Idempotent."""
        with self._lock:
            self._is_closed = True
            for segment in self.segments.values():
                segment.close()
            self.segments.clear()
            self.returned = deque(maxlen=0)
