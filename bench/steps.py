"""Measures a served step of a stepped model beside the same step in a bare loop, and how soon a request joins others.

    python -m bench.steps [--rounds 5] [--seconds 2] [--slots 64]     bench/models/writer with so many slots

Both run in turn, a hundred steps each; printed for a round are first quartiles. The bare loop calls the model's jitted ``step``
for all slots and reads its outputs. The served model has requests in all slots but one, which begin together; it is measured
while they are stepped and none begins or ends. Processor time is the worker's, or the loop's; a busy machine changes it less than
wall time, because the front and the client run on the same cores. For a request that joins it counts how many steps the others
got before its first response. The time until that response is printed beside the time it takes without other requests, which is
its prefill and the way to the worker and back.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import re
import runpy
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from bench.server import ROOT, children, serving
from bench.token_stream import PROMPT, TokenStream

HTTP, GRPC = "127.0.0.1:18174", ("127.0.0.1", 18175)
WRITER = ROOT / "bench" / "models" / "writer"
#: Steps that are measured of a crowd, those before, while it gathers, and those after, before the first of it ends.
MEASURED, BEFORE, AFTER = 96, 8, 14
#: Requests that join a crowd, one after the other.
JOINS = 8


class Cost(NamedTuple):
    """The microseconds of one step: wall time, processor time of the process that runs it, and of the front."""

    clock_us: float
    processor_us: float
    front_us: float = 0.0


class Bare:
    """Runs the model's step in a loop, without a daemon."""

    def __init__(self, folder: Path) -> None:
        """Loads and compiles the model. ``folder``: the folder of its version."""
        module = runpy.run_path(str(folder / "model.py"))
        (init, _, step), parameters = module["create"](folder, {}, jax.devices()[0])
        self.slots: int = module["slots"]
        self._parameters = jax.device_put(parameters)
        self._carry = jax.jit(init, static_argnums=1)(self._parameters, self.slots)
        self._step = jax.jit(step, donate_argnums=1)
        self._active = jax.device_put(np.ones(self.slots, np.bool_))
        self.run(5)

    def run(self, count: int) -> None:
        """Runs ``count`` steps and reads the outputs of each."""
        for _ in range(count):
            self._carry, outputs, emit, finished = self._step(self._parameters, self._carry, self._active)
            np.asarray(outputs["token"]), np.asarray(emit), np.asarray(finished)

    def measure(self) -> Cost:
        """Measures steps with all slots in use."""
        began, used = time.perf_counter(), time.process_time()
        self.run(MEASURED)
        lasted, used = time.perf_counter() - began, time.process_time() - used
        return Cost(lasted / MEASURED * 1e6, used / MEASURED * 1e6)


class Served:
    """The daemon with the model, which a crowd of requests and one that joins them are sent to."""

    def __init__(self, daemon: int, slots: int) -> None:
        """Opens a connection for the crowd and one for the request that joins. ``daemon``: its process id."""
        found = {name: pid for pid, name in children(daemon).items()}
        self._processes = found["workers"], found["daemon.grpc"]
        self._crowd, self._size = TokenStream(GRPC), slots - 1
        self._joining = TokenStream(GRPC)

    def measure(self) -> Cost | None:
        """Measures steps with all slots but one in use.

        Returns None if the responses of nearly all steps came at once, as on a busy machine.
        """
        before = self._gather()
        first, began = self._crowd.wait(before + BEFORE * self._size)
        used = [processor_us(pid) for pid in self._processes]
        last, ended = self._crowd.wait(before + (BEFORE + MEASURED) * self._size)
        used = [processor_us(pid) - at_first for pid, at_first in zip(self._processes, used, strict=True)]
        self._scatter()
        steps = (last - first) / self._size
        return Cost((ended - began) * 1e6 / steps, used[0] / steps, used[1] / steps) if steps > MEASURED / 2 else None

    def alone_us(self) -> float:
        """Returns the median microseconds until the first response of a request while there is no other one."""
        return statistics.median(self._join() for _ in range(20))

    def joining(self, step_us: float, seconds: float) -> list[tuple[float, float]]:
        """Returns, for requests that join the crowd at random moments, the microseconds until their first response and how
        many steps the crowd got meanwhile.
        """
        found: list[tuple[float, float]] = []
        until = time.perf_counter() + seconds
        while time.perf_counter() < until:
            before = self._gather()
            self._crowd.wait(before + BEFORE * self._size)
            for _ in range(JOINS):
                time.sleep(random.random() * step_us / 1e6)
                at_first = self._crowd.responses
                took_us = self._join()
                steps = (self._crowd.responses - at_first) / self._size
                if self._crowd.responses > before + (BEFORE + MEASURED) * self._size:
                    break
                found.append((took_us, steps))
            self._scatter()
        return found

    def _join(self) -> float:
        before, began = self._joining.responses, time.perf_counter()
        self._joining.ask(1)
        _, ended = self._joining.wait(before + 1)
        return (ended - began) * 1e6

    def _gather(self) -> int:
        """Sends the crowd's requests. Returns how many responses had come before."""
        before = self._crowd.responses
        self._crowd.ask(BEFORE + MEASURED + AFTER, self._size)
        return before

    def _scatter(self) -> None:
        self._crowd.wait(ended=self._crowd.asked)

    def close(self) -> None:
        """Closes both connections."""
        self._crowd.close()
        self._joining.close()


def quiet(costs: list[Cost]) -> Cost:
    """Returns the first quartile of each figure, because other programs on the machine only ever add to it."""
    return Cost(*(statistics.quantiles(each, n=4, method="inclusive")[0] for each in zip(*costs, strict=True)))


def processor_us(pid: int) -> float:
    """Returns the processor time that all threads of a process have used, in microseconds."""
    used = 0
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            used += int((thread / "schedstat").read_text().split()[0])
    return used / 1e3


def main() -> int:
    """Parses the command line, measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--log", type=Path, default=Path(f"/tmp/bench-steps-{os.getpid()}.log"))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as repository:
        return measure(arguments, Path(repository))


def write_model(repository: Path, slots: int) -> Path:
    """Writes the model ``writer`` with so many slots. Returns the folder of its version."""
    folder = repository / "writer"
    shutil.copytree(WRITER, folder)
    file = folder / "1" / "model.py"
    text, found = re.subn(r"^slots = \d+$", f"slots = {slots}", file.read_text(), flags=re.MULTILINE)
    assert found == 1, file
    assert f"LONGEST = 256, 128, 4, 2, {PROMPT + BEFORE + MEASURED + AFTER + 2}" in text
    text = re.sub(
        r"^step_slots = .*$", f"step_slots = {tuple(size for size in (1, 4, 16) if size < slots)}", text, flags=re.M
    )
    file.write_text(text)
    return folder / "1"


def measure(arguments: argparse.Namespace, repository: Path) -> int:
    """Measures both in turn and prints the figures; returns the exit status."""
    bare = Bare(write_model(repository, arguments.slots))
    tensord = [sys.executable, "-m", "tensord", "serve", f"--model-repository={repository}", "--device=cpu"]
    tensord += [f"--http-port={HTTP.rpartition(':')[2]}", f"--grpc-port={GRPC[1]}", "--allow-metrics=false"]
    ratios: list[tuple[float, float]] = []
    waits: list[float] = []
    with serving(tensord, HTTP, arguments.log) as pid, contextlib.closing(Served(pid, bare.slots)) as served:
        for _ in range(arguments.rounds):
            loops, crowds = list[Cost](), list[Cost]()
            until = time.perf_counter() + 2 * arguments.seconds
            while len(crowds) < 4 or time.perf_counter() < until:
                loops.append(bare.measure())
                if (measured := served.measure()) is not None:
                    crowds.append(measured)
            alone, cost = quiet(loops), quiet(crowds)
            prefill_us = served.alone_us()
            joining_us, steps = zip(*served.joining(cost.clock_us, arguments.seconds / 2), strict=True)
            ratios.append((cost.clock_us / alone.clock_us, cost.processor_us / alone.processor_us))
            waits += steps
            print(
                f"step: bare {alone.clock_us:.0f} us, served {cost.clock_us:.0f} us; processor {alone.processor_us:.0f} and "
                f"{cost.processor_us:.0f} us, front {cost.front_us:.0f} us; first response alone {prefill_us:.0f} us, joining "
                f"{bare.slots - 1} others {statistics.median(joining_us):.0f} us",
                flush=True,
            )
    step, processor = (statistics.median(each) for each in zip(*ratios, strict=True))
    *_, ninth = statistics.quantiles(waits, n=10)
    print(
        f"a step costs {step:.2f} x (processor {processor:.2f} x); who joins waits for {statistics.median(waits):.2f} steps, "
        f"one of ten for more than {ninth:.2f}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
