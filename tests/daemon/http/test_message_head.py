"""The request line and the fields as values."""

from __future__ import annotations

import pytest

from tensord.daemon.http.infer_route import InferRoute
from tensord.daemon.http.message_head import infer_head, path_and_query, refusal
from tensord.shm.errors import InvalidArgument, Unsupported

HOST = (b"host", b"x")


@pytest.mark.parametrize(
    ("version", "fields", "status"),
    [
        ("1.1", [HOST], 0),
        ("1.1", [], 400),
        ("1.1", [HOST, HOST], 400),
        ("1.0", [], 0),
        ("1.0", [HOST], 0),
        ("0.9", [], 505),
        ("2.0", [HOST], 505),
        ("1.1", [HOST, (b"transfer-encoding", b"Chunked")], 0),
        ("1.1", [HOST, (b"transfer-encoding", b"gzip, chunked")], 501),
        ("1.0", [HOST, (b"transfer-encoding", b"chunked")], 501),
    ],
)
def test_refusals(version: str, fields: list[tuple[bytes, bytes]], status: int) -> None:
    refused = refusal(version, fields)
    assert (refused[0] if refused else 0) == status


@pytest.mark.parametrize(
    ("target", "path", "raw", "query"),
    [
        (b"/v2", "/v2", b"/v2", b""),
        (b"/v2?a=b?c", "/v2", b"/v2", b"a=b?c"),
        (b"http://h:1/v2/x?q", "/v2/x", b"/v2/x", b"q"),
        (b"HTTPS://h/v2", "/v2", b"/v2", b""),
        (b"/a%20b/%C3%A9", "/a b/é", b"/a%20b/%C3%A9", b""),
        (b"/a%2Fb/%2f", "/a%2Fb/%2F", b"/a%2Fb/%2f", b""),
        (b"/%", "/%", b"/%", b""),
        (b"/%ff", "/\ufffd", b"/%ff", b""),
        (b"*", "*", b"*", b""),
        (b"http://host", "http://host", b"http://host", b""),
    ],
)
def test_targets(target: bytes, path: str, raw: bytes, query: bytes) -> None:
    assert path_and_query(target) == (path, raw, query)


def test_infer_heads() -> None:
    route = InferRoute("m", 3)
    head = infer_head(
        route, "1.1", True, [HOST, (b"content-length", b"80"), (b"inference-header-content-length", b"7")]
    )
    assert (head.model, head.version, head.content_length, head.json_size) == ("m", 3, 80, 7)
    assert (head.keep_alive, head.error, head.keep_alive_line) == (True, None, b"")
    assert infer_head(route, "1.1", True, [HOST]).content_length == 0
    assert infer_head(route, "1.1", True, [HOST, (b"transfer-encoding", b"chunked")]).content_length is None
    assert infer_head(route, "1.0", True, []).keep_alive_line == b"Connection: keep-alive\r\n"


@pytest.mark.parametrize("compresses", [True, False])
def test_answers_are_compressed_where_the_operator_wants_it(compresses: bool) -> None:
    fields = [HOST, (b"accept-encoding", b"gzip, deflate")]
    assert infer_head(InferRoute("m", 0), "1.1", True, fields, compresses).accepts == ("gzip" if compresses else "")


@pytest.mark.parametrize("value", [b"", b"-1", b"x", b"1 ", b"9" * 19])
def test_bad_json_sizes(value: bytes) -> None:
    head = infer_head(InferRoute("m", 0), "1.1", True, [(b"inference-header-content-length", value)])
    assert isinstance(head.error, InvalidArgument)


def test_the_first_error_counts() -> None:
    wrong = InvalidArgument("the version")
    fields = [(b"content-encoding", b"br"), (b"inference-header-content-length", b"x")]
    assert infer_head(InferRoute("m", 0, wrong), "1.1", True, fields).error is wrong
    assert isinstance(infer_head(InferRoute("m", 0), "1.1", True, fields).error, Unsupported)
