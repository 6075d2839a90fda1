"""Tests that a model's memory is given back when it is unloaded: a worker that loads for ever keeps its size."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import threading
from collections import Counter
from pathlib import Path

from tests.daemon_process import PATIENCE, DaemonProcess
from tests.repositories import scale_model, write_model

#: As large as what XLA and the allocator may keep of what has been, whatever the number of loads.
_SLACK = 12 << 20
#: Of descriptors and threads: a compile process may live or have ended, a thread of a pool be needed later.
_FEW = 10


def test_two_hundred_loads(tmp_path: Path) -> None:
    """In turn unloaded and replaced. 1 MiB of parameters each time: kept, they would be 100 MiB in the second hundred."""
    write_model(
        tmp_path / "models",
        "megabyte",
        """
        import numpy as np
        inputs = {"x": "FP32[4]"}
        outputs = {"y": "FP32[4]"}
        max_batch_size = 2

        def create(path, config, device):
            return (lambda params, inputs: {"y": inputs["x"] + params["w"][:4]}), {"w": np.ones(1 << 18, np.float32)}
        """,
    )
    options = {"repository": {"paths": [str(tmp_path / "models")], "control_mode": "explicit", "load": []}}
    with DaemonProcess(tmp_path, (tmp_path / "models",), options) as daemon:
        sizes = []
        for number in range(1, 201):
            # Else it is the one that is loaded already.
            os.utime(tmp_path / "models/megabyte/1/model.py", (number, number))
            status, answer = daemon.request("POST", "/v2/repository/models/megabyte/load", b"{}")
            assert status == 200, answer
            if number % 2:
                daemon.request("POST", "/v2/repository/models/megabyte/unload", b"{}")
            if number % 100 == 0:
                (worker,) = daemon.workers
                sizes.append((worker.memory_info().rss, worker.num_fds(), worker.num_threads()))
    (half, *before), (whole, *after) = sizes
    assert all(later - earlier < _FEW for earlier, later in zip(before, after, strict=True))
    # Of a busy machine, where compile processes and loads meet otherwise each time, a little more may stay.
    assert whole - half < 2 * _SLACK


def test_loads_beside_requests(tmp_path: Path) -> None:
    """
    1. A model is asked again and again, over connections that stay.
    2. It is loaded anew sixty times meanwhile, each time with new files.
    Result: no request fails, and the last forty leave the worker as large as it was. A program and what it was traced from have
    half a megabyte.
    """
    repository = scale_model(tmp_path / "models")
    options = {"repository": {"paths": [str(repository)], "control_mode": "explicit", "load": ["scale"]}}
    body = json.dumps({"inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}]})
    seen: Counter[int] = Counter()
    ended = threading.Event()

    def ask() -> None:
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", daemon.port, timeout=PATIENCE)) as connection:
            while not ended.is_set():
                connection.request("POST", "/v2/models/scale/infer", body)
                answer = connection.getresponse()
                answer.read()
                seen[answer.status] += 1

    with DaemonProcess(tmp_path, (repository,), options) as daemon:
        daemon.wait_ready()
        clients = [threading.Thread(target=ask) for _ in range(2)]
        for client in clients:
            client.start()
        sizes = []
        try:
            for number in range(1, 61):
                os.utime(repository / "scale/1/model.py", (number, number))
                assert daemon.request("POST", "/v2/repository/models/scale/load", b"{}")[0] == 200
                if number in (20, 60):
                    sizes.append(daemon.workers[0].memory_info().rss)
        finally:
            ended.set()
            for client in clients:
                client.join()
    assert set(seen) == {200}
    assert seen[200] > 60
    assert sizes[1] - sizes[0] < _SLACK
