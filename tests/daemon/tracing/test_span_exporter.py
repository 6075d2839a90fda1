"""Spans of ended traces, as a collector gets them."""

from __future__ import annotations

import http.server
import threading
import time

import pytest

pytest.importorskip("opentelemetry.exporter.otlp.proto.http")

from tensord.daemon.tracing.span_exporter import SpanCounts, SpanExporter
from tensord.shm.control_records import EndedTrace
from tensord.shm.messages import OwnSpan, Timeline
from tests.collector import Collector
from tests.daemon_process import PATIENCE, wait_until

TRACE, SPAN, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7", "1111111111111111"


def test_a_trace_and_its_parts() -> None:
    """Parts lie in the request, what the model has named in its run, and requests that were made for it in it."""
    collector = Collector()
    counts = SpanCounts()
    exporter = SpanExporter(collector.url, "unit", counts)
    now_ns = time.monotonic_ns()
    names = ("HTTP_RECV_START", "HTTP_RECV_END", "QUEUE_START", "COMPUTE_START", "COMPUTE_END", "HTTP_SEND_END")
    moments = tuple((name, now_ns + 1000 * number) for number, name in enumerate(names))
    child = Timeline((("QUEUE_START", now_ns), ("COMPUTE_START", now_ns + 7)), model="step", version=4)
    own = (
        OwnSpan("outer", now_ns, now_ns + 9, {"words": 7}),
        OwnSpan("inner", now_ns, now_ns + 5, parent=1, error="E"),
    )
    told = Timeline((), children=(child, Timeline((), model="not timed")), spans=own)
    said: dict[str, str | int] = {"model": "m", "version": 3, "request_id": "one"}
    exporter.export(
        [
            EndedTrace(TRACE, SPAN, PARENT, now_ns - 500, moments, "m", said, told, "refused"),
            EndedTrace("2" * 32, SPAN, "", now_ns, (), "m", said),
        ]
    )
    collector.of(TRACE, 8)
    exporter.close()
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
    assert sum(span.parent_span_id == step.span_id for span in collector.spans) == 1
    assert compute.end_time_unix_nano - compute.start_time_unix_nano == 1000
    assert request.end_time_unix_nano - request.start_time_unix_nano == 5500
    assert abs(request.start_time_unix_nano - time.time_ns()) < 600 * 10**9
    assert collector.services == {"unit"}
    assert (counts.outcomes(), counts.waiting) == ({"sent": 7 + 1, "failed": 0, "dropped": 0}, 0)
    collector.close()


def test_what_a_collector_does_not_take_is_counted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Spans wait up to the bound; the others are dropped, and so are those that the collector refuses in the end."""
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "10")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "10")
    counts, refused = SpanCounts(), RefusingCollector()
    exporter = SpanExporter(refused.url, "unit", counts)
    now_ns = time.monotonic_ns()
    for number in range(1, 31):
        moments = (("HTTP_RECV_START", now_ns), ("HTTP_RECV_END", now_ns))
        exporter.export([EndedTrace(TRACE, f"{number:016x}", "", now_ns, moments, "m", {})])
    assert (counts.queued, counts.dropped, counts.sent) == (10, 50, 0)
    refused.answers.set()
    wait_until(lambda: counts.failed == 10, "refused spans")
    exporter.export([EndedTrace(TRACE, SPAN, "", now_ns, moments, "m", {})])
    exporter.close()
    assert (counts.queued, counts.outcomes()) == (12, {"sent": 0, "failed": 12, "dropped": 50})
    assert caplog.text.count("the collector does not take spans: 1 were dropped so far") == 1
    refused.close()


class RefusingCollector:
    """Answers 400 to everything, as soon as it may."""

    def __init__(self) -> None:
        self.answers = answers = threading.Event()

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["content-length"]))
                assert answers.wait(PATIENCE)
                self.send_response(400)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/v1/traces"
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
