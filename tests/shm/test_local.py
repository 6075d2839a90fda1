"""Models in this process: who waits for what while one is loaded or closed, and requests that nobody waits for."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from tensord import testing
from tensord.shm.common.call import Call
from tensord.shm.common.local import LocalConnection, LocalRequest
from tensord.shm.common.model import promised
from tests.daemon_process import PATIENCE
from tests.repositories import applying, scale_model, write_model


class Answering:
    """A model that answers when it is closed."""

    description = SimpleNamespace(version=1)

    def __init__(self) -> None:
        self.asked: list[LocalRequest] = []

    def begin(self, request: LocalRequest, call: Call) -> int:
        self.asked.append(request)
        return 0

    def close(self) -> None:
        for request in self.asked:
            answer(request)


def answer(request: LocalRequest) -> None:
    request.take(None, {"y": np.zeros(1)}, None, True)


def test_close_calls_the_callbacks_of_what_ends_meanwhile() -> None:
    before = set(threading.enumerate())
    model: Any = Answering()
    connection = LocalConnection(lambda *_: model)
    called = []
    futures = [promised(connection.ask(Call("m", {}))) for _ in range(2)]
    for future in futures:
        future.add_done_callback(called.append)
    # The thread that calls back exists before the connection is closed.
    answer(model.asked.pop(0))
    futures[0].result(PATIENCE)
    closing = threading.Thread(target=connection.close)
    closing.start()
    closing.join(PATIENCE)
    assert not closing.is_alive()
    assert called == futures
    assert set(threading.enumerate()) <= before


def test_a_model_answers_while_another_one_is_loaded(tmp_path: Path) -> None:
    scale_model(tmp_path)
    goes_on = threading.Event()

    def load(model: str, version: int) -> Any:
        if model == "slow":
            assert goes_on.wait(PATIENCE)
        return testing.served(tmp_path, "scale", version)

    connection = LocalConnection(load)
    x = np.ones((1, 4), np.float32)
    connection.ask(Call("scale", {"x": x})).result(PATIENCE)
    with ThreadPoolExecutor() as pool:
        slow = pool.submit(connection.open, "slow")
        # Its callback is called, though its thread does not exist yet.
        future = promised(connection.ask(Call("scale", {"x": x})))
        called = threading.Event()
        future.add_done_callback(lambda _: called.set())
        assert called.wait(PATIENCE)
        connection.end_sequence("scale", 7)
        goes_on.set()
        slow.result()
    connection.close()


def test_a_request_that_is_cancelled_before_the_worker_looks_at_it(tmp_path: Path) -> None:
    code = """
        for i in range(int(inputs["n"][0])):
            yield {"i": np.full(65536, i, np.int32)}
        """
    write_model(tmp_path, "count", applying(code, "n INT32[1]", "i INT32[65536]", more="host = True"))
    model = testing.load(tmp_path / "count")
    connection: Any = model._connection
    looks = threading.Event()
    next(iter(connection._models.values()))._worker.post(looks.wait)
    endless = connection.ask(model.call({"n": [2**31 - 1]}, (), {}, streams=True))
    endless.cancel()
    looks.set()
    # It would wait for the request.
    closing = threading.Thread(target=model.close)
    closing.start()
    closing.join(PATIENCE)
    assert not closing.is_alive()
