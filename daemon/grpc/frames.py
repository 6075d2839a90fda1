"""Defines the layout and the numbers of HTTP/2 frames, and builds those that the server sends. Source: RFC 9113, sections 4 to 7.

| length 24 | type 8 | flags 8 | R 1, stream id 31 | payload: length bytes |       all big-endian
"""

from __future__ import annotations

import struct
from collections.abc import Iterable

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEAD_SIZE = 9
#: Length (its upper byte, its lower two), type, flags, stream id.
read_head = struct.Struct(">BHBBI").unpack_from
write_head = struct.Struct(">BHBBI").pack
#: Stream id and increment of a WINDOW_UPDATE.
read_update = struct.Struct(">5xII").unpack_from
number = struct.Struct(">I").pack
read_number = struct.Struct(">I").unpack_from
_setting = struct.Struct(">HI")

# Types.
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)

# Flags.
END_STREAM = ACK = 0x1
END_HEADERS = 0x4
PADDED = 0x8
PRIORITIZED = 0x20

# Settings.
HEADER_TABLE_SIZE, ENABLE_PUSH, MAX_CONCURRENT_STREAMS, INITIAL_WINDOW_SIZE, MAX_FRAME_SIZE, MAX_HEADER_LIST_SIZE = (
    range(1, 7)
)

# Error codes.
NO_ERROR, PROTOCOL_ERROR, INTERNAL_ERROR, FLOW_CONTROL_ERROR, _, STREAM_CLOSED, FRAME_SIZE_ERROR, REFUSED_STREAM = (
    range(8)
)
CANCEL, COMPRESSION_ERROR, _, ENHANCE_YOUR_CALM = range(8, 12)

#: How every WINDOW_UPDATE that is none too long or too short begins, and how long those are.
UPDATE, UPDATE_SIZE = bytes((0, 0, 4, WINDOW_UPDATE)), 13

STREAM_ID = (1 << 31) - 1
MAX_WINDOW = (1 << 31) - 1
#: The window's size until a SETTINGS frame says otherwise.
DEFAULT_WINDOW = 65535
DEFAULT_FRAME_SIZE = 16384


class Violation(Exception):
    """Raised when the client breaks the HTTP/2 protocol.

    The connection ends with a GOAWAY that has ``code`` and ``reason``.
    """

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """Returns a complete HTTP/2 frame of type ``kind`` on the stream number ``stream``."""
    size = len(payload)
    return write_head(size >> 16, size & 0xFFFF, kind, flags, stream) + payload


def head(kind: int, flags: int, stream: int, size: int) -> bytes:
    """Returns the nine-byte head of an HTTP/2 frame of type ``kind``.

    ``stream``: the number of the stream. ``size``: the number of bytes of the payload.
    """
    return write_head(size >> 16, size & 0xFFFF, kind, flags, stream)


def window_update(stream: int, increment: int) -> bytes:
    """Returns a WINDOW_UPDATE frame, which lets the receiver send ``increment`` more bytes.

    ``stream``: the number of the stream, or 0 for the connection.
    """
    return frame(WINDOW_UPDATE, 0, stream, number(increment))


def rst_stream(stream: int, code: int) -> bytes:
    """Returns an RST_STREAM frame, which ends ``stream`` with the error ``code``."""
    return frame(RST_STREAM, 0, stream, number(code))


def goaway(last_stream: int, code: int, reason: str = "") -> bytes:
    """Returns a GOAWAY frame with the error ``code``. No stream above ``last_stream`` will be processed."""
    return frame(GOAWAY, 0, 0, number(last_stream) + number(code) + reason.encode())


def settings(values: Iterable[tuple[int, int]]) -> bytes:
    """Returns a SETTINGS frame with these (key, value) pairs."""
    return frame(SETTINGS, 0, 0, b"".join(_setting.pack(key, value) for key, value in values))


def read_settings(payload: bytes) -> dict[int, int]:
    """Returns the settings in the payload of a SETTINGS frame, by key.

    Raises Violation if the payload is cut short, or if a value is not allowed.
    """
    if len(payload) % _setting.size:
        raise Violation(FRAME_SIZE_ERROR, f"SETTINGS of {len(payload)} bytes")
    values = {}
    for key, value in _setting.iter_unpack(payload):
        values[key] = value
        if key == INITIAL_WINDOW_SIZE and value > MAX_WINDOW:
            raise Violation(FLOW_CONTROL_ERROR, f"an initial window of {value} bytes")
        if key == MAX_FRAME_SIZE and not DEFAULT_FRAME_SIZE <= value < 1 << 24:
            raise Violation(PROTOCOL_ERROR, f"a largest frame of {value} bytes")
        if key == ENABLE_PUSH and value > 1:
            raise Violation(PROTOCOL_ERROR, f"ENABLE_PUSH of {value}")
    return values


def check_dependency(stream: int, payload: bytes) -> None:
    """Raises Violation if the priority at the start of ``payload`` makes ``stream`` depend on itself."""
    if read_number(payload)[0] & STREAM_ID == stream:
        raise Violation(PROTOCOL_ERROR, f"stream {stream} depends on itself")


def unpadded(payload: bytes) -> bytes:
    """Returns the payload of a PADDED frame without its padding.

    Raises Violation if the length of the padding is missing or too large.
    """
    if not payload:
        raise Violation(FRAME_SIZE_ERROR, "a padded frame without the size of its padding")
    if payload[0] >= len(payload):
        raise Violation(PROTOCOL_ERROR, "the padding is longer than its frame")
    return payload[1 : len(payload) - payload[0]]
