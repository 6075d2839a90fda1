"""Histograms of how long requests to a model version took: one for each protocol and each kind of duration, such as queue time.

All histograms of a version are in one array, ordered by PROTOCOLS and then by KINDS. Each histogram has, for each upper bound,
the number of durations between the bound below and this bound. Then come the number of durations above all bounds, and the sum
of all durations in ns. The C code in ``workers/native/_runs.c`` writes to the same array.
"""

from __future__ import annotations

import operator
from array import array
from bisect import bisect_left
from collections.abc import Mapping, Sequence

#: How requests reach a worker; the order is that of the array, and of the numbers in ``workers/native/_native.h``.
PROTOCOLS = ("http", "grpc", "lane")
#: The times that are measured: from a request's arrival to its answer; its wait in queues; its run, from the inputs to the placed
#: outputs; and, of models with several responses, from its arrival to the first of them.
KINDS = ("request", "queue", "compute", "first_response")
REQUEST, QUEUE, COMPUTE, FIRST_RESPONSE = range(len(KINDS))
#: Protocol -> counts and sums of each kind, one behind the other as in the array. Protocols without requests are not in it.
Counted = Mapping[str, tuple[int, ...]]


class Durations:
    """Histograms of how long requests to a model version took: one for each protocol and kind of duration.

    ``buckets`` are the histograms' upper bounds in seconds, ascending. Not thread-safe.
    """

    __slots__ = ("_row", "bounds", "counts")

    def __init__(self, buckets: Sequence[float]) -> None:
        #: Upper bounds in ns.
        self.bounds = array("Q", [round(bound * 1e9) for bound in buckets])
        self._row = len(self.bounds) + 2
        self.counts = array("Q", bytes(8 * len(PROTOCOLS) * len(KINDS) * self._row))

    def add(self, protocol: int, kind: int, ns: int) -> None:
        """Counts one duration in ns. ``protocol`` and ``kind`` are indices in PROTOCOLS and KINDS."""
        ns = max(0, ns)
        counts, at = self.counts, (protocol * len(KINDS) + kind) * self._row
        counts[at + bisect_left(self.bounds, ns)] += 1
        counts[at + self._row - 1] += ns

    def ran(self, protocol: int, request_ns: int, queue_ns: int, compute_ns: int) -> None:
        """Counts a request's total time, queue time and compute time. ``protocol`` is the protocol's index in PROTOCOLS."""
        counts, bounds, row, at = self.counts, self.bounds, self._row, protocol * len(KINDS) * self._row
        counts[at + bisect_left(bounds, request_ns)] += 1
        counts[at + row - 1] += request_ns
        at += row
        counts[at + bisect_left(bounds, queue_ns)] += 1
        counts[at + row - 1] += queue_ns
        at += row
        counts[at + bisect_left(bounds, compute_ns)] += 1
        counts[at + row - 1] += compute_ns

    def counted(self) -> Counted:
        """Returns the counts and sums of each protocol's histograms, by protocol. Protocols without requests are absent."""
        size = len(KINDS) * self._row
        found: dict[str, tuple[int, ...]] = {}
        for number, protocol in enumerate(PROTOCOLS):
            counts = tuple(self.counts[number * size : (number + 1) * size])
            if any(counts):
                found[protocol] = counts
        return found

    def __repr__(self) -> str:
        return f"<Durations of {len(self.bounds)} buckets>"


def total(one: Counted, other: Counted) -> Counted:
    """Adds two results of ``Durations.counted`` and returns the sums by protocol. All histograms must have the same bounds."""
    found = dict(one)
    for protocol, counts in other.items():
        before = found.get(protocol)
        found[protocol] = counts if before is None else tuple(map(operator.add, before, counts))
    return found
