"""Describes this host, and formats the report as a Markdown page: the targets beside what was measured, then every figure."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tensord.daemon.processes.devices import visible_gpus

_PACKAGES = re.compile("tensord|jax|cuda-(bindings|python)|numpy|ml.dtypes|tritonclient|nvidia-ml-py|uvloop")
_QUERY = (
    "name,driver_version,pci.bus_id,pcie.link.gen.max,pcie.link.gen.current,pcie.link.width.current,memory.total,"
    "mig.mode.current,ecc.mode.current,compute_mode,persistence_mode"
)


def describe() -> dict[str, Any]:
    """Returns the description, name -> value.

    ``gpus``: the devices' names in ``CUDA_VISIBLE_DEVICES``; where it is empty ``why`` has the reason.
    """
    found = visible_gpus(os.environ)
    installed = {one.metadata["Name"]: one.version for one in importlib.metadata.distributions()}
    models = re.findall(r"^model name\s*: (.*)", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "gpus": list(found.entries),
        "why": found.reason or ("" if found.entries else "there is no CUDA driver"),
        "cards": _said("nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader"),
        "topology": _said("nvidia-smi", "topo", "-m"),
        "processor": models[0] if models else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": sys.version.split()[0],
        "commit": _said("git", "rev-parse", "--short", "HEAD"),
        "packages": {name: version for name, version in sorted(installed.items()) if _PACKAGES.match(name)},
        "variables": {
            name: value for name, value in os.environ.items() if name.startswith(("CUDA", "XLA", "JAX", "NVIDIA"))
        },
    }


def _said(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


_LONGEST = 400


@dataclass(frozen=True, slots=True)
class Target:
    """One target that a GPU host has to reach, a row of the page's first table."""

    what: str
    #: Of what ``serve`` found. Raises KeyError, TypeError: that was not measured.
    value: Callable[[Mapping[str, Any]], float]
    limit: float
    unit: str
    #: Whether more is better.
    least: bool = False

    def line(self, found: Mapping[str, Any]) -> str:
        """Formats the table's row: target, limit, measured value, reached or not."""
        wanted = f"{'>=' if self.least else '<='} {self.limit:g} {self.unit}"
        try:
            value = self.value(found)
        except (KeyError, TypeError, ValueError, ZeroDivisionError):
            return f"| {self.what} | {wanted} | not measured | |"
        reached = value >= self.limit if self.least else value <= self.limit
        return f"| {self.what} | {wanted} | {value:.4g} {self.unit} | {'yes' if reached else '**no**'} |"


def _batch(found: Mapping[str, Any]) -> float:
    """Returns the microseconds that the worker took for the largest batch. Raises ValueError: none had 32 rows."""
    batches = found["in the worker, of a batch of mlp, on cuda"]
    of = batches[max(batches, key=int)]
    if int(max(batches, key=int)) < 32:
        raise ValueError("there was no such batch")
    return float(sum(of[part] for part in ("compute_input", "compute_infer", "compute_output")))


TARGETS = (
    Target(
        "small-http-c1, above the CPU worker's",
        lambda found: found["small-http-c1 on cuda"]["p50_us"] - found["small-http-c1 on cpu"]["p50_us"],
        60,
        "us",
    ),
    Target("32 small requests together, in the worker", _batch, 300, "us"),
    Target("16 MiB system region, one client", lambda found: found["16MiB-http-system-c1 on cuda"]["p50_us"], 700, "us"),
    Target("16 MiB system region, four clients", lambda found: found["16MiB-http-system-c4 on cuda"]["rate"], 2500, "/s", True),
    Target("16 MiB CUDA region, by gRPC", lambda found: found["16MiB-grpc-cuda-c1 on cuda"]["p50_us"], 200, "us"),
    Target(
        "mlp-grpc-c32, of the CPU worker's",
        lambda found: found["mlp-grpc-c32 on cuda"]["rate"] / found["mlp-grpc-c32 on cpu"]["rate"],
        3,
        "x",
        True,
    ),
    Target("kill -9 under four clients", lambda found: found["kill -9 under four clients"]["clients"]["errors"], 0, "errors"),
)  # fmt: skip


def markdown(host: Mapping[str, Any], served: Mapping[str, Any]) -> str:
    """Formats the whole page."""
    packages = ", ".join(f"{name} {version}" for name, version in host["packages"].items())
    cards = "; ".join(host["cards"].splitlines()) or f"{len(host['gpus'])} GPUs"
    lines = [
        "## On a GPU",
        "",
        f"{host['date']}. {cards}. {host['cores']} cores of {host['processor']},",
        f"Linux {host['kernel']}, Python {host['python']}; {packages}; commit {host['commit']}.",
        "By `python -m bench.gpu`.",
        "",
        "| to be reached | wanted | found | |",
        "| --- | --- | --- | --- |",
        *(target.line(served) for target in TARGETS),
        "",
        "| | |",
        "| --- | --- |",
        *(f"| {name} | {_cell(content)} |" for name, content in served.items()),
    ]
    return "\n".join(lines) + "\n"


def _cell(content: Any) -> str:
    text = content if isinstance(content, str) else json.dumps(content, default=str)
    return " ".join(text.split())[:_LONGEST].replace("|", "\\|")
