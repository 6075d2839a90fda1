"""Measures a host with a GPU, unattended, within the given minutes; the most valuable measurements come first.

    pip install '.[cuda12,test]'
    python -m bench.gpu [--minutes 10] [--out FOLDER]

    host     the machine: card, driver, versions
    driver   what its driver allows: page-locking, handles of other processes, bandwidth      (driver_checks.py)
    xla      what XLA does with memory of ours, and after errors                              (xla_checks.py)
    serve    a daemon on the GPU and one on the CPU, stock clients, kill -9, the targets      (serve.py)
    tests    tests/gpu

FOLDER/report.json has everything, FOLDER/gpu.md is a page for docs/measurements.md; both are written again after each part. Each
check is a process of its own, so that a hang or a lost context costs only that check.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

from bench.gpu import checking, driver_checks, host, page, serve, xla_checks
from bench.helper import end
from bench.server import ROOT

#: Each part's share of the time that is left when it begins.
_SHARES = {"host": 1.0, "driver": 0.25, "xla": 0.4, "serve": 0.75, "tests": 1.0}

#: Seconds that pytest may take to end its tests.
_END = 20.0


def main() -> int:
    """Parses the command line, runs the parts and writes both files. Returns 1 if there is no GPU to measure."""
    parser = argparse.ArgumentParser(
        prog="bench.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=10.0, help="all parts together end within")
    parser.add_argument("--out", type=Path, default=Path("gpu-report"), help="where report, page and logs go")
    parser.add_argument("--parts", default=",".join(_SHARES), help="which of them, in their order")
    parser.add_argument("--checks", default="", help="only these checks of driver and xla")
    parser.add_argument("--seconds", type=float, default=2.0, help="length of one measurement of a row")
    parser.add_argument("--largest", type=int, default=256, help="MiB of the largest transfer")
    parser.add_argument("--port", type=int, default=18100, help="the first of three that the daemons serve on")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    ends = time.monotonic() + 60 * arguments.minutes - 10
    os.environ[checking.LARGEST] = str(arguments.largest)
    found: dict[str, Any] = {}
    wanted = [name for name in arguments.checks.split(",") if name]
    for part in arguments.parts.split(","):
        until = time.monotonic() + _SHARES[part] * max(0.0, ends - time.monotonic())
        match part:
            case "host":
                found[part] = host.describe()
                if not found[part]["gpus"]:
                    print(f"there is no GPU to measure: {found[part]['why']}")
                    return 1
            case "driver" | "xla":
                module = driver_checks if part == "driver" else xla_checks
                names = [name for name in module.CHECKS if not wanted or name in wanted]
                found[part] = checking.run(module.__name__, names, until)
            case "serve":
                one = serve.Serving(arguments.out, until, arguments.seconds, arguments.largest, arguments.port)
                found[part] = one.run()
            case "tests":
                found[part] = _tests(arguments.out, until)
        (arguments.out / "report.json").write_text(json.dumps(found, indent=1, default=str) + "\n")
        (arguments.out / "gpu.md").write_text(page.markdown(found))
        print(f"== {part} done, {max(0.0, ends - time.monotonic()):.0f} s left", flush=True)
    print((arguments.out / "gpu.md").read_text())
    return 0


def _tests(folder: Path, until: float) -> dict[str, Any]:
    """Runs the tests that need a GPU until ``until``; returns how many ran and what failed."""
    result = folder / "tests_gpu.xml"
    result.unlink(missing_ok=True)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-n",
        "4",
        "-p",
        "no:cacheprovider",
        "tests/gpu",
        f"--junitxml={result.resolve()}",
    ]
    # Several daemons stand beside each other.
    environment = {"XLA_CLIENT_MEM_FRACTION": "0.1", **os.environ}
    with (folder / "tests_gpu.log").open("w") as log:
        running = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True)
    said = {}
    try:
        running.wait(max(1.0, until - time.monotonic() - _END))
    except subprocess.TimeoutExpired:
        # As Ctrl-C does: it ends the daemons of its tests, and says what has come to an end.
        running.send_signal(signal.SIGINT)
        said = {"unfinished": "no time left"}
        with contextlib.suppress(subprocess.TimeoutExpired):
            running.wait(_END)
    finally:
        end(running)
    if not result.exists():
        return {"unfinished": "pytest wrote no result, see tests_gpu.log"}
    cases = list(ElementTree.parse(result).getroot().iter("testcase"))
    marked = {kind: [case for case in cases if case.find(kind) is not None] for kind in ("failure", "error", "skipped")}
    return {**said, "tests": len(cases)} | {
        kind: {case.get("name"): str(case.find(kind).get("message"))[:300] for case in those}  # type: ignore[union-attr]
        for kind, those in marked.items()
    }


if __name__ == "__main__":
    sys.exit(main())
