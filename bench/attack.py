"""Measures what attackers cost other clients, the daemon's memory and its file descriptors: ``python -m bench.attack``.

Each attack of ``bench/attackers`` runs for some seconds, in a process of its own, against a daemon with the default bounds, while
an ordinary client of HTTP, one of gRPC and one on a lane go on with small requests (bench/bystander.py). Printed for each attack:
how many answers these clients got, how many failed or were wrong, their longest wait over HTTP, gRPC and the lane, and the memory
and descriptors of each process before the attack and some seconds after it.
The first line is measured without an attack: the machine by itself. At the end a body of the largest allowed size is answered,
for which the arenas must be free again, and the log is searched for tracebacks. Then each attack is tried once where arenas are
small, with a table of its own (bench/small_arenas.py). Exit status 1: an answer was wrong, a request failed, there is a
traceback, or a trial of the second part failed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tritonclient.http as httpclient

from bench import small_arenas
from bench.attackers.catalogue import ATTACKS
from bench.bystander import BEGUN
from bench.footprint import Footprint, footprints
from bench.helper import helper, report, reports
from bench.server import serving

_HTTP, _GRPC = "127.0.0.1:18160", "127.0.0.1:18161"
#: Floats of one tensor that is nearly as large as a body may be.
_LARGEST = 15 << 20


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of one attack: what the ordinary client of each protocol reported, and what the attacker counted."""

    others: dict[str, dict[str, Any]]
    attacker: dict[str, int]

    @property
    def noticed(self) -> int:
        """Returns how many requests of the ordinary clients failed or were answered wrongly."""
        return sum(sum(other["failures"].values()) for other in self.others.values())


@contextlib.contextmanager
def bystanders(http: str, grpc: str, clients: str, kind: str = "small") -> Iterator[dict[str, dict[str, Any]]]:
    """Runs an ordinary client of HTTP, one of gRPC and one on a lane, which have asked once when the block begins.

    Yields a dictionary, protocol -> the client's report, which is filled when the block ends.
    """
    seen: dict[str, dict[str, Any]] = {}
    with contextlib.ExitStack() as stack:
        addresses = {"http": http, "grpc": grpc, "lane": clients}
        running = [
            stack.enter_context(helper("bench.bystander", protocol, address, kind))
            for protocol, address in addresses.items()
        ]
        for each in running:
            assert each.stdout is not None
            if each.stdout.readline().strip() != BEGUN:
                raise SystemExit(f"{each.args} did not begin")
        yield seen
        seen.update(zip(addresses, reports(running), strict=True))


def attack(name: str | None, http: str, grpc: str, clients: str, seconds: float) -> Outcome:
    """Runs one attack beside the ordinary clients; ``name`` None: no attack. Raises SystemExit: the attacker itself failed."""
    counts: dict[str, int] = {}
    with bystanders(http, grpc, clients) as seen:
        if name is None:
            time.sleep(seconds)
        else:
            with helper("bench.attackers", name, http, grpc, str(seconds), clients) as attacker:
                counts = report(attacker)
    return Outcome(seen, counts)


def largest_is_answered(http: str) -> bool:
    """Returns whether the server answers a body of nearly the largest allowed size rightly, so that there is memory for it."""
    given = httpclient.InferInput("INPUT0", [_LARGEST], "FP32")
    values = np.random.default_rng(0).random(_LARGEST, np.float32)
    given.set_data_from_numpy(values)
    wanted = httpclient.InferRequestedOutput("OUTPUT0")
    with httpclient.InferenceServerClient(http, network_timeout=120) as client:
        answer = client.infer("identity", [given], outputs=[wanted])
    return bool(np.array_equal(answer.as_numpy("OUTPUT0"), values))


def main() -> int:
    """Parses the command line, runs the attacks and prints both tables."""
    parser = argparse.ArgumentParser(
        prog="bench.attack", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--attacks", default=",".join(ATTACKS), help="by name, comma-separated; all by default")
    parser.add_argument("--seconds", type=float, default=10.0, help="length of each; 0: only where arenas are small")
    parser.add_argument(
        "--trial", type=float, default=4.0, help="length of each where arenas are small; 0: none of these"
    )
    parser.add_argument("--settle", type=float, default=5.0, help="seconds after it before the daemon is looked at")
    parser.add_argument("--log", type=Path, default=Path("/tmp/bench-attack.log"), help="where the daemon's log goes")
    arguments = parser.parse_args()
    names = arguments.attacks.split(",")
    for name in names:
        if name not in ATTACKS:
            parser.error(f"no attack '{name}', there are {', '.join(ATTACKS)}")
    status = 0
    with tempfile.TemporaryDirectory(prefix="tensord-bench-") as folder:
        # Where the user's own daemon has it there may be one.
        clients = os.environ["TENSORD_CLIENTS_SOCKET"] = str(Path(folder, "clients.sock"))
        if arguments.seconds:
            status = _default_bounds(names, clients, arguments.seconds, arguments.settle, arguments.log)
        if arguments.trial and small_arenas.run(names, clients, arguments.trial, arguments.log):
            status = 1
    return status


def _default_bounds(names: list[str], clients: str, seconds: float, settle: float, log: Path) -> int:
    command = [sys.executable, "-m", "tensord", "serve", "--config", "bench/attackers/serve.toml"]
    noticed = 0
    print("| attack | others' answers | failed or wrong | worst wait, ms: http | grpc | lane | attacker |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    with serving(command, _HTTP, log) as pid:
        warm(_HTTP, _GRPC, clients)
        first = footprints(pid)
        for name in (None, *names):
            outcome = attack(name, _HTTP, _GRPC, clients, seconds)
            noticed += outcome.noticed
            print(_line(name, outcome), flush=True)
            time.sleep(settle)
            print(_held(first, footprints(pid)), flush=True)
        whole = largest_is_answered(_HTTP)
    tracebacks = log.read_text(errors="replace").count("Traceback")
    print(f"\nlargest body answered: {whole}; tracebacks in the log: {tracebacks}; others' failed or wrong: {noticed}")
    return int(noticed > 0 or tracebacks > 0 or not whole)


def warm(http: str, grpc: str, clients: str) -> None:
    """Sends requests of each kind once, so that what a first request compiles or builds exists before anything is measured."""
    attack(None, http, grpc, clients, 2)
    largest_is_answered(http)


def _line(name: str | None, outcome: Outcome) -> str:
    others = outcome.others
    answers = sum(other["answers"] for other in others.values())
    waits = " | ".join(f"{others[protocol]['worst_ms']:.0f}" for protocol in ("http", "grpc", "lane"))
    attacker = ", ".join(f"{what} {count}" for what, count in outcome.attacker.items())
    line = f"| {name or 'none'} | {answers} | {outcome.noticed} | {waits} | {attacker} |"
    for protocol, other in others.items():
        line += "".join(f"\n|   {protocol}: {count} x {said} |" for said, count in other["failures"].items())
    return line


def _held(before: dict[str, Footprint], after: dict[str, Footprint]) -> str:
    """Returns a table row with each process's descriptors and private memory before the attack and after it."""
    parts = []
    for name, now in after.items():
        then = before.get(name, now)
        parts.append(
            f"{name}: {then.descriptors} -> {now.descriptors} descriptors, "
            f"{then.private_bytes / 1e6:.0f} -> {now.private_bytes / 1e6:.0f} MB"
        )
    return "|   " + "; ".join(parts) + " |"


if __name__ == "__main__":
    sys.exit(main())
