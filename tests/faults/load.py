"""Keeps a daemon busy with clients that check every answer: of one request that repeats, or of many that differ."""

from __future__ import annotations

import contextlib
import json
import queue
import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, Self

import grpc
import numpy as np
import tritonclient.http as httpclient
from tritonclient.grpc import service_pb2

from tests.daemon_process import PATIENCE, DaemonProcess
from tests.fakes import Answer, Client
from tests.faults.varied import Asked, Dice

_SERVICE = "/inference.GRPCInferenceService/"


class Load(ABC):
    """Runs ``clients`` threads, each with its own connection and its own values, until the ``with`` block ends."""

    def __init__(self, daemon: DaemonProcess, clients: int) -> None:
        self._daemon = daemon
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(i,)) for i in range(clients)]
        self._lock = threading.Lock()
        self.answers = 0
        self.wrong = 0
        self.errors: list[str] = []

    @abstractmethod
    def _run(self, seed: int) -> None:
        """Runs one client until the load stops."""

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(PATIENCE)
        assert not any(thread.is_alive() for thread in self._threads), "a client got no answer at all"


class CheckedLoad(Load):
    """Asks one model over HTTP, by tritonclient."""

    def __init__(self, daemon: DaemonProcess, clients: int, model: str = "scale", pause: float = 0.01) -> None:
        """Sets up the clients.

        ``pause``: seconds between an answer and its client's next request, in which others have the processor.
        """
        super().__init__(daemon, clients)
        self._model = model
        self._pause = pause

    def _run(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        client: Any = None
        while not self._stop.wait(self._pause):
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


class VariedLoad(Load):
    """Sends requests that differ (``tests.faults.varied``), in turn over HTTP, gRPC calls and gRPC streams."""

    def __init__(self, daemon: DaemonProcess, clients: int) -> None:
        super().__init__(daemon, clients)
        #: Answers by the way that their requests took.
        self.ways: Counter[str] = Counter()

    def _run(self, seed: int) -> None:
        way = (self._http, self._unary, self._stream)[seed % 3]
        dice = Dice(seed)
        with contextlib.ExitStack() as stack:
            ask = stack.enter_context(way())
            while not self._stop.is_set():
                asked = dice.asked()
                try:
                    right = ask(asked)
                except Exception as error:
                    with self._lock:
                        self.errors.append(f"{way.__name__}: {type(error).__name__}: {error}: {asked}")
                    return
                with self._lock:
                    self.answers += 1
                    self.ways[way.__name__] += 1
                    self.wrong += not right

    @contextlib.contextmanager
    def _http(self) -> Iterator[Callable[[Asked], bool]]:
        with Client(self._daemon.port) as client:

            def ask(asked: Asked) -> bool:
                client.send(asked.http())
                return _is_right(asked, client.answer())

            yield ask

    @contextlib.contextmanager
    def _unary(self) -> Iterator[Callable[[Asked], bool]]:
        with grpc.insecure_channel(self._daemon.grpc_url) as channel:
            call = channel.unary_unary(_SERVICE + "ModelInfer")

            def ask(asked: Asked) -> bool:
                answer = call(asked.grpc(), timeout=PATIENCE)
                return _is_right_message(asked, service_pb2.ModelInferResponse.FromString(answer))

            yield ask

    @contextlib.contextmanager
    def _stream(self) -> Iterator[Callable[[Asked], bool]]:
        sent: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        with grpc.insecure_channel(self._daemon.grpc_url) as channel:
            answers = channel.stream_stream(_SERVICE + "ModelStreamInfer")(iter(sent.get, None))

            def ask(asked: Asked) -> bool:
                sent.put(asked.grpc())
                answer = service_pb2.ModelStreamInferResponse.FromString(next(answers))
                assert not answer.error_message, answer.error_message
                return _is_right_message(asked, answer.infer_response)

            yield ask
            sent.put(None)


def _is_right(asked: Asked, answer: Answer) -> bool:
    assert answer.status == 200, answer.body
    size = int(answer.headers.get("inference-header-content-length", len(answer.body)))
    said, content = json.loads(answer.body[:size]), answer.body[size:]
    (output,) = said["outputs"]
    if not content:
        given = Asked(asked.model, "", "", asked.datatype, [], output["data"], "", {}, "", "", "", [])
        content = given.content
    return (said["model_name"], said.get("id", ""), output["shape"], content) == (
        *(asked.model, asked.id, asked.shape, asked.answer),
    )


def _is_right_message(asked: Asked, answer: Any) -> bool:
    (output,) = answer.outputs
    found = answer.model_name, answer.id, list(output.shape), answer.raw_output_contents[0]
    return found == (asked.model, asked.id, asked.shape, asked.answer)
