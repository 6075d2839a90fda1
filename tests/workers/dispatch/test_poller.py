"""Tests how the loop waits where the C part was not built."""

from __future__ import annotations

import contextlib
import os
import select
from collections.abc import Iterator

import numpy as np
import pytest

from tensord.workers.dispatch.poller import Poller
from tensord.workers.native import extensions
from tests.daemon_process import ROOT
from tests.records import Tensor
from tests.workers.worker_loop import WorkerLoop


@pytest.fixture
def event() -> Iterator[int]:
    fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
    yield fd
    os.close(fd)


@pytest.mark.parametrize("look_ns", [0, 10_000_000_000])
@pytest.mark.parametrize("timeout_ns", [0, 1_000_000, 100_000_000_000])
def test_what_came_is_returned(event: int, look_ns: int, timeout_ns: int) -> None:
    with select.epoll() as epoll:
        epoll.register(event, select.EPOLLIN)
        poller = Poller(epoll, look_ns)
        os.eventfd_write(event, 1)
        for _ in range(3):  # from the second time on it looks first
            assert poller.wait(timeout_ns, True) == ([(event, select.EPOLLIN)], [], [])


@pytest.mark.parametrize("look_ns", [0, 1000])
@pytest.mark.parametrize("timeout_ns", [0, 500_000, 60_000_000])
def test_nothing_came(event: int, look_ns: int, timeout_ns: int) -> None:
    with select.epoll() as epoll:
        epoll.register(event, select.EPOLLIN)
        poller = Poller(epoll, look_ns)
        for _ in range(2):
            assert poller.wait(timeout_ns, True) == ([], [], [])


def test_a_worker_answers_without_the_c_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extensions, "available", False)
    with contextlib.closing(WorkerLoop()) as loop:
        loop.load(ROOT / "bench" / "models" / "addsub")
        content = np.full((1, 16), 3, np.float32).tobytes()
        for _ in range(5):
            loop.submit("addsub", [Tensor(name, "FP32", (1, 16), content) for name in ("INPUT0", "INPUT1")])
            (answer,) = loop.answers(1)
            place = answer.outputs[0].place
            assert isinstance(place, bytes)
            assert np.frombuffer(place, np.float32).tolist() == [6.0] * 16
