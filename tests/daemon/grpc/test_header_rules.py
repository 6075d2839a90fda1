"""Each rule for header fields once broken, and requests of ordinary clients."""

from __future__ import annotations

import pytest

from tensord.daemon.grpc import hpack_decoder
from tensord.daemon.grpc.header_blocks import Malformed, check_common, check_own, check_trailers, metadata
from tensord.daemon.grpc.hpack_decoder import Fields

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
    assert metadata(given) == [("x", "a b"), ("y", ""), ("z", "c")]
