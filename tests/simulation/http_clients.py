"""Connections of clients that speak HTTP/1.1: requests in several forms, one behind the other, and their answers."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable
from typing import Any

import numpy as np
from tensord_client.http_channel import HttpResponse, MalformedResponse

from tests.simulation import ensembles
from tests.simulation.clients import Ask, safetensors
from tests.simulation.history import Change
from tests.simulation.network import Connection, Item
from tests.simulation.scheduler import SECOND

#: Forms of a request: its tensor as JSON or as bytes; the body with its length, or in chunks; the last of its connection.
_FORMS = ("json", "binary", "binary", "binary", "chunked", "last")
#: What a status says; 400 stands for several.
_CODES = {404: "NOT_FOUND", 500: "INTERNAL", 503: "UNAVAILABLE"}
#: A connection on which nothing is asked for that long is closed, in ns.
_KEPT_NS = 75 * SECOND
#: As many values are written as JSON at most.
_MOST_TEXT = 1000


class HttpConnection(Connection):
    """A connection over which requests are sent one behind the other, also before the first is answered."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._asked: deque[Item] = deque()
        self._response = HttpResponse()
        self._head = b""

    def unanswered(self) -> Iterable[Item]:
        return self._asked

    # ---------------------------------------------------------------------------------------------------------- requests

    def write(self, item: Item) -> None:
        self._asked.append(item)
        content = _change(item) if isinstance(item, Change) else self._request(item)
        if not self.broken:
            self.put(content, item)

    def _request(self, ask: Ask) -> bytes:
        chance = self.scheduler.chance
        form = chance.choice(_FORMS)
        shape = [1, 1] if ask.step else [ask.size]
        tensor: dict[str, Any] = {"name": "x", "datatype": "INT64", "shape": shape}
        request: dict[str, Any] = {"id": str(ask.number), "inputs": [tensor]}
        if ask.step is not None:
            step = ask.step
            request["parameters"] = {
                "sequence_id": step.run.number,
                "sequence_start": step.start,
                "sequence_end": step.end,
            }
        tail, fields = b"", b""
        if form == "json" and ask.size <= _MOST_TEXT:
            tensor["data"] = [ask.input] * ask.size
        else:
            tail = np.full(ask.size, ask.input, np.int64).tobytes()
            tensor["parameters"] = {"binary_data_size": len(tail)}
            request["parameters"] = {**request.get("parameters", {}), "binary_data_output": True}
        text = json.dumps(request).encode()
        if tail:
            fields = b"Inference-Header-Content-Length: %d\r\n" % len(text)
        body = text + tail
        if form == "chunked":
            fields += b"Transfer-Encoding: chunked\r\n"
            at = chance.randrange(1, len(body))
            body = b"".join(b"%x\r\n%b\r\n" % (len(each), each) for each in (body[:at], body[at:])) + b"0\r\n\r\n"
        else:
            fields += b"Content-Length: %d\r\n" % len(body)
        if form == "last":
            fields += b"Connection: close\r\n"
            self.ends = True
        return b"POST /v2/models/%b/infer HTTP/1.1\r\nHost: h\r\n%b\r\n%b" % (ask.model.encode(), fields, body)

    # ----------------------------------------------------------------------------------------------------------- answers

    def received(self, data: bytes) -> None:
        while data and not self.closed:
            response = self._response
            if response.place is None:
                head = self._head + data
                end = head.find(b"\r\n\r\n") + 4
                if end < 4:
                    self._head = head
                    return
                self._head, data = b"", head[end:]
                try:
                    response.feed(head[:end])
                except MalformedResponse as error:
                    self.scheduler.defect(f"{self} brings no HTTP: {error}: {head[:end]!r}")
                    return
            else:
                room = response.place
                part = data[: len(room)]
                room[: len(part)] = part
                response.filled(len(part))
                data = data[len(part) :]
            if response.whole:
                self._response = HttpResponse()
                self._answered(response)

    def _answered(self, response: HttpResponse) -> None:
        if not self._asked:
            # Where a request does not come, the daemon says so before it closes the connection.
            if not (self.clients.stopped_ns or self.clients.was_slow(self)):
                self.scheduler.defect(f"{self} brings an answer that nobody asked for: {bytes(response.text)!r}")
            self.ends = True
            return
        item = self._asked.popleft()
        self.ends |= not response.keep_alive
        if response.status == 408 and self.clients.was_slow(self):
            # What it has of the request is thrown away.
            self.clients.not_taken(item, "its client was too slow")
        elif isinstance(item, Change):
            error = "" if response.status == 200 else json.loads(bytes(response.text))["error"] or "?"
            self.clients.change_ended(item, error)
        elif response.status == 200:
            self._judge(item, response)
        else:
            self._judge_error(item, response)
        if not response.keep_alive and self.scheduler.chance.random() < 0.5:
            # The others close it when the daemon has.
            self._over()
        elif self.private and not self._asked:
            self.cut = True
            self.client.busy[self] = None

    def _judge(self, ask: Ask, response: HttpResponse) -> None:
        found = json.loads(bytes(response.text))
        if found.get("id") != str(ask.number):
            self.scheduler.defect(f"{ask} got the answer of request {found.get('id')!r}")
        tail = b"" if response.tail is None else response.tail.tobytes()
        values = {}
        for output in found["outputs"]:
            if "data" in output:
                values[output["name"]] = np.array(output["data"], np.int64)
            else:
                size = output["parameters"]["binary_data_size"]
                values[output["name"]] = np.frombuffer(tail[:size], np.int64)
                tail = tail[size:]
        if tail:
            self.scheduler.defect(f"{ask} got {len(tail)} bytes more than its outputs")
        self.clients.judge(ask, [values[name] for name in outputs_of(ask)])

    def _judge_error(self, ask: Ask, response: HttpResponse) -> None:
        message = json.loads(bytes(response.text))["error"]
        status = response.status
        if status == 503 and "is stopping" in message and self.refused_now(ask):
            self.clients.not_taken(ask, message)
            return
        self.clients.judge_error(ask, _CODES.get(status, ""), message)

    def refused_now(self, item: Item) -> str:
        is_old = self.scheduler.clock.now_ns - self.used_ns > _KEPT_NS * 0.9
        return super().refused_now(item) or ("it was not used for long" if is_old else "")

    def lost(self) -> None:
        asked, self._asked = list(self._asked), deque()
        for item in asked:
            if self.clients.cut:
                self.clients.left(item)
            elif self.ends or self.refused_now(item):
                if (self._response.begun or self._head) and not self.slept_ns:
                    self.scheduler.defect(f"{self} is cut in the middle of the answer to {item}")
                self.clients.not_taken(item, "its connection has ended")
            else:
                self.scheduler.defect(f"{self} is closed, and {item} has no answer")
                return


def outputs_of(ask: Ask) -> tuple[str, ...]:
    return ("first", "y") if ask.model == ensembles.MODEL else ("y",)


def _change(change: Change) -> bytes:
    if change.kind == "push":
        text = json.dumps({"move_sequences": change.moves}).encode()
        body = text + safetensors(change.number)
        return (
            b"POST /v2/models/%b/parameters/main HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n"
            b"Inference-Header-Content-Length: %d\r\n\r\n%b"
        ) % (change.model.encode(), len(body), len(text), body)
    return b"POST /v2/repository/models/%b/%b HTTP/1.1\r\nHost: h\r\nContent-Length: 0\r\n\r\n" % (
        change.model.encode(),
        change.kind.encode(),
    )
