"""Describes this host: its cards, driver, processor and the versions of the packages that matter."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import resource
import subprocess
import sys
from typing import Any

from tensord.daemon.processes.devices import visible_gpus

_PACKAGES = (
    "tensord", "jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin", "cuda-bindings", "cuda-python", "numpy", "ml-dtypes",
    "tritonclient", "nvidia-ml-py", "uvloop", "pytest",
)  # fmt: skip
_QUERY = (
    "name,driver_version,pci.bus_id,pcie.link.gen.max,pcie.link.gen.current,pcie.link.width.current,memory.total,"
    "mig.mode.current,ecc.mode.current,compute_mode,persistence_mode"
)


def describe() -> dict[str, Any]:
    """Returns the description, name -> value.

    ``gpus``: the devices' names in ``CUDA_VISIBLE_DEVICES``; where it is empty ``why`` has the reason.
    """
    found = visible_gpus(os.environ)
    gpus, why = list(found.entries), found.reason
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "gpus": gpus,
        "why": why or ("" if gpus else "there is no CUDA driver"),
        "cards": _said("nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader"),
        "topology": _said("nvidia-smi", "topo", "-m"),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": sys.version.split()[0],
        "memlock": resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        "commit": _said("git", "rev-parse", "--short", "HEAD"),
        "packages": {name: found for name in _PACKAGES if (found := _version(name))},
        "variables": {
            name: value for name, value in os.environ.items() if name.startswith(("CUDA", "XLA", "JAX", "NVIDIA"))
        },
    }


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _said(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


def _processor() -> str:
    with open("/proc/cpuinfo") as lines:
        return next(
            (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine()
        )
