"""Checks, each a process of its own: a hang or a context that is lost costs one of them. And how what they time is said."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bench.server import ROOT

MIB = 1 << 20
#: In the environment of a check: MiB of its largest transfer.
LARGEST = "BENCH_GPU_LARGEST_MIB"
#: Seconds that one may take. The first on a GPU waits for its driver.
_PATIENCE = 90.0
_TAIL = 1500
Check = Callable[[], Any]


def run(module: str, names: Sequence[str], until: float) -> dict[str, Any]:
    """What each check found, or how it ended. ``until``: CLOCK_MONOTONIC in seconds, after which none begins."""
    return {name: _run_one(module, name, until) for name in names}


def _run_one(module: str, name: str, until: float) -> Any:
    began = time.monotonic()
    if began >= until:
        return {"unfinished": "no time left"}
    command = [sys.executable, "-m", module, name]
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=min(_PATIENCE, max(5.0, until - began)),
            check=False,
        )
    except subprocess.TimeoutExpired as expired:
        said = expired.stderr.decode(errors="replace") if isinstance(expired.stderr, bytes) else ""
        found: dict[str, Any] = {"hangs": f"no end within {expired.timeout:.0f} s", "stderr": said[-_TAIL:]}
    else:
        lines = done.stdout.splitlines()
        try:
            found = json.loads(lines[-1])
        except (IndexError, ValueError):
            found = {"failed": f"exit status {done.returncode}", "stderr": done.stderr[-_TAIL:]}
    found["seconds"] = round(time.monotonic() - began, 1)
    print(f"{name}: {json.dumps(found)[:200]}", flush=True)
    return found


def main(checks: Mapping[str, Check]) -> None:
    """Of a module with checks: runs the one that the command line names and prints what it found. Never returns."""
    print(json.dumps(checks[sys.argv[1]](), default=str), flush=True)
    # What XLA and the driver do at the end of a process is not asked for.
    os._exit(0)


def largest() -> int:
    """Bytes of the largest transfer."""
    return int(os.environ.get(LARGEST, "256")) * MIB


def tried(function: Callable[[], Any]) -> Any:
    """What it returns, or the error that it ends with, as a sentence."""
    try:
        return function()
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def timed(function: Callable[[], Any], count: int = 200, warm: int = 10, seconds: float = 2.0) -> dict[str, float]:
    """Microseconds of a call: median and percentiles, of so many calls or as many as the time allows."""
    for _ in range(warm):
        function()
    lasted: list[float] = []
    ends = time.perf_counter() + seconds
    while len(lasted) < count and (not lasted or time.perf_counter() < ends):
        began = time.perf_counter()
        function()
        lasted.append(1e6 * (time.perf_counter() - began))
    lasted.sort()
    at = {"p50_us": 50, "p10_us": 10, "p99_us": 99}
    return {name: round(lasted[len(lasted) * percent // 100], 1) for name, percent in at.items()}


def rate(byte_size: int, function: Callable[[], Any], count: int = 200) -> dict[str, float]:
    """As ``timed``, and the bytes of a call per second of its median."""
    found = timed(function, count, warm=2)
    return found | {"GB_s": round(byte_size / max(found["p50_us"], 0.1) / 1e3, 2)}
