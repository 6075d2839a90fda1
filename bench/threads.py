"""Measures a small network with all threads of XLA and with one, by its number of rows, to find where one is enough.

python -m bench.threads [--rounds N]      784 x 512 x 512 x 10 (bench/models/mlp); rounds alternate, medians are printed

The processor time is the whole process's, so that what XLA's threads spend waiting for each other is counted.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tensord.workers.devices.device import DeviceName
from tensord.workers.imports.model_imports import ModelImports

if TYPE_CHECKING:
    from tensord.workers.programs.placement import Placement

_MODEL = Path(__file__).parent / "models" / "mlp" / "1" / "model.py"
_RUNS = 100


class Spent(NamedTuple):
    """The microseconds of one run: wall time, and processor time of the process."""

    clock: float
    processor: float


class Program:
    """The network compiled for ``rows`` rows, with the worker's options."""

    def __init__(self, apply: Any, placement: Placement, rows: int) -> None:
        import jax

        self._parameters = placement.parameters
        self._inputs = {"x": np.ones((rows, 784), np.float32)}
        inputs = {"x": placement.spec((rows, 784), np.dtype(np.float32))}
        lowered = jax.jit(apply).lower(placement.parameter_specs, inputs)
        self.flops = lowered.cost_analysis()["flops"]
        self._compiled = placement.compile(lowered)

    def measure(self) -> Spent:
        """Runs the program a hundred times; returns the median wall time and the mean processor time."""
        spans: list[float] = []
        processor = time.process_time()
        for _ in range(_RUNS):
            begin = time.perf_counter()
            np.asarray(self._compiled(self._parameters, self._inputs)["logits"])
            spans.append(time.perf_counter() - begin)
        processor = time.process_time() - processor
        return Spent(statistics.median(spans) * 1e6, processor / _RUNS * 1e6)


def main() -> None:
    """Measures each batch size and prints a line for it."""
    parser = argparse.ArgumentParser(prog="bench.threads", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    rounds = parser.parse_args().rounds
    name = DeviceName("cpu", 0)
    name.prepare_environment()
    from tensord.workers.devices.device_cpu import thread_count
    from tensord.workers.loading.parameters import host_sets
    from tensord.workers.processor.single_thread import SingleThreadDevice
    from tensord.workers.processor.small_programs import placed
    from tensord.workers.programs.placement import Placement

    usual, single = name.open(), SingleThreadDevice(0).device
    model = ModelImports.of_version("mlp", [_MODEL.parent]).run(_MODEL)
    apply, parameters = model.create(_MODEL.parent, {}, usual)
    sets = host_sets("mlp", parameters)
    placements = (Placement(sets), placed(sets, single))
    print(f"{'':12}   {thread_count()} threads, us       one thread, us")
    print(f"{'rows':>4} {'Mflops':>7}   {'clock':>7} {'processor':>9}   {'clock':>7} {'processor':>9}")
    for rows in model.batch_buckets:
        programs = [Program(apply, placement, rows) for placement in placements]
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
