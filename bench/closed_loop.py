"""Loads a server in a closed loop as cheaply as Python can: prebuilt requests, raw sockets, one thread and one poll loop.

Each connection sends, waits for its whole answer, checks it and sends again. It makes less load than perf_analyzer, but it
needs nothing installed and shows whether a change helped. HTTP is here, gRPC in bench/grpc_connection.py.
"""

from __future__ import annotations

import contextlib
import json
import selectors
import socket
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np


class Connection:
    """A keep-alive HTTP connection and the answer that is being read from it."""

    def __init__(self, address: tuple[str, int], host: str = "") -> None:
        """Connects. ``host``: the local address to connect from; "": as the kernel chooses."""
        self.socket = socket.create_connection(address, source_address=(host, 0) if host else None)
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
        """Reads what has arrived. Returns True once the answer is complete. Raises ConnectionError: the server hung up."""
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


@dataclass(frozen=True, slots=True)
class Row:
    """One kind of load, a row of the table."""

    name: str
    connections: int
    request: bytes
    #: The tensor a right answer carries.
    values: np.ndarray
    #: It is in the binary part; else it is in the JSON, where each server writes numbers in its own way.
    binary: bool = True
    #: Speaks the protocol of the request.
    connection: type[Connection] = Connection

    def check(self, answer: bytes | bytearray) -> None:
        """Raises AssertionError if the answer does not carry the right tensor."""
        if self.binary:
            right = answer.endswith(self.values.tobytes())
        else:
            (output,) = json.loads(bytes(answer).partition(b"\r\n\r\n")[2])["outputs"]
            right = np.array_equal(np.array(output["data"], self.values.dtype), self.values)
        if not right:
            raise AssertionError(f"{self.name}: wrong answer: {bytes(answer[:300])!r}")


def infer_request(
    model: str,
    tensors: list[tuple[str, np.ndarray]],
    output: str,
    parameters: Mapping[str, int | bool] | None = None,
) -> bytes:
    """Builds an HTTP request with binary tensors that asks for one binary output."""
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
            **({"parameters": parameters} if parameters else {}),
        }
    ).encode()
    body = head + b"".join(values.tobytes() for _, values in tensors)
    return (
        f"POST /v2/models/{model}/infer HTTP/1.1\r\nHost: bench\r\n"
        f"Inference-Header-Content-Length: {len(head)}\r\nContent-Length: {len(body)}\r\n\r\n"
    ).encode() + body


def json_request(model: str, name: str, values: np.ndarray) -> bytes:
    """Builds an HTTP request with its tensor in JSON, as Python clients write numbers; the answer comes as JSON as well."""
    body = json.dumps(
        {"inputs": [{"name": name, "datatype": "FP32", "shape": list(values.shape), "data": values.tolist()}]}
    ).encode()
    return (
        f"POST /v2/models/{model}/infer HTTP/1.1\r\nHost: bench\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
    )


def rows() -> list[Row]:
    """Returns the HTTP rows, whose right answers are known without running a model."""
    return [*binary_rows("http", infer_request, Connection, (1, 16)), json_row()]


def binary_rows(
    protocol: str,
    request: Callable[[str, list[tuple[str, np.ndarray]], str], bytes],
    connection: type[Connection],
    mebibytes: Sequence[int],
) -> list[Row]:
    """Returns rows of small requests over 1, 4 and 16 connections, and one row for each size in ``mebibytes``.

    ``request`` builds a request from the model, its input tensors and the name of the wanted output.
    """
    a, b = np.arange(16, dtype=np.float32).reshape(1, 16), np.full((1, 16), 2, np.float32)
    small = request("addsub", [("INPUT0", a), ("INPUT1", b)], "OUTPUT0")
    made = [Row(f"small-{protocol}-c{n}", n, small, a + b, connection=connection) for n in (1, 4, 16)]
    for count in mebibytes:
        values = np.arange(count << 18, dtype=np.float32)
        large = request("identity", [("INPUT0", values)], "OUTPUT0")
        made.append(Row(f"{count}MiB-{protocol}-c1", 1, large, values, connection=connection))
    return made


def json_row() -> Row:
    """Returns the row that sends a 1 MiB tensor as JSON both ways: about 5 MiB of digits in the request."""
    values = np.random.default_rng(0).standard_normal(1 << 18).astype(np.float32)
    return Row("json-1MiB-http-c1", 1, json_request("identity", "INPUT0", values), values, binary=False)


@contextlib.contextmanager
def connected(
    address: str, kind: type[Connection], count: int
) -> Iterator[tuple[selectors.BaseSelector, list[Connection]]]:
    """Opens ``count`` connections to HOST:PORT, which are closed when the block ends.

    Yields a selector and the connections; each is registered for reading, with itself as the data.
    """
    host, port = address.rsplit(":", 1)
    with contextlib.ExitStack() as stack:
        poll = stack.enter_context(selectors.DefaultSelector())
        connections = [kind((host, int(port))) for _ in range(count)]
        for connection in connections:
            stack.enter_context(connection.socket)
            poll.register(connection.socket, selectors.EVENT_READ, connection)
        yield poll, connections


def measure(address: str, row: Row, seconds: float) -> tuple[float, float, float]:
    """Runs a closed loop. Returns answers per second, and the median and the 99th percentile of latency in microseconds.

    Every binary answer is compared. Of JSON answers only the first is compared and then the length, or parsing would be measured.
    """
    with connected(address, row.connection, row.connections) as (poll, connections):
        for connection in connections:
            connection.send(row.request)
        return _run(poll, row, seconds)


def _run(poll: selectors.BaseSelector, row: Row, seconds: float) -> tuple[float, float, float]:
    latencies: list[float] = []
    checked_size = 0
    begin = time.perf_counter()
    while time.perf_counter() - begin < seconds or not latencies:
        for key, _ in poll.select(1):
            connection = key.data
            if connection.read():
                latencies.append(time.perf_counter() - connection.started)
                if row.binary or len(connection.received) != checked_size:
                    row.check(connection.received)
                    checked_size = len(connection.received)
                connection.send(row.request)
    took = time.perf_counter() - begin
    latencies.sort()
    return len(latencies) / took, latencies[len(latencies) // 2] * 1e6, latencies[len(latencies) * 99 // 100] * 1e6


def compare(ours: str, peer: str, row: Row, seconds: float, rounds: int) -> None:
    """Measures both servers in turn and prints the medians and the median ratio, in the format of compare.py's rows."""
    for address in (ours, peer):
        measure(address, row, 0.5)
    pairs = [(measure(ours, row, seconds), measure(peer, row, seconds)) for _ in range(rounds)]
    rates = [statistics.median(pair[who][0] for pair in pairs) for who in (0, 1)]
    latencies = [statistics.median(pair[who][1] for pair in pairs) for who in (0, 1)]
    rate = statistics.median(our[0] / their[0] for our, their in pairs)
    p50 = statistics.median(our[1] / their[1] for our, their in pairs)
    print(
        f"{row.name:24} {rates[0]:9.1f} {rates[1]:9.1f} {rate:7.2f}   {latencies[0]:9.0f} {latencies[1]:9.0f} {p50:6.2f}"
        "   (our own client)",
        flush=True,
    )


def report(address: str, seconds: float, rounds: int) -> None:
    """Measures the server and prints the medians over the rounds for each row."""
    print(f"{'row':20} {'rate/s':>9} {'p50 us':>9} {'p99 us':>9}")
    for row in rows():
        measure(address, row, 0.5)
        figures = [measure(address, row, seconds) for _ in range(rounds)]
        rate, p50, p99 = (statistics.median(column) for column in zip(*figures, strict=True))
        print(f"{row.name:20} {rate:9.0f} {p50:9.0f} {p99:9.0f}", flush=True)
