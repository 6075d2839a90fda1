"""Measures what observability costs: metrics, an access log of 1 in 1000 and traces of 1 in 100, beside a daemon without any.

    python -m bench.observed [--rounds 7] [--seconds 2]    rates in turn, and the processor time of an answer
    python -m bench.observed --scrape [--models 100]       the supervisor's time for a scrape, and the memory of an idle front

The metrics are scraped once a second meanwhile, and the spans are sent to a collector that throws them away. A third daemon is a
control: it has none of that either, so its ratios are noise. Rates scatter by a tenth where client, daemons and collector share
two cores; the processor time of all processes of a daemon for an answer scatters less, so judge by that.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench import closed_loop, grpc_connection
from bench.fronts import Run, Server, closed
from bench.server import Usage, children, serving

_PORT = 18140
_ROWS = ("small-http-c16", "small-grpc-c16")
_SCRAPES = 50
#: Takes spans, on a port that it prints.
_COLLECTOR = """
import http.server
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()
    def log_message(self, *_):
        pass
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
print(server.server_address[1], flush=True)
server.serve_forever()
"""
_MODEL = """
import numpy as np
inputs = {"x": "FP32[4]"}
outputs = {"y": "FP32[4]"}
host = True

def create(path, config, device):
    return (lambda params, inputs: {"y": inputs["x"]}), None
"""


def main() -> int:
    """Parses the command line and measures."""
    parser = argparse.ArgumentParser(
        prog="bench.observed", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=2.0, help="length of one measurement")
    parser.add_argument("--scrape", action="store_true", help="measure scrapes, not requests")
    parser.add_argument("--models", type=int, default=100)
    parser.add_argument("--logs", type=Path, default=Path("/tmp"), help="where the daemons' logs go")
    arguments = parser.parse_args()
    if arguments.scrape:
        _report_scrapes(arguments.models, arguments.logs)
    else:
        # Spans leave while the daemon that made them is measured.
        os.environ["OTEL_BSP_SCHEDULE_DELAY"] = "200"
        _report_requests(arguments.rounds, arguments.seconds, arguments.logs)
    return 0


# ------------------------------------------------------------------------------------------------------------ requests


def _report_requests(rounds: int, seconds: float, logs: Path) -> None:
    rows = {row.name: row for row in [*closed_loop.rows(), *grpc_connection.rows()]}
    with contextlib.ExitStack() as stack:
        url = stack.enter_context(_collector())
        off = stack.enter_context(_served(0, ["--allow-metrics=false"], "", logs))
        seen = f'[log]\naccess = 1000\n[trace]\notlp = "{url}"\nrate = 100\nlevel = ["TIMESTAMPS"]\n'
        on = stack.enter_context(_served(10, [f"--metrics-port={_PORT + 12}"], seen, logs))
        control = stack.enter_context(_served(30, ["--allow-metrics=false"], "", logs))
        stack.enter_context(_scraped(_PORT + 12))
        print(
            "Ratios to the daemon that is not seen, medians of pairs; times in us of processor for an answer, unseen -> seen.\n"
        )
        print(
            "| row | unseen/s | rate, seen | control | all processes, seen | control | all | front | worker | others |"
        )
        print("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |")
        for name in _ROWS:
            load, protocol = closed(rows[name], seconds), name.split("-")[1]
            servers = [Server(protocol, 1, pid, at[protocol], at["http"]) for pid, at in (off, on, control)]
            for server in servers:
                load(server.address)
            runs: list[list[Run]] = [[], [], []]
            for number in range(rounds):
                # Whoever comes last has no advantage.
                for which in (0, 1, 2) if number % 2 else (2, 1, 0):
                    runs[which].append(servers[which].run(load))
            print(_line(name, *runs), flush=True)


def _line(name: str, off: Sequence[Run], on: Sequence[Run], control: Sequence[Run]) -> str:
    def median(runs: Sequence[Run], of: str) -> float:
        return statistics.median(getattr(run, of) for run in runs)

    cells = [f"{median(off, 'rate'):.0f}"]
    for of in ("rate", "all_us"):
        for runs in (on, control):
            pairs = zip(runs, off, strict=True)
            cells.append(f"{statistics.median(getattr(one, of) / getattr(other, of) for one, other in pairs):.3f}")
    for of in ("all_us", "fronts_us", "worker_us", "others_us"):
        cells.append(f"{median(off, of):.1f} -> {median(on, of):.1f}")
    return f"| {name} | {' | '.join(cells)} |"


@contextlib.contextmanager
def _collector() -> Iterator[str]:
    """Runs a collector of spans within the block. Yields its URL."""
    with subprocess.Popen([sys.executable, "-c", _COLLECTOR], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{process.stdout.readline().strip()}/v1/traces"
        finally:
            process.kill()


@contextlib.contextmanager
def _scraped(port: int) -> Iterator[None]:
    """Scrapes the metrics once a second within the block."""
    stop = threading.Event()

    def scrape() -> None:
        while not stop.wait(1.0):
            _scrape(port)

    thread = threading.Thread(target=scrape)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _scrape(port: int) -> bytes:
    accept = {"Accept": "application/openmetrics-text"}
    with urllib.request.urlopen(urllib.request.Request(f"http://127.0.0.1:{port}/metrics", headers=accept)) as answer:
        content: bytes = answer.read()
    return content


@contextlib.contextmanager
def _served(
    ports: int, flags: Sequence[str], more: str, logs: Path, models: str = "bench/models"
) -> Iterator[tuple[int, dict[str, str]]]:
    """Runs a daemon within the block. Yields its process id, and its addresses by protocol."""
    at = {"http": f"127.0.0.1:{_PORT + ports}", "grpc": f"127.0.0.1:{_PORT + ports + 1}"}
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as config:
        config.write(f'[repository]\npaths = ["{models}"]\n{more}')
        config.flush()
        command = [sys.executable, "-m", "tensord", "serve", "--config", config.name, *flags]
        command += [f"--http-port={_PORT + ports}", f"--grpc-port={_PORT + ports + 1}"]
        command += ["--http-processes=1", "--grpc-processes=1"]
        with serving(command, at["http"], logs / f"bench-observed-{ports}.log") as pid:
            yield pid, at


# ------------------------------------------------------------------------------------------------------------- scrapes


def _report_scrapes(models: int, logs: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for number in range(models):
            version = Path(folder) / f"model_{number}" / "1"
            version.mkdir(parents=True)
            (version / "model.py").write_text(textwrap.dedent(_MODEL))
        with _served(20, [f"--metrics-port={_PORT + 22}"], "", logs, folder) as (pid, at):
            fronts = [child for child, module in children(pid).items() if module in ("daemon.http", "daemon.grpc")]
            held = [_pss(front) / 1e6 for front in fronts]
            body = json.dumps({"inputs": [{"name": "x", "shape": [4], "datatype": "FP32", "data": [1, 2, 3, 4]}]})
            for number in range(models):
                asked = f"http://{at['http']}/v2/models/model_{number}/infer"
                urllib.request.urlopen(urllib.request.Request(asked, body.encode())).close()
            size = len(_scrape(_PORT + 22))
            before, began = Usage.of(pid), time.perf_counter()
            for _ in range(_SCRAPES):
                _scrape(_PORT + 22)
            took = (time.perf_counter() - began) / _SCRAPES
            used = Usage.of(pid).since(before)
            spent = (used.user_us + used.kernel_us) / _SCRAPES / 1e3
            print(f"{models} models, {size} bytes: {1e3 * took:.1f} ms a scrape, {spent:.1f} ms of the supervisor")
            print(f"PSS of idle fronts before any request: {', '.join(f'{each:.1f} MB' for each in held)}")


def _pss(pid: int) -> int:
    """Returns a process's proportional set size in bytes."""
    (line,) = (each for each in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines() if each.startswith("Pss:"))
    return int(line.split()[1]) << 10


if __name__ == "__main__":
    sys.exit(main())
