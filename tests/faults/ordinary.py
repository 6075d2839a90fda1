"""Runs ordinary clients that notice when something is wrong: one of each protocol sends requests and checks every answer."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Self

import numpy as np
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient

from tests.daemon_process import PATIENCE, DaemonProcess, wait_until
from tests.faults.load import Load

#: What each of them has to be answered before it counts as going on.
_MORE = 3


class Ordinary(Load):
    """Asks the model ``scale`` over HTTP, gRPC and a gRPC stream, each on its own connection, until the ``with`` block ends."""

    def __init__(self, daemon: DaemonProcess) -> None:
        self._kinds: tuple[Callable[[], None], ...] = (self._http, self._grpc, self._stream)
        super().__init__(daemon, len(self._kinds))
        #: How many answers each client got, by the name of its method.
        self.got = {kind.__name__: 0 for kind in self._kinds}

    def __enter__(self) -> Self:
        super().__enter__()
        self.go_on()
        return self

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        assert self.errors == []

    def go_on(self) -> None:
        """Waits until each client has got some more answers; fails if one has noticed an error."""
        before = dict(self.got)
        wait_until(
            lambda: self.errors or all(self.got[kind] >= before[kind] + _MORE for kind in before),
            "the ordinary clients to go on",
            self._daemon,
        )
        assert self.errors == []

    def _run(self, seed: int) -> None:
        kind = self._kinds[seed]
        try:
            kind()
        except Exception as error:
            self.errors.append(f"{kind.__name__}: {type(error).__name__}: {error}")

    def _values(self, kind: str) -> np.ndarray:
        return np.full((1, 4), self.got[kind] % 1000, np.float32)

    def _checked(self, kind: str, values: np.ndarray, answer: Any) -> None:
        assert np.allclose(answer.as_numpy("y"), 3 * values + 1), "a wrong answer"
        self.got[kind] += 1

    def _http(self) -> None:
        with httpclient.InferenceServerClient(
            self._daemon.url, connection_timeout=PATIENCE, network_timeout=PATIENCE
        ) as client:
            while not self._stop.is_set():
                values = self._values("_http")
                given = httpclient.InferInput("x", [1, 4], "FP32")
                given.set_data_from_numpy(values)
                self._checked("_http", values, client.infer("scale", [given]))

    def _grpc(self) -> None:
        with grpcclient.InferenceServerClient(self._daemon.grpc_url) as client:
            while not self._stop.is_set():
                values = self._values("_grpc")
                given = grpcclient.InferInput("x", [1, 4], "FP32")
                given.set_data_from_numpy(values)
                self._checked("_grpc", values, client.infer("scale", [given]))

    def _stream(self) -> None:
        came = threading.Semaphore(0)
        got: list[tuple[Any, Any]] = []

        def called(result: Any, error: Any) -> None:
            got.append((result, error))
            came.release()

        with grpcclient.InferenceServerClient(self._daemon.grpc_url) as client:
            client.start_stream(called)
            while not self._stop.is_set():
                values = self._values("_stream")
                given = grpcclient.InferInput("x", [1, 4], "FP32")
                given.set_data_from_numpy(values)
                client.async_stream_infer("scale", [given])
                assert came.acquire(timeout=PATIENCE), "no answer"
                result, error = got.pop()
                assert error is None, error
                self._checked("_stream", values, result)
            client.stop_stream()
