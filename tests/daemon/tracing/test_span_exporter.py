"""Spans of ended traces, as a collector gets them."""

from __future__ import annotations

import asyncio
import gzip
import threading
import time
from collections.abc import Iterable
from email.message import Message

import pytest

pytest.importorskip("opentelemetry.proto")

from google.protobuf import text_format
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tensord.daemon.tracing.span_exporter import SpanCounts, SpanExporter
from tensord.shm.control_records import EndedTrace
from tensord.shm.messages import OwnSpan, Timeline
from tests.collector import Collector, Listener
from tests.daemon_process import PATIENCE, wait_until

TRACE, SPAN, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7", "1111111111111111"


def exported(url: str, counts: SpanCounts, traces: Iterable[EndedTrace]) -> None:
    """Exports traces as the supervisor does, until they are sent."""

    async def run() -> None:
        exporter = SpanExporter(url, "unit", counts)
        exporter.export(traces)
        await exporter.close()

    asyncio.run(asyncio.wait_for(run(), PATIENCE))


def request(number: int) -> EndedTrace:
    """A request with one part: two spans."""
    now_ns = time.monotonic_ns()
    return EndedTrace(
        TRACE, f"{number:016x}", "", now_ns, (("HTTP_RECV_START", now_ns), ("HTTP_RECV_END", now_ns)), "m", {}
    )


def test_a_trace_and_its_parts() -> None:
    """Parts lie in the request, what the model has named in its run, and requests that were made for it in it."""
    collector = Collector()
    counts = SpanCounts()
    now_ns = time.monotonic_ns()
    names = ("HTTP_RECV_START", "HTTP_RECV_END", "QUEUE_START", "COMPUTE_START", "COMPUTE_END", "HTTP_SEND_END")
    moments = tuple((name, now_ns + 1000 * number) for number, name in enumerate(names))
    child = Timeline((("QUEUE_START", now_ns), ("COMPUTE_START", now_ns + 7)), model="step", version=4)
    own = (
        OwnSpan("outer", now_ns, now_ns + 9, {"words": 7, "whole": True, "part": 0.5, "large": 1 << 63, "how": "so"}),
        OwnSpan("inner", now_ns, now_ns + 5, parent=1, error="E"),
    )
    told = Timeline((), children=(child, Timeline((), model="not timed")), spans=own)
    said: dict[str, str | int] = {"model": "m", "version": 3, "request_id": "one"}
    exported(
        collector.url,
        counts,
        [
            EndedTrace(TRACE, SPAN, PARENT, now_ns - 500, moments, "m", said, told, "refused"),
            EndedTrace("2" * 32, SPAN, "", now_ns, (), "m", said),
        ],
    )
    assert len(collector.of(TRACE, 8)) == 8
    spans = {span.name: span for span in collector.spans}
    assert set(spans) == {"infer m", "receive", "queue", "compute", "outer", "inner", "infer step"}
    assert {span.trace_id.hex() for span in collector.spans} == {TRACE}
    request, compute, step = spans["infer m"], spans["compute"], spans["infer step"]
    assert (request.span_id.hex(), request.parent_span_id.hex(), request.kind) == (SPAN, PARENT, 2)
    assert (request.status.code, request.status.message) == (2, "refused")
    assert {each.key: each.value.string_value or each.value.int_value for each in request.attributes} == {
        "tensord.model": "m",
        "tensord.version": 3,
        "tensord.request_id": "one",
    }
    assert (compute.parent_span_id, step.parent_span_id) == (request.span_id, request.span_id)
    assert (spans["outer"].parent_span_id, spans["inner"].parent_span_id) == (compute.span_id, spans["outer"].span_id)
    assert (spans["inner"].status.code, spans["outer"].status.code) == (2, 0)
    assert {
        each.key: text_format.MessageToString(each.value, as_one_line=True) for each in spans["outer"].attributes
    } == {
        "words": "int_value: 7",
        "whole": "bool_value: true",
        "part": "double_value: 0.5",
        "large": f'string_value: "{1 << 63}"',
        "how": 'string_value: "so"',
    }
    # Whether the parent is another process's is said of each.
    assert (request.flags, compute.flags) == (0x300, 0x100)
    assert sum(span.parent_span_id == step.span_id for span in collector.spans) == 1
    assert compute.end_time_unix_nano - compute.start_time_unix_nano == 1000
    assert request.end_time_unix_nano - request.start_time_unix_nano == 5500
    assert abs(request.start_time_unix_nano - time.time_ns()) < 600 * 10**9
    assert collector.services == {"unit"}
    assert (counts.outcomes(), counts.waiting) == ({"sent": 7 + 1, "failed": 0, "dropped": 0}, 0)
    collector.close()


def test_spans_leave_together_or_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """Enough spans for a message leave at once, fewer after the delay."""
    collector, counts = Collector(), SpanCounts()

    async def run(delay: str, traces: int, first: int, all_: int) -> None:
        monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "4")
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", delay)
        exporter = SpanExporter(collector.url, "unit", counts)
        exporter.export(map(request, range(1, traces + 1)))
        await asyncio.to_thread(wait_until, lambda: counts.sent == first, "spans that make a message")
        await asyncio.to_thread(wait_until, lambda: counts.sent == all_ or delay == "3600000", "the others")
        await exporter.close()
        assert (counts.waiting, len(collector.spans)) == (0, counts.queued)

    asyncio.run(asyncio.wait_for(run("3600000", 3, 4, 6), PATIENCE))
    asyncio.run(asyncio.wait_for(run("1", 1, 8, 8), PATIENCE))
    collector.close()


def test_what_a_collector_does_not_take_is_counted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Spans wait up to the bound; the others are dropped, and so are those that the collector refuses in the end."""
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "10")
    counts, refused = SpanCounts(), RefusingCollector([400, 400])

    async def run() -> None:
        exporter = SpanExporter(refused.url, "unit", counts)
        exporter.export(map(request, range(1, 31)))
        assert (counts.queued, counts.dropped, counts.sent) == (10, 50, 0)
        refused.answers.set()
        await asyncio.to_thread(wait_until, lambda: counts.failed == 10, "refused spans")
        exporter.export([request(31)])
        await exporter.close()

    asyncio.run(asyncio.wait_for(run(), PATIENCE))
    assert (counts.queued, counts.outcomes()) == (12, {"sent": 0, "failed": 12, "dropped": 50})
    assert caplog.text.count("the collector does not take spans: 1 were dropped so far") == 1
    assert caplog.text.count("the collector did not take 10 spans: 400 Bad Request") == 1
    refused.close()


def test_a_message_is_sent_again_if_the_collector_is_busy_or_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the variables of the library, too: each attempt has the header and the compressed spans."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-key=all")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_HEADERS", "x-key=a%20b,x-more=1")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "gzip")
    counts, busy = SpanCounts(), RefusingCollector([503, 429, 200])
    busy.answers.set()

    async def run() -> None:
        exporter = SpanExporter(busy.url, "unit", counts)
        exporter.export([request(1)])
        await asyncio.to_thread(wait_until, lambda: not counts.waiting, "an answer")
        await exporter.close()

    asyncio.run(asyncio.wait_for(run(), PATIENCE))
    assert counts.outcomes() == {"sent": 2, "failed": 0, "dropped": 0}
    assert [(head["x-key"], head["x-more"], head["content-encoding"]) for head, _ in busy.seen] == [
        ("a b", "1", "gzip")
    ] * 3
    sent = {gzip.decompress(content) for _, content in busy.seen}
    assert len(sent) == 1
    assert len(ExportTraceServiceRequest.FromString(sent.pop()).resource_spans[0].scope_spans[0].spans) == 2
    busy.close()


class RefusingCollector(Listener):
    """Answers with one status after the other, as soon as it may, and keeps what it was sent."""

    def __init__(self, statuses: list[int]) -> None:
        self.answers = threading.Event()
        #: The headers and the body of each request.
        self.seen: list[tuple[Message, bytes]] = []
        self._left = iter(statuses)
        super().__init__()

    def take(self, path: str, headers: Message, body: bytes) -> int:
        self.seen.append((headers, body))
        assert self.answers.wait(PATIENCE)
        return next(self._left)
