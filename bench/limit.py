"""How far the small rows could go: beside tensord and a real Triton, chains of the same processes that check nothing.

    python -m bench.limit --peer DIR [--rounds 5] [--rows NAME,...]      DIR as for ``python -m bench``

``bench.bare_chain`` says what each of them leaves out, which is nearly everything; but they sleep whenever they wait, where
tensord looks first (``lanes.spin_us``), so they show what checks and bookkeeping cost rather than a bound.
All servers are measured in turn with perf_analyzer; ``x`` is the median of the rounds' ratios to the peer.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import subprocess
import sys
from pathlib import Path

from bench.server import serving
from bench.spans import ADDRESS, compare_module

_PEER = "127.0.0.1:18000"
_FIRST_PORT = 18130
_KINDS = {"front": "a front alone", "process": "front and model in one process", "chain": "front and worker"}
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
    with contextlib.ExitStack() as stack:
        ours = [sys.executable, "-m", "daemon", "serve", "--config", "bench/serve.toml"]
        stack.enter_context(serving(ours, ADDRESS, arguments.logs / "bench-tensord.log"))
        triton = [str(peer / "triton.sh"), str(peer / "models")]
        stack.enter_context(serving(triton, _PEER, arguments.logs / "bench-peer.log"))
        print(f"| row | {' | '.join(f'{kind}/s, x' for kind in _KINDS.values())} | tensord/s, x | Triton/s |")
        print(f"| --- |{' --- |' * (len(_KINDS) + 2)}")
        servers: dict[str, dict[str, str]] = {}
        for name in arguments.rows.split(","):
            protocol, concurrency, extra = compare.ROWS[name]
            model = extra[extra.index("-m") + 1]
            if model not in servers:
                servers[model] = _bare(stack, model, _FIRST_PORT + len(servers) * len(_KINDS), arguments.logs)
            addresses = [*servers[model].values(), ADDRESS, _PEER]
            rounds: list[list[float | None]] = []
            for _ in range(arguments.rounds):
                figures = [compare.measure(address, protocol, concurrency, extra, 1500)[0] for address in addresses]
                rounds.append([None if figure is None else figure["infer_per_s"] for figure in figures])
            print(_line(name, rounds), flush=True)
    return 0


def _bare(stack: contextlib.ExitStack, model: str, port: int, logs: Path) -> dict[str, str]:
    """Starts the bare servers of a model; kind -> address."""
    addresses = {}
    for number, kind in enumerate(_KINDS):
        address = f"127.0.0.1:{port + number}"
        command = [sys.executable, "-m", "bench.bare_chain", str(port + number), ADDRESS, model, kind]
        stack.enter_context(serving(command, address, logs / f"bench-{kind}.log"))
        addresses[kind] = address
    return addresses


def _line(name: str, rounds: list[list[float | None]]) -> str:
    """Of each server, the medians of the rounds in which perf_analyzer found a figure stable."""
    cells = []
    for server in range(len(rounds[0])):
        rates = [figures[server] for figures in rounds if figures[server]]
        ratios = [figures[server] / figures[-1] for figures in rounds if figures[server] and figures[-1]]
        cell = f"{statistics.median(rates):.0f}" if rates else "never stable"
        if ratios and server < len(rounds[0]) - 1:
            cell += f", {statistics.median(ratios):.2f}"
        cells.append(cell)
    return f"| {name} | {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.exit(main())
