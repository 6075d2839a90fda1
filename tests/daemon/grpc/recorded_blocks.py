"""Records header blocks that grpcio writes: a client of grpcio calls a server here, which keeps the blocks."""

from __future__ import annotations

import socket
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from tensord.daemon.grpc import frames, header_blocks
from tests.fakes import PATIENCE_SECONDS

_WHOLE = frames.END_HEADERS | frames.END_STREAM
#: An empty message, and the status.
_ANSWER = (
    (frames.HEADERS, frames.END_HEADERS, header_blocks.RESPONSE),
    (frames.DATA, 0, bytes(5)),
    (frames.HEADERS, _WHOLE, header_blocks.TRAILERS_OK),
)


def recorded(calls: Iterable[tuple[float, tuple[tuple[str, str | bytes], ...]]]) -> list[bytes]:
    """Makes unary calls on one connection, each with a timeout in seconds and metadata; returns their header blocks."""
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as threads:
        listener.settimeout(PATIENCE_SECONDS)
        blocks = threads.submit(_serve, listener)
        with grpc.insecure_channel(f"127.0.0.1:{listener.getsockname()[1]}") as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            for timeout, metadata in calls:
                stub.ServerLive(service_pb2.ServerLiveRequest(), timeout=timeout, metadata=metadata)
        return blocks.result(PATIENCE_SECONDS)


def _serve(listener: socket.socket) -> list[bytes]:
    """Answers each call of a connection, until it ends; returns the header blocks."""
    blocks: list[bytes] = []
    connection, _ = listener.accept()
    with connection, connection.makefile("rb") as stream:
        connection.settimeout(PATIENCE_SECONDS)
        connection.sendall(frames.settings(()))
        assert stream.read(len(frames.PREFACE)) == frames.PREFACE
        while head := stream.read(frames.HEAD_SIZE):
            high, low, kind, flags, number = frames.read_head(head)
            payload = stream.read(high << 16 | low)
            if kind == frames.HEADERS:
                assert flags == frames.END_HEADERS
                blocks.append(payload)
            elif kind == frames.DATA and flags & frames.END_STREAM:
                connection.sendall(b"".join(frames.frame(kind, flags, number, part) for kind, flags, part in _ANSWER))
            elif kind in (frames.SETTINGS, frames.PING) and not flags & frames.ACK:
                answer = payload if kind == frames.PING else b""
                connection.sendall(frames.frame(kind, frames.ACK, 0, answer))
    return blocks
