"""Provides a collector of spans: it takes OTLP over HTTP and decodes its protobufs."""

from __future__ import annotations

import http.server
import threading
from email.message import Message
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.daemon_process import wait_until


class Listener:
    """Takes what is posted to it over HTTP in a thread; ``take`` returns the status of the answer."""

    def __init__(self) -> None:
        taken = self.take

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                status = taken(self.path, self.headers, self.rfile.read(int(self.headers["content-length"])))
                self.send_response(status)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/v1/traces"
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def take(self, path: str, headers: Message, body: bytes) -> int:
        raise NotImplementedError

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class Collector(Listener):
    """Takes OTLP over HTTP, and keeps the spans that were sent."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.services: set[str] = set()
        #: Of the resource that the last spans are of.
        self.resource: dict[str, str] = {}
        super().__init__()

    def take(self, path: str, headers: Message, body: bytes) -> int:
        assert path == "/v1/traces"
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            self.resource = {each.key: each.value.string_value for each in resource.resource.attributes}
            self.services.add(self.resource["service.name"])
            for scope in resource.scope_spans:
                self.spans += scope.spans
        return 200

    def of(self, trace_id: str, count: int) -> list[Any]:
        """Waits until so many spans of a trace have come; returns them."""
        wait_until(lambda: len(self._of(trace_id)) >= count, f"{count} spans of trace {trace_id}")
        return self._of(trace_id)

    def _of(self, trace_id: str) -> list[Any]:
        return [span for span in self.spans if span.trace_id.hex() == trace_id]

    def named(self, trace_id: str, count: int) -> dict[str, Any]:
        """Returns the spans of a trace by name once so many have come. Fails if two have the same name."""
        found = self.of(trace_id, count)
        assert len({span.name for span in found}) == len(found) == count, sorted(span.name for span in found)
        return {span.name: span for span in found}
