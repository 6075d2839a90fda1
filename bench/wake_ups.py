"""Measures what it costs on this machine to wake a process that sleeps: the reason why fronts and workers poll before they sleep.

    python -m bench.wake_ups [--count 3000]

Two processes pass a byte to and fro over a socket pair like a lane's. On one core the other process never has to be woken on an
idle core; on two cores it always has, because its core has nothing else to do meanwhile. Half of the difference is one wake-up,
and ``expert.spin_us`` should be several times that.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import subprocess
import sys
import time

from bench.server import ROOT
from tensord.shm import channel


def round_trips(ours: int, theirs: int, count: int) -> list[float]:
    """Returns the microseconds of each round trip between a process on core ``ours`` and one on core ``theirs``."""
    before = os.sched_getaffinity(0)
    near, far = channel.pair()
    echo = [sys.executable, "-m", "bench.wake_ups", "--echo", str(far.fileno()), str(theirs)]
    with far, subprocess.Popen(echo, cwd=ROOT, pass_fds=[far.fileno()]):
        far.close()
        try:
            os.sched_setaffinity(0, {ours})
            near.send(b"x")
            near.recv(1)  # it is there
            took = []
            for _ in range(count):
                began = time.perf_counter_ns()
                near.send(b"x")
                near.recv(1)
                took.append((time.perf_counter_ns() - began) / 1e3)
            return took
        finally:
            near.close()
            os.sched_setaffinity(0, before)


def _echo(sock: socket.socket, core: int) -> None:
    """Runs the other process: sends each byte back until the socket pair is closed."""
    os.sched_setaffinity(0, {core})
    while sock.recv(1):
        sock.send(b"x")


def main() -> int:
    """Parses the command line, measures and prints."""
    parser = argparse.ArgumentParser(
        prog="bench.wake_ups", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=3000, help="round trips of each kind")
    parser.add_argument("--echo", type=int, nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.echo:
        fd, core = arguments.echo
        _echo(socket.socket(fileno=fd), core)
        return 0
    first, *others = sorted(os.sched_getaffinity(0))
    pairs = {"one core": (first, first)}
    if others:
        pairs["two cores"] = (first, others[0])
    print("| a round trip on | p10 us | p50 us | p90 us |\n| --- | --- | --- | --- |")
    for name, (ours, theirs) in pairs.items():
        deciles = statistics.quantiles(round_trips(ours, theirs, arguments.count), n=10)
        print(f"| {name} | {deciles[0]:.0f} | {deciles[4]:.0f} | {deciles[8]:.0f} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
