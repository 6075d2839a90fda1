"""A worker that was spawned, and that nobody adopts."""

from __future__ import annotations

import os

from tensord.config.options import Workers
from tensord.daemon.processes.spawned import WORKER, spawn_workers


def test_one_for_each_device_and_it_ends_with_its_channel(leaves_nothing: None) -> None:
    spawned = spawn_workers(Workers(device="cpu", cpu=2), {}, WORKER)
    assert [device.name for device, _ in spawned] == ["cpu:0", "cpu:1"]
    for _, worker in spawned:
        assert worker.process.poll() is None
        worker.channel.close()
        # It has not begun: it opens no device before it is told to.
        assert worker.process.wait() == 0
        os.close(worker.stack_fd)
