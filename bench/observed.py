"""Measures what observability costs: metrics, an access log of 1 in 1000 and traces of 1 in 100, beside a daemon without any.

    python -m bench.observed [--rounds 12] [--seconds 0.8] rates in turn, and the processor time of an answer
    python -m bench.observed --each [--rounds 12]          what one traced request, one line of the access log and one scrape cost
    python -m bench.observed --scrape [--models 100]       the supervisor's time for a scrape, and the memory of an idle front

One daemon is measured in both states in turn: two daemons of the same kind differ by more than what is looked for. Unseen, its
metrics are not scraped, nothing is logged and nothing traced; seen, they are scraped once a second, and spans are sent to a
collector that throws them away. A third measurement of each round is unseen again, as a control: its ratios are noise.
Rates scatter where client, daemon and collector share two cores; the processor time of all processes for an answer does less. It
is read once the last spans have been sent, and after the same pause where there are none. What is looked for is small beside the
noise of a busy machine; so ``--each`` traces and logs every request and scrapes all the time, and divides by how often that was.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
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
from bench.fronts import Load, Run, Server, closed
from bench.server import Usage, children, serving

_PORT = 18140
_ROWS = ("small-http-c16", "small-grpc-c16")
_SCRAPES = 50
_SCRAPE_SECONDS = 1.0
#: One request in so many is logged, and traced.
_SEEN, _UNSEEN = (1000, 100), (0, 0)
#: A pause after each switch of the daemon's state, in which work that the state before has left to it ends.
_SETTLE_SECONDS = 0.5
#: A pause after each load, in which its last spans leave front and supervisor.
_LAST_SECONDS = 0.8
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
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=0.8, help="length of one measurement")
    parser.add_argument("--each", action="store_true", help="measure each of the three by itself, magnified")
    parser.add_argument("--scrape", action="store_true", help="measure scrapes, not requests")
    parser.add_argument("--models", type=int, default=100)
    parser.add_argument("--logs", type=Path, default=Path("/tmp"), help="where the daemons' logs go")
    arguments = parser.parse_args()
    if arguments.scrape:
        _report_scrapes(arguments.models, arguments.logs)
    else:
        # Spans leave while the daemon that made them is measured.
        os.environ["OTEL_BSP_SCHEDULE_DELAY"] = "200"
        report = _report_each if arguments.each else _report_requests
        report(arguments.rounds, arguments.seconds, arguments.logs)
    return 0


# ------------------------------------------------------------------------------------------------------------ requests


def _report_requests(rounds: int, seconds: float, logs: Path) -> None:
    rows = {row.name: row for row in [*closed_loop.rows(), *grpc_connection.rows()]}
    with contextlib.ExitStack() as stack:
        url = stack.enter_context(_collector())
        seen = _Seen(stack, url, logs)
        print(
            "Ratios to the daemon unseen, medians of pairs; times in us of processor for an answer, unseen -> seen.\n"
        )
        print(
            "| row | unseen/s | rate, seen | control | all processes, seen | control | all | front | worker | others |"
        )
        print("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |")
        for name in _ROWS:
            load, protocol = closed(rows[name], seconds), name.split("-")[1]
            server = Server(protocol, 1, seen.pid, seen.at[protocol], seen.at["http"])
            load(server.address)
            runs: list[list[Run]] = [[], [], []]
            for number in range(rounds):
                # Whoever comes last has no advantage.
                for which in (0, 1, 2) if number % 2 else (2, 1, 0):
                    seen.switch(*(_SEEN if which == 1 else _UNSEEN))
                    runs[which].append(server.run(_settled(load, _SCRAPE_SECONDS if which == 1 else 0.0)))
            print(_line(name, *runs), flush=True)


def _report_each(rounds: int, seconds: float, logs: Path) -> None:
    rows = {row.name: row for row in [*closed_loop.rows(), *grpc_connection.rows()]}
    with contextlib.ExitStack() as stack:
        seen = _Seen(stack, stack.enter_context(_collector()), logs)
        print(
            "us of processor of all processes, medians; together: one in 100 traced, one in 1,000 logged, a scrape a second,"
        )
        print("where the daemon is busy all the time\n")
        print("| row | an answer | traced, more | of it the supervisor | logged, more | a scrape | together |")
        print("| --- | --- | --- | --- | --- | --- | --- |")
        for name in _ROWS:
            load, protocol = closed(rows[name], seconds), name.split("-")[1]
            server = Server(protocol, 1, seen.pid, seen.at[protocol], seen.at["http"])
            states = (_UNSEEN, 0.0), ((0, 1), 0.0), ((1, 0), 0.0), (_UNSEEN, 0.01)
            runs: list[list[Run]] = [[] for _ in states]
            scrapes: list[int] = []
            for number in range(rounds):
                for which in range(len(states))[:: 1 if number % 2 else -1]:
                    (access, rate), pause = states[which]
                    seen.switch(access, rate)
                    scraped: list[float] = []
                    runs[which].append(server.run(_settled(load, pause, scraped)))
                    scrapes += [len(scraped)] if pause else []
            answer, traced, logged = (statistics.median(run.all_us for run in of) for of in runs[:3])
            other, sent = (statistics.median(run.others_us for run in of) for of in runs[:2])
            each = statistics.median(
                (run.all_us - answer) * run.count / count for run, count in zip(runs[3], scrapes, strict=True)
            )
            together = ((traced - answer) / 100 + (logged - answer) / 1000) / answer + each / 1e6
            cells = [answer, traced - answer, sent - other, logged - answer, each]
            print(f"| {name} | {' | '.join(f'{cell:.1f}' for cell in cells)} | {100 * together:.2f} % |", flush=True)


class _Seen:
    """A daemon that can be seen, and is while it is switched so."""

    def __init__(self, stack: contextlib.ExitStack, url: str, logs: Path) -> None:
        """Starts the daemon, unseen; ``stack`` ends it. ``url``: of a collector."""
        self._file = Path(stack.enter_context(tempfile.TemporaryDirectory()), "serve.toml")
        self._url = url
        self._configure(0)
        self.pid, self.at = stack.enter_context(_served(0, [f"--metrics-port={_PORT + 2}"], self._file, logs))

    def _configure(self, access: int) -> None:
        repository = '[repository]\npaths = ["bench/models"]\n'
        self._file.write_text(f'{repository}[log]\naccess = {access}\n[trace]\notlp = "{self._url}"\nrate = 100\n')

    def switch(self, access: int, rate: int) -> None:
        """Switches the daemon, and waits until nothing of that goes on. One request in so many is logged and traced; 0: none."""
        self._configure(access)
        os.kill(self.pid, signal.SIGHUP)
        settings = {"trace_level": ["TIMESTAMPS" if rate else "OFF"], "trace_rate": str(rate or 100)}
        asked = urllib.request.Request(f"http://{self.at['http']}/v2/trace/setting", json.dumps(settings).encode())
        urllib.request.urlopen(asked).close()
        time.sleep(_SETTLE_SECONDS)


def _settled(load: Load, pause: float, scraped: list[float] | None = None) -> Load:
    """Returns a load that ends once what it has caused is done, and during which metrics are scraped.

    ``pause``: seconds between two scrapes; 0: there are none. ``scraped``: gets the moment of each.
    """

    def measure(address: str) -> tuple[float, float, int]:
        with _scraped(_PORT + 2, pause, [] if scraped is None else scraped) if pause else contextlib.nullcontext():
            came = load(address)
        time.sleep(_LAST_SECONDS)
        return came

    return measure


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
def _scraped(port: int, pause: float, moments: list[float]) -> Iterator[None]:
    """Scrapes the metrics within the block, with so many seconds between two scrapes; ``moments`` gets when."""
    stop = threading.Event()

    def scrape() -> None:
        while True:
            _scrape(port)
            moments.append(time.monotonic())
            if stop.wait(pause):
                return

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
def _served(ports: int, flags: Sequence[str], config: Path, logs: Path) -> Iterator[tuple[int, dict[str, str]]]:
    """A daemon that runs while the block does. Yields its process id, and protocol -> address."""
    at = {"http": f"127.0.0.1:{_PORT + ports}", "grpc": f"127.0.0.1:{_PORT + ports + 1}"}
    command = [sys.executable, "-m", "tensord", "serve", "--config", str(config), *flags]
    command += [f"--http-port={_PORT + ports}", f"--grpc-port={_PORT + ports + 1}"]
    command += ["--http-processes=1", "--grpc-processes=1"]
    with serving(command, at["http"], logs / f"bench-observed-{ports}.log") as pid:
        yield pid, at


# ------------------------------------------------------------------------------------------------------------- scrapes


def _report_scrapes(models: int, logs: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for number in range(models):
            version = Path(folder, "models", f"model_{number}", "1")
            version.mkdir(parents=True)
            (version / "model.py").write_text(textwrap.dedent(_MODEL))
        config = Path(folder, "serve.toml")
        config.write_text(f'[repository]\npaths = ["{folder}/models"]\n')
        with _served(20, [f"--metrics-port={_PORT + 22}"], config, logs) as (pid, at):
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
