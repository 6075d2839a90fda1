"""Makes spans from ended traces, and sends the spans to a collector over OTLP. Runs in the supervisor.

    infer m      [----------------------------------------]     a client's request; its parent is the client's span, if any
      receive    [--]
      queue          [-----]
      compute               [--------------------]
        tokenize                [---]                           a span that the model's code made with ``tensord.models.span``
      send                                         [-----]
      infer step            [--------]                          a request to the model "step", made for the client's request

A message is sent when it has OTEL_BSP_MAX_EXPORT_BATCH_SIZE spans, or OTEL_BSP_SCHEDULE_DELAY milliseconds after its first
span. If OTEL_BSP_MAX_QUEUE_SIZE spans wait for the collector, new spans are dropped and counted.
Source: OpenTelemetry's specification of traces, opentelemetry-proto.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from tensord import __version__
from tensord.shm import trace_stamps as stamps
from tensord.shm.control_records import EndedTrace
from tensord.shm.messages import Timeline
from tensord.shm.seldom import Seldom

_log = logging.getLogger(__name__)
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


#: The sentence for an operator who configures a collector without them.
NOT_INSTALLED = "trace.otlp is set, and what sends spans is not installed: pip install 'tensord[otel]'"


def installed() -> bool:
    """Returns whether the libraries that export spans (the extra ``otel``) are installed."""
    try:
        return all(map(find_spec, ("opentelemetry.proto", "opentelemetry.sdk", "requests")))
    except ModuleNotFoundError:
        return False


class SpanCounts:
    """Counts spans that were queued, dropped, sent, or failed to be sent."""

    def __init__(self) -> None:
        #: Spans that were queued, and those that were dropped because too many waited.
        self.queued = self.dropped = 0
        #: Spans that the collector took, and those that it refused or that did not reach it.
        self.sent = self.failed = 0

    @property
    def waiting(self) -> int:
        """Returns how many spans are queued or being sent."""
        return self.queued - self.sent - self.failed

    def sending_ended(self, spans: int, accepted: bool) -> None:
        """Counts the spans of a message that was sent. ``accepted``: whether the collector took the message."""
        if accepted:
            self.sent += spans
        else:
            self.failed += spans

    def outcomes(self) -> dict[str, int]:
        """Returns how many spans were "sent", "failed" to be sent, and were "dropped"."""
        return {"sent": self.sent, "failed": self.failed, "dropped": self.dropped}


class SpanExporter:
    """Sends the spans of ended traces to an OpenTelemetry collector.

    ``url``: the address of the collector. ``service``: the service name that the spans carry.
    """

    def __init__(self, url: str, service: str, counts: SpanCounts) -> None:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
        from opentelemetry.proto.trace.v1.trace_pb2 import Span, SpanFlags, Status
        from opentelemetry.sdk.resources import HOST_NAME, SERVICE_NAME, SERVICE_VERSION, Resource

        from tensord.daemon.tracing.span_sender import SpanSender

        self._counts = counts
        #: How many spans may wait for the collector, how many make a message, and after which time fewer do.
        self._most = _variable("OTEL_BSP_MAX_QUEUE_SIZE", 2048)
        self._together = min(self._most, _variable("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", 512))
        self._seconds = _variable("OTEL_BSP_SCHEDULE_DELAY", 5000) / 1e3
        self._seldom = Seldom()
        self._internal, self._server = Span.SPAN_KIND_INTERNAL, Span.SPAN_KIND_SERVER
        self._error = Status.STATUS_CODE_ERROR
        self._here = SpanFlags.SPAN_FLAGS_CONTEXT_HAS_IS_REMOTE_MASK
        self._elsewhere = self._here | SpanFlags.SPAN_FLAGS_CONTEXT_IS_REMOTE_MASK
        #: A message without spans.
        self._empty = ExportTraceServiceRequest()
        # What the operator's OTEL_RESOURCE_ATTRIBUTES say of them holds.
        here = Resource({HOST_NAME: socket.gethostname(), SERVICE_VERSION: __version__})
        known = here.merge(Resource.create({SERVICE_NAME: service}))
        resource = self._empty.resource_spans.add(schema_url=known.schema_url)
        for attribute in _encoded(known.attributes):
            resource.resource.attributes.add(**attribute)
        resource.scope_spans.add(scope={"name": "tensord"})
        self._new_message = ExportTraceServiceRequest
        self._sender = SpanSender(url, counts.sending_ended)
        self._timer: asyncio.TimerHandle | None = None
        self._begin_message()

    def _begin_message(self) -> None:
        self._message = self._new_message()
        self._message.CopyFrom(self._empty)
        self._spans = self._message.resource_spans[0].scope_spans[0].spans

    def export(self, traces: Iterable[EndedTrace]) -> None:
        """Queues the spans of ended traces for the collector. If too many spans wait already, further ones are dropped."""
        offset = time.time_ns() - time.monotonic_ns()
        for ended in traces:
            if not ended.moments:
                continue
            trace_id, own = bytes.fromhex(ended.trace_id), bytes.fromhex(ended.span_id)
            parent = bytes.fromhex(ended.parent_id)
            self._parts(trace_id, own, ended.moments, ended.timeline, offset)
            began_ns, ended_ns = ended.began_ns + offset, max([ns for _, ns in ended.moments]) + offset
            attributes, kind = _named(ended.attributes), self._server
            flags = self._elsewhere if parent else self._here
            name = f"infer {ended.model}"
            self._add(trace_id, own, parent, name, began_ns, ended_ns, attributes, ended.error, kind, flags)
            if len(self._spans) >= self._together:
                self._send()
        if len(self._spans) and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._seconds, self._send)

    def _parts(
        self, trace_id: bytes, own: bytes, moments: Sequence[tuple[str, int]], timeline: Timeline | None, offset: int
    ) -> None:
        at = dict(moments)
        run = own
        for name, begins, ends in _PARTS:
            if begins in at and ends in at:
                began_ns, part = at[begins] + offset, _new_id()
                self._add(trace_id, part, own, name, began_ns, max(began_ns, at[ends] + offset))
                if name == "compute":
                    run = part
        if timeline is None:
            return
        ids = [run]
        for span in timeline.spans:
            ids.append(_new_id())
            began_ns, ended_ns, attributes = span.began_ns + offset, span.ended_ns + offset, _encoded(span.attributes)
            self._add(trace_id, ids[-1], ids[span.parent], span.name, began_ns, ended_ns, attributes, span.error)
        within = {number: ids[at] for at, span in enumerate(timeline.spans, 1) for number in span.calls}
        for number, child in enumerate(timeline.children):
            if child.moments:
                made, times = _new_id(), [ns + offset for _, ns in child.moments]
                self._parts(trace_id, made, child.moments, child, offset)
                attributes = _named({"model": child.model, "version": child.version})
                parent = within.get(number, own)
                self._add(trace_id, made, parent, f"infer {child.model}", min(times), max(times), attributes)

    def _add(
        self,
        trace_id: bytes,
        span_id: bytes,
        parent_id: bytes,
        name: str,
        began_ns: int,
        ended_ns: int,
        attributes: Sequence[dict[str, Any]] = (),
        error: str = "",
        kind: int = 0,
        flags: int = 0,
    ) -> None:
        counts = self._counts
        if counts.waiting >= self._most:
            counts.dropped += 1
            if self._seldom.is_due():
                _log.warning("the collector does not take spans: %d were dropped so far", counts.dropped)
            return
        counts.queued += 1
        span = self._spans.add(
            trace_id=trace_id,
            span_id=span_id,
            parent_span_id=parent_id,
            name=name,
            kind=kind or self._internal,
            start_time_unix_nano=began_ns,
            end_time_unix_nano=ended_ns,
            attributes=attributes,
            flags=flags or self._here,
        )
        if error:
            span.status.code, span.status.message = self._error, error

    def _send(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if len(self._spans):
            self._sender.send(self._message.SerializeToString, len(self._spans))
            self._begin_message()

    async def close(self) -> None:
        """Sends all spans that are not sent yet. Returns after at most ``_CLOSE_SECONDS``, even if some spans are not sent."""
        self._send()
        await asyncio.to_thread(self._sender.close, _CLOSE_SECONDS)


def _variable(name: str, default: int) -> int:
    try:
        return max(1, int(os.environ[name]))
    except (KeyError, ValueError):
        return default


def _new_id() -> bytes:
    return (random.getrandbits(64) or 1).to_bytes(8, "big")


def _named(attributes: Mapping[str, str | int | bool]) -> list[dict[str, Any]]:
    return _encoded({f"tensord.{name}": value for name, value in attributes.items()})


def _encoded(attributes: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Converts attributes to a list of dicts. Each has the fields of a protobuf message ``KeyValue``."""
    return [{"key": name, "value": _value(value)} for name, value in attributes.items()]


def _value(value: Any) -> dict[str, Any]:
    """Returns OpenTelemetry's message ``AnyValue`` for a value, as a dict."""
    match value:
        case bool():
            return {"bool_value": value}
        case str():
            return {"string_value": value}
        case int() if -(1 << 63) <= value < 1 << 63:
            return {"int_value": value}
        case float():
            return {"double_value": value}
        case list() | tuple():
            return {"array_value": {"values": [_value(each) for each in value]}}
        case _:
            return {"string_value": str(value)}
