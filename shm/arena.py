"""An arena is shared memory for tensors of requests or answers, which one process passes to another.

The process that has the ``Arena`` allocates blocks in it. The other process maps the arena's segments with an ``ArenaMap``.
To end the lease of an answer, the other process sends back the lease's key. An arena has these segments:

    segment 0   has blocks of 4 KiB x 2^n, each at most a quarter of the segment; made at start, or when first needed
    others      each is one block for which segment 0 has no room, and may be kept for a later block of about this size
    reserve     has small blocks when segment 0 is full; it is not counted in the arena's size

Each lease has one block, whose offset in the segment is a multiple of 4096 bytes. A lease's key is (segment, offset,
generation). Each lease of an arena has a new generation, so a key that is wrong or is sent twice frees no block of another
lease. Not thread-safe: only one thread may use an arena.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from tensord.shm import descriptors
from tensord.shm.errors import InvalidArgument, Unavailable
from tensord.shm.messages import Slice
from tensord.shm.segment import Segment

#: The alignment that XLA:CPU needs to use a tensor in place, or to write an output there.
ALIGNMENT = 64
#: The page size: every lease starts on a page.
BLOCK = 4096
_BLOCK_BITS = 12
_LARGE_STEP = 1 << 20
#: A small lease takes at most this part of segment 0; the reserve is this part of it.
_SMALL_PART, _RESERVE_PART = 64, 8

LeaseKey = tuple[int, int, int]
#: Segment, offset and size of a block.
_Block = tuple[int, int, int]
OnSegment = Callable[[Segment], None]


class Lease(msgspec.Struct, eq=False):
    """The right to use one block of an arena. The right ends with ``release``."""

    #: None: it was released.
    _arena: Arena | None
    place: Slice
    generation: int
    #: The writable memory of exactly ``place.byte_size`` bytes.
    view: memoryview
    #: How many bytes of the arena it occupies.
    block_size: int
    #: These belong to whoever lends the lease on: whom it counts for, and whether its content is still to come.
    holder: Any = None
    arriving: bool = False

    @property
    def key(self) -> LeaseKey:
        return (self.place.segment, self.place.offset, self.generation)

    def release(self) -> None:
        """Frees the block, so that the arena can use it again. Idempotent."""
        if self._arena is not None:
            self._arena.take_back(self)

    def __repr__(self) -> str:
        state = "released" if self._arena is None else "on loan"
        return f"<Lease {self.place.segment}:{self.place.offset}+{self.place.byte_size} #{self.generation} {state}>"


@functools.lru_cache(1024)
def taken_by(segment: int, byte_size: int) -> int:
    """Returns the size in bytes of the block that an arena allocates for a lease of ``byte_size`` bytes.

    ``segment`` is the number of the block's segment. Sizes are rounded up to a power of two, at least 4096, in segment 0, and
    to MiB in others. A block in the reserve is smaller. A kept segment that is used again may be twice as large.
    """
    if segment == 0:
        return BLOCK << max(0, (byte_size - 1).bit_length() - _BLOCK_BITS)
    return -(-byte_size // _LARGE_STEP) * _LARGE_STEP


class Budget:
    """Limits how many bytes several arenas have together. Only the thread that owns the arenas may use it."""

    def __init__(self, max_byte_size: int) -> None:
        self.max_byte_size = max_byte_size
        #: Bytes of all segments of all of them.
        self.used = 0
        #: Counts leases that came back to any of them.
        self.returned = 0

    @property
    def share(self) -> int:
        """Returns how many bytes one arena may have, even if all arenas together exceed the limit. In this class it is 0."""
        return 0

    def take(self, byte_size: int, held: int = 0) -> bool:
        """Reserves ``byte_size`` bytes for a new segment of an arena, which has ``held`` bytes so far. Returns True on success.

        Returns False if all arenas together would exceed ``self.max_byte_size`` and this arena would exceed ``self.share``.
        """
        while self.used + byte_size > self.max_byte_size and not self.reclaim():
            if held + byte_size > self.share:
                return False
            break
        self.used += byte_size
        return True

    def give(self, byte_size: int) -> None:
        """Ends the reservation of ``byte_size`` bytes. Call it when a segment is closed."""
        self.used -= byte_size
        self.returned += 1

    def reclaim(self) -> bool:
        """Closes nothing and returns False. A subclass may instead close an unused segment of one arena and return True."""
        return False


class Arena:
    """Shared memory for tensors, made of segments. Only the process that owns the arena allocates in it.

    Args:
      byte_size: the number of bytes of segment 0. It is rounded up to a power of two.
      max_byte_size: the most bytes that all segments may have together, not counting one extra segment for small blocks.
      keep_byte_size: how many bytes of unused large segments are kept for later leases. A large segment is one block.
      on_segment: called with every new segment, if not None.
      lazy: True to make segment 0 when it is first needed, or False to make it at once.
      budget: limits several arenas together, if not None. ``lazy`` must then be True.
    """

    def __init__(
        self,
        byte_size: int,
        max_byte_size: int,
        keep_byte_size: int,
        on_segment: OnSegment | None = None,
        lazy: bool = False,
        budget: Budget | None = None,
    ) -> None:
        first = self._first = 1 << max(byte_size - 1, BLOCK * 4 - 1).bit_length()
        self._buddies = Buddies(first)
        self._on_segment = on_segment
        self._budget = budget
        self._segments: dict[int, Segment] = {}
        if not lazy:
            self._make(0, first)
        self._next_segment = 1
        #: Leases up to this size lie in segment 0, where it has room.
        self.shared_byte_size = self._buddies.largest
        #: Leases up to this size are small: they may use the reserve.
        self.small_byte_size = first // _SMALL_PART
        self._reserve_byte_size = max(first // _RESERVE_PART, BLOCK * 4)
        #: The number of the reserve segment and its blocks; None until it is needed.
        self._reserve: tuple[int, Buddies] | None = None
        #: Large segments that no lease uses, oldest first.
        self._free_large: list[int] = []
        self._leases: dict[tuple[int, int], Lease] = {}
        self._generation = 0
        self._max_byte_size = max(max_byte_size, first)
        self._keep_byte_size = keep_byte_size
        self._byte_size = first
        #: Counts closed segments, so that lanes notice a closure by one comparison.
        self.closures = 0
        #: Counts leases that came back, so that who waits for room looks for it only when there may be some.
        self.returned = 0
        #: After a loan that found no room: True if the budget was exhausted, False if ``max_byte_size`` was reached.
        self.over_budget = False

    def loan(self, byte_size: int) -> Lease | None:
        """Allocates a block of at least ``byte_size`` bytes. Returns its lease, or None if the arena has no room now.

        Raises InvalidArgument if the block would not even fit into an empty arena. Raises Unavailable if the host has no memory
        or this process no file descriptor left.
        """
        block: _Block | None = None
        if byte_size <= self._buddies.largest:
            order = max(0, (byte_size - 1).bit_length() - _BLOCK_BITS)
            made = 0 in self._segments or self._make(0, self._first)
            offset = self._buddies.take(order) if made else None
            if offset is not None:
                block = 0, offset, BLOCK << order
            elif byte_size <= self.small_byte_size:
                block = self._take_reserved(order)
        block = block or self._take_large(byte_size)
        if block is None:
            return None
        segment, offset, block_size = block
        self._generation += 1
        view = self._segments[segment].view[offset : offset + byte_size]
        lease = Lease(self, Slice(segment, offset, byte_size), self._generation, view, block_size)
        self._leases[segment, offset] = lease
        return lease

    def take_back(self, lease: Lease) -> None:
        """Frees the block of a lease. The lease must not be used any more. Idempotent."""
        if lease._arena is None:
            return
        lease._arena = None
        place = lease.place
        if self._leases.pop((place.segment, place.offset), None) is None:
            return  # the arena was closed meanwhile
        lease.view = memoryview(b"")
        self.returned += 1
        if self._budget is not None:
            self._budget.returned += 1
        if place.segment == 0:
            self._buddies.give(place.offset, lease.block_size)
            return
        if self._reserve is not None and place.segment == self._reserve[0]:
            self._reserve[1].give(place.offset, lease.block_size)
            return
        self._free_large.append(place.segment)
        while sum(self._segments[n].byte_size for n in self._free_large) > self._keep_byte_size:
            self._close_segment(self._free_large.pop(0))

    def release(self, key: LeaseKey) -> bool:
        """Releases the lease that has this key. Returns False if there is no such lease."""
        return self.release_all((key,)) is None

    def release_all(self, keys: Sequence[LeaseKey]) -> LeaseKey | None:
        """Releases the leases that have these keys. Either all of them are released or none.

        Returns None if all are released. Otherwise it returns the first key that has no lease or is repeated.
        """
        leases: dict[LeaseKey, Lease] = {}
        for key in keys:
            lease = self._leases.get(key[:2])
            if lease is None or lease.generation != key[2] or key in leases:
                return key
            leases[key] = lease
        for lease in leases.values():
            self.take_back(lease)
        return None

    @property
    def segments(self) -> dict[int, Segment]:
        """Returns the open segments by number."""
        return self._segments

    def statistics(self) -> dict[str, int]:
        """Returns sizes in bytes, such as ``leased_byte_size``, and counts, such as ``leases``, by name."""
        return {
            "byte_size": self._byte_size,
            "max_byte_size": self._max_byte_size,
            "segments": len(self._segments),
            "leases": len(self._leases),
            "leased_byte_size": self._leased_byte_size(),
            "free_large_segments": len(self._free_large),
        }

    def describe_full(self, byte_size: int) -> str:
        """Returns the error text for a request that has waited too long for ``byte_size`` free bytes of this arena."""
        used = self._leased_byte_size()
        return f"no room for {byte_size} bytes in the request arena: {used} of {self._max_byte_size} are in use"

    def close(self) -> None:
        """Closes every segment. No lease can be used any more."""
        for segment in self._segments.values():
            if self._budget is not None:
                self._budget.give(segment.byte_size)
            segment.close()
        self._segments.clear()
        self._leases.clear()
        self._free_large.clear()

    @property
    def held_byte_size(self) -> int:
        """Returns how many bytes the open segments have together."""
        return sum(segment.byte_size for segment in self._segments.values())

    def _leased_byte_size(self) -> int:
        return sum(lease.block_size for lease in self._leases.values())

    def _take_large(self, byte_size: int) -> _Block | None:
        """Allocates a whole segment for one lease. Returns the segment as a block, or None if the arena has no room now."""
        size = max(1, -(-byte_size // _LARGE_STEP)) * _LARGE_STEP
        if size > self._max_byte_size - self._first and byte_size > self._buddies.largest:
            limit = max((self._max_byte_size - self._first) // _LARGE_STEP * _LARGE_STEP, self._buddies.largest)
            raise InvalidArgument(
                f"{byte_size} bytes cannot fit into an arena whose largest place is {limit} bytes (arenas.max_byte_size; of "
                "answers on a client's lane clients.response_byte_size)"
            )
        # The smallest free segment that is large enough is taken, unless it would waste more than it holds.
        fitting = [n for n in self._free_large if size <= self._segments[n].byte_size <= 2 * size]
        if fitting:
            number = min(fitting, key=lambda n: self._segments[n].byte_size)
            self._free_large.remove(number)
            return number, 0, self._segments[number].byte_size
        while self._byte_size + size > self._max_byte_size and self._free_large:
            self._close_segment(self._free_large.pop(0))
        if self._byte_size + size > self._max_byte_size:
            self.over_budget = False
            return None
        number = self._next_segment
        if not self._make(number, size):
            return None
        self._next_segment += 1
        self._byte_size += size
        return number, 0, size

    def _take_reserved(self, order: int) -> _Block | None:
        if self._reserve is None:
            number = self._next_segment
            if not self._make(number, self._reserve_byte_size):
                return None
            self._next_segment += 1
            self._reserve = number, Buddies(self._reserve_byte_size)
        number, buddies = self._reserve
        offset = buddies.take(order)
        return None if offset is None else (number, offset, BLOCK << order)

    def _make(self, number: int, byte_size: int) -> bool:
        """Creates segment ``number`` and returns True. Returns False if the arena's ``Budget`` does not allow so many bytes."""
        if self._budget is not None and not self._budget.take(byte_size, self.held_byte_size):
            self.over_budget = True
            return False
        try:
            segment = self._segments[number] = Segment.create(byte_size)
        except BaseException:
            if self._budget is not None:
                self._budget.give(byte_size)
            raise
        if self._on_segment is not None:
            self._on_segment(segment)
        return True

    def trim(self) -> bool:
        """Closes an unused segment that was made for one lease and returns True. Returns False if no such segment exists."""
        if not self._free_large:
            return False
        self._close_segment(self._free_large.pop(0))
        return True

    def _close_segment(self, number: int) -> None:
        segment = self._segments.pop(number)
        self._byte_size -= segment.byte_size
        if self._budget is not None:
            self._budget.give(segment.byte_size)
        segment.close()
        self.closures += 1

    def __repr__(self) -> str:
        return f"<Arena {self._byte_size}/{self._max_byte_size} bytes, {len(self._leases)} leases>"


class Buddies:
    """A buddy allocator. It hands out blocks of ``BLOCK`` x 2^n bytes from one range of memory."""

    def __init__(self, byte_size: int) -> None:
        self._orders = (byte_size // BLOCK).bit_length()
        #: Free blocks of each order, joined as far as they can be; and those released since.
        self._free: list[dict[int, None]] = [{} for _ in range(self._orders)]
        self._free[-1][0] = None
        self._given: list[list[int]] = [[] for _ in range(self._orders)]
        #: Larger requests get a segment of their own: one of them must not be able to empty the shared segment.
        self.largest = byte_size // 4

    def take(self, order: int) -> int | None:
        """Allocates ``BLOCK`` x 2^order bytes. Returns their offset in bytes, or None if no free block is large enough."""
        given = self._given[order]
        if given:
            # The block freed last is taken first: its pages are in the cache and in both page tables.
            return given.pop()
        offset = self._split(order)
        if offset is None and any(self._given):
            self._join()
            offset = self._split(order)
        return offset

    def give(self, offset: int, block_size: int) -> None:
        """Frees the block of ``block_size`` bytes at ``offset``."""
        # It is joined with its buddy only when no other block is large enough: most often the next block has the same size.
        self._given[(block_size // BLOCK).bit_length() - 1].append(offset)

    def _split(self, order: int) -> int | None:
        """Takes ``BLOCK`` x 2^order bytes from a free block. Returns their offset, or None if no free block is large enough."""
        for larger in range(order, self._orders):
            if self._free[larger]:
                offset, _ = self._free[larger].popitem()
                while larger > order:
                    larger -= 1
                    self._free[larger][offset + (BLOCK << larger)] = None
                return offset
        return None

    def _join(self) -> None:
        """Joins each released block with its buddy, if the buddy is free too."""
        for least, given in enumerate(self._given):
            for offset in given:
                order = least
                while order < self._orders - 1:
                    buddy = offset ^ (BLOCK << order)
                    if buddy not in self._free[order]:
                        break
                    del self._free[order][buddy]
                    offset = min(offset, buddy)
                    order += 1
                self._free[order][offset] = None
            given.clear()


class ArenaMap:
    """Maps the segments of another process's arena in this process."""

    #: More segments than any configured arena needs; a peer that announces more is broken or hostile.
    MAX_SEGMENTS = 4096

    def __init__(self, on_segment: OnSegment | None = None, writable: bool = False) -> None:
        """Starts with no segment mapped. ``on_segment``, if not None, is called with each segment when it is mapped.

        If ``writable`` is True, pages are mapped writable, as page-locking for a GPU needs. Views are read-only nevertheless.
        """
        self._segments: dict[int, Segment] = {}
        #: Announced segments that could not be mapped; they will be announced again.
        self.refused: set[int] = set()
        self._writable = writable
        self._on_segment = on_segment

    def open(self, segment: int, byte_size: int, fd: int) -> None:
        """Maps a segment that the arena's owner has announced. Takes ownership of ``fd``, also if it raises.

        Raises InvalidArgument if the segment is already mapped, is not sealed or has another size, or if there are more than
        ``MAX_SEGMENTS`` segments. Raises Unavailable if the segment cannot be mapped now.
        """
        attached = Segment.attach(fd, byte_size, self._writable)
        if segment in self._segments or len(self._segments) >= self.MAX_SEGMENTS:
            attached.close()
            raise InvalidArgument(f"segment {segment} is announced twice or is one of more than {self.MAX_SEGMENTS}")
        self._segments[segment] = attached
        self.refused.discard(segment)
        if self._on_segment is not None:
            self._on_segment(attached)

    def refuse(self, segment: int) -> None:
        """Makes ``view`` raise Unavailable for a segment, until ``open`` succeeds for it."""
        self.refused.add(segment)
        if len(self.refused) > self.MAX_SEGMENTS:
            raise InvalidArgument(f"more than {self.MAX_SEGMENTS} segments could not be mapped")

    def close_segment(self, segment: int) -> None:
        """Unmaps the segment with this number, if it is mapped."""
        self.refused.discard(segment)
        gone = self._segments.pop(segment, None)
        if gone is not None:
            gone.close()

    def view(self, place: Slice) -> memoryview:
        """Returns the range ``place`` of a segment as a read-only view.

        Raises Unavailable if the last call for the segment was ``refuse``. Raises InvalidArgument if the range is not inside
        the segment, or if the segment is not mapped for another reason.
        """
        segment = self._segments.get(place.segment)
        if segment is None:
            if place.segment in self.refused:
                raise Unavailable(
                    f"{place.byte_size} bytes of a tensor cannot be reached: a process of the server had as many files open as "
                    f"it may, {descriptors.limit()}"
                )
            raise InvalidArgument(f"segment {place.segment} is not open")
        offset, byte_size = place.offset, place.byte_size
        end = offset + byte_size
        if offset < 0 or byte_size < 0 or end > segment.byte_size:
            raise InvalidArgument(f"offset {offset} and {byte_size} bytes leave a segment of {segment.byte_size} bytes")
        return segment.view[offset:end]

    def close(self) -> None:
        for number in list(self._segments):
            self.close_segment(number)
