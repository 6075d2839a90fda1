"""Header blocks against the hpack library's encoder: what they mean, and what is refused."""

from __future__ import annotations

import urllib.parse

import hpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensord.daemon.grpc import header_blocks, hpack_decoder
from tensord.daemon.grpc.frames import COMPRESSION_ERROR, ENHANCE_YOUR_CALM, Violation
from tensord.daemon.grpc.header_blocks import (
    CallHead,
    HeaderBlocks,
    Malformed,
    check_common,
    check_own,
    check_trailers,
)
from tensord.daemon.grpc.hpack_decoder import Fields

NAMES = st.text("abc-", min_size=1, max_size=8).map("x".__add__)
CALLS = st.tuples(
    st.sampled_from(["/A", "/B", "/C/D"]),
    st.lists(st.tuples(NAMES, st.text("01 ~", max_size=30).map(str.strip)), max_size=4),
)


def fields(path: str = "/A", *more: tuple[str, str]) -> list[tuple[str, str]]:
    own = [(":method", "POST"), (":scheme", "http"), (":path", path), ("te", "trailers")]
    return [*own, ("content-type", "application/grpc"), *more]


def decoded(*more: tuple[str, str]) -> CallHead:
    return HeaderBlocks(65536).decode(hpack.Encoder().encode(fields("/A", *more)))


def test_what_a_client_says_of_each_call_is_understood_once() -> None:
    """On whatever connection, whatever its table holds; what is the call's own is read each time."""
    first, second = HeaderBlocks(65536), HeaderBlocks(65536)
    encoder = hpack.Encoder()
    head = first.decode(encoder.encode(fields("/once")))
    assert first.decode(encoder.encode(fields("/once"))) is head
    assert second.decode(hpack.Encoder().encode(fields("/once"))) is head
    own = first.decode(encoder.encode(fields("/once", ("x-key", "1"), ("grpc-timeout", "1S"))))
    assert own == head._replace(timeout_ns=10**9, metadata=(("x-key", "1"),))
    assert own.accepts is head.accepts
    # What is larger is nothing that is said of each call.
    large = fields("/" + 2000 * "x")
    assert first.decode(encoder.encode(large)) == second.decode(hpack.Encoder().encode(large))
    assert first.decode(encoder.encode(large)) is not first.decode(encoder.encode(large))


@given(st.lists(st.tuples(CALLS, st.sampled_from([None, None, None, 0, 100, 4096])), max_size=40))
def test_every_block_means_what_was_encoded(calls: list[tuple[tuple[str, list[tuple[str, str]]], int | None]]) -> None:
    """Each block is decoded right whatever came before it, also where the client's table shrinks and grows."""
    encoder, blocks = hpack.Encoder(), HeaderBlocks(65536)
    for (path, metadata), table_size in calls:
        if table_size is not None:
            encoder.header_table_size = table_size
        for _ in range(2):
            head = blocks.decode(encoder.encode(fields(path, *metadata)))
            assert (head.path, list(head.metadata), head.http_status) == (path, metadata, 200)


def test_the_same_bytes_mean_something_else_after_the_table_changed() -> None:
    encoder, blocks = hpack.Encoder(), HeaderBlocks(65536)
    calls = [
        [(":method", "POST"), (":scheme", "http"), (":path", path), ("content-type", kind)]
        for path, kind in (("/A", "application/grpc"), ("/B", "application/grpc+proto"))
    ]
    steady = []
    for call in calls:
        for _ in range(3):
            block = encoder.encode(call)
            assert blocks.decode(block).path == call[2][1]
        steady.append(block)
    assert steady[0] == steady[1]


def test_a_block_that_resizes_the_table_does_so_every_time() -> None:
    blocks = HeaderBlocks(65536)
    plain = [
        b"".join(header_blocks._literal(name.encode(), value.encode()) for name, value in fields(path))
        for path in ("/A", "/B")
    ]
    nothing, whole = b"\x20", b"\x3f\xe1\x1f"
    for block in (nothing + plain[0], whole + plain[0], nothing + plain[1], whole + plain[0]):
        blocks.decode(block)
    # The table has its size again: what is put into it can be referred to.
    put = b"\x40\x01x\x01y"
    assert blocks.decode(plain[0] + put + b"\xbe").metadata == (("x", "y"), ("x", "y"))


@pytest.mark.parametrize("size", [2000, 20_000])
def test_headers_larger_than_allowed(size: int) -> None:
    with pytest.raises(Violation, match="larger than allowed") as caught:
        HeaderBlocks(1024).decode(hpack.Encoder().encode(fields("/A", ("x", "a" * size))))
    assert caught.value.code == ENHANCE_YOUR_CALM


def test_a_bomb_of_references() -> None:
    """A byte each in the block, a kilobyte each when decoded."""
    encoder = hpack.Encoder()
    blocks = HeaderBlocks(65536)
    blocks.decode(encoder.encode(fields("/A", ("x", "a" * 1000))))
    with pytest.raises(Violation, match="larger than allowed"):
        blocks.decode(encoder.encode(fields("/A", *[("x", "a" * 1000)] * 100)))


@given(st.binary(max_size=200))
def test_any_bytes_are_a_head_or_a_violation(block: bytes) -> None:
    blocks = HeaderBlocks(65536)
    try:
        assert isinstance(blocks.decode(block), CallHead)
    except Malformed:
        pass
    except Violation as violation:
        assert violation.code == COMPRESSION_ERROR


@pytest.mark.parametrize(
    ("text", "ns"),
    [
        ("1H", 3600 * 10**9),
        ("2M", 120 * 10**9),
        ("10S", 10**10),
        ("99999999m", 99999999 * 10**6),
        ("5u", 5000),
        ("7n", 7),
        ("0S", 1),
        ("123456789S", 0),
        ("S", 0),
        ("5", 0),
        ("-5S", 0),
        ("1.5S", 0),
        ("5s", 0),
        ("", 0),
    ],
)
def test_timeouts(text: str, ns: int) -> None:
    assert decoded(("grpc-timeout", text)).timeout_ns == ns


def test_compression_and_metadata() -> None:
    head = decoded(
        ("grpc-encoding", "gzip"), ("grpc-accept-encoding", "identity, gzip"), ("user-agent", "x"), ("a-bin", "AA==")
    )
    assert (head.encoding, head.accepts, head.metadata) == ("gzip", ("identity", "gzip"), (("a-bin", "AA=="),))


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({":method": "GET"}, 405),
        ({"content-type": "application/json"}, 415),
        ({"content-type": "application/grpcx"}, 415),
        ({"content-type": "application/grpc+proto"}, 200),
        ({"content-type": "application/grpc;x"}, 200),
    ],
)
def test_what_is_no_call(changes: dict[str, str], status: int) -> None:
    block = hpack.Encoder().encode((dict(fields()) | changes).items())
    assert HeaderBlocks(65536).decode(block).http_status == status


@given(st.integers(0, 16), st.text(max_size=600))
def test_trailers(status: int, message: str) -> None:
    """A client reads back what was said; a text too long is cut, never in the middle of an escape."""
    decoder = hpack.Decoder()
    found = dict(decoder.decode(header_blocks.trailers(status, message)))
    text = found.get("grpc-message", "")
    assert found["grpc-status"] == str(status)
    assert len(text) <= 4096
    whole = urllib.parse.quote(message)
    said = urllib.parse.unquote_to_bytes(text)
    assert message.encode("utf-8", "surrogatepass").startswith(said)
    assert len(text) >= min(len(whole), 4094) or said == message.encode()


def test_a_client_reads_the_blocks_of_an_answer() -> None:
    decoder = hpack.Decoder()
    assert dict(decoder.decode(header_blocks.RESPONSE_GZIP)) == {
        ":status": "200",
        "content-type": "application/grpc",
        "grpc-encoding": "gzip",
    }
    assert dict(decoder.decode(header_blocks.trailers_only(5, "no ☃"))) == {
        ":status": "200",
        "content-type": "application/grpc",
        "grpc-accept-encoding": "identity,deflate,gzip",
        "grpc-status": "5",
        "grpc-message": "no %E2%98%83",
    }
    assert dict(decoder.decode(header_blocks.http_error(415))) == {":status": "415"}


GOOD: Fields = [
    (b":method", b"POST"),
    (b":scheme", b"http"),
    (b":path", b"/a/b"),
    (b":authority", b"x"),
    (b"te", b"trailers"),
    (b"content-type", b"application/grpc"),
]


def without(name: bytes) -> Fields:
    return [field for field in GOOD if field[0] != name]


def check_request(fields: Fields) -> int | None:
    """Checks header fields as a connection does."""
    common, own = hpack_decoder.parted(fields)
    check_common(hpack_decoder.fields(common))
    return check_own(own)


#: What programs write into metadata, and no gRPC library refuses.
CONNECTION = [
    (name, b"x") for name in (b"connection", b"proxy-connection", b"keep-alive", b"transfer-encoding", b"upgrade")
]


@pytest.mark.parametrize(
    ("fields", "length"),
    [
        (GOOD, None),
        ([*GOOD, (b"content-length", b"17")], 17),
        ([*GOOD, (b"content-length", b"17"), (b"content-length", b"017")], 17),
        ([*GOOD, (b"host", b"x"), (b"x-bin", b"AA=="), (b"empty", b""), (b"inner", b"a \t b\xff")], None),
        ([*without(b":authority"), (b"host", b"y")], None),
        ([*GOOD, (b"host", b"y"), *CONNECTION], None),
        *(([*GOOD, (b"x", value)], None) for value in (b" a", b"a ", b"\ta", b"a\t", b" ")),
        ([(b":method", b"CONNECT"), (b":authority", b"x:1")], None),
    ],
)
def test_what_a_request_may_have(fields: Fields, length: int | None) -> None:
    assert check_request(fields) == length


@pytest.mark.parametrize(
    "fields",
    [
        *(without(name) for name in (b":method", b":scheme", b":path")),
        [*without(b":path"), (b":path", b"")],
        [(b":path", b""), *without(b":path")],
        *([(name, b"x"), *GOOD] for name in (b":method", b":scheme", b":path", b":authority")),
        *([(name, b"x"), *GOOD] for name in (b":status", b":protocol", b":", b":Path")),
        [(b"x-own", b"1"), *GOOD],
        [*GOOD[:2], (b"x-own", b"1"), *GOOD[2:]],
        [GOOD[-1], *GOOD[:-1]],
        [*without(b":path"), (b":path", b"/")],
        *([*GOOD, (name, b"x")] for name in (b"Upper", b"a b", b"a:b", b"", b"a\0", b"a\x7f", b"\xc3\xa9", b"a\n")),
        *([*without(b"te"), (b"te", value)] for value in (b"gzip", b"", b"trailers, gzip")),
        *([*GOOD, (b"x", value)] for value in (b"a\0b", b"a\rb", b"a\nb", b"a\n", b"\n")),
        *([*GOOD, (b"content-length", value)] for value in (b"", b"-1", b"1.0", b"x", b"1, 1", b"9" * 19)),
        [*GOOD, (b"content-length", b"1"), (b"content-length", b"2")],
        [(b":method", b"CONNECT"), (b":authority", b"x:1"), (b":path", b"/")],
        [(b":method", b"CONNECT")],
    ],
)
def test_what_no_request_has(fields: Fields) -> None:
    with pytest.raises(Malformed):
        check_request(fields)


@pytest.mark.parametrize("field", [(b":path", b"/"), (b":status", b"200"), (b"A", b"x"), (b"te", b"\0")])
def test_what_no_trailers_have(field: tuple[bytes, bytes]) -> None:
    check_trailers([(b"a", b"b"), (b"grpc-status", b"0")])
    with pytest.raises(Malformed):
        check_trailers([(b"a", b"b"), field])


def test_what_a_call_gets_of_its_metadata() -> None:
    given = [(b"x", b" a b\t"), *CONNECTION, (b"host", b"y"), (b"y", b" "), (b"z", b"c")]
    check_trailers(given)
    assert header_blocks.metadata(given) == [("x", "a b"), ("y", ""), ("z", "c")]
