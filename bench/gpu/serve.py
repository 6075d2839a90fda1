"""Measures a daemon on the GPU and one on the CPU: small and large requests, and a worker that is killed.

Small requests are sent by the raw clients of bench/closed_loop.py, because a stock client in Python takes longer than the daemon;
large tensors are sent by stock clients (client.py), a process each.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench import closed_loop, grpc_connection, server
from bench.closed_loop import Row
from bench.gpu.checking import MIB, tried
from bench.helper import helper, report

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
port = {metrics}

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


@dataclass(frozen=True, slots=True)
class Near(Row):
    """A row whose answer may differ by rounding from the one computed on the CPU: batches are computed in another order."""

    def check(self, answer: bytes | bytearray) -> None:
        values = np.frombuffer(bytes(answer[-self.values.nbytes :]), self.values.dtype)
        if not np.allclose(values, self.values.ravel(), rtol=1e-2, atol=1e-2):
            raise AssertionError(f"{self.name}: wrong answer: {values} for {self.values.ravel()}")


class Serving:
    """One run of all measurements."""

    def __init__(self, folder: Path, until: float, seconds: float, largest: int, port: int) -> None:
        """Sets up the run; nothing is started yet.

        Args:
          folder: where logs and configurations are written.
          until: CLOCK_MONOTONIC in seconds; no measurement begins that would end later.
          seconds: length of one measurement.
          largest: MiB of the largest tensor.
          port: the first of three ports.
        """
        self._folder, self._until, self._seconds, self._largest = folder, until, seconds, largest
        self._ports = dict(zip(("http", "grpc", "metrics"), range(port, port + 3), strict=True))
        self._addresses = {what: f"127.0.0.1:{number}" for what, number in self._ports.items()}
        self._found: dict[str, Any] = {}

    def run(self) -> dict[str, Any]:
        """Runs all measurements and returns their results; an error that ended them is under ``stopped``."""
        try:
            with self._served("cuda") as pid:
                self._small("cuda")
                self._regions()
                self._killed(pid)
                self._found["metrics"] = _metrics(self._addresses["metrics"])
            with self._served("cpu"):
                self._small("cpu")
        # A daemon that does not come up ends a measurement with SystemExit.
        except (Exception, SystemExit) as error:
            self._note("stopped", f"{type(error).__name__}: {str(error)[:2000]}")
        said = (self._folder / "daemon-cuda.log").read_text(errors="replace").splitlines()
        self._found["log"] = [line for line in said if line[:1] in "WEC" and line[1:5].isdecimal()][:20]
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
        a, b = np.arange(16, dtype=np.float32).reshape(1, 16), np.full((1, 16), 2, np.float32)
        x, expected = _mlp()
        for protocol, request, kind in (
            ("http", closed_loop.infer_request, closed_loop.Connection),
            ("grpc", grpc_connection.infer_request, grpc_connection.GrpcConnection),
        ):
            small = request("addsub", [("INPUT0", a), ("INPUT1", b)], "OUTPUT0")
            self._row(device, protocol, Row(f"small-{protocol}-c1", 1, small, a + b, connection=kind))
        logits = request("mlp", [("x", x)], "logits")
        self._row(device, "grpc", Near("mlp-grpc-c32", 32, logits, expected, connection=kind))
        self._note(
            f"in the worker, of a batch of mlp, on {device}", tried(lambda: _in_worker(self._addresses["http"], "mlp"))
        )

    def _row(self, device: str, protocol: str, row: Row) -> None:
        def measure() -> dict[str, float]:
            closed_loop.measure(self._addresses[protocol], row, self._seconds / 4)
            rate, p50, p99 = closed_loop.measure(self._addresses[protocol], row, self._seconds)
            return {"rate": round(rate, 1), "p50_us": round(p50, 1), "p99_us": round(p99, 1)}

        if self._has(self._seconds):
            self._note(f"{row.name} on {device}", tried(measure))

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
        told = {"url": self._addresses[protocol], "protocol": protocol, "way": way, "byte_size": byte_size}
        words = json.dumps(told | {"seconds": seconds or self._seconds})
        with contextlib.ExitStack() as stack:
            clients = [stack.enter_context(helper("bench.gpu.client", words)) for _ in range(count)]
            for client in clients:
                _wait(client)
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


def _wait(client: subprocess.Popen[str]) -> None:
    """Waits until a client is ready. Raises RuntimeError: the client ended before."""
    assert client.stdout is not None
    if client.stdout.readline().strip() != "ready":
        raise RuntimeError(f"a client ended with {client.wait()} before it was answered")


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


@functools.cache
def _mlp() -> tuple[Any, Any]:
    """Returns an input of ``mlp``, FP32[1, 784], and its logits, computed on the CPU by another process: this one has no JAX."""
    x = np.random.default_rng(0).random((1, 784), np.float32)
    code = (
        "import importlib.util, json, sys, jax, numpy as np\n"
        "spec = importlib.util.spec_from_file_location('mlp', 'bench/models/mlp/1/model.py')\n"
        "model = importlib.util.module_from_spec(spec); spec.loader.exec_module(model)\n"
        "apply, params = model.create(None, None, jax.devices('cpu')[0])\n"
        "x = np.array(json.loads(sys.stdin.read()), np.float32)\n"
        "print(json.dumps(np.asarray(apply(params, {'x': x})['logits']).tolist()))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=server.ROOT,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        input=json.dumps(x.tolist()),
        capture_output=True,
        text=True,
        check=True,
    )
    return x, np.array(json.loads(done.stdout), np.float32)


def _in_worker(address: str, model: str) -> dict[str, Any]:
    """Returns the server's statistics of a model's batches.

    Size of a batch -> how many batches, and the mean microseconds of input, computation and output of one.
    """
    with urllib.request.urlopen(f"http://{address}/v2/models/{model}/stats", timeout=30) as answer:
        (found,) = json.load(answer)["model_stats"]
    parts = ("compute_input", "compute_infer", "compute_output")
    return {
        str(batch["batch_size"]): {"batches": batch["compute_infer"]["count"]}
        | {part: round(batch[part]["ns"] / max(1, batch[part]["count"]) / 1e3, 1) for part in parts}
        for batch in found["batch_stats"]
    }


def _metrics(address: str) -> list[str]:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=30) as answer:
        lines: list[str] = answer.read().decode().splitlines()
    names = ("tensord_copied", "tensord_gpu", "nv_gpu", "tensord_process_failures", "tensord_region")
    return [line for line in lines if line.startswith(names) and not line.endswith(" 0.0")]
