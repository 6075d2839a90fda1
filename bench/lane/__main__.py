"""Measures clients on the same host, over lanes and in other ways: ``python -m bench.lane``.

    python -m bench.lane                 the lane, our own gRPC and HTTP with system regions by tritonclient
    python -m bench.lane --other DIR     and lanes of another checkout of ours, daemon and client
    python -m bench.lane --peer DIR      and a real Triton over HTTP with system regions; DIR as for ``python -m bench``

Rows: small-c1, a small request at a time; small-p16, sixteen such processes; 16MiB-c1; flight-64, 64 requests in flight on one
asynchronous client; simulators-64, 64 processes with 96x96x3 uint8 and 32 floats each (without gRPC). Each has a sibling, -vary,
in which ids, values and, where the model has them, shapes differ. Every answer is compared with what is right, outside of p50.
All ways are measured in turn in each round.

local is the same jitted function on the same array in one process without a server, in rows with one client and one request at
a time.

Printed for each way: answers a second, the lane's rate divided by this rate, p50, the lane's p50 divided by this p50 (all medians
of the rounds, ratios of each round), and processor microseconds of an answer: of the clients, comparing included, and of each
process of the server. Exit status 1: an answer was wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import shutil
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench.helper import helper, line
from bench.lane.rows import ROWS, Row
from bench.server import ROOT
from bench.vary import servers
from bench.vary.servers import Server

_POLICY = Path(__file__).parent / "peer" / "policy"
_MANY = 16
LANE, LOCAL = "lane", "local"


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of one way of asking in one round."""

    rate: float
    p50_us: float
    #: Processor time of an answer: of the clients, and of the server's processes by name.
    client_us: float
    server_us: dict[str, float] = field(default_factory=dict)


class Load:
    """The client processes of a row that ask in one way; they wait between rounds."""

    def __init__(
        self, stack: contextlib.ExitStack, way: str, kind: str, address: str, row: Row, server: Server | None
    ) -> None:
        """Starts the processes. ``kind``: the WAY of ``bench.lane.load``. Raises SystemExit: a process has ended."""
        self.way, python = way, sys.executable if server is None else server.python
        self._server = server
        self._processes = [
            stack.enter_context(helper("bench.lane.load", kind, row.name, address, str(number), python=python))
            for number in range(row.processes)
        ]
        for process in self._processes:
            line(process)

    def measure(self, seconds: float) -> Figures:
        """Has all processes ask for so many seconds; returns their figures together."""
        before = self._server.used_us() if self._server else {}
        for process in self._processes:
            assert process.stdin is not None
            print(seconds, file=process.stdin, flush=True)
        said = [json.loads(line(process)) for process in self._processes]
        answers = sum(one["answers"] for one in said)
        after = self._server.used_us() if self._server else {}
        return Figures(
            sum(one["answers"] / one["seconds"] for one in said),
            statistics.median(one["p50_us"] for one in said),
            sum(one["client_us"] * one["answers"] for one in said) / answers,
            {name: (used - before.get(name, 0.0)) / answers for name, used in after.items()},
        )


def main() -> int:
    """Parses the command line, measures and prints a line for each row and way."""
    parser = argparse.ArgumentParser(
        prog="bench.lane", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--other", type=Path, metavar="DIR", help="another checkout of ours")
    parser.add_argument("--peer", type=Path, metavar="DIR", help="folder with the peer's setup.sh and triton.sh")
    parser.add_argument("--rows", default=",".join(ROWS), help="by name, comma-separated; all by default: %(default)s")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="length of one measurement")
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
        lanes = []
        for name, checkout in ((servers.OURS, ROOT), *([(servers.OTHER, arguments.other)] if arguments.other else [])):
            clients = os.environ["TENSORD_CLIENTS_SOCKET"] = str(folder / name)
            models = f"--model-repository={ROOT / 'bench/lane/models'}"
            run = servers.ours(name, checkout.resolve(), arguments.logs, models)
            lanes.append((LANE if checkout is ROOT else name, clients, stack.enter_context(run)))
        server, peer = lanes[0][2], None
        if arguments.peer:
            for model in (arguments.peer / "models/addsub", arguments.peer / "models/identity", _POLICY):
                shutil.copytree(model, folder / "peer" / model.name)
            peer = stack.enter_context(servers.peer(str(arguments.peer), arguments.logs, folder / "peer"))
        print("| row | way | answers/s | lane x | p50 us | lane p50 x | client us | server us |")
        print("| --- | --- | --- | --- | --- | --- | --- | --- |")
        for row in [ROWS[name] for name in names]:
            with contextlib.ExitStack() as running:
                loads = [Load(running, way, LANE, clients, row, one) for way, clients, one in lanes]
                # Processes that import grpc besides would fill a machine's memory.
                if row.processes <= _MANY:
                    loads.append(Load(running, "grpc", "grpc", server.grpc, row, server))
                loads.append(Load(running, "http", "http", server.http, row, server))
                if peer is not None:
                    loads.append(Load(running, "peer", "http", peer.http, row, peer))
                if row.processes == row.in_flight == 1:
                    loads.append(Load(running, LOCAL, LOCAL, "", row, None))
                rounds = [
                    {load.way: load.measure(arguments.seconds) for load in loads} for _ in range(arguments.rounds)
                ]
            print(lines(row.name, rounds), flush=True)
            report[row.name] = {way: [dataclasses.asdict(one[way]) for one in rounds] for way in rounds[0]}
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1))
    return 0


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


if __name__ == "__main__":
    sys.exit(main())
