"""Turns each sampled request into a span of its client's trace, and hands ended traces to the supervisor, for a collector.

    sample ─▶ SpanIds ─▶ the request ─▶ EndedTrace ─▶ several at a time ─▶ the supervisor: ``span_exporter``

Ids are made here, because a worker and the log name them while the request runs. The supervisor does all other work for spans, so
that making and sending them costs the front's requests nothing. Source: W3C Trace Context.
"""

from __future__ import annotations

import asyncio
import logging
import random
import re
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from tensord.shm.control_records import EndedTrace, TracesEnded
from tensord.shm.messages import Timeline
from tensord.shm.seldom import Seldom

_log = logging.getLogger(__name__)
#: Traces that are handed over together, and seconds after which fewer are.
_TOGETHER = 64
_SECONDS = 0.5
_TRACEPARENT = re.compile(r"[ \t]*([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?[ \t]*")
_SAMPLED = 1
#: Has a function called in so many seconds.
Later = Callable[[float, Callable[[], None]], None]


@dataclass(frozen=True, slots=True)
class SpanIds:
    """Identifies a span by its trace id and span id, in hexadecimal digits as in W3C Trace Context."""

    trace_id: str
    span_id: str

    @classmethod
    def parse(cls, traceparent: str) -> SpanIds | None:
        """Returns the ids in a ``traceparent`` header; None: the client has not sampled the trace, or the header is malformed."""
        found = _TRACEPARENT.fullmatch(traceparent)
        if found is None:
            return None
        version, trace_id, span_id, flags, more = found.groups()
        if version == "ff" or (version == "00" and more) or not int(trace_id, 16) or not int(span_id, 16):
            return None
        return cls(trace_id, span_id) if int(flags, 16) & _SAMPLED else None

    @classmethod
    def within(cls, parent: SpanIds | None) -> SpanIds:
        """Makes the ids of a new span inside ``parent``; None: the span begins a new trace."""
        trace_id = f"{random.getrandbits(128) or 1:032x}" if parent is None else parent.trace_id
        return cls(trace_id, f"{random.getrandbits(64) or 1:016x}")


class Spans:
    """Hands the ended traces of a front or a worker to the supervisor, several at a time. Used in its loop only."""

    def __init__(self, hand_over: Callable[[TracesEnded], bool], later: Later | None = None) -> None:
        """Starts without traces.

        Args:
          hand_over: sends traces; returns False if it drops them because too much waits.
          later: has a function called in so many seconds; None: the running event loop does.
        """
        self._hand_over = hand_over
        self._later = later or _in_loop
        self._waiting: list[EndedTrace] = []
        #: Whether a flush is due.
        self._due = False
        #: Traces that were dropped so far.
        self.dropped = 0
        self._seldom = Seldom()

    def ended(self, trace: EndedTrace) -> None:
        """Adds an ended trace, which is handed to the supervisor within half a second, with others."""
        self._waiting.append(trace)
        if len(self._waiting) >= _TOGETHER:
            self.flush()
        elif not self._due:
            self._due = True
            self._later(_SECONDS, self._flush_due)

    def _flush_due(self) -> None:
        self._due = False
        self.flush()

    def flush(self) -> None:
        """Hands all waiting traces to the supervisor now."""
        if not self._waiting:
            return
        traces, self._waiting = tuple(self._waiting), []
        if not self._hand_over(TracesEnded(traces)):
            self.dropped += len(traces)
            if self._seldom.is_due():
                _log.warning("the supervisor does not take traces: %d were dropped so far", self.dropped)


def _in_loop(seconds: float, call: Callable[[], None]) -> None:
    asyncio.get_running_loop().call_later(seconds, call)


def without_tensors(timeline: Timeline) -> Timeline:
    """Returns a timeline without tensors, also in its children, because spans do not show them."""
    if timeline.tensors or timeline.children:
        children = tuple(map(without_tensors, timeline.children))
        return msgspec.structs.replace(timeline, tensors=(), children=children)
    return timeline
