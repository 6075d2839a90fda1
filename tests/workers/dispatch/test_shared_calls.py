"""Tests that the way of requests depends only on the model and the requests, however busy the machine is."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tensord.workers.processor.processor import HostExecutable
from tensord.workers.programs.grouped_program import GroupedProgram
from tests.records import Tensor
from tests.repositories import write_model
from tests.workers.worker_loop import PATIENCE_SECONDS, WorkerLoop, ever_queued

MODEL = """
    inputs = {"x": "FP32[DIM]"}
    outputs = {"y": "FP32[DIM]"}

    def create(path, config, device):
        return (lambda params, inputs: {"y": inputs["x"] * 2}), {}
"""
#: How many come together; 300 requests.
GROUPS = (1, 2, 3, 4, 5, 8, 12, 16, 9, 15) * 4
TIMES = 10
#: Of each group: requests that were queued in Python, and calls of programs.
Way = list[tuple[int, tuple[str, ...]]]


@pytest.fixture(scope="module")
def busy() -> Iterator[None]:
    """Runs processes within the block that use the cores as well."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(3)]
    yield
    for other in others:
        other.kill()
        other.wait()


def ask(loop: WorkerLoop, count: int) -> None:
    x = np.arange(4, dtype=np.float32)
    for _ in range(count):
        loop.submit("m", [Tensor("x", "FP32", (4,), x.tobytes())])
    for answer in loop.answers(count):
        place = answer.outputs[0].place
        assert isinstance(place, bytes)
        assert np.frombuffer(place, np.float32).tolist() == [0, 2, 4, 6]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Records each call of a program, whoever makes it."""
    made: list[str] = []

    def count(kind: type, name: str) -> None:
        usual = getattr(kind, name)

        def counted(*arguments: Any) -> Any:
            made.append(f"{kind.__name__}.{name}")
            return usual(*arguments)

        monkeypatch.setattr(kind, name, counted)

    count(GroupedProgram, "run")
    count(HostExecutable, "run")
    count(HostExecutable, "compute")
    return made


def shares(loop: WorkerLoop) -> bool:
    """Returns whether there is a program for several requests."""
    (version,) = loop.worker._models
    assert version.jitted is not None
    assert version.jitted.grouped is not None
    return version.jitted.grouped.find(((4,),), 8) is not None


def way(loop: WorkerLoop, calls: list[str]) -> Way:
    """Sends groups of requests; returns how each group was run."""
    (version,) = loop.worker._models
    found: Way = []
    for count in GROUPS:
        before = ever_queued(version.queue)
        calls.clear()
        ask(loop, count)
        found.append((ever_queued(version.queue) - before, tuple(calls)))
    assert version.statistics.inference_count >= sum(GROUPS)
    return found


@pytest.mark.parametrize("dim", ["4", "-1"])
def test_the_same_requests_find_the_same_way_each_time(
    leaves_nothing: None, busy: None, calls: list[str], tmp_path: Path, dim: str
) -> None:
    write_model(tmp_path, "m", MODEL.replace("DIM", dim), 'backend: "jax"')
    ways: list[Way] = []
    for _ in range(TIMES):
        loop = WorkerLoop()
        try:
            loop.load(tmp_path / "m")
            if dim == "-1":
                # The first one has its programs compiled; what comes before they are there goes without them.
                ask(loop, 1)
                deadline = time.monotonic() + PATIENCE_SECONDS
                while not shares(loop):
                    loop.worker.iterate()
                    assert time.monotonic() < deadline
            ways.append(way(loop, calls))
        finally:
            loop.close()
    assert sum(len(made) for _, made in ways[0]) < sum(GROUPS) // 2, "requests share calls"
    assert [made for made in ways if made != ways[0]] == []
