"""Story: the worker that steps many requests is killed.

1. 256 requests, of which four have slots at a time: many steps until all have ended.
2. Responses come, and the worker is killed with SIGKILL, in the middle of a step.
3. Those that had a response end with one error, after numbers in their order; the others begin elsewhere and get all of theirs.
4. The worker that takes its place serves as ever.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from tests.daemon_process import DaemonProcess
from tests.protocol.stepped_models import Steps, write_stepped_models

#: Comes, in its steps, to the one that waits for ``let_go``.
_HELD = 770


@pytest.fixture
def daemon(leaves_nothing: None, tmp_path: Path) -> Iterator[DaemonProcess]:
    write_stepped_models(tmp_path / "models")
    with DaemonProcess(tmp_path, [tmp_path / "models"]) as running:
        yield running


def let_go(daemon: DaemonProcess) -> None:
    (daemon.folder / "models" / "counts" / "1" / "go").touch()


def test_a_killed_worker(daemon: DaemonProcess) -> None:
    names = [str(number) for number in (_HELD, *range(255))]
    with Steps(daemon.grpc_url) as steps:
        for name in names:
            steps.ask(name, (int(name),), ends=False)
        for _ in range(3):
            steps.take()
        (worker,) = daemon.workers
        worker.kill()
        let_go(daemon)
        errors = 0
        for name, got in zip(names, steps.all_of(*names), strict=True):
            numbers = [value for value in got if isinstance(value, int)]
            assert numbers == list(range(int(name), int(name) + len(numbers)))
            if got[len(numbers) :] == [None]:
                assert len(numbers) == 41
            else:
                (error,) = got[len(numbers) :]
                assert "the worker process died while it had the request" in error
                errors += 1
        assert 1 <= errors <= 32
        assert steps.answers((1,), count=3) == [1, 2, 3, None]


def test_a_stop_in_the_middle(daemon: DaemonProcess) -> None:
    """1. Requests have slots, others wait for theirs. 2. The daemon is told to stop. 3. All that it took are answered whole."""
    names = [str(number) for number in (_HELD, *range(11))]
    with Steps(daemon.grpc_url) as steps:
        for name in names:
            steps.ask(name, (int(name),), ends=False)
        for _ in range(5):
            steps.take()
        begun = set(steps.got)
        daemon.signal(signal.SIGTERM)
        let_go(daemon)
        with pytest.raises(grpc.RpcError, match="the server is stopping"):
            steps.all_of("nobody, so all that comes")
        assert steps.ended >= begun
        # What came when nothing was taken any more has no answer, or an error.
        for name, got in steps.got.items():
            assert (
                got == [*range(int(name), int(name) + 41), None]
                if name in begun or len(got) > 1
                else isinstance(got[0], str)
            )
    assert daemon.stop() == 0
