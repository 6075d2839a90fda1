"""Measures what importing the client adds to numpy's own import: ``python -m bench.client_import [--rounds N]``.

Each round is a new interpreter that imports numpy, then ``tensord_client``. It prints the medians of the milliseconds and of the
KiB of resident memory that the second import took, and how many modules it loaded.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from typing import Any

from bench.server import ROOT

_IMPORT = """
import json, re, sys, time

def kib():
    return int(re.search(r"VmRSS:\\s+(\\d+)", open("/proc/self/status").read())[1])

began = time.perf_counter()
import numpy
numpy_s = time.perf_counter() - began
sys.path.insert(0, sys.argv[1])
before, modules, began = kib(), set(sys.modules), time.perf_counter()
import tensord_client
took = time.perf_counter() - began
loaded = sorted(set(sys.modules) - modules)
print(json.dumps({"ms": 1e3 * took, "numpy_ms": 1e3 * numpy_s, "kib": kib() - before, "modules": loaded}))
"""


def measured() -> dict[str, Any]:
    """Imports numpy and the client in one new interpreter and returns the figures."""
    command = [sys.executable, "-c", _IMPORT, str(ROOT / "client")]
    found: dict[str, Any] = json.loads(subprocess.check_output(command, text=True, cwd="/"))
    return found


def main() -> None:
    """Parses the command line, measures and prints the medians."""
    parser = argparse.ArgumentParser(
        prog="bench.client_import", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=11)
    rounds = [measured() for _ in range(parser.parse_args().rounds)]
    took, own, kib = (statistics.median(each[name] for each in rounds) for name in ("ms", "numpy_ms", "kib"))
    modules = rounds[0]["modules"]
    ours = sum(name.startswith("tensord_client") for name in modules)
    print(f"tensord_client over numpy: {took:.1f} ms (numpy itself {own:.1f} ms), {kib:.0f} KiB, ", end="")
    print(f"{ours} modules of its own and {len(modules) - ours} others")


if __name__ == "__main__":
    main()
