"""What a step of a stepped model costs when it is served, beside the same step in a bare loop; how soon a request joins others.

    python -m bench.steps [--rounds 5] [--seconds 2] [--slots 64]     bench/models/writer with so many slots

Both run in turn. The bare loop calls the model's jitted ``step`` for all slots and reads what it gives. Processor time is the
worker's, or the loop's, for one step with all slots taken; it minds a busy machine less than the clock does. The first response
of one that joins is told in steps of that moment, without its prefill, which is measured alone.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import re
import runpy
import shutil
import statistics
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import grpc
import jax
import numpy as np
from tritonclient.grpc import service_pb2, service_pb2_grpc

from bench.server import ROOT, Usage, children, serving

HTTP, GRPC = "127.0.0.1:18100", "127.0.0.1:18101"
WRITER = ROOT / "bench" / "models" / "writer"
COUNT = 100


class Bare:
    """The step in a loop."""

    def __init__(self, folder: Path) -> None:
        """``folder``: of the version."""
        module = runpy.run_path(str(folder / "model.py"))
        (init, _, step), parameters = module["create"](folder, {}, jax.devices()[0])
        self.slots: int = module["slots"]
        self._parameters = jax.device_put(parameters)
        self._carry = jax.jit(init, static_argnums=1)(self._parameters, self.slots)
        self._step = jax.jit(step, donate_argnums=1)
        self._active = jax.device_put(np.ones(self.slots, np.bool_))
        self.run(5)

    def run(self, count: int) -> None:
        """So many steps, each read."""
        for _ in range(count):
            self._carry, outputs, emit, finished = self._step(self._parameters, self._carry, self._active)
            np.asarray(outputs["token"]), np.asarray(emit), np.asarray(finished)

    def measure(self, seconds: float) -> tuple[float, float]:
        """Microseconds of a step: by the clock, and of the processor."""
        steps, began, used = 0, time.perf_counter(), time.process_time()
        while (lasted := time.perf_counter() - began) < seconds:
            self.run(20)
            steps += 20
        return lasted / steps * 1e6, (time.process_time() - used) / steps * 1e6


class Served:
    """Requests on one stream, as many at a time as are wanted: whoever ends is asked again."""

    def __init__(self) -> None:
        self._asked: queue.SimpleQueue[Any] = queue.SimpleQueue()
        channel = grpc.insecure_channel(GRPC)
        self._call = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelStreamInfer(iter(self._asked.get, None))
        self.again = True
        self.first: dict[str, float] = {}
        threading.Thread(target=self._read, daemon=True).start()

    def ask(self, name: str, count: int = COUNT) -> None:
        """One more request."""
        request = service_pb2.ModelInferRequest(model_name="writer", id=name)
        for key, values in (("prompt", list(range(8))), ("count", [count])):
            request.inputs.add(name=key, datatype="INT32", shape=[len(values)])
            request.raw_input_contents.append(np.array(values, np.int32).tobytes())
        request.parameters["triton_enable_empty_final_response"].bool_param = True
        self._asked.put(request)

    def _read(self) -> None:
        try:
            for answer in self._call:
                inner = answer.infer_response
                self.first.setdefault(inner.id, time.perf_counter())
                if inner.parameters["triton_final_response"].bool_param and self.again and inner.id.isdigit():
                    self.ask(inner.id)
        except grpc.RpcError:
            pass

    def joins(self, name: str) -> float:
        """Seconds until the first response of a request that joins now."""
        began = time.perf_counter()
        self.ask(name, 1)
        while name not in self.first:
            time.sleep(0)
        return self.first[name] - began

    def close(self) -> None:
        """Nobody waits for what is under way."""
        self.again = False
        self._call.cancel()


def steps_so_far() -> int:
    """Of the model, since it was loaded."""
    with urllib.request.urlopen(f"http://{HTTP}/v2/models/writer/stats", timeout=60) as answer:
        return int(json.load(answer)["model_stats"][0]["execution_count"])


def main() -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--log", type=Path, default=Path(f"/tmp/bench-steps-{os.getpid()}.log"))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as repository:
        return measure(arguments, Path(repository))


def write_model(repository: Path, slots: int) -> Path:
    """The writer with so many slots. Returns the folder of its version."""
    folder = repository / "writer"
    shutil.copytree(WRITER, folder)
    file = folder / "1" / "model.py"
    text, found = re.subn(r"^slots = \d+$", f"slots = {slots}", file.read_text(), flags=re.MULTILINE)
    assert found == 1, file
    text = re.sub(
        r"^step_slots = .*$", f"step_slots = {tuple(size for size in (1, 4, 16) if size < slots)}", text, flags=re.M
    )
    file.write_text(text)
    return folder / "1"


def measure(arguments: argparse.Namespace, repository: Path) -> int:
    """Both in turn."""
    bare = Bare(write_model(repository, arguments.slots))
    tensord = [
        sys.executable,
        "-m",
        "tensord",
        "serve",
        "--config",
        "bench/serve.toml",
        f"--model-repository={repository}",
    ]
    ratios: list[tuple[float, float, float]] = []
    with serving(tensord, HTTP, arguments.log) as pid:
        (worker,) = [child for child, name in children(pid).items() if name == "workers"]
        for turn in range(arguments.rounds):
            clock_us, processor_us = bare.measure(arguments.seconds)
            alone = Served()
            alone.joins("warm")
            prefill_us = statistics.median(alone.joins(f"alone {i}") for i in range(20)) * 1e6
            alone.close()
            served = Served()
            for slot in range(bare.slots - 1):
                served.ask(str(slot))
            time.sleep(0.3)
            before, began, used = steps_so_far(), time.perf_counter(), Usage.of(worker)
            time.sleep(arguments.seconds)
            count, lasted = steps_so_far() - before, time.perf_counter() - began
            spent = Usage.of(worker).since(used)
            step_us, worker_us = lasted / count * 1e6, (spent.user_us + spent.kernel_us) / count
            joined_us = statistics.median(served.joins(f"{turn} {i} joins") for i in range(20)) * 1e6
            served.close()
            ratios.append((step_us / clock_us, worker_us / processor_us, (joined_us - prefill_us) / step_us))
            print(
                f"step: bare {clock_us:.0f} us, served {step_us:.0f} us; processor {processor_us:.0f} and {worker_us:.0f} us; "
                f"first response alone {prefill_us:.0f} us, joining {bare.slots - 1} others {joined_us:.0f} us"
            )
    step, processor, joins = (statistics.median(each) for each in zip(*ratios, strict=True))
    print(
        f"a step costs {step:.2f} x (processor {processor:.2f} x); who joins waits {joins:.2f} steps besides its prefill"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
