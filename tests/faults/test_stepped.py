"""Story: the worker that steps many requests is killed.

1. 256 requests, of which four have slots at a time: many steps until all have ended.
2. Responses come, and the worker is killed with SIGKILL.
3. Those that had a response end with one error, after numbers in their order; the others begin elsewhere and get all of theirs.
4. The worker that takes its place serves as ever.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.daemon_process import DaemonProcess
from tests.protocol.stepped_models import Steps, write_stepped_models


@pytest.fixture
def daemon(leaves_nothing: None, tmp_path: Path) -> Iterator[DaemonProcess]:
    write_stepped_models(tmp_path / "models")
    with DaemonProcess(tmp_path, [tmp_path / "models"]) as running:
        running.wait_ready()
        yield running


def test_a_killed_worker(daemon: DaemonProcess) -> None:
    names = [str(number) for number in range(256)]
    with Steps(daemon.grpc_url) as steps:
        for name in names:
            steps.ask(name, (int(name),), ends=False)
        for _ in range(3):
            steps.take()
        (worker,) = daemon.workers
        worker.kill()
        errors = 0
        for name, got in zip(names, steps.all_of(*names), strict=True):
            numbers = [value for value in got if isinstance(value, int)]
            assert numbers == list(range(int(name), int(name) + len(numbers)))
            if got[len(numbers) :] == [None]:
                assert len(numbers) == 41
            else:
                (error,) = got[len(numbers) :]
                assert "the worker process died while it executed the request" in error
                errors += 1
        assert 1 <= errors <= 32
        assert steps.answers((1,), count=3) == [1, 2, 3, None]


def test_a_stop_in_the_middle(daemon: DaemonProcess) -> None:
    """1. Requests have slots, others wait for theirs. 2. The daemon is told to stop. 3. All that it took are answered whole."""
    names = [str(number) for number in range(12)]
    with Steps(daemon.grpc_url) as steps:
        for name in names:
            steps.ask(name, (int(name),), ends=False)
        for _ in range(5):
            steps.take()
        daemon.signal(signal.SIGTERM)
        for name, got in zip(names, steps.all_of(*names), strict=True):
            if got[-1] is None:
                assert got == [*range(int(name), int(name) + 41), None]
            else:
                # It came when nothing was taken any more.
                assert len(got) == 1, got
    assert daemon.stop() == 0
