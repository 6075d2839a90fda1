"""The command line of a worker process; what it does when started is tests/workers/test_worker.py."""

from __future__ import annotations

import os
import subprocess
import sys

import msgspec
import pytest

from tensord.config.options import Options
from tensord.shm import child_process
from tensord.shm.channel import Channel, ChannelClosed, pair
from tensord.shm.control_records import FromWorker, Load, Start, Stop, ToWorkerControl
from tensord.shm.record import decoder
from tensord.workers.__main__ import _receive_start


@pytest.mark.parametrize("arguments", [[], ["--control-fd", "x"], ["--control-fd", "3", "--device", "tpu:0"]])
def test_usage(arguments: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tensord.workers", *arguments], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 2
    assert "usage: tensord.workers" in done.stderr


def test_start_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = pair()
    supervisor, worker = Channel(ours, decoder(FromWorker)), Channel(theirs, decoder(ToWorkerControl))
    enabled: list[int] = []
    monkeypatch.setattr(child_process, "enable_stack_report", enabled.append)
    stack = child_process.create_stack_report()
    supervisor.put(Start(1, "worker-0", msgspec.Raw(msgspec.msgpack.encode(Options()))), stack)
    supervisor.put(Load("m", 1, "", "", b""))
    supervisor.flush()
    os.close(stack)
    found = _receive_start(worker)
    os.close(*enabled)
    assert (found.name, msgspec.msgpack.decode(found.options, type=Options)) == ("worker-0", Options())
    assert worker.receive() == ([Load("m", 1, "", "", b"")], [])
    supervisor.put(Stop(0))
    supervisor.flush()
    with pytest.raises(SystemExit, match="Stop came before Start"):
        _receive_start(worker)
    supervisor.close()
    with pytest.raises(ChannelClosed):
        _receive_start(worker)
    worker.close()
