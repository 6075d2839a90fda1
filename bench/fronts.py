"""Measures what several front processes bring and cost: rate, latency, and the processor time of one request.

    python -m bench.fronts [--protocols http,grpc] [--processes 1,2] [--rounds 5] [--seconds 2] [--rate 1000] [--per-front 1,4,8]

It prints a table for each protocol. A daemon runs for each number of fronts, all at once, and they are measured in turn: closed
loops of small requests with so many connections for each front, one of large requests, and an open loop of small ones at the
stated rate. A front that has many requests waiting handles several each time it wakes up, so the cost of one request can only be
compared between equally busy fronts: hence connections for each front. Beside the median over the rounds stands the least,
because other work on a machine only ever adds. Every answer is compared, and the number of answers with what the daemon's
statistics say.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from bench import closed_loop, grpc_connection, open_loop
from bench.server import Usage, answered, children, serving

_FIRST_PORT = 18120
_FIRST_GRPC_PORT = 18220
_CONNECTIONS = 16
#: Measures the server at an address: answers per second, median latency in microseconds, and how many answers came.
Load = Callable[[str], tuple[float, float, int]]


@dataclass(frozen=True, slots=True)
class Run:
    """One measurement of one daemon. Processor times are microseconds a request, user and kernel mode together."""

    rate: float
    p50_us: float
    fronts_us: float
    worker_us: float
    #: The part of the fronts' time that the busiest of them took; 0.5 is even for two.
    busiest: float
    #: Requests that the client had answered and the daemon does not count as answered.
    lost: int
    #: Processor time of all other processes of the daemon: the supervisor, and fronts of other protocols.
    others_us: float = 0.0
    #: Requests that the daemon has answered.
    count: int = 0

    @property
    def all_us(self) -> float:
        """The processor time of all processes of the daemon."""
        return self.fronts_us + self.worker_us + self.others_us


@dataclass(frozen=True, slots=True)
class Server:
    """A running daemon with ``fronts`` front processes for one protocol, "http" or "grpc"."""

    protocol: str
    fronts: int
    pid: int
    #: Where those fronts listen, and where HTTP is served, which says how many requests were answered.
    address: str
    http: str

    def run(self, measure: Load) -> Run:
        """Measures the daemon once, with the processor time that its processes used meanwhile."""
        processes = {self.pid: "supervisor", **children(self.pid)}
        before, counted = {pid: Usage.of(pid) for pid in processes}, answered(self.http)
        rate, p50_us, count = measure(self.address)
        used = {pid: Usage.of(pid).since(usage) for pid, usage in before.items()}
        counted = answered(self.http) - counted

        def spent(module: str) -> list[float]:
            return [used[pid].busy_us / counted for pid, name in processes.items() if name == module]

        fronts, workers = spent(f"daemon.{self.protocol}"), spent("workers")
        busiest = max(fronts) / sum(fronts) if any(fronts) else 1.0
        others = sum(sum(spent(name)) for name in {*processes.values()} - {f"daemon.{self.protocol}", "workers"})
        return Run(rate, p50_us, sum(fronts), sum(workers), busiest, count - counted, others, counted)


def closed(row: closed_loop.Row, seconds: float) -> Load:
    """Returns a closed loop as a load. It ends while requests are in flight, so it counts only the answers that it received."""

    def measure(address: str) -> tuple[float, float, int]:
        rate, p50_us, _ = closed_loop.measure(address, row, seconds)
        return rate, p50_us, int(rate * seconds)

    return measure


def opened(row: closed_loop.Row, times: list[float]) -> Load:
    """Returns an open loop as a load. It waits for every answer."""

    def measure(address: str) -> tuple[float, float, int]:
        load = open_loop.measure(address, row, times, _CONNECTIONS)
        return load.rate, load.percentile(50), len(load.latencies_us)

    return measure


def main() -> int:
    """Parses the command line, measures and prints a table for each protocol."""
    parser = argparse.ArgumentParser(
        prog="bench.fronts", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--protocols", default="http,grpc")
    parser.add_argument("--processes", default="1,2", help="numbers of fronts")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="length of one measurement")
    parser.add_argument("--rate", type=float, default=1000, help="requests per second of the open loop")
    parser.add_argument("--per-front", default="1,4,8", help="connections for each front")
    parser.add_argument("--logs", type=Path, default=Path("/tmp"), help="where the daemons' logs go")
    arguments = parser.parse_args()
    protocols = arguments.protocols.split(",")
    for protocol in protocols:
        if protocol not in ("http", "grpc"):
            parser.error(f"no protocol '{protocol}', there are http, grpc")
    for protocol in protocols:
        with contextlib.ExitStack() as stack:
            servers = [
                stack.enter_context(_served(protocol, fronts, arguments.logs))
                for fronts in map(int, arguments.processes.split(","))
            ]
            _report(protocol, servers, arguments)
    return 0


def flags(protocol: str, fronts: int) -> list[str]:
    """Returns a daemon's flags besides bench/serve.toml, with ports that no daemon with another number of fronts has."""
    chosen = [f"--http-port={_FIRST_PORT + fronts}", f"--grpc-port={_FIRST_GRPC_PORT + fronts}"]
    chosen += ["--allow-metrics=false", f"--{protocol}-processes={fronts}"]
    return [*chosen, "--allow-grpc=false"] if protocol == "http" else chosen


@contextlib.contextmanager
def _served(protocol: str, fronts: int, logs: Path) -> Iterator[Server]:
    """Runs a daemon with so many fronts within the block."""
    http = f"127.0.0.1:{_FIRST_PORT + fronts}"
    address = f"127.0.0.1:{_FIRST_GRPC_PORT + fronts}" if protocol == "grpc" else http
    command = [sys.executable, "-m", "tensord", "serve", "--config", "bench/serve.toml", *flags(protocol, fronts)]
    with serving(command, http, logs / f"bench-fronts-{protocol}-{fronts}.log") as pid:
        yield Server(protocol, fronts, pid, address, http)


def _loads(
    small: closed_loop.Row, large: closed_loop.Row, fronts: int, arguments: argparse.Namespace
) -> Iterator[tuple[str, Load]]:
    """Yields the loads for a daemon with so many fronts, each with its name in the table."""
    for count in map(int, arguments.per_front.split(",")):
        row = dataclasses.replace(small, connections=count * fronts)
        yield f"small, {count} for each front", closed(row, arguments.seconds)
    row = dataclasses.replace(large, connections=fronts)
    yield "1 MiB, 1 for each front", closed(row, arguments.seconds)
    yield f"open loop, {arguments.rate:g}/s", opened(small, open_loop.arrivals(arguments.rate, arguments.seconds))


def _report(protocol: str, servers: list[Server], arguments: argparse.Namespace) -> None:
    """Measures the daemons in turn and prints their table."""
    rows = {row.name: row for row in (grpc_connection if protocol == "grpc" else closed_loop).rows()}
    small, large = rows[f"small-{protocol}-c1"], rows[f"1MiB-{protocol}-c1"]
    print(
        f"| {protocol}: load | fronts | rate/s | p50 us | fronts' us | least | worker's us | least | busiest front | lost |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for several in zip(*(_loads(small, large, server.fronts, arguments) for server in servers), strict=True):
        runs: list[list[Run]] = [[] for _ in servers]
        for server, (_, load) in zip(servers, several, strict=True):
            load(server.address)
        for _ in range(arguments.rounds):
            for server, (_, load), done in zip(servers, several, runs, strict=True):
                done.append(server.run(load))
        for server, (name, _), done in zip(servers, several, runs, strict=True):
            print(_line(name, server.fronts, done), flush=True)


def _line(name: str, fronts: int, runs: list[Run]) -> str:
    def median(of: Callable[[Run], float]) -> float:
        return statistics.median(map(of, runs))

    lost = sum(max(0, run.lost) for run in runs)
    return (
        f"| {name} | {fronts} | {median(lambda run: run.rate):.0f} | {median(lambda run: run.p50_us):.0f} "
        f"| {median(lambda run: run.fronts_us):.1f} | {min(run.fronts_us for run in runs):.1f} "
        f"| {median(lambda run: run.worker_us):.1f} | {min(run.worker_us for run in runs):.1f} "
        f"| {median(lambda run: run.busiest):.2f} | {lost} |"
    )


if __name__ == "__main__":
    sys.exit(main())
