"""Holds counters of the fronts of a protocol in shared memory: one page that all of these fronts and the supervisor map.

Whichever front is quickest accepts a client's connection. So fronts read each other's counts, to have about as many connections
each and to keep a limit for all together. The memory has no name and is sealed against resizing. It has a row of 32 u64 words
for each front:

    the first words        serves (0 or 1), connections, prepared requests: with a number now, ever numbered, ever evicted,
                           refused requests by reason (``tensord.daemon.control.refusals.OF_FRONTS``),
                           answers by code (``CODES`` of its protocol)
    the last two words     how many records the supervisor has sent to the front, dropped traces

A row is four cache lines. Its front writes it, except the number of sent records, which the supervisor writes. When a front has
died, the supervisor sets the counts of its present state to 0 before a new front gets the row. The other counts go on.
"""

from __future__ import annotations

import fcntl
import mmap
import os
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
        """Returns the counters of the front in row number ``row``, which only that front may change."""
        return FrontCounters(self._words, self._serves, self._connections, row)

    def connections(self, row: int) -> int:
        """Returns how many client connections the front in row number ``row`` has."""
        return self._words[row * _WORDS + 1]

    def prepared_requests(self, row: int) -> tuple[int, int, int]:
        """Returns three counts of prepared requests of the front whose counters are in row ``row``.

        The first counts requests that have a number now. The second counts requests that ever got a number. The third counts
        requests that lost their number to make room for other requests.
        """
        at = row * _WORDS + _PREPARED
        return self._words[at], self._words[at + 1], self._words[at + 2]

    def refused(self, row: int) -> dict[Refusal, int]:
        """Returns reason -> number of requests that the front with row ``row``, and its predecessors in this row, refused."""
        at = row * _WORDS + _REFUSED
        return {refusal: self._words[at + i] for i, refusal in enumerate(OF_FRONTS)}

    def answers(self, row: int, protocol: str) -> dict[str, int]:
        """Returns status code -> number of answers of the front with row ``row``, and of fronts that had this row before."""
        at = row * _WORDS + _CODES
        return {code: self._words[at + i] for i, code in enumerate(CODES[protocol])}

    def dropped_traces(self, row: int) -> int:
        """Returns how many traces the front with row ``row``, and fronts that had this row before, have dropped."""
        return self._words[row * _WORDS + _TRACES]

    def note_sent(self, row: int, count: int) -> None:
        """Stores that the supervisor has sent ``count`` records to a front so far. ``row``: the front's row in these counters."""
        self._words[row * _WORDS + _SENT] = count

    def clear(self, row: int) -> None:
        """Sets the counts of a dead front's present state to 0, such as its connections. Counts that only grow stay."""
        at = row * _WORDS
        self._words[at] = self._words[at + 1] = self._words[at + _PREPARED] = self._words[at + _SENT] = 0

    def close(self) -> None:
        """Unmaps the memory and closes its file descriptor. Must be called once."""
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
        """Sets whether this front accepts connections. If so, fronts with more connections leave new ones to this front."""
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
        """Returns the smallest number of connections that another front of this protocol has.

        Returns None if no other front of this protocol accepts connections.
        """
        serves = self._serves.tolist()
        serves[self._row] = 0
        return min(compress(self._connections.tolist(), serves)) if any(serves) else None
