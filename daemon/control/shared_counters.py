"""Holds counters of the fronts of one protocol in shared memory, which these fronts and the supervisor map.

Each front reads how many client connections the other fronts have. So the fronts share the connections about equally, and keep
one limit for all connections. The memory is nameless and sealed against resizing. It has a row of 32 u64 words for each front:

    words 0 and 1          whether the front accepts connections (0 or 1); how many client connections the front has
    words 2 to 4           prepared requests: how many have a number now, how many ever got one, how many ever lost theirs
    from word 5            refused requests by reason, in the order of ``tensord.daemon.control.refusals.OF_FRONTS``;
                           then answers by status code, in the order of ``CODES`` in this module
    the last two words     how many records the supervisor has sent to the front; how many traces the front has dropped

The supervisor writes how many records it has sent. A front writes all other words of its row. When a front has died, the
supervisor sets words 0 to 2 and the number of sent records to 0 before a new front gets the row.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import compress

from tensord.config.options import MAX_PROCESSES
from tensord.daemon.control.refusals import OF_FRONTS
from tensord.shm.refusals import Refusal

_WORDS = 32
#: The offsets in a row of the counts of prepared requests, of refused requests, and of answers.
_PREPARED, _REFUSED = 2, 5
_CODES = _REFUSED + len(OF_FRONTS)
#: The indices of the number of records that were sent to the front, and of dropped traces, which is the last.
_SENT, _TRACES = _WORDS - 2, _WORDS - 1
#: The codes of each protocol that are counted, good answers first; the last one stands for all others.
CODES = {
    "http": (
        *("200", "400", "403", "404", "405", "408", "409", "413", "431"),
        *("500", "501", "503", "504", "505", "other"),
    ),
    "grpc": (
        *("OK", "CANCELLED", "UNKNOWN", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "NOT_FOUND", "ALREADY_EXISTS"),
        *("PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION", "ABORTED", "OUT_OF_RANGE"),
        *("UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS", "UNAUTHENTICATED", "other"),
    ),
}
_BYTE_SIZE = MAX_PROCESSES * _WORDS * 8
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


@dataclass(frozen=True, slots=True)
class FrontCounts:
    """The counts in one row, of all fronts that ever had this row."""

    #: Client connections now.
    connections: int
    #: Prepared requests that have a number now; that were given one, and that were evicted for others, ever.
    prepared_requests: int
    prepared_numbered: int
    prepared_evicted: int
    #: Requests that were refused, by reason, ever.
    refused: Mapping[Refusal, int]
    #: Code -> answers, ever.
    answers: Mapping[str, int]
    #: Traces that were dropped, ever.
    dropped_traces: int


class SharedCounters:
    """Counters of the fronts of one protocol in shared memory, with a row for each front."""

    def __init__(self, fd: int) -> None:
        """Maps the memory that ``create`` made, and owns the descriptor ``fd``.

        Raises OSError or ValueError if ``fd`` is no descriptor of such memory.
        """
        self.fd = fd
        self._mapping = mmap.mmap(fd, _BYTE_SIZE, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        self._words = memoryview(self._mapping).cast("Q")
        #: The first and second word of each row.
        self._serves, self._connections = self._words[::_WORDS], self._words[1::_WORDS]

    @classmethod
    def create(cls) -> SharedCounters:
        """Creates the shared memory with all counters 0. Raises OSError if no memory or no file descriptor is free."""
        fd = os.memfd_create("tensord-counters", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.posix_fallocate(fd, 0, _BYTE_SIZE)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            return cls(fd)
        except OSError:
            os.close(fd)
            raise

    def front(self, row: int) -> FrontCounters:
        """Returns the counters of the front to which row ``row`` belongs. Only this front may call methods that change them."""
        return FrontCounters(self._words, self._serves, self._connections, row)

    def connections(self, row: int) -> int:
        """Returns the number of client connections of the front to which row ``row`` belongs."""
        return self._words[row * _WORDS + 1]

    def counts(self, row: int, protocol: str) -> FrontCounts:
        """Returns the counts in row ``row``. ``protocol``: "http" or "grpc"."""
        words = self._words[row * _WORDS : (row + 1) * _WORDS].tolist()
        return FrontCounts(
            words[1],
            words[_PREPARED],
            words[_PREPARED + 1],
            words[_PREPARED + 2],
            dict(zip(OF_FRONTS, words[_REFUSED:], strict=False)),
            dict(zip(CODES[protocol], words[_CODES:], strict=False)),
            words[_TRACES],
        )

    def note_sent(self, row: int, count: int) -> None:
        """Stores that the supervisor has sent ``count`` records to a front so far. ``row``: the front's row in these counters."""
        self._words[row * _WORDS + _SENT] = count

    def clear(self, row: int) -> None:
        """Sets a dead front's current counts, such as connections, to 0 in row ``row``. Counts that only grow stay."""
        at = row * _WORDS
        self._words[at] = self._words[at + 1] = self._words[at + _PREPARED] = self._words[at + _SENT] = 0

    def close(self) -> None:
        """Unmaps the shared memory of these counters and closes its file descriptor. Must not be called twice."""
        for view in (self._serves, self._connections, self._words):
            view.release()
        self._mapping.close()
        os.close(self.fd)


class FrontCounters:
    """Counters of one front in shared memory. The front changes only its own counters, and reads the other fronts' counters."""

    def __init__(self, words: memoryview, serves: memoryview, connections: memoryview, row: int) -> None:
        self._words = words
        self._serves = serves
        self._connections = connections
        self._row = row
        self._at = row * _WORDS
        #: How many records of the supervisor this front has read.
        self.read = 0

    def is_behind(self) -> bool:
        """Returns whether the supervisor has sent this front a record that this front has not read yet."""
        return self.read < int(self._words[self._at + _SENT])

    def serve(self, serving: bool) -> None:
        """Tells the other fronts of the same protocol whether this front accepts client connections."""
        self._serves[self._row] = serving

    def count(self, connections: int) -> None:
        """Sets how many client connections this front has."""
        self._connections[self._row] = connections

    def note_number(self, numbered: int, evicted: int) -> None:
        """Counts a prepared request that got a number.

        ``numbered``: how many prepared requests of this front have a number now. ``evicted``: how many others lost their number
        to make room for this one.
        """
        at = self._at + _PREPARED
        self._words[at] = numbered
        self._words[at + 1] += 1
        self._words[at + 2] += evicted

    def refuse(self, refusal: Refusal) -> None:
        """Counts a request that this front refuses."""
        self._words[self._at + _REFUSED + OF_FRONTS.index(refusal)] += 1

    def drop_traces(self, count: int) -> None:
        """Counts traces that this front drops."""
        self._words[self._at + _TRACES] += count

    @property
    def codes(self) -> tuple[memoryview, int]:
        """Returns the counters of all fronts as 64-bit words, and the index at which this front's counters by status code begin.

        The counters by status code are in the order of ``CODES``.
        """
        return self._words, self._at + _CODES

    def own(self) -> int:
        """Returns how many client connections this front has open."""
        return self._connections[self._row]

    def total(self) -> int:
        """Returns how many client connections are open at all fronts of this front's protocol."""
        return sum(self._connections.tolist())

    def least(self) -> int | None:
        """Returns the smallest number of client connections among the other fronts of this front's protocol.

        Fronts that accept no connections do not count. Returns None if no other front accepts connections.
        """
        serves = self._serves.tolist()
        serves[self._row] = 0
        return min(compress(self._connections.tolist(), serves)) if any(serves) else None
