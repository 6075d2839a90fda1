"""Measures how fast the small rows could be: beside tensord and a real Triton, servers of the same processes that check nothing.

    python -m bench.limit --peer DIR [--rounds 5] [--rows NAME,...]      DIR as for ``python -m bench``

The servers in Python are those of ``bench.bare_chain``, which says what each of them leaves out: nearly everything. They sleep
whenever they wait, where tensord polls first (``expert.spin_us``), so they show what checks and bookkeeping cost, not a bound.

The bound is the server in C (``native_chain.c``), for ``addsub`` and where there is a C compiler: a front process and a worker
process that do nothing but pass bytes over a socket pair. It is measured twice: sleeping whenever it waits, and polling for 300
us first. The faster one shows what any server with a front process and a worker process can reach on this machine with this
client, as far as two ways of waiting can tell. Other ways to wait, to pass bytes (shared memory that the other process polls) or
to place the processes on cores are not tried.

All servers are measured in turn with perf_analyzer; ``x`` is the median of the rounds' ratios to the peer. An empty cell: that
server does not have the row's model.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from bench import native_chain
from bench.server import serving
from bench.spans import ADDRESS, compare_module

_PEER = "127.0.0.1:18000"
_FIRST_PORT = 18130
_KINDS = {"front": "a front alone", "process": "front and model in one process", "chain": "front and worker"}
#: Microseconds that the chain in C looks before it sleeps.
_NATIVE = {0: "front and worker in C", 300: "the same, looking 300 us"}
_ROWS = "small-http-c1,small-http-c4,small-http-c16,mlp-http-c32"


def main() -> int:
    """Parses the command line and measures."""
    parser = argparse.ArgumentParser(
        prog="bench.limit", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--peer", type=Path, required=True, help="folder with the peer's setup.sh, triton.sh and compare.py"
    )
    parser.add_argument("--rows", default=_ROWS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--logs", type=Path, default=Path("/tmp"), help="where the servers' logs go")
    arguments = parser.parse_args()
    peer = arguments.peer.resolve()
    compare = compare_module(peer)
    subprocess.run([peer / "setup.sh"], check=True, stdout=subprocess.DEVNULL)
    ports = itertools.count(_FIRST_PORT)
    with contextlib.ExitStack() as stack:
        ours = [sys.executable, "-m", "tensord", "serve", "--config", "bench/serve.toml"]
        stack.enter_context(serving(ours, ADDRESS, arguments.logs / "bench-tensord.log"))
        triton = [str(peer / "triton.sh"), str(peer / "models")]
        stack.enter_context(serving(triton, _PEER, arguments.logs / "bench-peer.log"))
        in_c = native(stack, ports, arguments.logs)
        columns = [*_KINDS.values(), *in_c, "tensord", "Triton"]
        print(f"| row | {'/s, x | '.join(columns)}/s |\n| --- |{' --- |' * len(columns)}", flush=True)
        bare: dict[str, dict[str, str]] = {}
        for name in arguments.rows.split(","):
            protocol, concurrency, extra = compare.ROWS[name]
            model = extra[extra.index("-m") + 1]
            if model not in bare:
                bare[model] = _bare(stack, model, ports, arguments.logs)
            servers = bare[model] | (in_c if model == native_chain.MODEL else {})
            servers |= {"tensord": ADDRESS, "Triton": _PEER}
            rounds: list[dict[str, float | None]] = []
            for _ in range(arguments.rounds):
                figures = {
                    column: compare.measure(address, protocol, concurrency, extra, 1500)[0]
                    for column, address in servers.items()
                }
                rounds.append({column: figure and figure["infer_per_s"] for column, figure in figures.items()})
            print(line(name, columns, rounds), flush=True)
    return 0


def _bare(stack: contextlib.ExitStack, model: str, ports: Iterator[int], logs: Path) -> dict[str, str]:
    """Starts the servers in Python for a model; returns their addresses by column."""
    addresses = {}
    for kind, column in _KINDS.items():
        port = next(ports)
        addresses[column] = f"127.0.0.1:{port}"
        command = [sys.executable, "-m", "bench.bare_chain", str(port), ADDRESS, model, kind]
        stack.enter_context(serving(command, addresses[column], logs / f"bench-{kind}.log"))
    return addresses


def native(stack: contextlib.ExitStack, ports: Iterator[int], logs: Path) -> dict[str, str]:
    """Compiles, starts and checks the servers in C; returns their addresses by column, none where there is no compiler."""
    program = native_chain.compiled(Path(stack.enter_context(tempfile.TemporaryDirectory())))
    if program is None:
        print("no C compiler (cc): the chain in C is left out, so there is no bound in this table", file=sys.stderr)
        return {}
    addresses = {}
    for spin_us, column in _NATIVE.items():
        addresses[column] = f"127.0.0.1:{next(ports)}"
        log = logs / f"bench-native-{spin_us}.log"
        stack.enter_context(native_chain.chain(program, ADDRESS, addresses[column], spin_us, log))
    return addresses


def line(name: str, columns: Sequence[str], rounds: Sequence[Mapping[str, float | None]]) -> str:
    """Formats a row of the table: for each column the median rate, and its median ratio to the last column's rate.

    Args:
      rounds: answers per second, by column; None where perf_analyzer found no stable figure, which counts in no median. A column
        that no round has is left empty.
    """
    cells = []
    for column in columns:
        of_both = [(figures.get(column), figures[columns[-1]]) for figures in rounds]
        rates = [rate for rate, _ in of_both if rate]
        ratios = [rate / other for rate, other in of_both if rate and other]
        cell = f"{statistics.median(rates):.0f}" if rates else "never stable"
        if ratios and column != columns[-1]:
            cell += f", {statistics.median(ratios):.2f}"
        cells.append(cell if any(column in figures for figures in rounds) else "")
    return f"| {name} | {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.exit(main())
