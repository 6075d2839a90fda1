"""Processes that models of a dead worker have started are killed, also if no file could be opened at first."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Iterator

from tensord.daemon.processes.worker_pool import Leftovers
from tensord.shm import marked_processes
from tensord.workers.calls.own_processes import OwnProcesses
from tests.daemon_process import PATIENCE, wait_until
from tests.open_files import no_descriptors_left


@contextlib.contextmanager
def started(mark: str) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "600"], env={**os.environ, marked_processes.MARK: mark}) as process:
        yield process
        process.kill()


def test_they_are_killed_once_files_can_be_opened() -> None:
    async def ended(process: subprocess.Popen[bytes]) -> None:
        leftovers = Leftovers()
        with no_descriptors_left():
            leftovers.end("worker-0", "of a test")
            await asyncio.sleep(0.3)
            assert process.poll() is None
        await leftovers.ended()

    with started("of a test.7") as process, started("of another") as other:
        asyncio.run(ended(process))
        assert process.wait(PATIENCE) == -signal.SIGKILL
        assert other.poll() is None


def test_a_model_ends_its_own_once_files_can_be_opened() -> None:
    own = OwnProcesses("m")
    with started(own.mark()) as process:
        with no_descriptors_left():
            own.forked(process.pid)
            own.close()
            assert not threading.Event().wait(0.3)
            assert process.poll() is None
            assert not own.ended
        assert process.wait(PATIENCE) == -signal.SIGTERM
        wait_until(lambda: own.ended, "they have ended")
