"""Tests what an iteration of a worker's loop asks, counted in calls of our own functions: only parts that have work."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

import numpy as np
import pytest

from tensord.workers.dispatch.fast_path import FastPath
from tests.daemon_process import ROOT
from tests.records import Tensor
from tests.work.counter import ROOMS
from tests.workers.worker_loop import WorkerLoop

MODELS = ("addsub", "identity", "mlp", "rnn")


class Route:
    """Records the calls of our own functions in one iteration, in their order."""

    def __init__(self, loop: WorkerLoop) -> None:
        self.files: list[str] = []
        gc.disable()
        sys.setprofile(self._profile)
        try:
            loop.worker.iterate()
        finally:
            sys.setprofile(None)
            gc.enable()

    def _profile(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(ROOMS):
            self.files.append(frame.f_code.co_filename)

    @property
    def returns(self) -> int:
        """Returns how often a file is entered again after it was left."""
        moves = [file for before, file in zip(["", *self.files], self.files, strict=False) if file != before]
        return len(moves) - len(set(moves))


@pytest.fixture(scope="module")
def loop(leaves_nothing: None) -> Iterator[WorkerLoop]:
    made = WorkerLoop()
    for name in MODELS:
        made.load(ROOT / "bench" / "models" / name)
    yield made
    made.close()


def ask(loop: WorkerLoop) -> None:
    content = bytes(64)
    loop.submit("addsub", [Tensor(name, "FP32", (1, 16), content) for name in ("INPUT0", "INPUT1")])
    assert loop.front.flush()


def rest(loop: WorkerLoop) -> None:
    """Runs some iterations, so that nothing of earlier requests is left to do."""
    for _ in range(5):
        loop.worker.iterate()


@pytest.mark.parametrize("lanes", [1, 8])
def test_an_iteration_with_nothing_due(loop: WorkerLoop, lanes: int) -> None:
    """However many lanes, models and sequences there are, and whatever was asked before."""
    others = [loop.open_lane(100 + number) for number in range(1, lanes)]
    for _ in range(3):
        ask(loop)
        loop.answers(1)
    inputs = [Tensor("x", "FP32", (1, 64), np.zeros((1, 64), np.float32).tobytes())]
    for number in range(3):
        loop.submit("rnn", inputs, own={"sequence_id": 100 * lanes + number, "sequence_start": True})
    loop.answers(3)
    rest(loop)
    assert len(Route(loop).files) <= 8
    for lane in others:
        lane.close()
    rest(loop)


def test_a_request_that_runs_in_python(loop: WorkerLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    if isinstance(poller := loop.worker._poller, FastPath):
        monkeypatch.setattr(poller, "learn", lambda version, execution: None)
        poller.forget_gone()
    for _ in range(50):
        ask(loop)
        loop.answers(1)
    rest(loop)
    ask(loop)
    route = Route(loop)
    assert len(loop.answers(1)) == 1
    figures = len(route.files), len(set(route.files)), route.returns
    assert figures[0] <= MOST[0], figures
    assert figures[1] <= MOST[1], figures
    assert figures[2] <= MOST[2], figures


#: Calls, files, returns to a file that was left.
MOST = 118, 30, 52
