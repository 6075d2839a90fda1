"""Clients that keep a daemon busy and check every answer."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import tritonclient.http as httpclient

from tests.daemon_process import PATIENCE, DaemonProcess


class CheckedLoad:
    """``clients`` threads, each with its own connection and its own values, until the ``with`` block ends."""

    def __init__(self, daemon: DaemonProcess, clients: int, model: str = "scale") -> None:
        self._daemon = daemon
        self._model = model
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(i,)) for i in range(clients)]
        self._lock = threading.Lock()
        self.answers = 0
        self.wrong = 0
        self.errors: list[str] = []

    def __enter__(self) -> CheckedLoad:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(PATIENCE)
        assert not any(thread.is_alive() for thread in self._threads), "a client got no answer at all"

    def _run(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        client: Any = None
        while not self._stop.is_set():
            if client is None:
                client = httpclient.InferenceServerClient(
                    self._daemon.url, connection_timeout=PATIENCE, network_timeout=PATIENCE
                )
            values = rng.random((int(rng.integers(1, 5)), 4), np.float32)
            made = httpclient.InferInput("x", list(values.shape), "FP32")
            made.set_data_from_numpy(values)
            try:
                answer = client.infer(self._model, [made])
            except Exception as error:
                with self._lock:
                    self.errors.append(f"{type(error).__name__}: {error}")
                client.close()
                client = None
                continue
            with self._lock:
                self.answers += 1
                self.wrong += not np.allclose(answer.as_numpy("y"), 3 * values + 1)
        if client is not None:
            client.close()
