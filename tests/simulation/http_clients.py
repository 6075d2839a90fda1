"""Connections of clients that speak HTTP/1.1: requests in several forms, one behind the other, and their answers."""

from __future__ import annotations

import json
import re
import struct
import zlib
from collections import deque
from collections.abc import Iterable
from typing import Any

import numpy as np
from tensord_client.http_channel import HttpResponse, MalformedResponse

from tests.simulation import rounds, streamed
from tests.simulation.clients import MOST_BODY, Ask, safetensors
from tests.simulation.history import Change
from tests.simulation.network import Connection, Item
from tests.simulation.regions import MODEL, Call, inputs_of
from tests.simulation.scheduler import SECOND

#: Forms of a request: its tensor as JSON or as bytes; the body with its length, or in chunks; the last of its connection; with a
#: body that is sent once the daemon asks for it; compressed, in codings as Content-Encoding names them.
_FORMS = ("json", "binary", "binary", "binary", "chunked", "last", "expecting")
_CODINGS = {"gzip": 31, "x-gzip": 31, "deflate": 15}
#: The endpoints at which models with one response are asked, mostly, and decoupled ones; those of them with JSON alone; and those
#: that send each response when it comes.
_ENDPOINTS = (*["infer"] * 17, "generate", "generate_stream", "infer_stream")
_DECOUPLED = (*["generate_stream", "infer_stream"] * 4, "generate", "infer")
_OF_JSON, STREAMS = ("generate", "generate_stream"), ("generate_stream", "infer_stream")
#: The daemon's errors for a compressed body where none may be compressed, and for one that cannot be decompressed.
_NO_CODING, _BROKEN = "Unsupported content-encoding", "failed to decompress"
_TOO_LARGE = f"at most {MOST_BODY} are allowed"
_SIZES = struct.Struct("<IQ")
_TEXT_SIZE = re.compile(rb"\r\ninference-header-content-length: *(\d+)", re.IGNORECASE)
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
        #: The requests that may be answered with 100 Continue, and what is sent then of the last one.
        self._expecting: set[Item] = set()
        self._held: bytes | None = None
        #: Requests behind one whose answer may have begun: nobody can tell their client that they will not be taken.
        self._behind: set[Item] = set()
        #: How many bytes of a compressed answer are JSON, as its head says.
        self._text_size = b""
        #: A request was answered whose body is larger than allowed, which was not known yet.
        self._overlong = False

    @property
    def writes(self) -> bool:
        return super().writes and self._held is None

    def unanswered(self) -> Iterable[Item]:
        return self._asked

    # ---------------------------------------------------------------------------------------------------------- requests

    def write(self, item: Item) -> None:
        if any(isinstance(each, Ask) and each.endpoint in STREAMS for each in self._asked):
            self._behind.add(item)
        self._asked.append(item)
        content = _change(item) if isinstance(item, Change) else self._request(item)
        if self.broken:
            return
        if isinstance(item, Change) or b"\r\nExpect: " not in content:
            self.put(content, item)
            return
        head, end, body = content.partition(b"\r\n\r\n")
        self.put(head + end)
        self._expecting.add(item)
        if self.scheduler.chance.random() < 0.3:
            self.put(body, item)  # it does not wait
        else:
            self._held = body
            self.awaits()

    def _request(self, ask: Ask) -> bytes:
        chance, is_decoupled = self.scheduler.chance, ask.model in streamed.SEVERAL
        form = chance.choice(_FORMS)
        endpoint = (
            "infer"
            if ask.step or ask.model == rounds.MODEL
            else chance.choice(_DECOUPLED if is_decoupled else _ENDPOINTS)
        )
        if endpoint in _OF_JSON and (ask.use is not None or ask.model == MODEL or ask.size > _MOST_TEXT):
            endpoint = "infer_stream"
        ask.endpoint, ask.wrong = endpoint, streamed.REFUSED if is_decoupled and endpoint == "infer" else ""
        tensors: list[dict[str, Any]] = [
            {"name": name, "datatype": "INT64", "shape": ask.shape} for name in inputs_of(ask.model)
        ]
        request: dict[str, Any] = {"id": str(ask.number), "inputs": tensors}
        if ask.step is not None:
            step = ask.step
            request["parameters"] = {
                "sequence_id": step.run.number,
                "sequence_start": step.start,
                "sequence_end": step.end,
            }
        tail, fields = b"", b""
        if endpoint in _OF_JSON:
            request = {"id": str(ask.number), "x": [ask.input] * ask.size}
        else:
            use = ask.use
            if use is not None and use.outputs:
                outputs = [(name, use.outputs.get(name)) for name in ask.outputs]
                request["outputs"] = [
                    {"name": name} if place is None else {"name": name, "parameters": place.parameters}
                    for name, place in outputs
                ]
            for tensor in tensors:
                if use is not None and (place := use.inputs.get(tensor["name"])) is not None:
                    tensor["parameters"] = place.parameters
                elif form == "json" and ask.size <= _MOST_TEXT:
                    tensor["data"] = [ask.input] * ask.size
                else:
                    tail += np.full(ask.size, ask.input, np.int64).tobytes()
                    tensor["parameters"] = {"binary_data_size": ask.size * 8}
                    request["parameters"] = {**request.get("parameters", {}), "binary_data_output": True}
        text = json.dumps(request).encode()
        if tail:
            fields = b"Inference-Header-Content-Length: %d\r\n" % len(text)
        body = text + tail
        if len(body) > MOST_BODY:
            ask.wrong = _TOO_LARGE
        if chance.random() < 0.15:
            coding = chance.choice(tuple(_CODINGS))
            members = 2 if coding != "deflate" and chance.random() < 0.3 else 1
            body = deflated(body, _CODINGS[coding], members)
            fields += b"Content-Encoding: %b\r\n" % coding.encode()
            if endpoint != "infer":
                ask.wrong = _NO_CODING
            elif not ask.wrong and members == 1 and chance.random() < 0.1:
                body, ask.wrong = body[: chance.randrange(2, len(body))], _BROKEN
        if chance.random() < 0.3:
            fields += b"Accept-Encoding: gzip, deflate\r\n"
        if form == "expecting":
            fields += b"Expect: 100-continue\r\n"
        if form == "chunked":
            fields += b"Transfer-Encoding: chunked\r\n"
            at = chance.randrange(1, len(body))
            body = b"".join(b"%x\r\n%b\r\n" % (len(each), each) for each in (body[:at], body[at:])) + b"0\r\n\r\n"
        else:
            fields += b"Content-Length: %d\r\n" % len(body)
        if form == "last":
            fields += b"Connection: close\r\n"
            self.ends = True
        target = f"{ask.model}/{endpoint}".encode()
        return b"POST /v2/models/%b HTTP/1.1\r\nHost: h\r\n%b\r\n%b" % (target, fields, body)

    # ----------------------------------------------------------------------------------------------------------- answers

    def received(self, data: bytes) -> None:
        while data and not self.closed:
            response = self._response
            try:
                if not response.status:
                    head = self._head + data
                    end = head.find(b"\r\n\r\n") + 4
                    if end < 4:
                        self._head = head
                        return
                    self._head, data = b"", head[end:]
                    response = self._begun(head[:end])
                elif response.place is not None:
                    room = response.place
                    part = data[: len(room)]
                    room[: len(part)] = part
                    response.filled(len(part))
                    data = data[len(part) :]
                else:
                    # In chunks: a piece ends where the answer may end.
                    end = response._left if response._left > 0 else data.find(b"\n") + 1 or len(data)
                    response.feed(data[:end])
                    data = data[end:]
            except MalformedResponse as error:
                self.scheduler.defect(f"{self} brings no HTTP: {error}: {self._head!r}, {data[:1000]!r}")
                return
            if response.stream:
                self._read(self._asked[0], response.stream)
            if response.whole:
                self._response = HttpResponse()
                self._answered(response)

    def _begun(self, head: bytes) -> HttpResponse:
        """Reads the head of an answer. Returns the answer, or the one that follows 100 Continue."""
        asked = self._asked[0] if self._asked else None
        if head.startswith(b"HTTP/1.1 100 "):
            if asked not in self._expecting:
                self.scheduler.defect(f"{self} brings 100 Continue, and {asked} does not expect it")
            self._expecting.discard(asked)
            self._send_held(asked)
            return self._response
        self._response = HttpResponse(isinstance(asked, Ask) and asked.endpoint in STREAMS)
        if b"\r\nContent-Encoding: " in head and (found := _TEXT_SIZE.search(head)):
            # It counts the bytes before they were compressed.
            head, self._text_size = head.replace(found[0], b""), found[1]
        self._response.feed(head)
        return self._response

    def _send_held(self, item: Item | None) -> None:
        held, self._held = self._held, None
        if held is not None and not self.broken:
            self.sends_on()
            self.put(held, item)

    def _answered(self, response: HttpResponse) -> None:
        if not self._asked:
            self.scheduler.defect(f"{self} brings an answer that nobody asked for: {bytes(response.text)!r}")
            return
        item = self._asked.popleft()
        self.ends |= not response.keep_alive
        # Its answer has left before its body was seen to be too large, which ends the connection.
        self._overlong |= isinstance(item, Ask) and item.wrong == _TOO_LARGE and response.keep_alive
        if item in self._expecting:
            # It was not asked for the body, which is a part of the request all the same.
            self._expecting.discard(item)
            if response.keep_alive:
                self._send_held(None)
            self._held = None
        if response.status == 408 and self.clients.was_slow(self):
            # What it has of the request is thrown away.
            self.clients.not_taken(item, "its client was too slow")
        elif isinstance(item, Change):
            error = "" if response.status == 200 else json.loads(bytes(response.text))["error"] or "?"
            if isinstance(item, Call) and not error:
                item.read_http(bytes(response.text))
            self.clients.change_ended(item, error)
        elif response.fields.get(b"content-type", b"").startswith(b"text/event-stream") and response.text:
            # Its first event is an error, which decides the status.
            self._read(item, response.text)
        elif item.endpoint in STREAMS and response.status == 200:
            if response.stream:
                self.scheduler.defect(f"{item} got a part of a response: {bytes(response.stream)!r}")
            elif item.model in streamed.SEVERAL and not item.outcome.startswith("error"):
                self.clients.judge_end(item)
            elif not item.outcome:
                self.scheduler.defect(f"{item} got no response")
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
        text, tail = bytes(response.text), b"" if response.tail is None else response.tail.tobytes()
        if coding := response.fields.get(b"content-encoding", b"").decode():
            text, size = zlib.decompress(text, _CODINGS[coding]), int(self._text_size or len(text))
            text, tail = (text[:size], text[size:]) if self._text_size else (text, b"")
            self._text_size = b""
        self._judge_said(ask, json.loads(text), tail)

    def _read(self, ask: Item, stream: bytearray) -> None:
        """Judges the responses that have come whole."""
        assert isinstance(ask, Ask)
        while True:
            tail = b""
            if ask.endpoint == "generate_stream":
                end = stream.find(b"\n\n") + 2
                if end < 2:
                    return
                said = json.loads(bytes(stream[len("data: ") : end]))
            else:
                if len(stream) < _SIZES.size:
                    return
                size, tail_size = _SIZES.unpack_from(stream)
                end = _SIZES.size + size + tail_size
                if len(stream) < end:
                    return
                said = json.loads(bytes(stream[_SIZES.size : _SIZES.size + size]))
                tail = bytes(stream[_SIZES.size + size : end])
            del stream[:end]
            if "error" in said:
                self.clients.judge_error(ask, said.get("code", ""), said["error"])
            else:
                self._judge_said(ask, said, tail)

    def _judge_said(self, ask: Ask, said: Any, tail: bytes) -> None:
        """Judges a response, or the only one."""
        if said.get("id") != str(ask.number):
            self.scheduler.defect(f"{ask} got the answer of request {said.get('id')!r}")
        names, values = ask.outputs, {}
        if ask.endpoint in _OF_JSON:
            values = {name: np.atleast_1d(np.array(said[name], np.int64)) for name in names if name in said}
        for output in said.get("outputs", ()):
            if "data" in output:
                values[output["name"]] = np.array(output["data"], np.int64)
            elif "parameters" not in output:
                values[output["name"]] = self.clients.regions.read(ask, output["name"])
            else:
                size = output["parameters"]["binary_data_size"]
                values[output["name"]] = np.frombuffer(tail[:size], np.int64)
                tail = tail[size:]
        if tail:
            self.scheduler.defect(f"{ask} got {len(tail)} bytes more than its outputs")
        outputs = [values.get(name, np.empty(0, np.int64)) for name in names]
        if ask.model not in streamed.SEVERAL or ask.endpoint == "infer":
            self.clients.judge(ask, outputs)
            return
        self.clients.judge_response(ask, outputs)
        if ask.endpoint == "generate":
            self.clients.judge_end(ask)

    def _judge_error(self, ask: Ask, response: HttpResponse) -> None:
        message = json.loads(bytes(response.text))["error"]
        status = response.status
        stopped = self.clients.stopped_ns and ask in self._behind
        if status == 503 and "is stopping" in message and (stopped or self.refused_now(ask)):
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
            elif self.ends or self._overlong or self.refused_now(item) or self.clients.was_slow(self):
                begun = self._response.begun or self._head
                if begun and not self.slept_ns:
                    self.scheduler.defect(f"{self} is cut in the middle of the answer to {item}")
                if begun and self.unread:
                    self.clients.left(item)
                else:
                    self.clients.not_taken(item, "its connection has ended")
            else:
                self.scheduler.defect(f"{self} is closed, and {item} has no answer")
                return


def deflated(content: bytes, bits: int, members: int = 1) -> bytes:
    """Compresses a body, to a stream of so many members."""
    made, step = b"", len(content) // members + 1
    for at in range(0, len(content) + 1, step):
        stream = zlib.compressobj(1, zlib.DEFLATED, bits)
        made += stream.compress(content[at : at + step]) + stream.flush()
    return made


def _change(change: Change) -> bytes:
    if isinstance(change, Call):
        return change.as_http()
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
