"""Shows where the microseconds of one request go: the daemon's traces, and the processor time of each process it passes.

    python -m bench.spans --peer DIR [--rows NAME,...]     DIR as for ``python -m bench``; its perf_analyzer is the client, its
                                                           compare.py says what a row is. The peer's server does not run.

One request in so many is traced while the row runs. A span is the median over the traced ones; "outside" is the rest of the
client's own median: its work, the kernel's, and waiting for a processor. The second table divides the processor time of each
process by the requests it answered, and says how many requests a second two processors could do if nobody ever waited: with all
processes, and with the client alone, which no server can exceed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import tritonclient.http as httpclient

from bench.server import Usage, answered, children, serving

ADDRESS, GRPC_ADDRESS = "127.0.0.1:18100", "127.0.0.1:18101"
ROWS = "small-http-c1,small-http-c4,small-http-c16,small-http-shm-c16,small-grpc-c1,small-grpc-c16,small-grpc-stream-c4"
ROWS += ",1MiB-http-c1,1MiB-grpc-c1,16MiB-http-c1,16MiB-grpc-c1,16MiB-http-shm-c1,16MiB-http-shm-c4,mlp-http-c32,mlp-grpc-c32"
#: Span -> the moment that ends it; the first begins with the first moment of a trace.
SPANS = {
    "body": ("HTTP_RECV_END", "GRPC_WAITREAD_END"),
    "parse, place": ("REQUEST_START",),
    "wake": ("QUEUE_START",),
    "queue": ("COMPUTE_START",),
    "gather": ("COMPUTE_INPUT_END",),
    "XLA": ("COMPUTE_OUTPUT_START",),
    "scatter": ("COMPUTE_END",),
    "wake back": ("REQUEST_END",),
    "serialise": ("HTTP_SEND_START", "GRPC_SEND_START"),
    "send": ("HTTP_SEND_END", "GRPC_SEND_END"),
}
#: One request in so many is traced, by the beginning of the row's name.
RATES = {"16MiB": 1, "1MiB": 5, "": 40}


def spans(trace: dict[str, int]) -> dict[str, float]:
    """Returns the microseconds of each span of a request. ``trace``: name of a moment -> nanoseconds; it has every moment."""
    at, found = min(trace.values()), {}
    for span, names in SPANS.items():
        end = next(trace[name] for name in names if name in trace)
        found[span] = (end - at) / 1e3
        at = end
    return found


def traces(file: Path) -> Iterator[dict[str, int]]:
    """Yields the moments of each complete trace in a trace file of the daemon: name -> nanoseconds."""
    moments: dict[int, dict[str, int]] = {}
    for entry in json.loads(file.read_text() or "[]"):
        for stamp in entry.get("timestamps", ()):
            moments.setdefault(entry["id"], {})[stamp["name"]] = stamp["ns"]
    for trace in moments.values():
        if all(any(name in trace for name in names) for names in SPANS.values()):
            yield trace


def settled(file: Path) -> None:
    """Waits until the file does not grow any more."""
    size = -1
    while size != (size := file.stat().st_size if file.exists() else 0):
        time.sleep(0.3)


class Measured:
    """Runs a row and holds its figures."""

    def __init__(self, supervisor: int, file: Path, command: list[str], rate: int) -> None:
        with httpclient.InferenceServerClient(ADDRESS) as client:
            client.update_trace_settings(settings={"trace_level": ["TIMESTAMPS"], "trace_rate": str(rate)})
        settled(file)
        known = len(list(traces(file)))
        processes = children(supervisor)
        # The steps of an ensemble are requests as well, but not the client's.
        model = command[command.index("-m") + 1]
        before, count = {pid: Usage.of(pid) for pid in processes}, answered(ADDRESS, model)
        began = time.perf_counter()
        client_us, said = run(command)
        took = time.perf_counter() - began
        after, self.count = {pid: Usage.of(pid) for pid in processes}, max(1, answered(ADDRESS, model) - count)
        settled(file)
        new = [spans(trace) for trace in list(traces(file))[known:]]
        self.traced = len(new)
        self.spans = {span: statistics.median(found[span] for found in new) for span in SPANS} if new else {}
        found = re.search(r"p50 latency: (\d+)", said)
        self.p50_us = float(found[1]) if found else 0.0
        self.used = {"client": client_us / self.count}
        for pid, name in processes.items():
            used = after[pid].since(before[pid])
            if (each := (used.user_us + used.kernel_us) / self.count) >= 0.5:
                self.used[name.removeprefix("daemon.")] = each
        self.took = took


def run(command: list[str]) -> tuple[float, str]:
    """Runs a client. Returns its processor time in microseconds, and its output."""
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT)
        _, _, used = os.wait4(process.pid, 0)
        process.returncode = 0  # it is buried already
        said.seek(0)
        return (used.ru_utime + used.ru_stime) * 1e6, said.read()


def compare_module(peer: Path) -> ModuleType:
    """Loads the peer's compare.py.

    It has ``ROWS`` (name -> protocol, concurrency, arguments of perf_analyzer) and ``measure``.
    """
    spec = importlib.util.spec_from_file_location("compare", peer / "compare.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def report(rows: dict[str, Measured]) -> None:
    """Prints both tables as Markdown."""
    print(f"| row | {' | '.join(SPANS)} | outside | p50 us |")
    print("| --- " * (len(SPANS) + 3) + "|")
    for name, row in rows.items():
        if row.spans:
            each = " | ".join(f"{us:.0f}" for us in row.spans.values())
            print(f"| {name} | {each} | {max(0, row.p50_us - sum(row.spans.values())):.0f} | {row.p50_us:.0f} |")
    print()
    print("| row | client us | front us | worker us | sum us | two processors could /s | with the client alone /s |")
    print("| --- " * 7 + "|")
    for name, row in rows.items():
        front = row.used.get("http" if "-http-" in name else "grpc", 0.0)
        client, worker = row.used["client"], row.used.get("workers", 0.0)
        total = client + front + worker
        print(
            f"| {name} | {client:.0f} | {front:.0f} | {worker:.0f} | {total:.0f} | {2e6 / total:.0f} | {2e6 / client:.0f} |"
        )


def main() -> int:
    """Parses the command line and measures."""
    parser = argparse.ArgumentParser(
        prog="bench.spans", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--peer", type=Path, required=True, help="folder with setup.sh, perf_analyzer.sh and compare.py"
    )
    parser.add_argument("--rows", default=ROWS)
    parser.add_argument("--seconds", type=float, default=2.0, help="length of perf_analyzer's window; it takes three")
    parser.add_argument("--logs", type=Path, default=Path("/tmp"), help="where the server's log goes")
    arguments = parser.parse_args()
    peer = arguments.peer.resolve()
    subprocess.run([peer / "setup.sh"], check=True, stdout=subprocess.DEVNULL)
    known: dict[str, Any] = compare_module(peer).ROWS
    tensord = [sys.executable, "-m", "tensord", "serve", "--config", "bench/serve.toml"]
    measured: dict[str, Measured] = {}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "traces.json")
        os.environ["TENSORD_TRACE_FILE"] = str(file)
        with serving(tensord, ADDRESS, arguments.logs / "bench-tensord.log") as pid:
            for name in arguments.rows.split(","):
                protocol, concurrency, extra = known[name]
                command = [
                    str(peer / "perf_analyzer.sh"),
                    "-u",
                    GRPC_ADDRESS if protocol == "grpc" else ADDRESS,
                    "-i",
                    protocol,
                ]
                command += [
                    "--concurrency-range",
                    str(concurrency),
                    "-p",
                    str(int(arguments.seconds * 1000)),
                    "-s",
                    "999",
                ]
                command += ["-r", "3", *extra]
                rate = next(rate for prefix, rate in RATES.items() if name.startswith(prefix))
                measured[name] = Measured(pid, file, command, rate)
                print(
                    f"{name}: {measured[name].count} answered, {measured[name].traced} traced",
                    file=sys.stderr,
                    flush=True,
                )
    report(measured)
    return 0


if __name__ == "__main__":
    sys.exit(main())
