"""Attacks on the gateway for robots, beside a robot that must not notice.

1. A gateway serves; a robot asks and compares, all the time.
2. Attackers of all kinds come at once, do their worst for a moment, and go.
3. No observation of the robot failed or was answered wrongly, the gateway's memory and descriptors are back, its log is short,
   and the daemon has noticed nothing.
"""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import numpy as np
import psutil
import websockets.sync.client as websocket

from bench.attackers.robots import ATTACKS
from tests import prepared
from tests.daemon_process import PATIENCE, DaemonProcess, wait_until
from tests.generated import times
from tests.openpi_gateway import GatewayProcess, actions, observation
from tests.repositories import scale_model

_SECONDS = times(100, 20) / 10
#: What Python keeps of what came by the way, whatever came: the attackers send hundreds of MiB, and hold a hundred at a time.
_MORE_BYTES = 48 << 20


def test_a_robot_does_not_notice(tmp_path: Path) -> None:
    options = {"clients": {"socket": str(tmp_path / "clients.sock")}}
    arguments = ("--max-message-bytes", str(32 << 20), "--max-unread-bytes", str(16 << 20), "--message-timeout", "1")
    with (
        DaemonProcess(tmp_path, [scale_model(tmp_path / "models")], options) as daemon,
        GatewayProcess(tmp_path, *arguments) as gateway,
        websocket.connect(f"{gateway.url}/scale", compression=None) as robot,
    ):
        robot.recv(PATIENCE)
        ended = threading.Event()
        seen: list[str] = []

        def ask() -> int:
            count = 0
            while not ended.is_set():
                x = np.arange(4, dtype=np.float32) + count
                robot.send(observation(x=x))
                answer = robot.recv(PATIENCE)
                if isinstance(answer, str) or actions(answer)["y"].tobytes() != (3 * x + 1).tobytes():
                    seen.append(repr(answer))
                count += 1
            return count

        answers: list[int] = []
        asking = threading.Thread(target=lambda: answers.append(ask()))
        process = psutil.Process(gateway.pid)
        before, descriptors = process.memory_info().rss, process.num_fds()
        asking.start()
        try:
            where = [f"127.0.0.1:{gateway.port}", "-", str(_SECONDS), "-"]
            done = prepared.run(["tests.faults.attackers_together", *where, *ATTACKS])
        finally:
            ended.set()
            asking.join(PATIENCE)
        assert done.returncode == 0, done.stderr
        for name, counts in zip(ATTACKS, json.loads(done.stdout), strict=True):
            assert sum(counts.values()) > 0, f"{name} did nothing"
        assert seen == []
        assert answers[0] > 0
        wait_until(lambda: process.num_fds() <= descriptors, "descriptors to be given back")
        assert process.memory_info().rss <= before + _MORE_BYTES
        assert len(os.listdir(f"/proc/{gateway.pid}/task")) < 20
        assert gateway.log.count("\n") == 1, gateway.log
        assert "Traceback" not in daemon.log
