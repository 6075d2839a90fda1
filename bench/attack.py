"""Measures what attackers cost other clients, the daemon's memory and its file descriptors: ``python -m bench.attack``.

Each attack of ``bench/attackers`` runs for some seconds, in a process of its own, against a daemon with the default bounds, while
an ordinary client of HTTP, one of gRPC and one on a lane go on with small requests (bench/bystander.py). Printed for each attack:
how many answers these clients got, how many failed or were wrong, their longest wait over HTTP, gRPC and the lane, and the memory
and descriptors of each process before the attack and some seconds after it.
The first line is measured without an attack: the machine by itself. At the end a body of the largest allowed size is answered,
for which the arenas must be free again, and the log is searched for tracebacks. Exit status 1: an answer was wrong, a request
failed, or there is a traceback.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import tritonclient.http as httpclient

from bench.attackers.catalogue import ATTACKS, named
from bench.bystander import bystanders
from bench.footprint import Footprint, footprints
from bench.helper import helper, report
from bench.server import serving

#: Floats of one tensor that is nearly as large as a body may be.
_LARGEST = 15 << 20


def attack(
    name: str | None, addresses: dict[str, str], seconds: float
) -> tuple[dict[str, dict[str, Any]], dict[str, int]]:
    """Runs one attack beside the ordinary clients; ``name`` None: no attack. Raises SystemExit: the attacker itself failed.

    Returns what each ordinary client reports, by protocol, and what the attacker counted.
    """
    counts: dict[str, int] = {}
    with bystanders(addresses) as seen:
        if name is None:
            time.sleep(seconds)
        else:
            words = (addresses["http"], addresses["grpc"], str(seconds), addresses["lane"])
            with helper("bench.attackers", name, *words) as attacker:
                counts = report(attacker)
    return seen, counts


def largest_is_answered(http: str, floats: int = _LARGEST) -> bool:
    """Returns whether the server answers a body of nearly the largest allowed size rightly, so that there is memory for it."""
    given = httpclient.InferInput("INPUT0", [floats], "FP32")
    values = np.random.default_rng(0).random(floats, np.float32)
    given.set_data_from_numpy(values)
    wanted = httpclient.InferRequestedOutput("OUTPUT0")
    with httpclient.InferenceServerClient(http, network_timeout=120) as client:
        answer = client.infer("identity", [given], outputs=[wanted])
    return bool(np.array_equal(answer.as_numpy("OUTPUT0"), values))


def main() -> int:
    """Parses the command line, runs the attacks and prints the table."""
    parser = argparse.ArgumentParser(
        prog="bench.attack", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--attacks", default=",".join(ATTACKS), help="by name, comma-separated; all by default")
    parser.add_argument("--seconds", type=float, default=10.0, help="length of each")
    parser.add_argument("--settle", type=float, default=5.0, help="seconds after it before the daemon is looked at")
    parser.add_argument("--log", type=Path, default=Path("/tmp/bench-attack.log"), help="where the daemon's log goes")
    parser.add_argument("--arenas", choices=("default", "small"), default="default", help="small: they are soon full")
    arguments = parser.parse_args()
    names = named(parser, arguments.attacks)
    with tempfile.TemporaryDirectory(prefix="tensord-bench-") as folder:
        # Where the user's own daemon has it there may be one.
        clients = os.environ["TENSORD_CLIENTS_SOCKET"] = str(Path(folder, "clients.sock"))
        addresses = {"http": "127.0.0.1:18160", "grpc": "127.0.0.1:18161", "lane": clients}
        return _attacked(names, addresses, arguments)


def _attacked(names: list[str], addresses: dict[str, str], arguments: argparse.Namespace) -> int:
    seconds, log, small = arguments.seconds, arguments.log, arguments.arenas == "small"
    config = f"bench/attackers/{'small_arenas' if small else 'serve'}.toml"
    command = [sys.executable, "-m", "tensord", "serve", "--config", config]
    noticed = 0
    print("| attack | others' answers | failed or wrong | worst wait, ms: http | grpc | lane | attacker |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    with serving(command, addresses["http"], log) as pid:
        # What a first request compiles or builds is to exist before anything is measured.
        attack(None, addresses, 2)
        largest_is_answered(addresses["http"], _LARGEST // 4 if small else _LARGEST)
        first = footprints(pid)
        for name in (None, *names):
            others, counts = attack(name, addresses, seconds)
            failed = sum(sum(other["failures"].values()) for other in others.values())
            noticed += failed
            answers = sum(other["answers"] for other in others.values())
            waits = " | ".join(f"{other['worst_ms']:.0f}" for other in others.values())
            counted = ", ".join(f"{what} {count}" for what, count in counts.items())
            print(f"| {name or 'none'} | {answers} | {failed} | {waits} | {counted} |", flush=True)
            for protocol, other in others.items():
                for said, count in other["failures"].items():
                    print(f"|   {protocol}: {count} x {said} |", flush=True)
            time.sleep(arguments.settle)
            print(_held(first, footprints(pid)), flush=True)
        whole = largest_is_answered(addresses["http"], _LARGEST // 4 if small else _LARGEST)
    tracebacks = log.read_text(errors="replace").count("Traceback")
    print(f"\nlargest body answered: {whole}; tracebacks in the log: {tracebacks}; others' failed or wrong: {noticed}")
    return int(noticed > 0 or tracebacks > 0 or not whole)


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
