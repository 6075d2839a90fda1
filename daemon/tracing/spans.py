"""Exports sampled requests as spans of OpenTelemetry, over OTLP, joined to the traces of whoever asked.

    infer m      [----------------------------------------]     kind server; parent: the client's span, from ``traceparent``
      receive    [--]
      queue          [-----]
      compute               [--------------------]
        tokenize                [---]                           what the model's code has named (``tensord.models.span``)
      send                                         [-----]
      infer step            [--------]                          of a request that was made for this one, with its own parts

A request's own span begins when it is sampled, so that its ids are known; the others are made from the trace's stamps once it has
ended. The library sends them in a thread of its own, keeps a bounded number of
them while the collector does not answer, and drops what is beyond. Source: OpenTelemetry's specification of traces; W3C Trace
Context.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING

from tensord.shm import trace_stamps as stamps
from tensord.shm.messages import OwnSpan, Timeline

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Span

_CLOSE_SECONDS = 2.0
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
    """Returns whether the libraries that export spans are there (the extra ``otel``)."""
    try:
        return find_spec("opentelemetry.exporter.otlp.proto.http") is not None
    except ModuleNotFoundError:
        return False


class Spans:
    """Sends finished traces to a collector.

    Args:
      url: where OTLP over HTTP is taken, such as ``http://127.0.0.1:4318/v1/traces``.
      service: the name of this server in the collector.
    """

    def __init__(self, url: str, service: str) -> None:
        from opentelemetry import trace
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ALWAYS_ON
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._trace = trace
        self._propagator = TraceContextTextMapPropagator()
        # What is sampled was decided before.
        self._provider = TracerProvider(ALWAYS_ON, Resource.create({SERVICE_NAME: service}), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(url)))
        self._tracer = self._provider.get_tracer("tensord")

    def parent(self, traceparent: str) -> Context | None:
        """Returns what a ``traceparent`` refers to, if its sender has sampled it; else None, also where it is malformed."""
        context = self._propagator.extract({"traceparent": traceparent})
        span = self._trace.get_current_span(context).get_span_context()
        return context if span.is_valid and span.trace_flags.sampled else None

    def begin(self, model: str, parent: Context | None, began_ns: int) -> Span:
        """Begins the span of a request. It is sent once ``export`` was called.

        Args:
          parent: the client's span. None: the trace begins here.
          began_ns: CLOCK_MONOTONIC.
        """
        span: Span = self._tracer.start_span(
            f"infer {model}", parent, self._trace.SpanKind.SERVER, start_time=began_ns + _since_1970()
        )
        return span

    def export(
        self,
        span: Span,
        moments: Sequence[tuple[str, int]],
        attributes: Mapping[str, str | int],
        timeline: Timeline | None,
        error: str,
    ) -> None:
        """Ends the span of a request, and makes those of its parts.

        Args:
          moments: names and CLOCK_MONOTONIC ns.
          attributes: of the request's own span.
          timeline: what its worker has said: its model's own spans, and the requests that were made for it.
          error: what it was answered instead; "": it was answered well.
        """
        if moments:
            self._export(span, moments, attributes, timeline, error, _since_1970())

    def _export(
        self,
        span: Span,
        moments: Sequence[tuple[str, int]],
        attributes: Mapping[str, str | int],
        timeline: Timeline | None,
        error: str,
        offset: int,
    ) -> None:
        trace, at = self._trace, {name: ns + offset for name, ns in moments}
        span.set_attributes({f"tensord.{name}": value for name, value in attributes.items()})
        own = run = trace.set_span_in_context(span)
        for name, begins, ends in _PARTS:
            if begins in at and ends in at:
                part = self._tracer.start_span(name, own, start_time=at[begins])
                part.end(max(at[begins], at[ends]))
                if name == "compute":
                    run = trace.set_span_in_context(part)
        if timeline is not None:
            self._named(timeline.spans, run, offset)
        for child in () if timeline is None else timeline.children:
            if child.moments:
                began = min(ns for _, ns in child.moments) + offset
                made = self._tracer.start_span(f"infer {child.model}", own, start_time=began)
                said: dict[str, str | int] = {"model": child.model, "version": child.version}
                self._export(made, child.moments, said, child, "", offset)
        if error:
            span.set_status(trace.StatusCode.ERROR, error)
        span.end(max(at.values()))

    def _named(self, spans: Sequence[OwnSpan], run: Context, offset: int) -> None:
        """Makes the spans that a model's code has named, each as a part of the run or of another one."""
        contexts = [run]
        for own in spans:
            span = self._tracer.start_span(
                own.name, contexts[own.parent], attributes=own.attributes, start_time=own.began_ns + offset
            )
            contexts.append(self._trace.set_span_in_context(span))
            if own.error:
                span.set_status(self._trace.StatusCode.ERROR, own.error)
            span.end(own.ended_ns + offset)

    def close(self) -> None:
        """Sends what waits, for a moment at most: a collector that is gone holds nobody up."""
        closing = threading.Thread(target=self._provider.shutdown, name="spans", daemon=True)
        closing.start()
        closing.join(_CLOSE_SECONDS)


def _since_1970() -> int:
    """Returns what makes a time of CLOCK_MONOTONIC one of the clock that everybody has, in ns."""
    return time.time_ns() - time.monotonic_ns()
