"""Generates bad requests from good ones by random changes of their bytes. A number is always the same request."""

from __future__ import annotations

import gzip
import json
import random
import re
from collections.abc import Callable

import numpy as np

#: What parsers stumble over, put in anywhere.
NASTY = (
    b"\r\n",
    b"\n",
    b"\r",
    b"\0",
    b" ",
    b"\t",
    b":",
    b"\r\n\r\n",
    b"\n\n",
    b"\r\n ",
    b"\xff",
    b"\xc3\x28",
    b"\xed\xa0\x80",
    b"%2F",
    b"%00",
    b"%",
    b"..",
    b"//",
    b"?",
    b"#",
    b"*",
    b"-1",
    b"0",
    b"+5",
    b"1e9",
    b"0x10",
    b"99999999999999999999",
    b"9223372036854775807",
    b"18446744073709551616",
    b"NaN",
    b"Infinity",
    b"null",
    b"true",
    b"[]",
    b"{}",
    b'"',
    b"\\u0000",
    b"\\ud800",
    b"[[[[",
    b"]",
    b"}",
    b",",
)
#: Header lines that change what a message is.
LINES = (
    b"Content-Length: 5",
    b"Content-Length: -1",
    b"Content-Length: 0",
    b"Content-Length: 999999999999",
    b"Transfer-Encoding: chunked",
    b"Transfer-Encoding: gzip",
    b"Transfer-Encoding : chunked",
    b"Content-Encoding: gzip",
    b"Content-Encoding: deflate",
    b"Content-Encoding: br",
    b"Accept-Encoding: gzip;q=0.5, deflate",
    b"Accept-Encoding: ;;;,q",
    b"Expect: 100-continue",
    b"Expect: nothing",
    b"Connection: close",
    b"Connection: keep-alive, Upgrade",
    b"Upgrade: h2c",
    b"Upgrade: websocket",
    b"Host: other",
    b"Inference-Header-Content-Length: 0",
    b"Inference-Header-Content-Length: 7",
    b"Inference-Header-Content-Length: x",
    b"X: " + b"y" * 3000,
    b"no colon",
    b": empty",
    b" folded",
    b"X: \x01",
    b"Content-Type: multipart/form-data; boundary=x",
)


def good_requests() -> list[bytes]:
    """Returns one request of each kind, for a daemon with ``scale`` (FP32[n, 4] to 3x + 1) and ``echo_bytes`` (BYTES[n])."""
    values = {"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}
    plain = json.dumps({"id": "a", "inputs": [values], "outputs": [{"name": "y"}], "parameters": {"p": 1}}).encode()
    texts = {"name": "x", "shape": [2], "datatype": "BYTES", "data": ["é", "b"]}
    described = {"name": "x", "shape": [1, 4], "datatype": "FP32", "parameters": {"binary_data_size": 16}}
    large = {"name": "x", "shape": [400, 4], "datatype": "FP32", "parameters": {"binary_data_size": 6400}}
    head = json.dumps({"inputs": [described], "outputs": [{"name": "y", "parameters": {"binary_data": True}}]}).encode()
    large_head = json.dumps({"inputs": [large]}).encode()
    region = json.dumps(
        {"inputs": [{**described, "parameters": {"shared_memory_region": "r", "shared_memory_byte_size": 16}}]}
    )
    packed = gzip.compress(plain, mtime=0)
    return [
        _post("/v2/models/scale/infer", plain),
        _post("/v2/models/echo_bytes/versions/1/infer", json.dumps({"inputs": [texts]}).encode()),
        _post(
            "/v2/models/scale/infer",
            head + np.ones(4, "<f4").tobytes(),
            f"Inference-Header-Content-Length: {len(head)}",
        ),
        _post(
            "/v2/models/scale/infer", large_head + bytes(6400), f"Inference-Header-Content-Length: {len(large_head)}"
        ),
        _post("/v2/models/echo_bytes/infer", b"\2\0\0\0hi", "Inference-Header-Content-Length: 0"),
        _post("/v2/models/scale/infer", packed, "Content-Encoding: gzip", "Accept-Encoding: deflate"),
        _post("/v2/models/scale/infer", region.encode()),
        _chunked("/v2/models/scale/infer", plain),
        _post("/v2/models/scale/infer", plain, "Expect: 100-continue"),
        _post("/v2/models/scale/generate", b'{"id": "g", "x": [1, 2, 3, 4], "parameters": {"p": 1.5}}'),
        _post("/v2/models/scale/generate_stream", b'{"x": [[1, 2, 3, 4]]}'),
        _chunked("/v2/models/echo_bytes/generate", b'{"x": ["a", "b"]}'),
        _post("/v2/systemsharedmemory/region/r/register", b'{"key": "/nothing-here", "offset": 0, "byte_size": 64}'),
        _post(
            "/v2/cudasharedmemory/region/r/register",
            b'{"raw_handle": {"b64": "AAAA"}, "device_id": 0, "byte_size": 64}',
        ),
        _post("/v2/systemsharedmemory/region/r/unregister", b""),
        _post("/v2/repository/index", b'{"ready": true}'),
        _post("/v2/repository/models/scale/load", b'{"parameters": {"config": "{}"}}'),
        *[
            f"{method} {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode()
            for method in ("GET", "HEAD", "OPTIONS", "DELETE")
            for path in (
                "/v2",
                "/v2/health/ready",
                "/v2/models/scale/config",
                "/v2/models/scale/stats",
                "/v2/systemsharedmemory/status",
            )
        ],
    ]


def _post(path: str, body: bytes, *fields: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: x", f"Content-Length: {len(body)}", *fields]
    return "".join(f"{line}\r\n" for line in lines).encode() + b"\r\n" + body


def _chunked(path: str, body: bytes) -> bytes:
    half = len(body) // 2
    pieces = [b"%x\r\n%b\r\n" % (len(piece), piece) for piece in (body[:half], body[half:], b"")]
    return f"POST {path} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n".encode() + b"".join(pieces)


class Mutator:
    """Makes bad requests by number; a number always gives the same bytes."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._good = good_requests()
        self._changes: tuple[Callable[[random.Random, bytes], bytes], ...] = (
            self._flip,
            self._insert,
            self._insert,
            self._delete,
            self._repeat,
            self._cut,
            self._number,
            self._number,
            self._line,
            self._line,
            self._token,
            self._body,
            self._splice,
            self._bare_lines,
            self._noise,
        )

    def request(self, number: int) -> bytes:
        """Returns the bytes for one connection: a changed request, sometimes with good ones before or behind it."""
        rng = random.Random(f"{self._seed} {number}")
        content = rng.choice(self._good)
        for _ in range(rng.choice((1, 1, 1, 2, 3, 6))):
            content = rng.choice(self._changes)(rng, content)
        before = rng.choice(self._good) if rng.random() < 0.2 else b""
        behind = rng.choice(self._good) if rng.random() < 0.2 else b""
        return before + content + behind

    def _flip(self, rng: random.Random, content: bytes) -> bytes:
        changed = bytearray(content)
        for _ in range(rng.choice((1, 1, 4, 20))):
            if changed:
                changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
        return bytes(changed)

    def _insert(self, rng: random.Random, content: bytes) -> bytes:
        at = rng.randint(0, len(content))
        return content[:at] + rng.choice(NASTY) * rng.choice((1, 1, 2, 300)) + content[at:]

    def _delete(self, rng: random.Random, content: bytes) -> bytes:
        at = rng.randint(0, len(content))
        return content[:at] + content[at + rng.choice((1, 2, 10, 100)) :]

    def _repeat(self, rng: random.Random, content: bytes) -> bytes:
        first, last = sorted((rng.randint(0, len(content)), rng.randint(0, len(content))))
        return content[:last] + content[first:last] * rng.choice((1, 2, 20)) + content[last:]

    def _cut(self, rng: random.Random, content: bytes) -> bytes:
        return content[: rng.randint(0, len(content))]

    def _number(self, rng: random.Random, content: bytes) -> bytes:
        """Replaces a number by another one."""
        found = list(re.finditer(rb"\d+", content))
        if not found:
            return content
        match = rng.choice(found)
        other = rng.choice(
            (
                b"0",
                b"-1",
                b"1.5",
                b"2147483648",
                b"9223372036854775808",
                b"1e400",
                b"9" * 400,
                b"",
                b"true",
                b"4294967297",
            )
        )
        return content[: match.start()] + other + content[match.end() :]

    def _line(self, rng: random.Random, content: bytes) -> bytes:
        """Adds a header line, or removes one."""
        head, end, body = content.partition(b"\r\n\r\n")
        lines = head.split(b"\r\n")
        if rng.random() < 0.3 and len(lines) > 1:
            del lines[rng.randrange(len(lines))]
        else:
            lines.insert(rng.randint(1, len(lines)), rng.choice(LINES))
        return b"\r\n".join(lines) + end + body

    def _token(self, rng: random.Random, content: bytes) -> bytes:
        """Replaces a JSON value or a word by another one."""
        found = list(re.finditer(rb'"[^"]*"|[\[\]{}]|\b[A-Za-z_]+\b', content))
        if not found:
            return content
        match = rng.choice(found)
        return (
            content[: match.start()] + rng.choice((*NASTY, b"[1, [2]]", b'{"a": 1}', b'"x"')) + content[match.end() :]
        )

    def _body(self, rng: random.Random, content: bytes) -> bytes:
        """Changes the body and sets Content-Length to its new size."""
        head, end, body = content.partition(b"\r\n\r\n")
        if not end:
            return content
        body = self._token(rng, self._number(rng, body)) if rng.random() < 0.8 else rng.randbytes(rng.randint(0, 300))
        head = re.sub(rb"Content-Length: \d+", b"Content-Length: %d" % len(body), head, count=1)
        return head + end + body

    def _splice(self, rng: random.Random, content: bytes) -> bytes:
        other = rng.choice(self._good)
        return content[: rng.randint(0, len(content))] + other[rng.randint(0, len(other)) :]

    def _bare_lines(self, rng: random.Random, content: bytes) -> bytes:
        return content.replace(b"\r\n", rng.choice((b"\n", b"\r", b"\r\r\n")), rng.choice((1, 100)))

    def _noise(self, rng: random.Random, content: bytes) -> bytes:
        at = rng.randint(0, len(content))
        return content[:at] + rng.randbytes(rng.choice((1, 10, 1000, 20_000))) + content[at:]
