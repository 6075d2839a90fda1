"""Loads a server in an open loop: requests are due at times that do not depend on the answers, as those of many users.

    python -m bench.open_loop --rate 2000 [--seconds 10] [--connections 64] [--row small-http-c1] ADDRESS [ADDRESS ...]

A closed loop waits for a slow answer before it sends the next request, and so forgets those that would have suffered meanwhile
(coordinated omission). Here a latency counts from the moment a request was due, whether or not a connection was free for it.
Several addresses are measured in turn, a round each, so that the figures of two servers stand side by side. Arrivals are a
Poisson process from a fixed seed: every server meets the same ones. Every answer is compared.
"""

from __future__ import annotations

import argparse
import random
import selectors
import statistics
import sys
import time
from collections import deque
from dataclasses import dataclass

from bench.closed_loop import Connection, Row, connected, rows

_PERCENTILES = (50, 90, 99, 99.9)


@dataclass(frozen=True, slots=True)
class Load:
    """The results of one run against one server."""

    #: Answers per second, over the whole run with its tail.
    rate: float
    #: Microseconds from due to answered, ascending.
    latencies_us: list[float]
    #: Most requests that were due and had no free connection.
    backlog: int

    def percentile(self, percent: float) -> float:
        return self.latencies_us[min(len(self.latencies_us) - 1, int(len(self.latencies_us) * percent / 100))]


def arrivals(rate: float, seconds: float, seed: int = 1) -> list[float]:
    """Returns the times at which requests are due, in seconds from the start: a Poisson process from a seed."""
    random_source = random.Random(seed)
    due, times = 0.0, []
    while (due := due + random_source.expovariate(rate)) < seconds:
        times.append(due)
    return times


def measure(address: str, row: Row, times: list[float], connections: int) -> Load:
    """Sends each request when it is due, or as soon after that as a connection is free; waits for every answer.

    Raises AssertionError: an answer's tensor is wrong; ConnectionError: the server hung up.
    """
    with connected(address, row.connection, connections) as (poll, every):
        return _run(poll, list(every), row, times)


def _run(poll: selectors.BaseSelector, free: list[Connection], row: Row, times: list[float]) -> Load:
    waiting: deque[float] = deque()
    due_of: dict[Connection, float] = {}
    latencies: list[float] = []
    coming, backlog = 0, 0
    begin = time.perf_counter()
    while len(latencies) < len(times):
        now = time.perf_counter() - begin
        while coming < len(times) and times[coming] <= now:
            waiting.append(times[coming])
            coming += 1
        while waiting and free:
            connection = free.pop()
            due_of[connection] = waiting.popleft()
            connection.send(row.request)
        backlog = max(backlog, len(waiting))
        until_next = times[coming] - now if coming < len(times) else 1.0
        for key, _ in poll.select(max(0.0, until_next)):
            connection = key.data
            if connection.read():
                latencies.append((time.perf_counter() - begin - due_of.pop(connection)) * 1e6)
                row.check(connection.received)
                free.append(connection)
    took = time.perf_counter() - begin
    return Load(len(latencies) / took, sorted(latencies), backlog)


def main() -> int:
    """Parses the command line and measures."""
    parser = argparse.ArgumentParser(
        prog="bench.open_loop", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "addresses", nargs="+", metavar="ADDRESS", help="HOST:PORT of a server with the models of bench/models"
    )
    parser.add_argument("--rate", type=float, required=True, help="requests per second that are due")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--connections", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--row", default="small-http-c1", help="whose request is sent; its number of connections is not used"
    )
    arguments = parser.parse_args()
    found = [row for row in rows() if row.name == arguments.row]
    if not found:
        parser.error(f"no row '{arguments.row}', there are {', '.join(row.name for row in rows())}")
    times = arrivals(arguments.rate, arguments.seconds)
    loads: dict[str, list[Load]] = {address: [] for address in arguments.addresses}
    for _ in range(arguments.rounds):
        for address, done in loads.items():
            done.append(measure(address, found[0], times, arguments.connections))
    heads = " ".join(f"{f'p{percent:g} us':>10}" for percent in _PERCENTILES)
    print(f"{'server':22} {'due/s':>8} {'done/s':>8} {heads} {'backlog':>8}")
    for address, done in loads.items():
        columns = " ".join(f"{statistics.median(load.percentile(p) for load in done):10.0f}" for p in _PERCENTILES)
        rate = statistics.median(load.rate for load in done)
        print(f"{address:22} {arguments.rate:8.0f} {rate:8.0f} {columns} {max(load.backlog for load in done):8d}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
