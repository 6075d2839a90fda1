"""Measures requests that all differ, as clients behind a proxy or a mesh send them: ``python -m bench.vary``.

    python -m bench.vary                              this checkout alone
    python -m bench.vary --other DIR                  and another checkout of ours, in turn
    python -m bench.vary --other DIR --control        and this one a second time: what x is between equal servers
    python -m bench.vary --peer DIR                   and a real Triton, in turn; DIR as for ``python -m bench``
    python -m bench.vary --peer HOST:PORT,HOST:PORT   and one that runs, by its HTTP and its gRPC address

A row vary-PROTOCOL-KIND-cN has N connections, of which each sends, waits for its whole answer and sends the next request of a
pool in which no two are the same. KIND says what differs: id; trace, a trace header, and over gRPC a deadline, in header blocks
that use the HPACK table; shape; size, tensors of 6 to 16 KiB; models, three in turn; new, a connection for each request; all,
ids, trace headers, values and the heads of four clients in turn; rnn, steps of sequences of one to forty steps, each of which
one connection sends in order.
Before a row is measured each request is sent once to each server and the answers are checked in full; then every answer is
compared with the first, byte for byte. The client is one thread in C (client.c); its own time for each answer is printed.

Rates, p50 and cpu, the processor time of all the server's processes for an answer, are medians of the rounds; x is the median
of the rounds' ratios ours/that server (rate: more is better), with the least and the largest of them. Every other round begins
with the last server, so that none always comes first. How far the control's x is from 1 is noise, and so much of any other x may
be. On a busy machine the processor times say more than the rates. MB is the memory of all the server's processes after the row.
The number of requests that were never answered is printed beside the rate. A server that answers wrongly or not at all fails the
row, and the error is printed instead; the other rows are still measured.
Exit status 1: an answer was wrong or never came.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.server import ROOT
from bench.vary import servers
from bench.vary.answers import WrongAnswer
from bench.vary.client import Client, Figures, compiled
from bench.vary.pools import ROWS, Row, pool
from bench.vary.servers import Server

#: A smaller pool would fit into what a server may remember of requests.
_SMALLEST_POOL = 2000


def main() -> int:
    """Parses the command line and measures."""
    arguments = _parse()
    report: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        client = stack.enter_context(compiled())
        measured = [stack.enter_context(servers.ours(servers.OURS, ROOT, arguments.logs))]
        if arguments.other:
            measured.append(stack.enter_context(servers.ours(servers.OTHER, arguments.other.resolve(), arguments.logs)))
        if arguments.control:
            measured.append(stack.enter_context(servers.ours(servers.CONTROL, ROOT, arguments.logs)))
        if arguments.peer:
            measured.append(stack.enter_context(servers.peer(arguments.peer, arguments.logs)))
        print(head([server.name for server in measured]), flush=True)
        failed = 0
        for _, rows in itertools.groupby(map(ROWS.__getitem__, arguments.rows), lambda row: (row.protocol, row.kind)):
            failed += _measure(client, measured, list(rows), arguments, report)
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1))
    return int(failed > 0)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench.vary", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peer", metavar="DIR|HTTP,GRPC", help="a real Triton")
    parser.add_argument(
        "--other", type=Path, metavar="DIR", help="another checkout of ours, its extensions built in place"
    )
    parser.add_argument("--control", action="store_true", help="this checkout in a second daemon")
    parser.add_argument("--rows", default=",".join(ROWS), help="by name, comma-separated; all by default: %(default)s")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="length of one measurement")
    parser.add_argument("--pool", type=int, default=8000, help=f"requests of a pool, {_SMALLEST_POOL} or more")
    parser.add_argument("--json", type=Path, help="where every figure goes")
    parser.add_argument("--logs", type=Path, default=Path("/tmp"), help="where the servers' logs go")
    arguments = parser.parse_args()
    arguments.rows = arguments.rows.split(",")
    for name in arguments.rows:
        if name not in ROWS:
            parser.error(f"no row '{name}', there are {', '.join(ROWS)}")
    if arguments.pool < _SMALLEST_POOL:
        parser.error(f"--pool {arguments.pool}: {_SMALLEST_POOL} or more are needed")
    if arguments.rounds < 1 or arguments.seconds <= 0:
        parser.error("--rounds and --seconds must be more than 0")
    if arguments.other and not (arguments.other / "daemon").is_dir():
        parser.error(f"--other {arguments.other}: no checkout of ours")
    return arguments


def _measure(
    client: Client, measured: list[Server], rows: list[Row], arguments: argparse.Namespace, report: dict[str, Any]
) -> int:
    """Measures rows that send the same pool and prints each; returns how many failed."""
    protocol, failed = rows[0].protocol, 0
    requests = pool(protocol, rows[0].kind, arguments.pool)
    files: list[Path] = []
    try:
        for server in measured:
            files.append(client.record(server.address(protocol), requests))
    except (WrongAnswer, RuntimeError) as error:
        print(f"{', '.join(row.name for row in rows)} not measured: {error}", flush=True)
        failed, rows = len(rows), []
    for row in rows:
        try:
            rounds = []
            for order in itertools.islice(orders(len(measured)), arguments.rounds):
                found = {at: _figures(client, measured[at], row, files[at], arguments.seconds) for at in order}
                rounds.append([found[at] for at in sorted(found)])
        except (WrongAnswer, RuntimeError) as error:
            print(f"{row.name} not measured: {error}", flush=True)
            failed += 1
            continue
        memory = [server.megabytes() for server in measured]
        report[row.name] = {
            server.name: {"rounds": [dataclasses.asdict(one) for one in column], "megabytes": megabytes}
            for server, column, megabytes in zip(measured, zip(*rounds, strict=True), memory, strict=True)
        }
        print(line(row.name, rounds, memory), flush=True)
        failed += any(one.lost for each in rounds for one in each)
    for file in files:
        file.unlink()
    return failed


def orders(count: int) -> Iterator[range]:
    """Yields the order of the servers for each round, without end: first to last and last to first in turn."""
    forwards = range(count)
    return itertools.cycle((forwards, forwards[::-1]))


def _figures(client: Client, server: Server, row: Row, file: Path, seconds: float) -> Figures:
    """Makes one measurement, with the processor time that the server used in it."""
    before = server.used_us()
    figures = client.measure(row.protocol, server.address(row.protocol), file, row.connections, seconds, row.renews)
    after = server.used_us()
    if not after:
        return figures
    return dataclasses.replace(figures, server_us=(sum(after.values()) - sum(before.values())) / figures.total)


def head(names: Sequence[str]) -> str:
    """Formats the head of the table."""
    columns = ["row"]
    for name in names:
        columns += [f"{name}/s", *(["x"] if name != names[0] else []), "p50 us", "cpu us", "MB"]
    columns.append("client us")
    return f"| {' | '.join(columns)} |\n|{' --- |' * len(columns)}"


def line(name: str, rounds: Sequence[Sequence[Figures]], memory: Sequence[float | None]) -> str:
    """Formats a row of the table with the columns of each server.

    Args:
      rounds: for each round the figures of each server, ours first.
      memory: megabytes of each server; None: not known.
    """
    cells = [name]
    for number, column in enumerate(zip(*rounds, strict=True)):
        lost = sum(one.lost for one in column)
        cells.append(f"{statistics.median(one.rate for one in column):.0f}{f' ({lost} lost)' if lost else ''}")
        if number:
            ratios = [each[0].rate / each[number].rate for each in rounds]
            cells.append(f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")
        megabytes = memory[number]
        cells.append(f"{statistics.median(one.p50_us for one in column):.0f}")
        used = [one.server_us for one in column if one.server_us is not None]
        cells.append(f"{statistics.median(used):.0f}" if used else "")
        cells.append("" if megabytes is None else f"{megabytes:.0f}")
    cells.append(f"{statistics.median(each[0].client_us for each in rounds):.1f}")
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.exit(main())
