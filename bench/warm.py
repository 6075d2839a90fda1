"""Measures how soon a daemon that has just started answers as fast as it ever does: the rate of each second of load.

python -m bench.warm [--seconds 30] [--models addsub,identity,mlp]   a daemon of its own for each model, with an empty cache

Sixteen connections send requests from the moment that the daemon is ready. Printed are the answers of the first, third and tenth
second, divided by those of the median second of the last third, and the processor time of the daemon's processes for an answer,
which shows on a busy machine whether the daemon itself was slower. The shapes of addsub and identity are open in their
configurations, so a first request waits until its program is compiled, and the program of grouped calls is compiled during the
next ones: the first second has both. The programs of mlp are compiled before the daemon is ready.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

import numpy as np

from bench.closed_loop import Row, connected, infer_request
from bench.server import Usage, children, serving

ADDRESS = "127.0.0.1:18100"
CONNECTIONS = 16
SHOWN = (1, 3, 10)


def rows() -> dict[str, Row]:
    """Returns a kind of load for each model: model -> row."""
    a, b = np.arange(16, dtype=np.float32).reshape(1, 16), np.full((1, 16), 2, np.float32)
    small = infer_request("addsub", [("INPUT0", a), ("INPUT1", b)], "OUTPUT0")
    large = infer_request("identity", [("INPUT0", a.ravel())], "OUTPUT0")
    pixels = infer_request("mlp", [("x", np.zeros((1, 784), np.float32))], "logits")
    return {
        "addsub": Row("addsub", CONNECTIONS, small, a + b),
        "identity": Row("identity", CONNECTIONS, large, a.ravel()),
        # Zeros stay zeros, whoever computes them.
        "mlp": Row("mlp", CONNECTIONS, pixels, np.zeros((1, 10), np.float32)),
    }


def each_second(address: str, row: Row, seconds: int, pid: int) -> tuple[list[int], list[float]]:
    """Counts right answers in each second of load; returns them, and the daemon's processor microseconds for an answer."""
    counts, used = [0] * seconds, [used_us(pid)]
    with connected(address, row.connection, row.connections) as (poll, connections):
        begin = time.perf_counter()
        for connection in connections:
            connection.send(row.request)
        while (now := int(time.perf_counter() - begin)) < seconds:
            if now == len(used):
                used.append(used_us(pid))
            for key, _ in poll.select(1):
                if key.data.read():
                    row.check(key.data.received)
                    counts[now] += 1
                    key.data.send(row.request)
    used.append(used_us(pid))
    costs = [(after - before) / max(1, count) for (before, after), count in zip(pairwise(used), counts, strict=True)]
    return counts, costs


def used_us(pid: int) -> float:
    """Returns the processor time of a daemon's processes since they started, in microseconds."""
    usages = [Usage.of(each) for each in (pid, *children(pid))]
    return sum(usage.user_us + usage.kernel_us for usage in usages)


def main() -> None:
    """Measures each model and prints a line for it."""
    parser = argparse.ArgumentParser(
        prog="bench.warm", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=int, default=30)
    parser.add_argument("--models", default=",".join(rows()))
    arguments = parser.parse_args()
    for name in arguments.models.split(","):
        with tempfile.TemporaryDirectory() as folder:
            os.environ["XDG_CACHE_HOME"] = folder
            command = [sys.executable, "-m", "tensord", "serve", "--config", "bench/serve.toml"]
            with serving(command, ADDRESS, Path(folder, "log")) as pid:
                counts, costs = each_second(ADDRESS, rows()[name], arguments.seconds, pid)
        settled, cost = (statistics.median(each[-max(1, len(each) // 3) :]) for each in (counts, costs))
        parts = ", ".join(
            f"second {at}: {counts[at - 1] / settled:.2f} ({costs[at - 1]:.0f} us)" for at in SHOWN if at <= len(counts)
        )
        print(f"{name:10} {settled:7.0f} answers a second ({cost:.0f} us); {parts}", flush=True)


if __name__ == "__main__":
    main()
