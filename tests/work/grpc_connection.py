"""Provides a gRPC front's connection without client sockets, and the bytes that perf_analyzer's C++ client sends on it.

test ─▶ Connection ─▶ Submitter ══ lane ══ WorkerLane, answered by the test
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from tensord.config.options import Options
from tensord.daemon.front.answered import Answered
from tensord.daemon.grpc import frames
from tensord.daemon.grpc.call import Call
from tensord.daemon.grpc.connection import Http2Connection
from tensord.daemon.grpc.infer import Infer
from tensord.daemon.grpc.serving import GrpcServing
from tensord.daemon.grpc.stream import Stream
from tensord.daemon.grpc.stream_infer import StreamInfer
from tensord.daemon.grpc.unary_infer import UnaryInfer
from tensord.shm.trace_file import TraceFiles
from tensord.shm.tracer import Tracer
from tests.daemon.grpc.frame_client import INFER, STREAM, prefixed
from tests.work.connection import OPTIONS, KeptTransport, LaneBench

#: A client's window for all it is sent; each answer is granted again with the next request. And the frames it takes.
_WINDOW = 1 << 24
_FRAME_SIZE = (1 << 22) - 1


#: Literals without indexing: the same bytes for every call, as of a client whose table holds what it repeats.
def head_of(path: str, *metadata: tuple[bytes, bytes]) -> bytes:
    """Encodes the header block of a call."""
    fields = (
        (b":method", b"POST"),
        (b":scheme", b"http"),
        (b":path", path.encode()),
        (b":authority", b"127.0.0.1:8001"),
        (b"te", b"trailers"),
        (b"content-type", b"application/grpc"),
        (b"user-agent", b"grpc-c++/1.54.3 grpc-c/31.0.0 (linux; chttp2)"),
        (b"grpc-accept-encoding", b"identity, deflate, gzip"),
        *metadata,
    )
    return b"".join(b"\x00" + bytes((len(name),)) + name + bytes((len(value),)) + value for name, value in fields)


_BLOCK = {path: head_of(path) for path in (INFER, STREAM)}


class GrpcBench(LaneBench):
    """The gRPC front's bench."""

    def __init__(self, tracer: Tracer | None = None, options: Options = OPTIONS) -> None:
        super().__init__(options)
        tracer = tracer or Tracer(1, TraceFiles())
        infer = Infer(self.submitter, self.table, options, tracer)
        methods: dict[str, Callable[[Stream], Call]] = {
            INFER: functools.partial(UnaryInfer, infer),
            STREAM: functools.partial(StreamInfer, infer),
        }
        counters = self.counters.front(0)
        answered = Answered(counters, self.submitter.refusals, "grpc")
        self._serving = GrpcServing(options.grpc, methods, counters, self.submitter.accounts, answered)

    def connect(self) -> KeptTransport:
        connection = Http2Connection(self._serving, "tcp 127.0.0.1")
        transport = self.transport(connection)
        connection.connection_made(transport)
        transport.arrive(
            frames.PREFACE
            + frames.settings(((frames.INITIAL_WINDOW_SIZE, _WINDOW), (frames.MAX_FRAME_SIZE, _FRAME_SIZE)))
            + frames.window_update(0, _WINDOW - frames.DEFAULT_WINDOW)
        )
        self.transports.append(transport)
        return transport

    def answers(self, transport: KeptTransport) -> int:
        """Returns how many writes with answers a transport has kept, without those that only grant the client a window."""
        return sum(sum(map(len, write)) > frames.UPDATE_SIZE for write in transport.writes)


def opened(number: int, path: str, block: bytes | None = None) -> bytes:
    """Builds the HEADERS frame of a call."""
    return frames.frame(frames.HEADERS, frames.END_HEADERS, number, block or _BLOCK[path])


def message(number: int, content: bytes, granted: int) -> bytes:
    """Builds a message on a stream, preceded by the window that the client grants for the last answer."""
    data = frames.frame(frames.DATA, 0, number, prefixed(content))
    return frames.window_update(number, granted) + frames.window_update(0, granted) + data


def call(number: int, content: bytes, granted: int, block: bytes | None = None) -> bytes:
    """Builds a unary call; ``block``: its header block, or None for the usual one."""
    data = frames.frame(frames.DATA, frames.END_STREAM, number, prefixed(content))
    return opened(number, INFER, block) + frames.window_update(number, 5) + data + frames.window_update(0, granted)


def payloads(written: bytes, kind: int) -> list[bytes]:
    """Returns the payloads of the frames of a type."""
    found, at = [], 0
    while at < len(written):
        high, low, kind_, _, _ = frames.read_head(written, at)
        at += frames.HEAD_SIZE + (high << 16 | low)
        if kind_ == kind:
            found.append(written[at - (high << 16 | low) : at])
    return found
