"""Runs checks, each in a process of its own so that a hang or a lost context costs only that check; and times calls."""

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
    """Runs each check of a module and returns its result or how it ended.

    ``until``: CLOCK_MONOTONIC in seconds; no check begins later.
    """
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
    """Runs the check that the command line names, prints its result as JSON and ends the process."""
    print(json.dumps(checks[sys.argv[1]](), default=str), flush=True)
    # What XLA and the driver do at the end of a process is not asked for.
    os._exit(0)


def largest() -> int:
    """Returns the size of the largest transfer that a check may make, in bytes."""
    return int(os.environ.get(LARGEST, "256")) * MIB


def tried(function: Callable[[], Any]) -> Any:
    """Calls a function and returns its result, or the error that it raised as a sentence."""
    try:
        return function()
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def timed(function: Callable[[], Any], count: int = 200, warm: int = 10, seconds: float = 2.0) -> dict[str, float]:
    """Returns the microseconds of one call: median, 10th and 99th percentile.

    It calls ``count`` times, or as often as fits into ``seconds``, after ``warm`` calls that are not timed.
    """
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
    """Returns the times of a call as ``timed`` does, and with them the gigabytes a second at the median."""
    found = timed(function, count, warm=2)
    return found | {"GB_s": round(byte_size / max(found["p50_us"], 0.1) / 1e3, 2)}
