"""Tries each attack once beside four ordinary clients, with arenas that fill up soon (bench/attackers/small_arenas.toml).

    127.0.0.2  HTTP, small requests      127.0.0.4  gRPC, small requests
    127.0.0.3  HTTP, a MiB each          127.0.0.5  gRPC, a MiB each          127.0.0.1  the attacker

A trial holds if no request of an ordinary client fails, and none waits longer than twice the longest wait of the same client in
the quiet trial, which comes first, and 0.3 s. Part of ``python -m bench.attack``.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.helper import helper, report, reports
from bench.server import serving

CONFIGURATION = "bench/attackers/small_arenas.toml"
_HTTP, _GRPC = "127.0.0.1:18160", "127.0.0.1:18161"
#: Protocol, what it asks and where it comes from, of each ordinary client.
_CLIENTS = (
    ("http", "small", "127.0.0.2"),
    ("http", "mebibyte", "127.0.0.3"),
    ("grpc", "small", "127.0.0.4"),
    ("grpc", "mebibyte", "127.0.0.5"),
)
#: How much longer than in twice its quiet time a request may take.
_SLACK_MS = 300.0
#: The write timeout and some more: what an attacker left is let go by then.
_SETTLE = 7.0


@dataclass(frozen=True, slots=True)
class Trial:
    """One trial: the figures of each ordinary client, in the order of ``_CLIENTS``."""

    others: tuple[dict[str, Any], ...]

    @property
    def failed(self) -> int:
        """Returns how many requests of the ordinary clients failed or were answered wrongly."""
        return sum(sum(other["failures"].values()) for other in self.others)

    def waits(self, quiet: Trial) -> list[float]:
        """Returns the longest wait of each client divided by its longest wait in the quiet trial."""
        return [o["worst_ms"] / q["worst_ms"] for o, q in zip(self.others, quiet.others, strict=True)]

    def late(self, quiet: Trial) -> int:
        """Returns how many clients had a request that waited too long."""
        pairs = zip(self.others, quiet.others, strict=True)
        return sum(other["worst_ms"] > 2 * calm["worst_ms"] + _SLACK_MS for other, calm in pairs)


def run(attacks: Sequence[str], clients: str, seconds: float, log: Path) -> int:
    """Runs the trials and prints a line for each; returns how many failed, plus 1 where the log has a traceback."""
    names = " | ".join(f"{protocol} {kind}" for protocol, kind, _ in _CLIENTS)
    print(f"\n| attack, small arenas | failed or wrong | longest wait / quiet: {names} | |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    command = [sys.executable, "-m", "tensord", "serve", "--config", CONFIGURATION]
    missed = 0
    with serving(command, _HTTP, log):
        _trial(None, "", 2)  # what is compiled or built at a first request
        quiet = _trial(None, "", seconds)
        waits = " | ".join(f"{other['worst_ms']:.0f} ms" for other in quiet.others)
        print(f"| none | {quiet.failed} | {waits} | |", flush=True)
        for name in attacks:
            trial = _trial(name, clients, seconds)
            late = trial.late(quiet)
            holds = not (trial.failed or late)
            missed += not holds
            waits = " | ".join(f"{wait:.1f}" for wait in trial.waits(quiet))
            print(f"| {name} | {trial.failed} | {waits} | {'' if holds else f'{late} too late'} |", flush=True)
            for (protocol, kind, _), other in zip(_CLIENTS, trial.others, strict=True):
                for said, count in other["failures"].items():
                    print(f"|   {protocol} {kind}: {count} x {said} |", flush=True)
            time.sleep(_SETTLE)
    tracebacks = log.read_text(errors="replace").count("Traceback")
    print(f"\nsmall arenas: trials that did not hold: {missed}; tracebacks in the log: {tracebacks}")
    return missed + (tracebacks > 0)


def _trial(name: str | None, clients: str, seconds: float) -> Trial:
    with _clients() as seen:
        time.sleep(1)  # their own start
        if name is None:
            time.sleep(seconds)
        else:
            with helper("bench.attackers", name, _HTTP, _GRPC, str(seconds), clients) as attacker:
                report(attacker)
    return Trial(tuple(seen))


@contextlib.contextmanager
def _clients() -> Iterator[list[dict[str, Any]]]:
    """Runs the ordinary clients within the block; the list that it yields has their reports afterwards."""
    seen: list[dict[str, Any]] = []
    with contextlib.ExitStack() as stack:
        running = []
        for protocol, kind, host in _CLIENTS:
            address = {"http": _HTTP, "grpc": _GRPC}[protocol]
            running.append(stack.enter_context(helper("bench.bystander", protocol, address, kind, host)))
        yield seen
        seen.extend(reports(running))
