"""Makes spans from ended traces, and sends them to a collector over OTLP. Runs in the supervisor: no request waits for it.

    infer m      [----------------------------------------]     kind server; parent: the client's span, from ``traceparent``
      receive    [--]
      queue          [-----]
      compute               [--------------------]
        tokenize                [---]                           what the model's code has named (``tensord.models.span``)
      send                                         [-----]
      infer step            [--------]                          of a request that was made for this one, with its own parts

The library sends spans in its own thread and keeps a bounded number of them while the collector does not answer; further spans
are dropped and counted. Source: OpenTelemetry's specification of traces.
"""

from __future__ import annotations

import logging
import os
import random
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING

from tensord.config.log import Seldom
from tensord.shm import trace_stamps as stamps
from tensord.shm.control_records import EndedTrace
from tensord.shm.messages import Parameter, Timeline

if TYPE_CHECKING:
    from opentelemetry.trace import SpanContext, SpanKind

_log = logging.getLogger(__name__)
_CLOSE_SECONDS = 2.0
#: The variable that says how many spans may wait for the collector, and how many may where it does not.
_WAITING_VARIABLE, _MAX_WAITING = "OTEL_BSP_MAX_QUEUE_SIZE", 2048
#: Part of a request -> the stamps at its two ends.
_PARTS = (
    ("receive", stamps.HTTP_RECV_START, stamps.HTTP_RECV_END),
    ("receive", stamps.GRPC_WAITREAD_START, stamps.GRPC_WAITREAD_END),
    ("queue", stamps.QUEUE_START, stamps.COMPUTE_START),
    ("compute", stamps.COMPUTE_START, stamps.COMPUTE_END),
    ("send", stamps.HTTP_SEND_START, stamps.HTTP_SEND_END),
    ("send", stamps.GRPC_SEND_START, stamps.GRPC_SEND_END),
)


def installed() -> bool:
    """Returns whether the libraries that export spans are installed (the extra ``otel``)."""
    try:
        return find_spec("opentelemetry.exporter.otlp.proto.http") is not None
    except ModuleNotFoundError:
        return False


class SpanCounts:
    """Counts spans: queued and dropped ones, written by the supervisor's loop; sent and failed ones, by the sending thread."""

    def __init__(self) -> None:
        #: Spans that were queued, and those that were dropped because too many waited.
        self.queued = self.dropped = 0
        #: Spans that the collector took, and those that it refused or that did not reach it.
        self.sent = self.failed = 0

    @property
    def waiting(self) -> int:
        """Returns how many spans are queued or being sent."""
        return self.queued - self.sent - self.failed

    def outcomes(self) -> dict[str, int]:
        """Returns how many spans were sent, failed to be sent, or were dropped: the keys "sent", "failed" and "dropped"."""
        return {"sent": self.sent, "failed": self.failed, "dropped": self.dropped}


class SpanExporter:
    """Sends the spans of ended traces to a collector. Used by the supervisor.

    Args:
      url: the collector's endpoint for OTLP over HTTP, such as ``http://127.0.0.1:4318/v1/traces``.
      service: the name of this server in the collector.
      counts: is kept up to date with what happens to the spans.
    """

    def __init__(self, url: str, service: str, counts: SpanCounts) -> None:
        from opentelemetry import trace
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
        from opentelemetry.sdk.trace import ReadableSpan
        from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExportResult
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope

        class QuickResource(Resource):
            """A Resource hashed by identity: the library's hash writes all attributes as JSON, once for each span sent."""

            def __hash__(self) -> int:
                return id(self)

        class CountedExporter(OTLPSpanExporter):
            """Sends spans, and counts those that arrived or failed. Runs in the thread of BatchSpanProcessor."""

            def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
                result = SpanExportResult.FAILURE
                try:
                    result = super().export(spans)
                finally:
                    if result is SpanExportResult.SUCCESS:
                        counts.sent += len(spans)
                    else:
                        counts.failed += len(spans)
                return result

        self._counts = counts
        self._most = _max_waiting()
        self._seldom = Seldom()
        self._trace = trace
        self._span = ReadableSpan
        self._flags = trace.TraceFlags(trace.TraceFlags.SAMPLED)
        known = Resource.create({SERVICE_NAME: service})
        self._resource = QuickResource(known.attributes, known.schema_url)
        self._scope = InstrumentationScope("tensord")
        self._fine, self._internal = trace.Status(trace.StatusCode.UNSET), trace.SpanKind.INTERNAL
        # Those that are being sent are in its queue no more, so it never has to drop one by itself.
        self._processor = BatchSpanProcessor(CountedExporter(url), self._most)

    def export(self, traces: Iterable[EndedTrace]) -> None:
        """Queues the spans of ended traces for the collector, or drops them if too many wait."""
        offset = _since_1970()
        for ended in traces:
            if ended.moments:
                own = self._context(int(ended.trace_id, 16), int(ended.span_id, 16))
                parent = self._context(own.trace_id, int(ended.parent_id, 16), True) if ended.parent_id else None
                self._parts(own, ended.moments, ended.timeline, offset)
                self._request(own, parent, ended, offset)

    def _request(self, own: SpanContext, parent: SpanContext | None, ended: EndedTrace, offset: int) -> None:
        """Queues the span of a client's request, which ``ended`` describes, for the collector, or drops it if too many wait.

        Args:
          own: the ids of the span.
          parent: the ids of the client's span; None: the request began the trace.
          offset: ns to add to CLOCK_MONOTONIC to get the time since 1970.
        """
        began_ns, ended_ns = ended.began_ns + offset, max(ns for _, ns in ended.moments) + offset
        attributes, server = _named(ended.attributes), self._trace.SpanKind.SERVER
        self._end(own, parent, f"infer {ended.model}", began_ns, ended_ns, attributes, ended.error, server)

    def _parts(
        self, own: SpanContext, moments: Sequence[tuple[str, int]], timeline: Timeline | None, offset: int
    ) -> None:
        """Queues the spans of a request's parts, such as "compute", and of the requests that its model made of other models.

        Args:
          own: the ids of the request's span.
          moments: name and CLOCK_MONOTONIC ns of each timestamp.
          timeline: what the worker has reported, with the spans of the model's code; None: nothing.
          offset: ns to add to CLOCK_MONOTONIC to get the time since 1970.
        """
        at = {name: ns + offset for name, ns in moments}
        run = own
        for name, begins, ends in _PARTS:
            if begins in at and ends in at:
                part = self._within(own)
                self._end(part, own, name, at[begins], max(at[begins], at[ends]))
                if name == "compute":
                    run = part
        if timeline is None:
            return
        contexts = [run]
        for span in timeline.spans:
            context = self._within(run)
            contexts.append(context)
            began_ns, ended_ns = span.began_ns + offset, span.ended_ns + offset
            self._end(context, contexts[span.parent], span.name, began_ns, ended_ns, span.attributes, span.error)
        for child in timeline.children:
            if child.moments:
                made, times = self._within(own), [ns + offset for _, ns in child.moments]
                self._parts(made, child.moments, child, offset)
                attributes = _named({"model": child.model, "version": child.version})
                self._end(made, own, f"infer {child.model}", min(times), max(times), attributes)

    def _end(
        self,
        context: SpanContext,
        parent: SpanContext | None,
        name: str,
        began_ns: int,
        ended_ns: int,
        attributes: Mapping[str, Parameter] | None = None,
        error: str = "",
        kind: SpanKind | None = None,
    ) -> None:
        counts = self._counts
        if counts.waiting >= self._most:
            counts.dropped += 1
            if self._seldom.is_due():
                _log.warning("the collector does not take spans: %d were dropped so far", counts.dropped)
            return
        counts.queued += 1
        span = self._span(
            name,
            context,
            parent,
            self._resource,
            attributes,
            kind=self._internal if kind is None else kind,
            status=self._trace.Status(self._trace.StatusCode.ERROR, error) if error else self._fine,
            start_time=began_ns,
            end_time=ended_ns,
            instrumentation_scope=self._scope,
        )
        self._processor.on_end(span)

    def _within(self, parent: SpanContext) -> SpanContext:
        """Makes the ids of a new span that is part of the span ``parent``."""
        return self._context(parent.trace_id, random.getrandbits(64) or 1)

    def _context(self, trace_id: int, span_id: int, is_remote: bool = False) -> SpanContext:
        return self._trace.SpanContext(trace_id, span_id, is_remote, self._flags)

    def close(self) -> None:
        """Sends the spans that wait, for ``_CLOSE_SECONDS`` at most, so that the daemon can end without the collector."""
        closing = threading.Thread(target=self._processor.shutdown, name="spans", daemon=True)
        closing.start()
        closing.join(_CLOSE_SECONDS)


def _max_waiting() -> int:
    try:
        return int(os.environ[_WAITING_VARIABLE])
    except (KeyError, ValueError):
        return _MAX_WAITING


def _named(attributes: Mapping[str, str | int]) -> dict[str, str | int]:
    return {f"tensord.{name}": value for name, value in attributes.items()}


def _since_1970() -> int:
    """Returns how many ns to add to a time of CLOCK_MONOTONIC to get the time since 1970."""
    return time.time_ns() - time.monotonic_ns()
