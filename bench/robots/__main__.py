"""Measures robots: ``python -m bench.robots --packages FOLDER [--rounds N] [--seconds S]``.

FOLDER has the packages of robots, and the peer: ``pip install --no-deps --target FOLDER openpi-client openpi-server``.

one       the p50 of one robot that asks all the time (target: at most 1.0 times the peer's)
many      observations a second of sixteen robots (at least 4 times), and their p99 (at most 0.35 times)
connect   from connecting to the metadata, while sixteen robots ask (at most 0.1 times)

The peer serves the same jitted function. Both are asked in turn in each round, by the same program; the other one is idle
meanwhile. Actions are compared. Figures are medians of the rounds. Exit status 1: actions were others than the peer's.
"""

from __future__ import annotations

import argparse
import contextlib
import socket
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from bench.helper import end, helper, line, report
from bench.server import serving

_MODELS = Path(__file__).parent / "models"
_SIDES = ("tensord", "peer")


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])


def _load(packages: str, url: str, robots: int, seconds: float, *connect: str) -> dict[str, Any]:
    with helper("bench.robots.load", packages, url, str(robots), str(seconds), *connect) as process:
        return report(process)


def _figures(packages: str, url: str, seconds: float) -> tuple[dict[str, float], list[Any]]:
    one = _load(packages, url, 1, seconds)
    many = _load(packages, url, 16, seconds)
    connect = _load(packages, url, 16, seconds, "0.1")
    return {
        "one p50 ms": statistics.median(one["ms"]),
        "many /s": len(many["ms"]) / seconds,
        "many p99 ms": float(np.percentile(many["ms"], 99)),
        "connect ms": statistics.median(connect["connect_ms"]),
    }, many["actions"]


def main() -> None:
    """Measures, and prints a line for each figure."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--packages", required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0)
    arguments = parser.parse_args()
    http, port, peer_port = _free_port(), _free_port(), _free_port()
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        config = folder / "serve.toml"
        config.write_text(
            f'[repository]\npaths = ["{_MODELS}"]\n[http]\nport = {http}\n[grpc]\nport = 0\n[metrics]\nport = 0\n'
            f'[workers]\ndevice = "cpu"\n[clients]\nsocket = "{folder}/clients.sock"\n'
        )
        daemon = [sys.executable, "-m", "tensord", "serve", "--config", str(config)]
        stack.enter_context(serving(daemon, f"127.0.0.1:{http}", folder / "daemon.log"))
        words = ("--server", str(folder), "--address", f"127.0.0.1:{port}", "--model", "policy")
        gateway = subprocess.Popen([sys.executable, "-m", "tensord_client.openpi", *words], stderr=subprocess.PIPE)
        stack.callback(end, gateway)
        assert gateway.stderr is not None
        stack.callback(gateway.stderr.close)
        gateway.stderr.readline()
        line(stack.enter_context(helper("bench.robots.peer", arguments.packages, str(peer_port))))
        urls = dict(zip(_SIDES, (f"ws://127.0.0.1:{port}", f"ws://127.0.0.1:{peer_port}"), strict=True))
        rounds: list[dict[str, dict[str, float]]] = []
        for number in range(arguments.rounds):
            seen = {
                side: _figures(arguments.packages, urls[side], arguments.seconds)
                for side in (_SIDES if number % 2 else _SIDES[::-1])
            }
            if not np.allclose(seen["tensord"][1], seen["peer"][1], atol=1e-3):
                sys.exit("the actions are not the peer's")
            rounds.append({side: figures for side, (figures, _) in seen.items()})
    for name in rounds[0]["peer"]:
        ours, theirs = (statistics.median(each[side][name] for each in rounds) for side in _SIDES)
        ratio = statistics.median(each["tensord"][name] / each["peer"][name] for each in rounds)
        print(f"{name:12} {ours:10.2f} peer {theirs:10.2f} ratio {ratio:6.3f}")


if __name__ == "__main__":
    main()
