"""Counts the requests that are refused with 503, by reason, for metrics and the log.

A worker counts its refusals for each model version (``tensord.shm.figures``). Fronts count theirs in shared counters
(``tensord.daemon.control.shared_counters``). Each process logs at most one line a minute about them.
"""

from __future__ import annotations

import enum
import logging
from collections import Counter

_log = logging.getLogger(__name__)
#: Waiting so long gathers the refusals that come with the first one into its line.
_GATHER_NS = 1_000_000_000
_INTERVAL_NS = 60_000_000_000
#: The most models that one line names; others are only counted.
_MAX_ENTRIES = 10


class Refusal(enum.Enum):
    """A reason why a request is refused with 503, such as a full queue. The value is a label in metrics and the log."""

    #: The queue of the model on this worker is full.
    QUEUE_FULL = "queue_full"
    #: The request waited in the queue for longer than the model's policy, or its client, lets it.
    QUEUE_TIMEOUT = "queue_timeout"
    #: Too many other shapes of the model are being compiled.
    COMPILING = "compiling"
    #: The arena has no room for the answer: its front does not take what it is sent.
    ANSWER_ROOM = "answer_room"
    #: The front's arena has no room for the tensors.
    REQUEST_ROOM = "request_room"
    #: Bodies that have to be collected in ordinary memory exceed their limit.
    BODIES = "bodies"
    #: A front has as many requests in flight as it may have.
    IN_FLIGHT = "in_flight"
    #: No worker that serves the model was up in time.
    NO_WORKER = "no_worker"
    #: The client has not taken its answers, and holds its share of the arenas for them.
    ANSWERS_HELD = "answers_held"
    #: No answer came within ``requests.timeout``.
    NO_ANSWER = "no_answer"
    #: The daemon is being drained.
    DRAINING = "draining"


class RefusalLog:
    """Counts the requests that one process has refused, and logs the counts at most once a minute.

    Only one thread may use it. The thread must call ``settle``, which logs the counts, once CLOCK_MONOTONIC reaches ``due_ns``.
    """

    def __init__(self, what: str = "refused with 503") -> None:
        """Starts with no request counted. Each log line begins with ``what``."""
        self._what = what
        self._counts: Counter[tuple[str, str]] = Counter()
        #: The text that the first of them was answered with.
        self._example = ""
        self._others = 0
        self._began_ns = 0
        self._last_ns = -_INTERVAL_NS

    def note(self, model: str, why: str, now_ns: int, example: str = "") -> None:
        """Counts one refused request.

        Args:
          model: the model's name, or "" if it was not known yet.
          why: a value of ``Refusal``, or an error's code.
          now_ns: the time, in ns of CLOCK_MONOTONIC.
          example: the error's message. Each log line quotes the message of the first request that it counts.
        """
        if not self._counts:
            self._began_ns = now_ns
            self._example = example
        if (model, why) in self._counts or len(self._counts) < _MAX_ENTRIES:
            self._counts[model, why] += 1
        else:
            self._others += 1

    @property
    def due_ns(self) -> int | None:
        """Returns when to log the next line (CLOCK_MONOTONIC ns), or None if no request was refused since the last line."""
        return max(self._began_ns + _GATHER_NS, self._last_ns + _INTERVAL_NS) if self._counts else None

    def settle(self, now_ns: int) -> None:
        """Logs the counts and sets them to zero. Does nothing if the property ``due_ns`` is None or later than ``now_ns``."""
        due_ns = self.due_ns
        if due_ns is None or now_ns < due_ns:
            return
        listed = [
            f"{count} for model '{model}' ({why})" if model else f"{count} ({why})"
            for (model, why), count in self._counts.most_common()
        ]
        if self._others:
            listed.append(f"{self._others} others")
        seconds = max(1.0, (now_ns - self._began_ns) / 1e9)
        example = f"; the first: {self._example}" if self._example else ""
        _log.warning("%s in the last %.0f s: %s%s", self._what, seconds, ", ".join(listed), example)
        self._counts.clear()
        self._others = 0
        self._last_ns = now_ns

    def __repr__(self) -> str:
        return f"<RefusalLog {self._counts.total() + self._others} refused>"
