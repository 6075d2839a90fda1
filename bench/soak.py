"""Runs load, attacks and kills at once for many minutes: ``python -m bench.soak MINUTES``.

A daemon has two workers and two fronts of each protocol. Ordinary clients of each protocol send requests of all kinds
(bench/bystander.py) and compare every answer; one attack after the other runs, in random order; and now and then a process is
killed. The first worker and the first front of each protocol are never killed, so that their memory can be followed: every so
often a line is printed with descriptors and private memory of these and of the supervisor, and the attack that runs, and at the
end how much each grew since the first quarter. A killed front takes its connections with it: requests lost with them are counted
apart. A killed worker costs no client anything.
Exit status 1: an answer was wrong, a request failed otherwise, descriptors grew that are no segments of arenas (arenas keep some,
docs/sizing.md), or there is a traceback in the log.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from bench.attackers.catalogue import ATTACKS, named
from bench.bystander import LOST, bystanders
from bench.footprint import Footprint
from bench.helper import helper, report
from bench.server import children, serving

_HTTP, _GRPC = "127.0.0.1:18170", "127.0.0.1:18171"
_ATTACK_SECONDS = 10.0
#: Connections of the ordinary clients and their lanes' channels come and go: so many more are no leak.
_MORE_DESCRIPTORS = 32
#: The descriptor of an arena's segment.
_SEGMENT = "memfd:tensord"


class Killer:
    """Kills random processes of a daemon one after the other, never the first of its kind."""

    def __init__(self, supervisor: int, pause: float) -> None:
        """Notes the processes that are never killed. ``pause``: mean seconds between two kills; 0: none is killed."""
        self._supervisor = supervisor
        self._pause = pause
        self._first = set(first_of_each(supervisor).values())
        self._next = time.monotonic() + pause
        self.killed: dict[str, int] = {}

    def kill_if_due(self) -> None:
        """Kills one random process if the next kill is due."""
        if not self._pause or time.monotonic() < self._next:
            return
        self._next = time.monotonic() + random.expovariate(1 / self._pause)
        candidates = [(pid, kind) for pid, kind in children(self._supervisor).items() if pid not in self._first]
        if candidates:
            pid, kind = random.choice(candidates)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                self.killed[kind] = self.killed.get(kind, 0) + 1


class Attacks:
    """Runs one attacker at a time, until the block ends; ``done`` counts those that have ended."""

    def __init__(self, names: list[str], clients: str) -> None:
        """Starts none yet. ``clients``: path of the daemon's socket for clients."""
        self._names = names
        self._clients = clients
        self._stack = contextlib.ExitStack()
        self._running: subprocess.Popen[str] | None = None
        #: The one that runs now, or ran last; "": none has.
        self.name = ""
        self.done = 0

    def __enter__(self) -> Attacks:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def go_on(self) -> None:
        """Starts the next attack if the last one is over. Raises SystemExit: the attacker itself failed."""
        if self._running is not None:
            if self._running.poll() is None:
                return
            report(self._running)
            self._stack.close()
            self.done += 1
        if self._names:
            self.name = random.choice(self._names)
            words = (self.name, _HTTP, _GRPC, str(_ATTACK_SECONDS), self._clients)
            self._running = self._stack.enter_context(helper("bench.attackers", *words))


def first_of_each(supervisor: int) -> dict[str, int]:
    """Returns the process that was started first of each kind, and the supervisor: kind -> process id."""
    found = {"supervisor": supervisor}
    for pid, kind in sorted(children(supervisor).items()):
        found.setdefault(kind, pid)
    return found


def grown(samples: list[dict[str, Footprint]]) -> dict[str, tuple[int, int]]:
    """Returns how much each process grew: name -> descriptors that are no segments of arenas, and private bytes.

    The last sample is compared with the largest values of the first quarter.
    """
    early = samples[: max(1, len(samples) // 4)]
    return {
        name: (
            _lasting(now) - max(_lasting(sample[name]) for sample in early),
            now.private_bytes - max(sample[name].private_bytes for sample in early),
        )
        for name, now in samples[-1].items()
    }


def _lasting(footprint: Footprint) -> int:
    return footprint.descriptors - footprint.kinds.get(_SEGMENT, 0)


def main() -> int:
    """Parses the command line, runs and prints the report."""
    parser = argparse.ArgumentParser(
        prog="bench.soak", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("minutes", type=float, help="how long; attacks go on for ten seconds each")
    parser.add_argument("--clients", type=int, default=2, help="ordinary clients of each protocol")
    parser.add_argument("--kill-pause", type=float, default=10.0, help="mean seconds between two kills; 0: none")
    parser.add_argument("--attacks", default=",".join(ATTACKS), help="by name, comma-separated; '' for none")
    parser.add_argument("--samples", type=int, default=20, help="lines")
    parser.add_argument("--log", type=Path, default=Path("/tmp/bench-soak.log"), help="where the daemon's log goes")
    arguments = parser.parse_args()
    names = named(parser, arguments.attacks)
    if arguments.minutes <= 0 or arguments.samples < 1 or arguments.clients < 1 or arguments.kill_pause < 0:
        parser.error("minutes, --samples and --clients must be more than 0, --kill-pause no less")
    command = [sys.executable, "-m", "tensord", "serve", "--config", "bench/attackers/serve.toml"]
    command += [f"--http-port={_HTTP.rpartition(':')[2]}", f"--grpc-port={_GRPC.rpartition(':')[2]}"]
    command += ["--http-processes=2", "--grpc-processes=2"]
    os.environ["TENSORD_WORKERS_CPU"] = "2"
    samples: list[dict[str, Footprint]] = []
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="tensord-bench-"))
        clients = os.environ["TENSORD_CLIENTS_SOCKET"] = str(Path(folder, "clients.sock"))
        pid = stack.enter_context(serving(command, _HTTP, arguments.log))
        seen = stack.enter_context(bystanders({"http": _HTTP, "grpc": _GRPC}, "mixed", arguments.clients))
        killer = Killer(pid, arguments.kill_pause)
        with Attacks(names, clients) as attacks:
            staying = first_of_each(pid)
            begin, length = time.monotonic(), 60 * arguments.minutes
            while (passed := time.monotonic() - begin) < length:
                if passed >= length / arguments.samples * (len(samples) + 1):
                    samples.append({name: Footprint.of(number) for name, number in staying.items()})
                    print(_line(passed, samples[-1], attacks.name), flush=True)
                attacks.go_on()
                killer.kill_if_due()
                time.sleep(0.1)
        # What attackers left is given back within the timeouts of the bounds; what is left then is a leak.
        time.sleep(5)
        samples.append({name: Footprint.of(number) for name, number in staying.items()})
        print(_line(time.monotonic() - begin, samples[-1], "all over"), flush=True)
    tracebacks = arguments.log.read_text(errors="replace").count("Traceback")
    return _report(samples, list(seen.values()), killer.killed, attacks.done, tracebacks)


def _line(passed: float, sample: dict[str, Footprint], attack: str) -> str:
    held = (f"{name} {now.descriptors} fds {now.private_bytes / 1e6:.1f} MB" for name, now in sample.items())
    return f"{passed:6.0f} s   " + "   ".join(held) + f"   {attack}"


def _report(
    samples: list[dict[str, Footprint]],
    seen: list[dict[str, Any]],
    killed: dict[str, int],
    attacks: int,
    tracebacks: int,
) -> int:
    """Prints the outcome of the run; returns the exit status."""
    failures = sum((Counter(client["failures"]) for client in seen), Counter[str]())
    lost = sum(count for said, count in failures.items() if said.startswith(LOST))
    failed = {said: count for said, count in failures.items() if not said.startswith(LOST)}
    answers = sum(client["answers"] for client in seen)
    print(f"answers {answers}, worst wait {max(client['worst_ms'] for client in seen):.0f} ms")
    print(
        f"killed: {killed or 'none'}; attacks: {attacks}; connections lost with fronts: {lost}; tracebacks: {tracebacks}"
    )
    for said, count in failed.items():
        print(f"failed or wrong: {count} x {said}")
    leaked = False
    for name, (descriptors, private_bytes) in grown(samples).items():
        rate = private_bytes / max(1, answers)  # megabytes a million
        first, now = samples[0][name], samples[-1][name]
        kinds = {kind: more for kind, count in now.kinds.items() if (more := count - first.kinds.get(kind, 0)) > 0}
        print(
            f"{name}: {descriptors:+} descriptors besides segments, {private_bytes / 1e6:+.1f} MB "
            f"({rate:+.1f} a million answers); since the first line {(now.arena_bytes - first.arena_bytes) / 1e6:+.1f} MB "
            f"of arenas (arenas.keep_byte_size may stay), more descriptors: {kinds or 'none'}"
        )
        leaked |= descriptors > _MORE_DESCRIPTORS
    lost_for_nothing = lost > 0 and not any(kind.startswith("daemon.") for kind in killed)
    return int(bool(failed) or lost_for_nothing or leaked or tracebacks > 0)


if __name__ == "__main__":
    sys.exit(main())
