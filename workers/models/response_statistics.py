"""Counts a model version's responses by their number in their request, for Triton's statistics."""

from __future__ import annotations

from typing import Any

import numpy as np

from tensord.shm.arrays import Array

#: Responses of a request that are counted by their number.
MAX_RESPONSES = 1024


class Duration:
    """Counts how often something happened, and how long it took."""

    __slots__ = ("count", "ns")

    def __init__(self) -> None:
        self.count = 0
        self.ns = 0

    def add(self, ns: int) -> None:
        self.count += 1
        self.ns += ns

    def to_dict(self) -> dict[str, int]:
        """Returns the entry in Triton's protocol."""
        return {"count": self.count, "ns": self.ns}


class ResponseStatistics:
    """Statistics of the responses of one number in their requests: 0 is each request's first."""

    __slots__ = ("cancel", "compute_infer", "compute_output", "empty_response", "fail", "success")

    def __init__(self) -> None:
        #: From the response before it, or from when the request began to run.
        self.compute_infer = Duration()
        #: Putting it into place.
        self.compute_output = Duration()
        self.success = Duration()
        self.fail = Duration()
        #: It had no outputs, or was no response but the mark that none comes any more.
        self.empty_response = Duration()
        #: Its request was given up before it came.
        self.cancel = Duration()

    def to_dict(self) -> dict[str, dict[str, int]]:
        """Returns the entry, in the order of Triton's protocol."""
        names = ("compute_infer", "compute_output", "success", "fail", "empty_response", "cancel")
        found: dict[str, Duration] = {name: getattr(self, name) for name in names}
        return {name: duration.to_dict() for name, duration in found.items()}


class ResponsesByNumber:
    """Response statistics of a model version by number; numbers from ``MAX_RESPONSES`` on are not counted."""

    def __init__(self) -> None:
        self._found: dict[int, ResponseStatistics] = {}
        #: Of those that were counted together: how many, and the ns from the response before each.
        self._counts = self._waited_ns = np.zeros(0, np.int64)

    def of(self, number: int) -> ResponseStatistics | None:
        """Returns the statistics of a number, or None where it is not counted."""
        if number >= MAX_RESPONSES:
            return None
        return self._found.get(number) or self._found.setdefault(number, ResponseStatistics())

    def add(self, first: int, waited_ns: Array) -> None:
        """Counts good responses of one request, from ``first`` on, placed in no time. ``waited_ns``: INT64[count]."""
        if not len(self._counts):
            self._open()
        which = slice(first, first + len(waited_ns))
        self._counts[which] += 1
        self._waited_ns[which] += waited_ns[: max(0, MAX_RESPONSES - first)]

    def add_at_once(self, first: int, count: int, waited_ns: int) -> None:
        """Counts ``count`` good responses that came together, ``waited_ns`` after the one before them."""
        if not len(self._counts):
            self._open()
        self._counts[first : first + count] += 1
        self._waited_ns[first : first + 1] += waited_ns

    def _open(self) -> None:
        self._counts, self._waited_ns = np.zeros((2, MAX_RESPONSES), np.int64)

    def to_dict(self) -> dict[str, Any]:
        """Returns ``response_stats`` of Triton's protocol."""
        for number in np.flatnonzero(self._counts).tolist():
            counted = self.of(number)
            assert counted is not None
            count, ns = int(self._counts[number]), int(self._waited_ns[number])
            for duration in (counted.compute_infer, counted.success):
                duration.count += count
                duration.ns += ns
            counted.compute_output.count += count
        self._counts[:], self._waited_ns[:] = 0, 0
        return {str(number): counted.to_dict() for number, counted in sorted(self._found.items())}

    def __repr__(self) -> str:
        return f"<ResponsesByNumber {len(self._found)} numbers>"
