"""Header blocks: a call's headers understood, and the three blocks that answers need. HPACK itself is the hpack library's work.

A client that calls again and again sends the same block, byte for byte, once its dynamic table holds what it repeats. As long as
that table does not change, the same bytes mean the same, so such a block needs no decoding: what it meant last time holds.
Source: RFC 7541; gRPC's PROTOCOL-HTTP2.md for the meaning of the headers.
"""

from __future__ import annotations

import functools
import urllib.parse
from dataclasses import dataclass

import hpack
from hpack.table import HeaderTable

from tensord.daemon.grpc import header_rules
from tensord.daemon.grpc.frames import COMPRESSION_ERROR, ENHANCE_YOUR_CALM, Violation
from tensord.daemon.grpc.header_rules import Fields

_MAX_REMEMBERED = 256
_UNITS_NS = {"H": 3600 * 10**9, "M": 60 * 10**9, "S": 10**9, "m": 10**6, "u": 1000, "n": 1}
#: Longer timeouts are this long, 146 years: with a moment of this host's clock it is still a number of 63 bits.
_LONGEST_NS = 1 << 62
#: Metadata names that are the protocol's own, not the caller's.
_OWN = frozenset(
    {
        ":method",
        ":scheme",
        ":path",
        ":authority",
        "te",
        "content-type",
        "user-agent",
        "host",
        "grpc-timeout",
        "grpc-encoding",
        "grpc-accept-encoding",
    }
)


@dataclass(frozen=True, slots=True)
class CallHead:
    """What the headers of a call say."""

    path: str
    #: 0: the caller waits for ever.
    timeout_ns: int = 0
    #: How its messages with the compressed flag are compressed.
    encoding: str = "identity"
    accepts: tuple[str, ...] = ()
    #: The caller's own headers, names in lower case.
    metadata: tuple[tuple[str, str], ...] = ()
    #: Not 200: this is no gRPC call, and HTTP's status is the answer.
    http_status: int = 200
    #: Bytes of DATA that its client will send; None: it has not said.
    content_length: int | None = None


class _Table(HeaderTable):
    """A dynamic table that counts its changes."""

    edition = 0

    def add(self, name: bytes, value: bytes) -> None:
        self.edition += 1
        super().add(name, value)

    @property
    def maxsize(self) -> int:
        return self._maxsize

    @maxsize.setter
    def maxsize(self, newmax: int) -> None:
        self.edition += 1
        HeaderTable.maxsize.fset(self, newmax)  # type: ignore[attr-defined]


class HeaderBlocks:
    """The decoding end of one connection."""

    def __init__(self, max_byte_size: int) -> None:
        self._decoder = hpack.Decoder(max_header_list_size=max_byte_size)
        self._table = self._decoder.header_table = _Table()
        self._edition = 0
        #: What blocks mean that need no decoding.
        self.known: dict[bytes, CallHead] = {}

    def decode(self, block: bytes) -> CallHead:
        """What the block of a request means that is not ``known``.

        Raises: Violation: it is no header block, or larger than allowed.  Malformed: it is one that no request may have.
        """
        edition = self._edition
        head = _understood(self._fields(block))
        if self._edition == edition:
            if len(self.known) >= _MAX_REMEMBERED:
                self.known.clear()
            self.known[block] = head
        return head

    def trailers(self, block: bytes) -> None:
        """Takes note of a block that ends a request; it tells nothing that anybody wants. Raises: as ``decode``."""
        header_rules.check_trailers(self._fields(block))

    def _fields(self, block: bytes) -> Fields:
        try:
            headers = self._decoder.decode(block, raw=True)
        except hpack.OversizedHeaderListError as error:
            raise Violation(ENHANCE_YOUR_CALM, "the headers are larger than allowed") from error
        except (hpack.HPACKError, UnicodeDecodeError) as error:
            raise Violation(COMPRESSION_ERROR, "the header block cannot be decoded") from error
        if self._table.edition != self._edition:
            # What the table held meant something else before, and this block would change it again.
            self._edition = self._table.edition
            self.known.clear()
        return [(bytes(name), bytes(value)) for name, value in headers]


def _understood(raw: Fields) -> CallHead:
    length = header_rules.check_request(raw)
    headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in raw]
    fields = dict(headers)
    method, kind = fields.get(":method", ""), fields.get("content-type", "")
    if method != "POST":
        return CallHead(fields.get(":path", ""), http_status=405)
    if not (kind == "application/grpc" or kind.startswith(("application/grpc+", "application/grpc;"))):
        return CallHead(fields.get(":path", ""), http_status=415)
    metadata = tuple([field for field in headers if field[0] not in _OWN])
    return CallHead(
        fields.get(":path", ""),
        _timeout_ns(fields.get("grpc-timeout", "")),
        fields.get("grpc-encoding", "identity"),
        _accepts(fields.get("grpc-accept-encoding", "")),
        metadata,
        content_length=length,
    )


@functools.lru_cache(64)
def _accepts(text: str) -> tuple[str, ...]:
    return tuple([name.strip() for name in text.split(",")])


def _timeout_ns(text: str) -> int:
    """At most eight digits and a unit; anything else is no timeout."""
    unit = _UNITS_NS.get(text[-1:])
    digits = text[:-1]
    if unit is None or not (digits.isascii() and digits.isdigit()) or len(digits) > 8:
        return 0
    return min(max(1, int(digits) * unit), _LONGEST_NS)


# ------------------------------------------------------------------------------------------------------------- answers
# Literals without indexing: they leave the client's table alone, so the same bytes serve every answer.


def _literal(name: bytes, value: bytes) -> bytes:
    return b"\x00" + _length(len(name)) + name + _length(len(value)) + value


def _length(size: int) -> bytes:
    """A seven-bit prefix integer without the Huffman flag."""
    if size < 127:
        return bytes((size,))
    size -= 127
    rest = b"\x7f"
    while size >= 128:
        rest += bytes((size & 127 | 128,))
        size >>= 7
    return rest + bytes((size,))


_STATUS_200 = b"\x88"  # entry 8 of the static table
_CONTENT_TYPE = _literal(b"content-type", b"application/grpc")
_ACCEPT = _literal(b"grpc-accept-encoding", b"identity,deflate,gzip")
_MAX_MESSAGE = 4096
#: Before the first message of an answer.
RESPONSE = _STATUS_200 + _CONTENT_TYPE
RESPONSE_GZIP = RESPONSE + _literal(b"grpc-encoding", b"gzip")
#: After the last message of a good answer.
TRAILERS_OK = _literal(b"grpc-status", b"0")


def trailers(status: int, message: str) -> bytes:
    """After the last message; the text is percent-encoded and cut to what clients take."""
    text = urllib.parse.quote(message[:_MAX_MESSAGE], safe=" !\"#$&'()*+,-./:;<=>?@[\\]^_`{|}~").encode()[:_MAX_MESSAGE]
    cut = text.rfind(b"%", max(0, len(text) - 2))
    if cut >= 0 and len(text) == _MAX_MESSAGE:
        text = text[:cut]
    block = _literal(b"grpc-status", str(status).encode())
    return block + _literal(b"grpc-message", text) if text else block


def trailers_only(status: int, message: str) -> bytes:
    """An answer without any message: headers and trailers in one block."""
    return RESPONSE + _ACCEPT + trailers(status, message)


def http_error(status: int) -> bytes:
    """The answer to what is no gRPC call."""
    return _literal(b":status", str(status).encode())
