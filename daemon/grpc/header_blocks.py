"""Decodes the header blocks of gRPC calls, and builds those of responses.

The meaning of headers that many calls share, such as ``:path``, is cached.
A request whose headers break a rule of HTTP/2 is malformed, and its stream is reset. Two exceptions are allowed, as in other
gRPC servers: blanks around a value are removed, and headers of HTTP/1.1 connections, such as ``keep-alive``, are ignored.
Source: RFC 7541; RFC 9113, sections 8.1 to 8.3; gRPC's PROTOCOL-HTTP2.md for the meaning of the headers.
"""

from __future__ import annotations

import functools
import re
import urllib.parse
from collections.abc import Iterable
from typing import NamedTuple

from tensord.daemon.front import load_report
from tensord.daemon.grpc.frames import COMPRESSION_ERROR, ENHANCE_YOUR_CALM, Violation
from tensord.daemon.grpc.hpack_decoder import Field, Fields, decoder, fields

#: More bytes than that are not what a client says of each call.
_MAX_KNOWN = 2048
_UNITS_NS = {"H": 3600 * 10**9, "M": 60 * 10**9, "S": 10**9, "m": 10**6, "u": 1000, "n": 1}
#: Longer timeouts are this long, 146 years: with a moment of this host's clock it is still a number of 63 bits.
_LONGEST_NS = 1 << 62

#: Controls, blanks, upper case, DEL and beyond, and a colon: one in front has a pseudo-header, which is unknown, or out of place.
_BAD_NAME = re.compile(rb"[\x00-\x20:A-Z\x7f-\xff]|^$", re.DOTALL)
_bad_value = re.compile(rb"[\x00\r\n]").search
_REQUIRED = (b":method", b":scheme", b":path")
#: Fields that are about one connection of HTTP/1.1, or about what ``:authority`` says.
_IGNORED = frozenset({b"connection", b"proxy-connection", b"keep-alive", b"transfer-encoding", b"upgrade", b"host"})


class Malformed(Exception):
    """Raised when the headers of a request break HTTP/2. Only the stream of the request is reset."""


class CallHead(NamedTuple):
    """Holds the decoded headers of a gRPC call."""

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
    #: How the trailers report the load; "": not (``tensord.daemon.front.load_report``).
    load_format: str = ""


class HeaderBlocks:
    """Decodes the header blocks of one connection. ``max_byte_size``: the most bytes of the decoded fields of one block."""

    def __init__(self, max_byte_size: int) -> None:
        self._decode = decoder(max_byte_size).decode

    def decode(self, block: bytes) -> CallHead:
        """Decodes the header block of a request.

        Raises Violation if the block cannot be decoded. Raises Malformed if the headers break HTTP/2.
        """
        try:
            common, own = self._decode(block)
        except (ValueError, OverflowError) as error:
            raise _violation(error) from error
        head = _known(common) if len(common) <= _MAX_KNOWN else _call_head(common)
        return _with_own(head, own) if own else head

    def trailers(self, block: bytes) -> None:
        """Checks the trailers of a request.

        Raises Violation if the block cannot be decoded. Raises Malformed if the trailers break HTTP/2.
        """
        try:
            common, own = self._decode(block)
        except (ValueError, OverflowError) as error:
            raise _violation(error) from error
        check_trailers(fields(common) + own)


def _violation(error: ValueError | OverflowError) -> Violation:
    if isinstance(error, OverflowError):
        return Violation(ENHANCE_YOUR_CALM, "the headers are larger than allowed")
    return Violation(COMPRESSION_ERROR, "the header block cannot be decoded")


def _call_head(common: bytes) -> CallHead:
    raw = fields(common)
    check_common(raw)
    said = dict(metadata(raw))
    path, kind = said.get(":path", ""), said.get("content-type", "")
    if said[":method"] != "POST":
        return CallHead(path, http_status=405)
    if not (kind == "application/grpc" or kind.startswith(("application/grpc+", "application/grpc;"))):
        return CallHead(path, http_status=415)
    return CallHead(
        path,
        encoding=said.get("grpc-encoding", "identity"),
        accepts=tuple([name.strip() for name in said.get("grpc-accept-encoding", "").split(",")]),
    )


#: Calls of all clients are of few kinds, which differ in what is their own.
_known = functools.lru_cache(256)(_call_head)


def _with_own(head: CallHead, own: Fields) -> CallHead:
    length = check_own(own)
    if head.http_status != 200:
        return head
    timeout_ns, load_format = 0, ""
    said: list[tuple[str, str]] = []
    for name, value in metadata(own):
        if name == "grpc-timeout":
            timeout_ns = _timeout_ns(value)
        else:
            said.append((name, value))
            if name == load_report.ASKED:
                load_format = load_report.asked(value)
    return CallHead(
        head.path,
        timeout_ns,
        head.encoding,
        head.accepts,
        tuple(said),
        content_length=length,
        load_format=load_format,
    )


def _timeout_ns(text: str) -> int:
    """Returns a grpc-timeout header in ns, or 0 if it is malformed."""
    unit = _UNITS_NS.get(text[-1:])
    digits = text[:-1]
    if unit is None or not (digits.isascii() and digits.isdigit()) or len(digits) > 8:
        return 0
    return min(max(1, int(digits) * unit), _LONGEST_NS)


# -------------------------------------------------------------------------------------------------------------- rules


def check_common(fields: Iterable[Field]) -> None:
    """Checks the header fields that are mostly the same in all calls. Raises Malformed if they break a rule of HTTP/2."""
    pseudo: dict[bytes, bytes] = {}
    regular = False
    for name, value in fields:
        if name[:1] == b":":
            if regular or name in pseudo:
                raise Malformed(f"{_shown(name)} comes twice, or after an ordinary field")
            pseudo[name] = value
        else:
            regular = True
            if name == b"te" and value.strip(b" \t").lower() != b"trailers":
                raise Malformed("te is something else than trailers")
        if _bad_value(value):
            _refuse_value(name)
    _check_pseudo(pseudo)


def check_own(fields: Iterable[Field]) -> int | None:
    """Checks the header fields that differ from call to call. Returns the content-length, or None if no field has it.

    Raises Malformed if a field is invalid.
    """
    length: bytes | None = None
    for name, value in fields:
        _check_name(name)
        if name == b"content-length":
            if not value.isdigit() or len(value) > 18 or (length is not None and int(length) != int(value)):
                raise Malformed("content-length is no number, or given twice")
            length = value
        if _bad_value(value):
            _refuse_value(name)
    return None if length is None else int(length)


def check_trailers(fields: Iterable[Field]) -> None:
    """Checks the trailers of a request. Raises Malformed if a name or a value is invalid."""
    for name, value in fields:
        _check_name(name)
        if _bad_value(value):
            _refuse_value(name)


def metadata(fields: Iterable[tuple[bytes, bytes]]) -> list[tuple[str, str]]:
    """Returns the name and the value of each header field as text, without blanks around the value. Validates nothing.

    Leaves out ``host`` and the fields of HTTP/1.1 connections, such as ``keep-alive``.
    """
    return [
        (name.decode("latin-1"), value.strip(b" \t").decode("latin-1"))
        for name, value in fields
        if name not in _IGNORED
    ]


def _check_pseudo(pseudo: dict[bytes, bytes]) -> None:
    if pseudo.get(b":method") == b"CONNECT":
        if b":scheme" in pseudo or b":path" in pseudo or not pseudo.get(b":authority"):
            raise Malformed("CONNECT names an authority, no scheme and no path")
        return
    for name in _REQUIRED:
        if not pseudo.get(name):
            raise Malformed(f"{_shown(name)} is missing")


# Clients have few names, and send them with every call that says anything new.
@functools.lru_cache(256)
def _check_name(name: bytes) -> None:
    if _BAD_NAME.search(name):
        raise Malformed(f"a field's name is {_shown(name)}")


def _refuse_value(name: bytes) -> None:
    raise Malformed(f"the value of {_shown(name)} has NUL or a line's end")


def _shown(name: bytes) -> str:
    return repr(name[:100])[1:]


# ------------------------------------------------------------------------------------------------------------- answers
# Literals without indexing: they leave the client's table alone, so the same bytes serve every answer.


def _literal(name: bytes, value: bytes) -> bytes:
    return b"\x00" + _length(len(name)) + name + _length(len(value)) + value


def _length(size: int) -> bytes:
    """Encodes the length of an HPACK string, without the Huffman flag."""
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
#: The headers before the first message of an answer.
RESPONSE = _STATUS_200 + _CONTENT_TYPE
RESPONSE_GZIP = RESPONSE + _literal(b"grpc-encoding", b"gzip")
#: The trailers after the last message of a good answer.
TRAILERS_OK = _literal(b"grpc-status", b"0")


def trailers(status: int, message: str) -> bytes:
    """Returns trailers with the gRPC ``status`` and ``message`` as an HPACK block. Cuts the message to at most 4096 bytes."""
    text = urllib.parse.quote(message[:_MAX_MESSAGE], safe=" !\"#$&'()*+,-./:;<=>?@[\\]^_`{|}~").encode()[:_MAX_MESSAGE]
    cut = text.rfind(b"%", max(0, len(text) - 2))
    if cut >= 0 and len(text) == _MAX_MESSAGE:
        text = text[:cut]
    block = _literal(b"grpc-status", str(status).encode())
    return block + _literal(b"grpc-message", text) if text else block


def with_field(block: bytes, name: bytes, value: bytes) -> bytes:
    """Returns the encoded header block ``block`` with a further field at its end."""
    return block + _literal(name, value)


def trailers_only(status: int, message: str) -> bytes:
    """Returns the encoded header block of a response without messages."""
    return RESPONSE + _ACCEPT + trailers(status, message)


def http_error(status: int) -> bytes:
    """Returns the encoded header block of the response to a request that is no gRPC call."""
    return _literal(b":status", str(status).encode())
