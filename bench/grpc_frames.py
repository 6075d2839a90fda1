"""Builds the frames of a client that speaks gRPC on a raw socket: one unary call, or one message, at a time.

    HELLO ─▶ HEADERS, DATA ─▶ ... HEADERS, DATA, HEADERS: the trailers ─▶ the next odd stream

Header blocks index nothing, and the server is told that its blocks cannot either, so the same bytes always mean the same.
Source: RFC 9113, RFC 7541; gRPC's PROTOCOL-HTTP2.md.
"""

from __future__ import annotations

import hpack

from tensord.daemon.grpc import frames

#: What a connection begins with: the server may send 64 MiB of answers ahead.
HELLO = (
    frames.PREFACE
    + frames.settings(
        (
            (frames.HEADER_TABLE_SIZE, 0),
            (frames.ENABLE_PUSH, 0),
            (frames.INITIAL_WINDOW_SIZE, frames.MAX_WINDOW),
            (frames.MAX_FRAME_SIZE, 4 << 20),
        )
    )
    + frames.window_update(0, (64 << 20) - frames.DEFAULT_WINDOW)
)


def fields(method: str) -> list[tuple[str, str]]:
    """Returns the header fields that begin a call of a method."""
    path = f"/inference.GRPCInferenceService/{method}"
    said = [(":method", "POST"), (":scheme", "http"), (":path", path), (":authority", "bench"), ("te", "trailers")]
    return [*said, ("content-type", "application/grpc")]


def block(method: str, *more: tuple[str, str]) -> bytes:
    """Encodes a header block that does not use the HPACK table, so that it can be sent on any connection."""
    said = [hpack.NeverIndexedHeaderTuple(*field) for field in (*fields(method), *more)]
    return bytes(hpack.Encoder().encode(said))


def headers(method: str, stream: int, *more: tuple[str, str]) -> bytes:
    """Builds the HEADERS frame that begins a call of a method. ``more``: header fields besides the usual ones."""
    return frames.frame(frames.HEADERS, frames.END_HEADERS, stream, block(method, *more))


def data(stream: int, message: bytes, flags: int = frames.END_STREAM) -> bytes:
    """Builds the DATA frame of a message, which by default ends its stream."""
    return frames.frame(frames.DATA, flags, stream, b"\0" + len(message).to_bytes(4, "big") + message)


def call(stream: int, message: bytes, *more: tuple[str, str]) -> bytes:
    """Builds the two frames of a unary ModelInfer call."""
    return headers("ModelInfer", stream, *more) + data(stream, message)
