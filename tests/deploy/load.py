"""Runs clients that ask a fleet without a pause, each on a connection of its own, and counts their answers and errors."""

from __future__ import annotations

import collections
import contextlib
import http.client
import json
import threading
from collections.abc import Callable, Iterator

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from tests.daemon_process import PATIENCE, wait_until


def http_asker(port: int, size: int) -> tuple[Callable[[], None], Callable[[], None]]:
    """Returns two functions: one asks ``work`` over HTTP and raises unless the answer is right, one ends the connection."""
    data = [7] * size
    body = json.dumps({"inputs": [{"name": "x", "datatype": "UINT8", "shape": [size], "data": data}]})
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)

    def ask() -> None:
        try:
            connection.request("POST", "/v2/models/work/infer", body)
            response = connection.getresponse()
            text = response.read()
        except Exception:
            connection.close()  # the next request opens it again
            raise
        if response.status != 200:
            raise ConnectionError(f"{response.status}: {text[:200]!r}")
        assert json.loads(text)["outputs"][0]["data"] == data

    return ask, connection.close


def grpc_asker(port: int, size: int) -> tuple[Callable[[], None], Callable[[], None]]:
    """Returns the two functions of ``http_asker``, for gRPC."""
    request = service_pb2.ModelInferRequest(model_name="work", raw_input_contents=[b"\7" * size])
    request.inputs.add(name="x", datatype="UINT8", shape=[size])
    # Without retries of its own, and not on a connection that others of this process have.
    channel = grpc.insecure_channel(
        f"127.0.0.1:{port}", [("grpc.enable_retries", 0), ("grpc.use_local_subchannel_pool", 1)]
    )
    stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)

    def ask() -> None:
        assert stub.ModelInfer(request, timeout=PATIENCE).raw_output_contents[0] == b"\7" * size

    return ask, channel.close


ASKERS = {"http": http_asker, "grpc": grpc_asker}


class Load:
    """Counts the answers that clients have got, by kind (``http``, ``grpc``), and keeps their errors."""

    def __init__(self) -> None:
        self.answered: collections.Counter[str] = collections.Counter()
        self.failed: list[str] = []
        self._ended = threading.Event()

    def _client(self, kind: str, port: int, size: int) -> None:
        ask, close = ASKERS[kind](port, size)
        with contextlib.ExitStack() as stack:
            stack.callback(close)
            while not self._ended.is_set():
                try:
                    ask()
                except Exception as error:
                    self.failed.append(f"{kind}, {size} bytes: {error!r}")
                else:
                    self.answered[kind] += 1

    def goes_on(self, *kinds: str) -> None:
        """Waits until every kind of client has got thirty more answers."""
        before = dict(self.answered)
        wait_until(
            lambda: all(self.answered[kind] >= before.get(kind, 0) + 30 for kind in kinds or set(ASKERS)),
            f"clients to be answered: {self.failed[:3]}",
        )

    @contextlib.contextmanager
    def of(self, clients: list[tuple[str, int, int]]) -> Iterator[Load]:
        """Runs clients within the block: a kind, a port and a size in bytes for each."""
        threads = [threading.Thread(target=self._client, args=client) for client in clients]
        for thread in threads:
            thread.start()
        try:
            yield self
        finally:
            self._ended.set()
            for thread in threads:
                thread.join(PATIENCE)
