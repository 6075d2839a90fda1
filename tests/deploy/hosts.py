"""Runs the hosts of a fleet: daemons that keep their ports when they are started again, as those of real hosts do."""

from __future__ import annotations

import contextlib
import random
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests import repositories, scrapes
from tests.daemon_process import PATIENCE, ROOT, DaemonProcess
from tests.protocol import sequence_models

#: Below those that the kernel gives to whoever connects.
_PORTS = range(20_000, 32_000)


def free_ports(count: int) -> list[int]:
    """Returns ports of 127.0.0.1 that nobody listens on and that the kernel gives to no client connection."""
    with contextlib.ExitStack() as held:
        found: list[int] = []
        while len(found) < count:
            sock = held.enter_context(socket.socket())
            port = random.choice(_PORTS)
            with contextlib.suppress(OSError):
                sock.bind(("127.0.0.1", port))
                found.append(port)
        return found


class Host(DaemonProcess):
    """A daemon with two models, ``work`` (sleeps, and returns x) and ``sums`` (of a sequence), and tensorctl for it.

    Args:
      seconds: how long a request to ``work`` takes; requests run one after the other.
    """

    def __init__(self, folder: Path, seconds: float) -> None:
        self.control = folder / "control.sock"
        self.http_port, self.grpc_port, self.agent_port, metrics = free_ports(4)
        repositories.write_model(folder / "models", "work", _WORK.format(seconds=seconds))
        sequences = "oldest { max_candidate_sequences: 64 }"
        sequence_models.python_model(folder / "models", "sums", sequences, rows=4, idle_us=int(4 * PATIENCE * 1e6))
        options: dict[str, dict[str, Any]] = {
            "http": {"port": self.http_port},
            "grpc": {"port": self.grpc_port},
            "metrics": {"port": metrics, "agent_port": self.agent_port},
            "supervisor": {"control_socket": str(self.control)},
        }
        super().__init__(folder, [folder / "models"], options)

    def tensorctl(self, *words: str) -> None:
        """Runs tensorctl. Raises AssertionError: it failed, with its output."""
        command = [sys.executable, "-m", "tensord.daemon.ctl", "--socket", str(self.control), *words]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr

    def answered(self, model: str) -> float:
        """Returns how many requests for a model this host has answered well since it was started."""
        return scrapes.scrape(self.metrics_url).model("nv_inference_request_success", model)


_WORK = """
    import time

    inputs = {{"x": "UINT8[n]"}}
    outputs = {{"y": "UINT8[n]"}}
    host = True

    def create(path, config, device):
        def apply(params, inputs):
            time.sleep({seconds})
            return {{"y": inputs["x"]}}

        return apply, None
"""
