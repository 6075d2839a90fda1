"""Measures a host with a GPU, unattended, within the given minutes; the most valuable measurements come first.

    pip install '.[cuda12,test]'
    python -m bench.gpu [--minutes 10] [--out FOLDER]

A daemon on the GPU and one on the CPU: small and large requests, and a worker that is killed. FOLDER/report.json has everything,
with card, driver and versions, and FOLDER/gpu.md is a page for docs/measurements.md. ``tests/gpu`` is run by pytest.
Small requests are sent by the client in C (bench/vary), because a stock client in Python takes longer than the daemon; large
tensors are sent by stock clients (client.py), a process each.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax

from bench import server
from bench.gpu.report import describe, markdown
from bench.helper import helper, line, report
from bench.vary.client import compiled
from bench.vary.pools import pool

MIB = 1 << 20

_CONFIGURATION = """
[repository]
paths = ["bench/models"]
control_mode = "explicit"
load = ["addsub", "identity", "mlp"]

[http]
port = {http}
max_body_byte_size = {most}

[grpc]
port = {grpc}
max_message_byte_size = {most}

[metrics]
enabled = false

[arenas]
max_byte_size = {arena}

[workers]
device = "{device}"
gpu_memory_fraction = 0.4

[expert]
start_timeout = 110.0
"""
#: Seconds that a measurement needs at most besides its own: clients start and register.
_AROUND = 8.0
#: Seconds in which a daemon has to be ready: a driver's first start, and three models compiled.
_START = 120.0
#: Of small requests: what each asks (bench/vary), over how many connections.
_SMALL = (("small-http-c1", "http", "id", 1), ("small-grpc-c1", "grpc", "id", 1), ("mlp-grpc-c32", "grpc", "mlp", 32))


def tried(function: Callable[[], Any]) -> Any:
    """Calls a function and returns its result, or the error that it raised as a sentence."""
    try:
        return function()
    except (Exception, SystemExit) as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


class Serving:
    """One run of all measurements."""

    def __init__(self, folder: Path, until: float, seconds: float, largest: int, port: int) -> None:
        """Sets up the run; nothing is started yet.

        Args:
          folder: where logs and configurations are written.
          until: CLOCK_MONOTONIC in seconds; no measurement begins that would end later.
          seconds: length of one measurement.
          largest: MiB of the largest tensor.
          port: the first of two ports.
        """
        self._folder, self._until, self._seconds, self._largest = folder, until, seconds, largest
        self._ports = dict(zip(("http", "grpc"), (port, port + 1), strict=True))
        self._addresses = {what: f"127.0.0.1:{number}" for what, number in self._ports.items()}
        self._found: dict[str, Any] = {}

    def run(self) -> dict[str, Any]:
        """Runs all measurements and returns their results; an error that ended them is under ``stopped``."""
        # The right answers are computed here, and the card is the daemon's.
        jax.config.update("jax_platforms", "cpu")
        try:
            with self._served("cuda") as pid:
                self._small("cuda")
                self._regions()
                self._killed(pid)
            with self._served("cpu"):
                self._small("cpu")
        # A daemon that does not come up ends a measurement with SystemExit.
        except (Exception, SystemExit) as error:
            self._note("stopped", f"{type(error).__name__}: {str(error)[:2000]}")
        said = (self._folder / "daemon-cuda.log").read_text(errors="replace").splitlines()
        self._note("log", [line for line in said if line[:1] in "WEC" and line[1:5].isdecimal()][:20])
        return self._found

    @contextlib.contextmanager
    def _served(self, device: str) -> Iterator[int]:
        configuration = self._folder / f"tensord-{device}.toml"
        sizes = {"most": 512 * MIB, "arena": 2048 * MIB}
        configuration.write_text(_CONFIGURATION.format(device=device, **self._ports, **sizes))
        command = [sys.executable, "-m", "tensord", "serve", "--config", str(configuration.resolve())]
        began = time.monotonic()
        log = self._folder / f"daemon-{device}.log"
        # What comes after it is to have its share.
        patience = min(_START, max(1.0, self._until - time.monotonic()))
        with server.serving(command, self._addresses["http"], log, patience=patience) as pid:
            self._note(f"ready on {device} after seconds", round(time.monotonic() - began, 1))
            yield pid

    def _small(self, device: str) -> None:
        """Measures small requests of one client, and those of 32 clients with the time of a batch in the worker."""
        with compiled() as client:

            def measure(protocol: str, kind: str, connections: int) -> dict[str, float]:
                address = self._addresses[protocol]
                file = client.record(address, pool(protocol, kind, 512))
                figures = client.measure(protocol, address, file, connections, self._seconds)
                return {name: round(getattr(figures, name), 1) for name in ("rate", "p50_us", "p99_us")}

            for name, protocol, kind, connections in _SMALL:
                if self._has(self._seconds):
                    found = tried(functools.partial(measure, protocol, kind, connections))
                    self._note(f"{name} on {device}", found)
        self._note(
            f"in the worker, of a batch of mlp, on {device}", tried(lambda: _in_worker(self._addresses["http"], "mlp"))
        )

    def _regions(self) -> None:
        sizes = [size for size in (16, 1, 256) if size <= self._largest]
        for size in sizes:
            for protocol, way, count in (
                ("http", "system", 1), ("grpc", "cuda", 1), ("http", "system", 4), ("http", "cuda", 4), ("http", "body", 1),
            ):  # fmt: skip
                if (size == sizes[0] or count == 1) and self._has(self._seconds + _AROUND):
                    name = f"{size}MiB-{protocol}-{way}-c{count} on cuda"
                    self._note(name, tried(lambda p=protocol, w=way, c=count, s=size: self._ask(p, w, s * MIB, c)))  # type: ignore[misc]

    def _killed(self, supervisor: int) -> None:
        """Kills the worker with SIGKILL while four clients ask, after a third of their time, and counts their errors."""
        if not self._has(4 * self._seconds + _AROUND):
            return

        def workers() -> list[int]:
            return sorted(pid for pid, what in server.children(supervisor).items() if what == "workers")

        before = workers()

        def kill() -> None:
            time.sleep(4 * self._seconds / 3)
            for pid in before:
                os.kill(pid, signal.SIGKILL)

        found = tried(lambda: self._ask("http", "cuda", MIB, 4, kill, 4 * self._seconds))
        self._note("kill -9 under four clients", {"clients": found, "before": before, "after": tried(workers)})

    def _ask(
        self,
        protocol: str,
        way: str,
        byte_size: int,
        count: int,
        meanwhile: Callable[[], None] | None = None,
        seconds: float = 0.0,
    ) -> dict[str, Any]:
        """Runs ``count`` clients at once and returns their figures together. Raises SystemExit: a client got a wrong answer."""
        words = (self._addresses[protocol], protocol, way, str(byte_size), str(seconds or self._seconds))
        with contextlib.ExitStack() as stack:
            clients = [stack.enter_context(helper("bench.gpu.client", *words)) for _ in range(count)]
            for client in clients:
                line(client)
            for client in clients:
                assert client.stdin is not None
                client.stdin.write("go\n")
                client.stdin.flush()
            if meanwhile is not None:
                meanwhile()
            return _together([report(client) for client in clients])

    def _has(self, seconds: float) -> bool:
        return time.monotonic() + seconds < self._until

    def _note(self, name: str, content: Any) -> None:
        self._found[name] = content
        print(f"{name}: {json.dumps(content)[:200]}", flush=True)


def _together(each: list[dict[str, Any]]) -> dict[str, Any]:
    answered = [one for one in each if one["answers"]]
    found = {
        "rate": round(sum(one["rate"] for one in answered), 1),
        "errors": sum(one["errors"] for one in each),
        "first_errors": [error for one in each for error in one["first_errors"]][:3],
    }
    if answered:
        middle = sorted(one["p50_us"] for one in answered)[len(answered) // 2]
        found |= {"p50_us": middle} | {name: max(one[name] for one in answered) for name in ("p99_us", "longest_ms")}
    return found


def _in_worker(address: str, model: str) -> dict[str, Any]:
    """Returns the server's statistics of a model's batches.

    Size of a batch -> how many batches, and the mean microseconds of input, computation and output of one.
    """
    (found,) = server.statistics(address, f"/{model}")
    parts = ("compute_input", "compute_infer", "compute_output")
    return {
        str(batch["batch_size"]): {"batches": batch["compute_infer"]["count"]}
        | {part: round(batch[part]["ns"] / max(1, batch[part]["count"]) / 1e3, 1) for part in parts}
        for batch in found["batch_stats"]
    }


def main() -> int:
    """Parses the command line, measures and writes both files. Returns 1 if there is no GPU to measure."""
    parser = argparse.ArgumentParser(
        prog="bench.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=10.0, help="everything ends within")
    parser.add_argument("--out", type=Path, default=Path("gpu-report"), help="where report, page and logs go")
    parser.add_argument("--seconds", type=float, default=2.0, help="length of one measurement of a row")
    parser.add_argument("--largest", type=int, default=256, help="MiB of the largest transfer")
    parser.add_argument("--port", type=int, default=18100, help="the first of two that the daemons serve on")
    arguments = parser.parse_args()
    described = describe()
    if not described["gpus"]:
        print(f"there is no GPU to measure: {described['why']}")
        return 1
    arguments.out.mkdir(parents=True, exist_ok=True)
    until = time.monotonic() + 60 * arguments.minutes - 10
    served = Serving(arguments.out, until, arguments.seconds, arguments.largest, arguments.port).run()
    found = {"host": described, "serve": served}
    (arguments.out / "report.json").write_text(json.dumps(found, indent=1, default=str) + "\n")
    (arguments.out / "gpu.md").write_text(markdown(described, served))
    print((arguments.out / "gpu.md").read_text())
    return 0


if __name__ == "__main__":
    sys.exit(main())
