"""The command line of a worker process; what it does when started is tests/workers/test_worker.py."""

from __future__ import annotations

import subprocess
import sys

import msgspec
import pytest

from config.options import Options
from shm.channel import Channel, ChannelClosed, pair
from shm.messages import FromWorker, Load, Start, Stop, ToWorkerControl, decoder
from workers.__main__ import _receive_start


@pytest.mark.parametrize("arguments", [[], ["--control-fd", "x"], ["--control-fd", "3", "--device", "tpu:0"]])
def test_usage(arguments: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "workers", *arguments], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 2
    assert "usage: workers" in done.stderr


def test_start_comes_first_and_what_is_behind_it_waits() -> None:
    ours, theirs = pair()
    supervisor, worker = Channel(ours, decoder(FromWorker)), Channel(theirs, decoder(ToWorkerControl))
    start = Start(1, "worker-0", msgspec.Raw(msgspec.msgpack.encode(Options())))
    load = Load("m", 1, "", "", b"")
    supervisor.put(start)
    supervisor.put(load)
    supervisor.flush()
    found, behind = _receive_start(worker)
    assert (found.name, behind) == ("worker-0", [(load, [])])
    assert msgspec.msgpack.decode(found.options, type=Options) == Options()
    supervisor.put(Stop(0))
    supervisor.flush()
    with pytest.raises(SystemExit, match="Stop came before Start"):
        _receive_start(worker)
    supervisor.close()
    with pytest.raises(ChannelClosed):
        _receive_start(worker)
    worker.close()
