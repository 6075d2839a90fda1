"""Encodes header blocks as grpc-core writes them: metadata stays out of the HPACK table, all other fields go into it.

    | 40 :path | ... | 40 grpc-timeout | 00 traceparent |    the first call
    | c4       | ... | 40 grpc-timeout | 00 traceparent |    a later one; each deadline moves the others, until they are evicted

Source: RFC 7541; what grpcio sends, with which the tests compare it byte for byte.
"""

from __future__ import annotations

from hpack.hpack import encode_integer

Field = tuple[bytes, bytes]

#: Sets the table's size to nothing and to the default again: the table is empty, whatever the connection has sent before.
EMPTIED = b"\x20\x3f\xe1\x1f"
_TABLE_SIZE = 4096
_STATIC_SIZE = 61
#: Bytes that RFC 7541 adds to the name and value of each table entry.
_ENTRY_SIZE = 32
_STATIC = {(b":method", b"POST"): 3, (b":scheme", b"http"): 6}
#: Header fields that every gRPC call sends.
_REPEATED = (
    (b":authority", b"bench"),
    (b":method", b"POST"),
    (b":scheme", b"http"),
    (b"content-type", b"application/grpc"),
    (b"te", b"trailers"),
    (b"grpc-accept-encoding", b"identity, deflate, gzip"),
)
_AGENT = (b"user-agent", b"grpc-c++/1.54.3 grpc-c/31.0.0 (linux; chttp2)")


def fields(method: str, timeout: str, trace: str) -> tuple[list[Field], list[Field]]:
    """Returns the header fields of one call of a method, its metadata included."""
    path = (b":path", b"/inference.GRPCInferenceService/" + method.encode())
    said = [path, *_REPEATED, (b"grpc-timeout", timeout.encode()), _AGENT]
    return said, [(b"traceparent", trace.encode())]


class Encoder:
    """Encodes the header blocks of one connection, whose HPACK table has its default size."""

    def __init__(self) -> None:
        #: The newest one first.
        self._entries: list[Field] = []

    def encode(self, said: list[Field], metadata: list[Field]) -> bytes:
        """Encodes a block: the fields of ``said`` go into the table, those of ``metadata`` do not."""
        return b"".join(
            [*map(self._indexed, said), *(b"\x00" + _text(name) + _text(value) for name, value in metadata)]
        )

    def _indexed(self, field: Field) -> bytes:
        index = _STATIC.get(field, 0)
        if not index and field in self._entries:
            index = _STATIC_SIZE + 1 + self._entries.index(field)
        if index:
            block = encode_integer(index, 7)
            block[0] |= 0x80
            return bytes(block)
        self._entries.insert(0, field)
        while sum(_ENTRY_SIZE + len(name) + len(value) for name, value in self._entries) > _TABLE_SIZE:
            self._entries.pop()
        return b"\x40" + _text(field[0]) + _text(field[1])


def _text(content: bytes) -> bytes:
    """Encodes a string literal without Huffman coding."""
    return bytes(encode_integer(len(content), 7)) + content
