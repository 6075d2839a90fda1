"""Runs an ordinary client beside other load: ``python -m bench.bystander http|grpc ADDRESS small|mixed|mebibyte [HOST]``.

Or ``lane SOCKET small``. It asks until its standard input ends. HOST: the local address that it connects from.
It sends one request after the other (bench/mixture.py) on a connection that is opened anew every fifty requests, and compares
each answer. It prints a line when it has asked once, and at its end one JSON object: ``answers``, how many were right;
``failures``, by error message; ``worst_ms`` and ``median_ms``, the times from sending to the whole answer, with the time to
connect.
"""

from __future__ import annotations

import contextlib
import json
import select
import statistics
import sys
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient

from bench.closed_loop import Connection
from bench.grpc_connection import GrpcConnection
from bench.helper import leaves_blocks, object_name
from bench.mixture import Exchange, mebibyte, mixed, small

_REQUESTS_A_CONNECTION = 50
#: A daemon that says nothing for so long has lost the request.
_PATIENCE = 120.0
#: The line that it prints first.
BEGUN = "begun"
#: A client that waits a little between its requests does not fill a processor by itself.
_PAUSE = 0.002


class Bystander:
    """An ordinary client. A subclass says how it sends a request."""

    def __init__(self) -> None:
        self._left = 0
        self._answers = 0
        self._failures: dict[str, int] = {}
        #: Of all requests; of long runs a sample, and the longest of them.
        self._waits_ms: deque[float] = deque(maxlen=100_000)
        self._worst_ms = 0.0

    def exchange(self) -> None:
        """Sends one request and checks the answer. Raises OSError: the connection is lost; AssertionError: a wrong answer."""
        raise NotImplementedError

    def close(self) -> None:
        """Closes the connection."""
        raise NotImplementedError

    def ask(self) -> None:
        """Sends one request, and notes its time and whether it failed."""
        began = time.perf_counter()
        try:
            self.exchange()
        except (OSError, AssertionError) as error:
            said = f"{type(error).__name__}: {error}"[:200]
            self._failures[said] = self._failures.get(said, 0) + 1
            self.close()
        else:
            self._answers += 1
        waited = 1e3 * (time.perf_counter() - began)
        self._waits_ms.append(waited)
        self._worst_ms = max(self._worst_ms, waited)

    def report(self) -> dict[str, Any]:
        """Returns the counts and times that the module prints."""
        return {
            "answers": self._answers,
            "failures": self._failures,
            "worst_ms": self._worst_ms,
            "median_ms": statistics.median(self._waits_ms or [0.0]),
        }


class SocketBystander(Bystander):
    """A client of HTTP or gRPC on a raw socket."""

    def __init__(self, protocol: str, address: str, exchanges: Iterator[Exchange], comes_from: str = "") -> None:
        super().__init__()
        self._comes_from = comes_from
        self._kind = GrpcConnection if protocol == "grpc" else Connection
        host, port = address.rsplit(":", 1)
        self._address = (host, int(port))
        self._exchanges = exchanges
        self._connection: Connection | None = None

    def close(self) -> None:
        if self._connection is not None:
            self._connection.socket.close()
        self._connection, self._left = None, 0

    def exchange(self) -> None:
        exchange = next(self._exchanges)
        if not self._left:
            self.close()
            self._connection, self._left = self._kind(self._address, self._comes_from), _REQUESTS_A_CONNECTION
            self._connection.socket.settimeout(_PATIENCE)
        assert self._connection is not None
        self._left -= 1
        self._connection.send(exchange.request)
        try:
            while not self._connection.read():
                pass
        except AssertionError:
            # So a gRPC connection says that the call failed. The next call has another stream.
            if not exchange.is_error:
                raise
        else:
            exchange.check(self._connection.received)


class LaneBystander(Bystander):
    """A client on a lane, by the Python client. Its inputs lie in the client's shared memory and in the records, in turn."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self._path = path
        self._client: Any = None
        self._chance = np.random.default_rng()

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
        self._client, self._left = None, 0

    def exchange(self) -> None:
        import tensord_client

        try:
            if not self._left:
                self.close()
                self._client, self._left = tensord_client.connect(self._path), _REQUESTS_A_CONNECTION
            self._left -= 1
            model = self._client.model("addsub", timeout=_PATIENCE)
            rows = int(self._chance.integers(1, 9))
            a, b = (self._client.empty((rows, 16), np.float32) for _ in range(2))
            a[:], b[:] = self._chance.integers(1000), self._chance.integers(1000)
            if self._left % 2:
                a, b = np.array(a), np.array(b)
            answer = model({"INPUT0": a, "INPUT1": b})
        except tensord_client.ServingError as error:
            raise ConnectionError(f"{type(error).__name__}: {error.message}") from error
        assert (answer["OUTPUT0"] == a + b).all(), "a wrong sum"
        assert (answer["OUTPUT1"] == a - b).all(), "a wrong difference"


@contextlib.contextmanager
def requests(protocol: str, address: str, kind: str) -> Iterator[Iterator[Exchange]]:
    """Yields the client's requests, without end.

    ``kind``: "small", "mebibyte", or "mixed", for which a region is registered within the block.
    """
    if kind != "mixed":
        yield {"small": small, "mebibyte": mebibyte}[kind](protocol)
        return
    library = grpcclient if protocol == "grpc" else httpclient
    name = object_name()
    values = np.random.default_rng().random(1 << 12, np.float32)
    path = Path("/dev/shm", name)
    with library.InferenceServerClient(address) as client:
        try:
            path.write_bytes(values.tobytes())
            client.register_system_shared_memory(name, f"/{name}", values.nbytes)
            yield mixed(protocol, name, values)
            client.unregister_system_shared_memory(name)
        finally:
            path.unlink(missing_ok=True)


def main(protocol: str, address: str, kind: str, comes_from: str = "") -> None:
    """Sends requests until standard input ends, and prints the report."""
    with contextlib.ExitStack() as stack:
        bystander: Bystander
        if protocol == "lane":
            bystander = LaneBystander(address)
        else:
            exchanges = stack.enter_context(requests(protocol, address, kind))
            bystander = SocketBystander(protocol, address, exchanges, comes_from)
        pause = 0.0 if kind == "mixed" else _PAUSE
        bystander.ask()
        print(BEGUN, flush=True)
        while not select.select([sys.stdin], [], [], pause)[0]:
            bystander.ask()
        bystander.close()
    print(json.dumps(bystander.report()))


if __name__ == "__main__":
    with leaves_blocks():
        main(*sys.argv[1:])
