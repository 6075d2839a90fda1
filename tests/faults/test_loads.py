"""What a model took is given back when it is unloaded: a worker that loads for ever keeps its size."""

from __future__ import annotations

import os
from pathlib import Path

from tests.daemon_process import DaemonProcess
from tests.repositories import write_model

#: As large as what XLA and the allocator may keep of what has been, whatever the number of loads.
_SLACK = 12 << 20


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
    assert before == after
    assert whole - half < _SLACK
