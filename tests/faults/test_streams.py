"""Streams of responses, some cancelled, some read slowly, while their worker is killed again and again."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from tests.daemon_process import PATIENCE, DaemonProcess, nothing_left_behind, wait_until
from tests.faults.stream_clients import GENERATORS, STEPPED, StreamClient, told

_CLIENTS = 16
_KILLS = 2
#: Requests before each of them, and at the end.
_REQUESTS = 30
#: How a request may end when its worker died.
_DIED = "error: the worker process died while it had the request, which may not be run twice"


@pytest.mark.parametrize("repository", [GENERATORS, STEPPED], ids=["generator", "stepped"])
def test_every_stream_is_complete_or_ends_with_one_error(tmp_path: Path, repository: Path) -> None:
    arguments = ["--model-control-mode=explicit", "--load-model=repeat"]
    with nothing_left_behind(), DaemonProcess(tmp_path, [repository], arguments=arguments) as daemon:
        staying = [
            psutil.Process(daemon.pid),
            *daemon.children("tensord.daemon.http"),
            *daemon.children("tensord.daemon.grpc"),
        ]
        before = {process.pid: process.num_fds() for process in staying}
        clients = [StreamClient(daemon.grpc_url, seed) for seed in range(_CLIENTS)]
        for client in clients:
            client.start()
        for number in range(1, _KILLS + 2):
            wait_until(lambda n=number: told(clients).total() > n * _REQUESTS, f"{number} times {_REQUESTS}", daemon)
            if number <= _KILLS:
                (worker,) = daemon.workers
                worker.kill()
                worker.wait(PATIENCE)
        for client in clients:
            client.stop()
        for client in clients:
            client.join(PATIENCE)
            assert not client.is_alive()
        assert told(clients).keys() <= {"complete", "cancelled", _DIED}
        # Lanes of other workers, and a connection or two of this test's own.
        wait_until(lambda: all(p.num_fds() <= before[p.pid] + 3 for p in staying), "descriptors to be closed", daemon)
        assert "Traceback" not in daemon.log
