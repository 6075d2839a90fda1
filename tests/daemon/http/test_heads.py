"""Heads that were parsed before: found by their bytes, or by what of them matters. Whatever is found, parsing gives as well."""

from __future__ import annotations

import httptools
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensord.daemon.http import message_head
from tensord.daemon.http.heads import MAX_HEAD, Heads
from tensord.daemon.http.message_head import InferHead
from tests.generated import examples

LINES = [b"Host: x", b"Content-Length: 9", b"Inference-Header-Content-Length: 5"]


def head_of(*lines: bytes, first: bytes = b"POST /v2/models/m/infer HTTP/1.1") -> bytes:
    return b"\r\n".join([first, *lines]) + b"\r\n\r\n"


class _Parsed:
    """Parses a head with httptools and holds the result."""

    def __init__(self, head: bytes) -> None:
        self.url, self.fields, self.done = b"", list[tuple[bytes, bytes]](), False
        self._parser = httptools.HttpRequestParser(self)
        self._parser.feed_data(head)

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.fields.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self.done = True

    def meaning(self) -> InferHead:
        version = self._parser.get_http_version()
        route = message_head.infer_route(self.url)
        if message_head.refusal(version, self.fields) is not None or route is None or not self.done:
            raise httptools.HttpParserError
        return message_head.infer_head(route, version, self._parser.should_keep_alive(), self.fields, True)


def parse(head: bytes) -> InferHead | None:
    """Parses a head with httptools; None: the parser, or the front behind it, refuses it."""
    try:
        return _Parsed(head).meaning()
    except (httptools.HttpParserError, httptools.HttpParserUpgrade):
        return None


def heads(cuts: bool = True, max_fields: int = 100) -> Heads:
    return Heads(65536, max_fields, cuts)


NAMES = st.sampled_from(
    [
        *(b"traceparent", b"User-Agent", b"X-Request-Id", b"Accept", b"x", b"Host", b"HOST", b"Connection", b"Expect"),
        *(b"Content-Length", b"content-length", b"Accept-Encoding", b"Content-Encoding", b"Upgrade", b"Keep-Alive"),
        *(b"Transfer-Encoding", b"Inference-Header-Content-Length", b" folded", b"no colon", b"", b"bad name", b"a\0b"),
    ]
)
VALUES = st.sampled_from(
    [b"x", b"close", b"chunked", b"9", b"5", b"gzip", b"", b"a: b", b"\tt ", b"\x80", b"\0", b"\r", b"\n"]
)
LINE = st.builds(lambda name, colon, value: name + colon + value, NAMES, st.sampled_from([b": ", b":", b" :"]), VALUES)
LISTS = st.lists(st.sampled_from(LINES) | LINE, max_size=6)


@settings(max_examples=examples(400))
@given(st.lists(LISTS.map(lambda lines: [*LINES[:2], *lines]), min_size=1, max_size=6), st.data())
def test_what_is_found_is_what_parsing_gives(all_lines: list[list[bytes]], data: st.DataObject) -> None:
    """A remembered head never changes the result, also with lines left out, put in and moved."""
    known = heads()
    for lines in all_lines:
        for times in range(2):
            head = head_of(*(data.draw(st.permutations(lines)) if times else lines))
            found, parsed = known[head], parse(head)
            if found is not None:
                assert found == parsed
            elif parsed is not None:
                known.learn(head, parsed)


def learned(*lines: bytes, **limits: int) -> Heads:
    known, head = heads(**limits), head_of(*LINES, *lines)  # type: ignore[arg-type]
    parsed = parse(head)
    assert parsed is not None
    known.learn(head, parsed)
    assert known[head] is parsed
    return known


@pytest.mark.parametrize("line", [b"traceparent: 00-1-2-01", b"x-request-id:7", b"User-Agent: a/1 (b; c)", b"a: \t"])
def test_a_line_that_nobody_reads_changes_nothing(line: bytes) -> None:
    known = learned(b"traceparent: 00-0-0-01")
    for lines in ([line, *LINES], [*LINES, line], [line, *LINES, line], LINES):
        assert known[head_of(*lines)] == parse(head_of(*LINES))


@pytest.mark.parametrize(
    "line",
    [
        *(b"Connection: close", b"Expect: 100-continue", b"Accept-Encoding: gzip", b"Content-Encoding: gzip", b"Host: y"),
        *(b"a : b", b"a b: c", b" folded", b"a: \x00", b"a: \x80", b"a", b": a", b"Content-Length: 9", b"upgrade: h2c"),
    ],
)  # fmt: skip
def test_any_other_line_has_the_head_parsed(line: bytes) -> None:
    known = learned()
    for lines in ([line, *LINES], [*LINES, line]):
        assert known[head_of(*lines)] is None


def test_limits_hold_for_lines_that_are_left_out() -> None:
    known = learned(max_fields=5)
    assert known[head_of(*LINES, b"a: b", b"c: d")] is not None
    assert known[head_of(*LINES, b"a: b", b"c: d", b"e: f")] is None
    assert known[head_of(*LINES, b"a: " + b"b" * MAX_HEAD)] is None


def test_rules_of_the_operator_see_every_line() -> None:
    known = learned(b"key: 1", cuts=False)
    assert known[head_of(*LINES, b"key: 2")] is None


def test_one_that_ends_its_connection_is_another_head() -> None:
    known = learned()
    assert known[head_of(*LINES, b"Connection: close")] is None
    known = learned(b"Connection: close")
    meaning = known[head_of(*LINES, b"Connection: close", b"a: b")]
    assert meaning is not None
    assert not meaning.keep_alive
    assert known[head_of(*LINES)] is None


@pytest.mark.parametrize(
    ("first", "lines"),
    [
        (b"\r\nPOST /v2/models/m/infer HTTP/1.1", LINES),
        (b"POST /v2/models/m/infer HTTP/1.1", [LINES[0], b"Transfer-Encoding: chunked"]),
        (b"POST /v2/models/m/infer HTTP/1.1", [*LINES, b"a: " + b"b" * MAX_HEAD]),
        (b"POST /v2/models/m/versions/0/infer HTTP/1.1", LINES),
    ],
)
def test_what_is_not_remembered(first: bytes, lines: list[bytes]) -> None:
    known, head = heads(), head_of(*lines, first=first)
    parsed = parse(head)
    assert parsed is not None
    known.learn(head, parsed)
    assert known[head] is None
