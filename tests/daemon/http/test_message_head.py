"""The request line and the fields as values."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensord.daemon.http.message_head import InferRoute, generate_head, infer_head, infer_route, path_and_query, refusal
from tensord.shm.errors import InvalidArgument, NotFound, Unsupported

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


@pytest.mark.parametrize(
    ("fields", "length", "coding"),
    [
        ([], 0, ""),
        ([(b"content-length", b"9")], 9, ""),
        ([(b"transfer-encoding", b"chunked")], None, ""),
        ([(b"content-encoding", b"identity"), (b"content-encoding", b"gzip")], 0, ""),
        ([(b"content-encoding", b"gzip")], 0, "unknown"),
        ([(b"content-encoding", b"")], 0, "unknown"),
        # What infer heeds means nothing there.
        ([(b"inference-header-content-length", b"x"), (b"accept-encoding", b"gzip")], 0, ""),
    ],
)
def test_heads_of_generate(fields: list[tuple[bytes, bytes]], length: int | None, coding: str) -> None:
    head = generate_head(InferRoute("m", 3), "1.1", True, [HOST, *fields])
    assert (head.model, head.version, head.content_length, head.coding) == ("m", 3, length, coding)
    assert (head.error, head.json_size, head.accepts) == (None, None, "")


@pytest.mark.parametrize(
    ("target", "route"),
    [
        (b"/v2/models/m/infer", InferRoute("m", 0)),
        (b"/v2/models/m/versions/3/infer", InferRoute("m", 3)),
        (b"/v2/models/m/versions/007/infer", InferRoute("m", 7)),
        (b"/v2/models/m/infer?a=/b", InferRoute("m", 0)),
        (b"http://host:1/v2/models/m/infer", InferRoute("m", 0)),
        (b"HTTPS://host/v2/models/m/infer?x", InferRoute("m", 0)),
        (b"/v2/models/a.b-c_d%20%2F/infer", InferRoute("a.b-c_d %2F", 0)),
        (b"/v2/models/%ff/infer", InferRoute("\ufffd", 0)),
        (b"/v2/models/versions/infer", InferRoute("versions", 0)),
        (b"/v2/models//infer", None),
        (b"/v2/models/m/infer/", None),
        (b"/v2/models/m/infers", None),
        (b"/v2/models/m/versions//infer", None),
        (b"/v2/models/m/versions/x/infer", None),
        (b"/v2/models/m/versions/-1/infer", None),
        (b"/v2/models/m/inf%65r", InferRoute("m", 0)),
        (b"/v2/models/m/generate", InferRoute("m", 0, endpoint="generate")),
        (b"/v2/models/m/versions/2/generate_stream", InferRoute("m", 2, endpoint="generate_stream")),
        (b"/v2/models/m/versions/x/generate", None),
        (b"v2/models/m/infer", None),
        (b"/x?/v2/models/m/infer", None),
        (b"", None),
    ],
)
def test_targets_of_inference(target: bytes, route: InferRoute | None) -> None:
    assert infer_route(target) == route


@pytest.mark.parametrize(
    ("version", "error"),
    [(b"0", NotFound), (b"00", NotFound), (b"9223372036854775808", InvalidArgument), (b"9" * 5000, InvalidArgument)],
)
def test_versions_that_are_none(version: bytes, error: type[Exception]) -> None:
    route = infer_route(b"/v2/models/m/versions/" + version + b"/infer")
    assert route is not None
    assert (route.model, type(route.error)) == ("m", error)


@given(st.binary())
def test_any_target_is_parsed(target: bytes) -> None:
    infer_route(target)
    infer_route(b"/v2/models/" + target + b"/infer")


def test_targets_are_remembered_and_bounded() -> None:
    first = infer_route(b"/v2/models/m/infer")
    assert infer_route(b"/v2/models/m/infer") is first
    for number in range(3000):
        assert infer_route(b"/v2/models/%d/infer" % number) == InferRoute(str(number), 0)
        assert infer_route(b"/%d" % number) is None
    assert infer_route.cache_info().currsize <= 1024
