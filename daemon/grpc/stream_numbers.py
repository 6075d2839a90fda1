"""Tracks the stream identifiers of a connection: which are not used yet, and how the streams ended that are no longer open.

A client uses odd identifiers, each one once, in rising order. What a frame on a stream that is not open means depends on how
the stream ended. Of the streams that only one side has ended, only the latest are remembered.
Does no I/O. Source: RFC 9113, sections 5.1 and 5.1.1.
"""

from __future__ import annotations

import enum
from collections import deque

#: The most streams that are remembered which ended otherwise, and the most gaps.
_MAX_REMEMBERED = 256


class Past(enum.Enum):
    """Says why a stream is not open: it was never opened, or how it ended."""

    #: Nobody has used it yet.
    IDLE = "idle"
    #: A higher one was used first, so it never can be.
    PASSED_OVER = "passed over"
    #: Both sides ended it.
    CLOSED = "closed"
    #: The client reset it: it sends nothing more.
    RESET = "reset"
    #: We ended it before the client had: what the client sent before it knew of that may still come.
    CUT = "cut"


class StreamNumbers:
    """Remembers which stream identifiers of one connection were used, and how those streams have ended."""

    __slots__ = ("_ended", "_forgotten", "_gaps", "next")

    def __init__(self) -> None:
        #: The lowest number that was not used yet. Whoever uses exactly this one adds two.
        self.next = 1
        self._ended: dict[int, Past] = {}
        #: The highest number that was in it and is not any more.
        self._forgotten = 0
        #: First and last number of those passed over.
        self._gaps: deque[tuple[int, int]] = deque(maxlen=_MAX_REMEMBERED)

    @property
    def last(self) -> int:
        """Returns the highest stream identifier that was used, or 0."""
        return max(0, self.next - 2)

    def use(self, number: int) -> None:
        """Notes that a new stream uses ``number``, which is odd and above all used numbers. Lower numbers become unusable."""
        if number > self.next:
            self._gaps.append((self.next, number - 2))
        self.next = number + 2

    def past(self, number: int) -> Past:
        """Returns why the stream ``number`` is not open.

        Returns ``Past.CUT`` for a stream that ended too long ago to be remembered. The caller must ignore the stream's frames.
        """
        if not number & 1 or number >= self.next:
            return Past.IDLE
        ended = self._ended.get(number)
        if ended is not None:
            return ended
        if any(first <= number <= last for first, last in self._gaps):
            return Past.PASSED_OVER
        return Past.CUT if number <= self._forgotten else Past.CLOSED

    def remember(self, number: int, past: Past) -> None:
        """Remembers how the stream ``number`` has ended: RESET by the client, or CUT by the server."""
        self._ended[number] = past
        if len(self._ended) > _MAX_REMEMBERED:
            oldest = next(iter(self._ended))
            del self._ended[oldest]
            self._forgotten = max(self._forgotten, oldest)

    def __repr__(self) -> str:
        return f"<StreamNumbers next={self.next} remembered={len(self._ended)} gaps={len(self._gaps)}>"
