"""Measures clients on the same host, over lanes and in other ways: ``python -m bench.lane``.

    python -m bench.lane                 the lane, our own gRPC and HTTP with system regions by tritonclient, and the limits
    python -m bench.lane --peer DIR      and a real Triton over HTTP with system regions; DIR as for ``python -m bench``

Rows: small-c1, a small request at a time; small-p16, sixteen such processes; 16MiB-c1; flight-64, 64 requests in flight on one
asynchronous client; simulators-64, 64 processes with 96x96x3 uint8 and 32 floats each (without gRPC). Each has a sibling, -vary,
in which ids, values and, where the model has them, shapes differ. Every answer is compared with what is right, outside of p50.
All ways are measured in turn in each round.

bare is client/examples/lane.c, the lane from C (small-c1). local is the same jitted function on the same array in one process
without a server, and limit two processes in C that pass the same bytes over a SEQPACKET socket and shared memory; both only in
rows with one client and one request at a time.

Printed for each way: answers a second, the lane's rate divided by this rate, p50, the lane's p50 divided by this p50 (all medians
of the rounds, ratios of each round), and processor microseconds of an answer: of the clients, comparing included, and of each
process of the server. At the end: the processor time used in some seconds while a client with an idle lane was connected. Exit
status 1: an answer was wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench.helper import helper
from bench.lane.rows import ROWS, Row
from bench.server import ROOT, Usage, children, serving

_HTTP, _GRPC, _PEER = "127.0.0.1:18170", "127.0.0.1:18171", "127.0.0.1:18000"
_MANY = 16
LANE, BARE, LOCAL, LIMIT = "lane", "bare", "local", "limit"
#: Calls of the example in C that tell how many fill a measurement.
_PROBE = 2000


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of one way of asking in one round."""

    rate: float
    p50_us: float
    #: Processor time of an answer: of the clients, and of the server's processes by name.
    client_us: float
    server_us: dict[str, float] = field(default_factory=dict)


class Server:
    """A running server, known by its process id."""

    def __init__(self, pid: int) -> None:
        self._pid = pid

    def used_us(self) -> dict[str, float]:
        """Returns the processor time of the server's processes since they started: name -> microseconds."""
        found: dict[str, float] = {}
        for pid, name in {self._pid: "supervisor", **children(self._pid)}.items():
            found[name] = found.get(name, 0.0) + Usage.of(pid).busy_us
        return found


class Load:
    """The client processes of a row that ask in one way; they wait between rounds."""

    def __init__(
        self, stack: contextlib.ExitStack, way: str, kind: str, address: str, row: Row, server: Server | None
    ) -> None:
        """Starts the processes. ``kind``: the WAY of ``bench.lane.load``. Raises SystemExit: a process has ended."""
        self.way = way
        self._server = server
        self._processes = [
            stack.enter_context(helper("bench.lane.load", kind, row.name, address, str(number)))
            for number in range(row.processes)
        ]
        for process in self._processes:
            self._line(process)

    def _line(self, process: subprocess.Popen[str]) -> str:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise SystemExit(f"{process.args} ended with {process.wait()}")
        return line

    def measure(self, seconds: float) -> Figures:
        """Has all processes ask for so many seconds; returns their figures together."""
        before = self._server.used_us() if self._server else {}
        for process in self._processes:
            assert process.stdin is not None
            print(seconds, file=process.stdin, flush=True)
        said = [json.loads(self._line(process)) for process in self._processes]
        answers = sum(one["answers"] for one in said)
        after = self._server.used_us() if self._server else {}
        return Figures(
            sum(one["answers"] / one["seconds"] for one in said),
            statistics.median(one["p50_us"] for one in said),
            sum(one["client_us"] * one["answers"] for one in said) / answers,
            {name: (used - before.get(name, 0.0)) / answers for name, used in after.items()},
        )


class Limit:
    """Two processes in C that pass a row's bytes to each other without a server."""

    def __init__(self, program: Path, row: Row) -> None:
        import random

        self.way = LIMIT
        inputs = row.inputs(random.Random(0))
        sizes = [sum(values.nbytes for values in each.values()) for each in (inputs, row.outputs(inputs))]
        self._command = [str(program), *map(str, sizes)]

    def measure(self, seconds: float) -> Figures:
        """Passes bytes for so many seconds."""
        said = json.loads(subprocess.check_output([*self._command, str(seconds)], text=True))
        return Figures(
            said["answers"] / said["seconds"], said["p50_us"], said["client_us"], {"other": said["server_us"]}
        )


class Bare:
    """The client's example in C, lane.c, as a load; it compares each answer itself."""

    way = BARE

    def __init__(self, program: Path, clients: Path, server: Server) -> None:
        self._command = [str(program), str(clients)]
        self._server = server
        self._call_us = self._run(_PROBE)

    def _run(self, calls: int) -> float:
        """Makes so many calls. Returns the median latency in microseconds."""
        said = subprocess.check_output([*self._command, str(calls)], text=True)
        (median,) = re.findall(r"the median took ([\d.]+) us", said)
        return float(median)

    def measure(self, seconds: float) -> Figures:
        """Makes as many calls as take about so many seconds."""
        calls = max(1, int(1e6 * seconds / self._call_us))
        before, used, began = self._server.used_us(), children_us(), time.perf_counter()
        self._call_us = self._run(calls)
        took, used = time.perf_counter() - began, children_us() - used
        after = self._server.used_us()
        return Figures(
            calls / took,
            self._call_us,
            used / calls,
            {name: (now - before.get(name, 0.0)) / calls for name, now in after.items()},
        )


def children_us() -> float:
    """Returns the processor time of all children that have ended, in microseconds."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return 1e6 * (usage.ru_utime + usage.ru_stime)


def main() -> int:
    """Parses the command line, measures and prints a line for each row and way."""
    parser = argparse.ArgumentParser(
        prog="bench.lane", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peer", type=Path, metavar="DIR", help="folder with the peer's setup.sh and triton.sh")
    parser.add_argument("--rows", default=",".join(ROWS), help="by name, comma-separated; all by default: %(default)s")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="length of one measurement, and of the idle one")
    parser.add_argument("--json", type=Path, help="where every figure goes")
    parser.add_argument("--logs", type=Path, default=Path("/tmp"), help="where the servers' logs go")
    arguments = parser.parse_args()
    names = arguments.rows.split(",") if arguments.rows else []
    for name in names:
        if name not in ROWS:
            parser.error(f"no row '{name}', there are {', '.join(ROWS)}")
    report: dict[str, dict[str, list[dict[str, object]]]] = {}
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tensord-bench-")))
        limit = compiled(folder, Path(__file__).with_name("limit.c"))
        bare = compiled(folder, ROOT / "client/examples/lane.c")
        clients = folder / "clients.sock"
        server = stack.enter_context(ours(clients, arguments.logs))
        peer = stack.enter_context(triton(arguments.peer.resolve(), folder, arguments.logs)) if arguments.peer else None
        print("| row | way | answers/s | lane x | p50 us | lane p50 x | client us | server us |")
        print("| --- | --- | --- | --- | --- | --- | --- | --- |")
        for row in [ROWS[name] for name in names]:
            with contextlib.ExitStack() as running:
                loads: list[Load | Bare | Limit] = [Load(running, LANE, LANE, str(clients), row, server)]
                if row.name == "small-c1":
                    loads.append(Bare(bare, clients, server))
                # Processes that import grpc besides would fill a machine's memory.
                if row.processes <= _MANY:
                    loads.append(Load(running, "grpc", "grpc", _GRPC, row, server))
                loads.append(Load(running, "http", "http", _HTTP, row, server))
                if peer is not None:
                    loads.append(Load(running, "peer", "http", _PEER, row, peer))
                if row.processes == row.in_flight == 1:
                    loads += [Load(running, LOCAL, LOCAL, "", row, None), Limit(limit, row)]
                rounds = [
                    {load.way: load.measure(arguments.seconds) for load in loads} for _ in range(arguments.rounds)
                ]
            print(lines(row.name, rounds), flush=True)
            report[row.name] = {way: [{**vars_of(one[way])} for one in rounds] for way in rounds[0]}
        print(idle(server, str(clients), arguments.seconds), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1))
    return 0


def vars_of(figures: Figures) -> dict[str, object]:
    """Returns the fields of the figures by name, for JSON."""
    return {name: getattr(figures, name) for name in ("rate", "p50_us", "client_us", "server_us")}


def compiled(folder: Path, source: Path) -> Path:
    """Compiles a C program into a folder and returns its path. Raises SystemExit: there is no C compiler."""
    compiler = shutil.which("cc")
    if compiler is None:
        raise SystemExit(f"{source.name} is written in C: there is no compiler (cc)")
    include = f"-I{ROOT / 'client/include'}"
    subprocess.run([compiler, "-O2", "-Wall", "-Wextra", include, "-o", folder / source.stem, source], check=True)
    return folder / source.stem


@contextlib.contextmanager
def ours(clients: Path, logs: Path) -> Iterator[Server]:
    """Runs the daemon within the block, with its socket for clients at the path ``clients``."""
    os.environ["TENSORD_CLIENTS_SOCKET"] = str(clients)
    command = [sys.executable, "-m", "tensord", "serve", "--config", "bench/serve.toml"]
    command += [f"--model-repository={ROOT / path}" for path in ("bench/models", "bench/lane/models")]
    command += [f"--http-port={_HTTP.rpartition(':')[2]}", f"--grpc-port={_GRPC.rpartition(':')[2]}"]
    with serving([*command, "--allow-metrics=false"], _HTTP, logs / "bench-lane.log") as pid:
        yield Server(pid)


@contextlib.contextmanager
def triton(peer: Path, folder: Path, logs: Path) -> Iterator[Server]:
    """Runs a real Triton with the models of the rows within the block."""
    subprocess.run([peer / "setup.sh"], check=True, stdout=subprocess.DEVNULL)
    models = folder / "peer-models"
    models.mkdir()
    for name in ("addsub", "identity"):
        shutil.copytree(peer / "models" / name, models / name)
    shutil.copytree(Path(__file__).parent / "peer" / "policy", models / "policy")
    with serving([str(peer / "triton.sh"), str(models)], _PEER, logs / "bench-peer.log") as pid:
        yield Server(pid)


def lines(name: str, rounds: Sequence[dict[str, Figures]]) -> str:
    """Formats a line of the table for each way of a row."""
    made = []
    for way in rounds[0]:
        column = [each[way] for each in rounds]
        rate = statistics.median(one.rate for one in column)
        p50_us = statistics.median(one.p50_us for one in column)
        times = statistics.median(each[LANE].rate / each[way].rate for each in rounds)
        waits = statistics.median(each[LANE].p50_us / each[way].p50_us for each in rounds)
        client_us = statistics.median(one.client_us for one in column)
        server = ", ".join(
            f"{process} {statistics.median(one.server_us.get(process, 0.0) for one in column):.1f}"
            for process in column[0].server_us
        )
        cells = [name, way, f"{rate:.0f}", f"{times:.2f}", f"{p50_us:.1f}", f"{waits:.3f}", f"{client_us:.1f}", server]
        made.append(f"| {' | '.join(cells)} |")
    return "\n".join(made)


def idle(server: Server, clients: str, seconds: float) -> str:
    """Returns a line with the processor time used while a client with an idle lane was connected, and without one."""
    used = []
    for connects in (False, True):
        with contextlib.ExitStack() as stack:
            own = 0.0
            if connects:
                client = stack.enter_context(helper("bench.lane.load", LANE, "small-c1", clients, "0"))
                assert client.stdout is not None
                client.stdout.readline()
                time.sleep(0.5)
                own = Usage.of(client.pid).busy_us
            before = server.used_us()
            time.sleep(seconds)
            after = server.used_us()
            used.append({name: (now - before[name]) / seconds for name, now in after.items() if name in before})
            if connects:
                used[-1]["client"] = (Usage.of(client.pid).busy_us - own) / seconds
    said = ", ".join(f"{name} {now:.1f} (without {used[0].get(name, 0.0):.1f})" for name, now in used[1].items())
    return f"\nan idle lane, processor us a second: {said}"


if __name__ == "__main__":
    sys.exit(main())
