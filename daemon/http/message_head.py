"""Reads the head of an HTTP request: what its request line and header fields mean. Sans-I/O.

Callers pass the header fields of a request that an HTTP parser has accepted, with names in lower case. So the fields are well
formed, and each Content-Length is a number. A request has at most one Content-Length. A request with a Transfer-Encoding has no
Content-Length.
"""

from __future__ import annotations

import functools
import re
import urllib.parse
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tensord.daemon.front import load_report
from tensord.daemon.http.body import COLLECT_BYTE_SIZE
from tensord.daemon.http.compression import answer_coding, request_coding
from tensord.daemon.submit.model_states import parse_version
from tensord.shm.errors import InvalidArgument, ServingError, Unsupported
from tensord.shm.messages import TIMING

Fields = Sequence[tuple[bytes, bytes]]
#: Model, version, and bytes of tensors behind the JSON.
TextKey = tuple[str, int, int]

#: Longer JSON is read each time.
MAX_TEXT = 2048

#: A request target: its path, absolute or not, and its query. Anything else ("*") is a path that nobody serves.
_TARGET = re.compile(rb"(?:https?://[^/?]*)?(/[^?#]*)(?:\?([^#]*))?.*", re.IGNORECASE | re.DOTALL)
#: The path of an inference request.
_INFER_PATH = re.compile(r"/v2/models/([^/]+)(?:/versions/([0-9]+))?/(infer|infer_stream|generate|generate_stream)")
#: The fields that say how long a body is.
_FRAMING = (b"content-length", b"transfer-encoding")
#: Request targets remembered, because the same ones come again and again; more than a client of many models and versions uses.
_REMEMBERED = 1024


@dataclass(frozen=True, slots=True)
class InferRoute:
    """Names the model, the version (0: the newest) and the endpoint of a request target.

    ``error``: why the version is refused, or None.
    """

    model: str
    version: int
    error: ServingError | None = None
    #: infer, infer_stream, generate or generate_stream.
    endpoint: str = "infer"


@functools.lru_cache(_REMEMBERED)
def infer_route(target: bytes) -> InferRoute | None:
    """Parses a request target. Returns None if the target is no inference endpoint."""
    match = _INFER_PATH.fullmatch(path_and_query(target)[0])
    if match is None:
        return None
    model, version, endpoint = match.groups()
    try:
        return InferRoute(model, parse_version(model, version) if version else 0, endpoint=endpoint)
    except ServingError as error:
        return InferRoute(model, 0, error, endpoint)


@dataclass(slots=True)
class InferHead:
    """Holds the parsed request line and header fields of an inference request."""

    model: str
    version: int
    #: The bytes of the body; None: it is chunked.
    content_length: int | None
    #: Value of Inference-Header-Content-Length; None: the body is JSON alone.
    json_size: int | None
    keep_alive: bool
    #: The error to answer the request with; None: its head is good.
    error: ServingError | None = None
    #: The header line of the answer that says that the connection is kept alive, for HTTP/1.0; else empty.
    keep_alive_line: bytes = b""
    #: How the body is compressed; "": it is not.
    coding: str = ""
    #: How the answer is to be compressed; "": not at all.
    accepts: str = ""
    #: Header lines of the answer for the page in a browser that asks; "": there is none.
    origin_lines: bytes = b""
    #: Headers that become parameters of the request, and override those in the body.
    forwarded: dict[str, str] | None = None
    #: The client's ``traceparent`` header, if the front reads it; a head with one is not cached.
    trace_parent: str = ""
    #: ``RequestRecord.trace``: TIMING where the answer is to say how long it took (Tensord-Timing).
    trace: int = 0
    #: How the answer reports the load; "": not (``tensord.daemon.front.load_report``).
    load_format: str = ""
    #: The edition of the table of models in which the model was last found; -1: it was not looked for.
    edition: int = -1
    #: True if the answer is sent uncompressed, and without header lines about the connection, the load or CORS.
    is_plain: bool = field(init=False)
    #: The bytes of the JSON, and of the tensors behind it, if the body is small, not compressed and not raw; else -1.
    text_size: int = field(init=False)
    tail_size: int = field(init=False)
    #: The key by which the parsed request is cached, which holds the bytes of such a JSON; None: the JSON is parsed each time.
    key: TextKey | None = field(init=False)

    def __post_init__(self) -> None:
        length, json_size = self.content_length, self.json_size
        self.is_plain = not self.accepts and not self.keep_alive_line and not self.load_format
        self.text_size = self.tail_size = -1
        if length is not None and length <= COLLECT_BYTE_SIZE and not self.coding and json_size != 0:
            text_size = length if json_size is None else json_size
            if text_size <= length:
                self.text_size, self.tail_size = text_size, length - text_size
        known = 0 <= self.text_size <= MAX_TEXT and self.forwarded is None
        self.key = (self.model, self.version, self.tail_size) if known else None

    def tell_origin(self, lines: bytes) -> None:
        """Sets the CORS header lines of the answer. ``lines`` is empty if the answer has none."""
        self.origin_lines = lines
        self.is_plain = self.is_plain and not lines

    def forward(self, parameters: dict[str, str]) -> None:
        """Stores HTTP headers that the model gets as request ``parameters``."""
        self.forwarded, self.key = parameters, None


def refusal(version: str, fields: Fields) -> tuple[int, str] | None:
    """Checks the framing and the Host of a request. Returns the status and text of an error, or None.

    ``version``: the version of HTTP, such as "1.1". ``fields``: the header fields.
    """
    hosts = 0
    for name, value in fields:
        if name == b"host":
            hosts += 1
        elif name == b"transfer-encoding" and (value.lower() != b"chunked" or version == "1.0"):
            return 501, "the only transfer coding that is understood is 'chunked', in an HTTP/1.1 request"
    if version == "1.1":
        return None if hosts == 1 else (400, "an HTTP/1.1 request needs exactly one Host header")
    return (
        None if version == "1.0" else (505, f"HTTP version {version} is not understood on this port, 1.0 and 1.1 are")
    )


def path_and_query(target: bytes) -> tuple[str, bytes, bytes]:
    """Splits the target of a request into the percent-decoded path, the path as it was sent, and the query.

    In the decoded path, %2F stays as it is.
    """
    match = _TARGET.fullmatch(target)
    path, query = (match[1], match[2] or b"") if match else (target, b"")
    if b"%" not in path:
        return path.decode("utf-8", "replace"), path, query
    segments = [urllib.parse.unquote_to_bytes(segment).replace(b"/", b"%2F") for segment in path.split(b"/")]
    return b"/".join(segments).decode("utf-8", "replace"), path, query


def scope(method: bytes, target: bytes, version: str, fields: Fields) -> dict[str, Any]:
    """Returns the ASGI scope of an HTTP request."""
    path, raw_path, query = path_and_query(target)
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": version,
        "method": method.decode("ascii"),
        "scheme": "http",
        "path": path,
        "raw_path": raw_path,
        "query_string": query,
        "headers": fields,
    }


def infer_head(
    route: InferRoute, version: str, keep_alive: bool, fields: Fields, compresses: bool = False
) -> InferHead:
    """Interprets the head of a request to ``route``. If a header field is wrong, the ``error`` of the result says so.

    Args:
      version: the version of HTTP, such as "1.1".
      keep_alive: whether the connection stays open after the answer.
      compresses: whether answers are compressed for clients that accept it.
    """
    length: int | None = 0
    json_size: int | None = None
    error: ServingError | None = route.error
    coding: str | None = None
    accepts, trace, load_format = "", 0, ""
    for name, value in fields:
        if name == b"content-length":
            length = int(value)
        elif name == b"transfer-encoding":
            length = None
        elif name == b"inference-header-content-length":
            if json_size is None and value.isdigit() and len(value) < 19:
                json_size = int(value)
            else:
                error = error or InvalidArgument(
                    "Inference-Header-Content-Length should be an unsigned integer, given once"
                )
        elif name == b"content-encoding":
            named = request_coding(value)
            if named is None or coding is not None:
                error = error or Unsupported("Unsupported compression type")
            coding = named or ""
        elif compresses and name == b"accept-encoding" and not accepts:
            accepts = answer_coding(value)
        elif name == b"tensord-timing":
            trace = TIMING
        elif name == b"endpoint-load-metrics-format":
            load_format = load_report.asked(value.decode("latin-1"))
    # Who speaks HTTP/1.0 must be told that the connection stays.
    connection = b"" if version != "1.0" else b"Connection: keep-alive\r\n"
    return InferHead(
        route.model,
        route.version,
        length,
        json_size,
        keep_alive,
        error,
        connection,
        coding or "",
        accepts,
        trace=trace,
        load_format=load_format,
    )


def generate_head(route: InferRoute, version: str, keep_alive: bool, fields: Fields) -> InferHead:
    """Returns the parsed head of an HTTP request to generate or generate_stream.

    The caller must refuse the request if ``coding`` of the result is not empty, because then the body is compressed.
    ``version``: the version of HTTP, such as "1.1". ``keep_alive``: whether the connection stays open after the answer.
    """
    head = infer_head(route, version, keep_alive, [each for each in fields if each[0] in _FRAMING])
    if next((value for name, value in fields if name == b"content-encoding"), b"identity") != b"identity":
        head.coding = "unknown"
    return head
