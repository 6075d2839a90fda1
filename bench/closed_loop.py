"""A closed-loop HTTP client that costs as little as Python can: prebuilt requests, raw sockets, one thread and one poll loop.

Each connection sends, waits for its whole answer, checks it and sends again. It is no match for perf_analyzer in load, but it
needs nothing installed and shows whether a change helped.
"""

from __future__ import annotations

import contextlib
import json
import selectors
import socket
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Row:
    """One kind of load."""

    name: str
    connections: int
    request: bytes
    #: The binary part of a right answer.
    answer: bytes


def infer_request(model: str, tensors: list[tuple[str, np.ndarray]], output: str) -> bytes:
    """A whole HTTP request with binary tensors, asking for one binary output."""
    head = json.dumps(
        {
            "inputs": [
                {
                    "name": name,
                    "datatype": "FP32",
                    "shape": list(values.shape),
                    "parameters": {"binary_data_size": values.nbytes},
                }
                for name, values in tensors
            ],
            "outputs": [{"name": output, "parameters": {"binary_data": True}}],
        }
    ).encode()
    body = head + b"".join(values.tobytes() for _, values in tensors)
    return (
        f"POST /v2/models/{model}/infer HTTP/1.1\r\nHost: bench\r\n"
        f"Inference-Header-Content-Length: {len(head)}\r\nContent-Length: {len(body)}\r\n\r\n"
    ).encode() + body


def rows() -> list[Row]:
    """The rows that need no model of ours to know the answer."""
    a, b = np.arange(16, dtype=np.float32).reshape(1, 16), np.full((1, 16), 2, np.float32)
    small = infer_request("addsub", [("INPUT0", a), ("INPUT1", b)], "OUTPUT0")
    made = [Row(f"small-http-c{n}", n, small, (a + b).tobytes()) for n in (1, 4, 16)]
    for name, count in (("1MiB", 1 << 18), ("16MiB", 1 << 22)):
        values = np.arange(count, dtype=np.float32)
        made.append(
            Row(f"{name}-http-c1", 1, infer_request("identity", [("INPUT0", values)], "OUTPUT0"), values.tobytes())
        )
    return made


class Connection:
    """One keep-alive connection and the answer it is reading."""

    def __init__(self, address: tuple[str, int]) -> None:
        self.socket = socket.create_connection(address)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.received = bytearray()
        self.needed = 0
        self.started = 0.0

    def send(self, request: bytes) -> None:
        self.received.clear()
        self.needed = 0
        self.started = time.perf_counter()
        self.socket.sendall(request)

    def read(self) -> bool:
        """True once the answer is whole."""
        chunk = self.socket.recv(1 << 20)
        if not chunk:
            raise ConnectionError("the server hung up")
        self.received += chunk
        if not self.needed:
            head, found, _ = self.received.partition(b"\r\n\r\n")
            if not found:
                return False
            length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
            self.needed = len(head) + 4 + int(length.split(b":")[1])
        return len(self.received) >= self.needed


@contextlib.contextmanager
def connected(address: str, count: int) -> Iterator[tuple[selectors.BaseSelector, list[Connection]]]:
    """Connections to HOST:PORT, registered for reading with themselves as data; closed when the block ends."""
    host, port = address.rsplit(":", 1)
    with contextlib.ExitStack() as stack:
        poll = stack.enter_context(selectors.DefaultSelector())
        connections = [Connection((host, int(port))) for _ in range(count)]
        for connection in connections:
            stack.enter_context(connection.socket)
            poll.register(connection.socket, selectors.EVENT_READ, connection)
        yield poll, connections


def measure(address: str, row: Row, seconds: float) -> tuple[float, float, float]:
    """Answers per second, median and 99th percentile latency in microseconds. Every answer's tensor is compared."""
    with connected(address, row.connections) as (poll, connections):
        for connection in connections:
            connection.send(row.request)
        return _run(poll, row, seconds)


def _run(poll: selectors.BaseSelector, row: Row, seconds: float) -> tuple[float, float, float]:
    latencies: list[float] = []
    begin = time.perf_counter()
    while time.perf_counter() - begin < seconds:
        for key, _ in poll.select(1):
            connection = key.data
            if connection.read():
                latencies.append(time.perf_counter() - connection.started)
                if not connection.received.endswith(row.answer):
                    raise AssertionError(f"{row.name}: wrong answer: {bytes(connection.received[:300])!r}")
                connection.send(row.request)
    took = time.perf_counter() - begin
    latencies.sort()
    return len(latencies) / took, latencies[len(latencies) // 2] * 1e6, latencies[len(latencies) * 99 // 100] * 1e6


def report(address: str, seconds: float, rounds: int) -> None:
    """Prints the median of the rounds for each row."""
    print(f"{'row':20} {'rate/s':>9} {'p50 us':>9} {'p99 us':>9}")
    for row in rows():
        measure(address, row, 0.5)
        figures = [measure(address, row, seconds) for _ in range(rounds)]
        rate, p50, p99 = (statistics.median(column) for column in zip(*figures, strict=True))
        print(f"{row.name:20} {rate:9.0f} {p50:9.0f} {p99:9.0f}", flush=True)
