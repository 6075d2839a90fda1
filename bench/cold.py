"""Measures the first start with many models that nobody has compiled yet: its time, and the worker's memory afterwards.

python -m bench.cold [--models N]        generated models of three small layers and four buckets each

There are three starts: compiled in processes of their own (``executables.compile_processes``), compiled in the worker, and found
in the cache. Printed are the seconds until the daemon is ready, the processor seconds of all its processes, and the worker's
resident memory then.
"""

from __future__ import annotations

import argparse
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from textwrap import dedent

from bench.memory import resident
from bench.server import ROOT, children, ready

ADDRESS = "127.0.0.1:18104"
BUCKETS = (1, 2, 4, 8)
SOURCE = """
    import jax, jax.numpy as jnp, numpy as np
    inputs = {{"x": "FP32[64]"}}
    outputs = {{"y": "FP32[64]"}}
    max_batch_size = 8
    batch_buckets = {buckets}

    def create(path, config, device):
        def apply(params, inputs):
            h = inputs["x"]
            for layer in range(3):
                h = jnp.tanh(h @ params[f"w{{layer}}"] + {number})
            return {{"y": jax.nn.softmax(h)}}
        random = np.random.default_rng({number})
        return apply, {{f"w{{layer}}": random.normal(size=(64, 64)).astype("f") for layer in range(3)}}
"""


def write(repository: Path, count: int) -> None:
    """Writes so many models, no two of which have the same program."""
    for number in range(count):
        folder = repository / f"m{number:03}" / "1"
        folder.mkdir(parents=True)
        (folder / "model.py").write_text(dedent(SOURCE.format(number=number, buckets=BUCKETS)))


def start(repository: Path, environment: Mapping[str, str]) -> str:
    """Starts the daemon; returns a line with the seconds until it is ready, the processor seconds and the worker's memory."""
    command = [sys.executable, "-m", "tensord", "serve", "--model-repository", str(repository)]
    command += ["--http-port", ADDRESS.rpartition(":")[2], "--grpc-port", "0", "--allow-metrics=false"]
    used, began = _processor(), time.perf_counter()
    process = subprocess.Popen(command, cwd=ROOT, env={**os.environ, **environment}, stderr=subprocess.DEVNULL)
    try:
        while not ready(ADDRESS):
            if process.poll() is not None:
                raise SystemExit(f"the daemon exited with {process.returncode}")
            time.sleep(0.05)
        seconds = time.perf_counter() - began
        (worker,) = (pid for pid, module in children(process.pid).items() if module == "workers")
        byte_size = resident(worker)
        # Compile processes have ended by then, and are counted.
        time.sleep(3)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()
    return f"{seconds:7.1f} s, {_processor() - used:7.1f} s of processors, worker {byte_size / 1e6:6.0f} MB"


def _processor() -> float:
    found = resource.getrusage(resource.RUSAGE_CHILDREN)
    return found.ru_utime + found.ru_stime


def main() -> None:
    """Starts the daemon three times and prints a line for each start."""
    parser = argparse.ArgumentParser(
        prog="bench.cold", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", type=int, default=300)
    count = parser.parse_args().models
    print(f"{count} models, {count * len(BUCKETS)} programs")
    with tempfile.TemporaryDirectory() as folder:
        repository = Path(folder, "models")
        write(repository, count)
        own = {"XDG_CACHE_HOME": f"{folder}/own", "TENSORD_EXECUTABLES_COMPILE_PROCESSES": "0"}
        print("compiled beside the worker ", start(repository, {"XDG_CACHE_HOME": f"{folder}/beside"}), flush=True)
        print("compiled in the worker     ", start(repository, own), flush=True)
        print("found in the cache         ", start(repository, {"XDG_CACHE_HOME": f"{folder}/beside"}), flush=True)


if __name__ == "__main__":
    main()
