"""Tells the process at the other end of a lane which segments an arena has.

first use ─▶ SegmentOpened with its descriptor ─▶ mapped there ─▶ closed here ─▶ SegmentClosed
                 ▲                                  ╰─ SegmentRefused: no descriptor is left there ─╮
                 ╰───────────────────────────────── before its next use ────────────────────────────╯
"""

from __future__ import annotations

from tensord.shm import descriptors
from tensord.shm.arena import Arena
from tensord.shm.channel import Channel
from tensord.shm.messages import SegmentClosed, SegmentOpened


class Announcer:
    """Tells the process at the other end of a lane (a connection to a worker) which segments an arena has.

    The record SegmentOpened is queued for that process before a segment's first use, SegmentClosed once it is closed.
    """

    def __init__(self, channel: Channel, arena: Arena, writable: bool) -> None:
        self._channel = channel
        self._arena = arena
        self._writable = writable
        #: The segments that the peer knows.
        self.announced: set[int] = set()
        #: The closures that the peer was told of.
        self.closures = arena.closures

    def announce(self, segment: int) -> None:
        """Queues a SegmentOpened with the segment's descriptor for the peer, unless the peer knows the segment already.

        Raises Unavailable: this process has no file descriptor left to send.
        """
        if segment not in self.announced:
            opened = self._arena.segment(segment)
            with descriptors.needed("sending an arena segment"):
                self._channel.put(SegmentOpened(segment, opened.byte_size), opened.share(self._writable))
            self.announced.add(segment)

    def refused(self, segment: int) -> None:
        """Notes that the peer could not map a segment: the next ``announce`` of it queues a SegmentOpened again."""
        self.announced.discard(segment)

    def is_published(self, segment: int) -> bool:
        """Returns whether the peer knows this segment and which segments are closed, so that no record on segments is due."""
        return segment in self.announced and self.closures == self._arena.closures

    @property
    def behind(self) -> bool:
        """Returns whether the arena has closed segments that the peer was not told of and may still have mapped."""
        return self.closures != self._arena.closures

    def withdraw_closed(self) -> None:
        """Queues a SegmentClosed for each closed segment that the peer knows, so that the peer unmaps it and frees its memory."""
        self.closures = self._arena.closures
        for gone in self.announced - self._arena.segments.keys():
            self._channel.put(SegmentClosed(gone))
            self.announced.discard(gone)
