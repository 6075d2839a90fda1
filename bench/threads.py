"""What one run of a small network costs with all threads of XLA and with one, by its number of rows: where to set the bound.

python -m bench.threads [--rounds N]      784 x 512 x 512 x 10 (bench/models/mlp); rounds alternate, medians are printed

The processor time is the whole process's, so that what XLA's threads spend waiting for each other is counted.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import time
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from workers.device import DeviceName

_MODEL = Path(__file__).parent / "models" / "mlp" / "1" / "model.py"
_RUNS = 100


class Spent(NamedTuple):
    """Microseconds a run."""

    clock: float
    processor: float


class Program:
    """The network for so many rows on one device."""

    def __init__(self, apply: Any, parameters: Any, rows: int, device: Any) -> None:
        import jax

        from workers.single_thread import share

        self._parameters = share(parameters, device)
        self._inputs = {"x": np.ones((rows, 784), np.float32)}
        where = jax.sharding.SingleDeviceSharding(device)
        given = jax.tree.map(
            lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=where),
            (parameters, self._inputs),
        )
        lowered = jax.jit(apply).lower(*given)
        self.flops = lowered.cost_analysis()["flops"]
        self._compiled = lowered.compile()

    def measure(self) -> Spent:
        """The median by the clock and the mean of processor time, of a hundred runs."""
        spans: list[float] = []
        processor = time.process_time()
        for _ in range(_RUNS):
            begin = time.perf_counter()
            np.asarray(self._compiled(self._parameters, self._inputs)["logits"])
            spans.append(time.perf_counter() - begin)
        processor = time.process_time() - processor
        return Spent(statistics.median(spans) * 1e6, processor / _RUNS * 1e6)


def _model() -> ModuleType:
    specification = importlib.util.spec_from_file_location("mlp", _MODEL)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def main() -> None:
    """Prints a line for each bucket."""
    parser = argparse.ArgumentParser(prog="bench.threads", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    rounds = parser.parse_args().rounds
    name = DeviceName("cpu", 0)
    name.prepare_environment()
    from workers.device_cpu import thread_count
    from workers.single_thread import SingleThreadDevice

    usual, single = name.open(), SingleThreadDevice(0).open()
    if single is None:
        raise SystemExit("this jax has no second CPU client")
    model = _model()
    apply, parameters = model.create(_MODEL.parent, {}, usual)
    print(f"{'':12}   {thread_count()} threads, us       one thread, us")
    print(f"{'rows':>4} {'Mflops':>7}   {'clock':>7} {'processor':>9}   {'clock':>7} {'processor':>9}")
    for rows in model.batch_buckets:
        programs = [Program(apply, parameters, rows, device) for device in (usual, single)]
        for program in programs:
            program.measure()
        spent: list[list[Spent]] = [[], []]
        for _ in range(rounds):
            for program, found in zip(programs, spent, strict=True):
                found.append(program.measure())
        line = f"{rows:4} {programs[0].flops / 1e6:7.1f}"
        for found in spent:
            clock, processor = (statistics.median(column) for column in zip(*found, strict=True))
            line += f"   {clock:7.0f} {processor:9.0f}"
        print(line, flush=True)


if __name__ == "__main__":
    main()
