"""Tests that how requests are run depends on the model and on what comes together, never on how long anything took."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest

from tensord.workers.models.model_version import ModelVersion
from tests.daemon_process import ROOT
from tests.records import Tensor
from tests.repositories import of_x, write_model
from tests.workers.worker_loop import WorkerLoop

REQUESTS, REPEATED = 300, 4
#: All programs are there when none has come for so often that many requests.
QUIET = 5
#: So many come together, again and again.
TOGETHER = (1, 1, 2, 5, 8, 13)


class Way(NamedTuple):
    """Names how requests that came together were run."""

    together: int
    #: Those of them that Python saw.
    seen: int
    runs: int


#: A model with a thread of its own: requests are given to it ahead, or not.
HOST = of_x("x + 1", "FP32[16]", more="host = True")


def drive(loop: WorkerLoop, version: ModelVersion, inputs: list[Tensor], slow: bool = False) -> list[Way]:
    """Sends all requests and takes their answers."""
    dispatcher, found = loop.worker._dispatcher, list[Way]()
    submit, seen, sent = dispatcher.submit, [0], 0

    def counted(*arguments: Any) -> None:
        seen[0] += 1
        submit(*arguments)

    with mock.patch.object(dispatcher, "submit", counted):
        while sent < REQUESTS:
            together = TOGETHER[len(found) % len(TOGETHER)]
            before = seen[0], version.statistics.execution_count
            for _ in range(together):
                loop.submit(version.name, inputs)
            if slow and len(found) % 7 == 3:
                # Somebody else has the processor.
                time.sleep(0.02)
            assert {answer.code for answer in loop.answers(together)} == {""}
            loop.worker.iterate()
            found.append(Way(together, seen[0] - before[0], version.statistics.execution_count - before[1]))
            sent += together
    return found


def ways(folder: Path, inputs: list[Tensor], slow: bool) -> list[Way]:
    """Loads a model in a new worker, sends requests until all programs for them are there, and then says how they are run."""
    with contextlib.closing(WorkerLoop()) as loop:
        loop.load(folder)
        version, seen = loop.worker._models.find(folder.name, 1), list[int]()
        # A program that is missed often enough is made.
        while len(set(seen[-QUIET:])) != 1 or len(seen) < QUIET:
            drive(loop, version, inputs)
            while loop.worker._engine.compiler.pending:
                loop.worker.iterate()
            seen.append(loop.worker._models.changes)
        return drive(loop, version, inputs, slow)


@pytest.mark.parametrize("name", ["addsub", "mlp", "host"])
def test_the_same_requests_are_run_the_same_way_each_time(leaves_nothing: None, tmp_path: Path, name: str) -> None:
    write_model(tmp_path, "host", HOST, 'backend: "jax"')
    folder = tmp_path / name if name == "host" else ROOT / "bench" / "models" / name
    shapes = {"addsub": (1, 16), "mlp": (1, 784), "host": (16,)}
    names = {"addsub": ("INPUT0", "INPUT1")}.get(name, ("x",))
    content = np.zeros(shapes[name], np.float32).tobytes()
    inputs = [Tensor(each, "FP32", shapes[name], content) for each in names]
    first = ways(folder, inputs, False)
    for number in range(1, REPEATED):
        assert ways(folder, inputs, number % 2 == 1) == first
