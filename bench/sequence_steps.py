"""Measures what a step of a sequence costs beside a stateless request of the same arithmetic, and finding its worker.

    python -m bench.sequence_steps [--rounds 5] [--seconds 2] [--connections 1,16]

One daemon serves bench/models/rnn and the same network with inputs in place of its state; both are asked in turn, each connection
of steps with a sequence of its own. Every answer is compared. The figures are processor time of the worker and of the front for a
request, medians of the rounds, and the median ratio; a busy machine changes them less than it changes wall time. No process polls
before it sleeps (``expert.spin_us = 0``), because that time belongs to no request.

The second table shows how long ``tensord.daemon.submit.routing`` takes to find the worker of a living sequence, with real pages
in this process: processor time of the best and of the median round.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np

from bench import closed_loop, grpc_connection
from bench.closed_loop import Connection, Row
from bench.fronts import Run, Server, closed
from bench.server import ROOT, serving
from tensord.daemon.submit.in_flight import InFlight, WorkerLink
from tensord.daemon.submit.sequences import SequenceRouting
from tensord.shm.control_records import ModelState
from tensord.shm.messages import PreparedRequest, PreparedTensor, RequestRecord
from tensord.shm.prepared import Numbered
from tensord.shm.sequence_keys import SequenceKeys
from tensord.shm.sequence_page import SequencePage

HTTP, GRPC = "127.0.0.1:18105", "127.0.0.1:18106"
_MODEL = """
import runpy

import jax.numpy as jnp


def create(path, config, device):
    step, params = runpy.run_path({rnn!r})["create"](path, config, device)

    def apply(params, inputs):
        return step(params, inputs, {{"h": jnp.tile(inputs["x"], (1, 4))}})[0]

    return apply, params
"""
_CONFIG = """
backend: "jax"
max_batch_size: 32
input [ { name: "x" data_type: TYPE_FP32 dims: [ 64 ] } ]
output [ { name: "y" data_type: TYPE_FP32 dims: [ 64 ] } ]
dynamic_batching { }
instance_group [ { count: 1 kind: KIND_CPU } ]
"""
#: Sequences on each page while it is probed, and look-ups of a round.
_LIVE, _LOOKS = 250, 5000


def rows(protocol: str, connections: int) -> tuple[Row, Row]:
    """Returns the row of stateless requests and the row of steps. Both send zeros, for which the right answer is zeros."""
    room = grpc_connection if protocol == "grpc" else closed_loop
    kind = grpc_connection.GrpcConnection if protocol == "grpc" else Connection
    x = np.zeros((1, 64), np.float32)

    def request(model: str, parameters: dict[str, int | bool]) -> bytes:
        return room.infer_request(model, [("x", x)], "y", parameters)

    def step(number: int, start: bool) -> bytes:
        return request("rnn", {"sequence_id": number, "sequence_start": start, "sequence_end": False})

    alone = Row("stateless", connections, request("rnn_alone", {}), x, connection=kind)
    return alone, Row("step", connections, b"", x, connection=_stepping(kind, step, connections))


def _stepping(kind: type[Connection], step: Callable[[int, bool], bytes], count: int) -> type[Connection]:
    """Returns a class of connections that send steps: each has a sequence of its own, which its first request begins.

    The ids of sequences are used again when there are more than ``count`` connections.
    """
    numbers = itertools.cycle(range(1, count + 1))

    class Stepping(kind):
        def __init__(self, address: tuple[str, int]) -> None:
            super().__init__(address)
            number = next(numbers)
            self._next, self._others = step(number, True), step(number, False)

        def send(self, request: bytes) -> None:
            request, self._next = self._next, self._others
            super().send(request)

    return Stepping


def write_stateless(repository: Path) -> None:
    """Writes the model ``rnn_alone``: the network, with its input repeated four times in place of its state."""
    folder = repository / "rnn_alone" / "1"
    folder.mkdir(parents=True)
    (folder / "model.py").write_text(_MODEL.format(rnn=str(ROOT / "bench/models/rnn/1/model.py")))
    (folder.parent / "config.pbtxt").write_text(_CONFIG)


@contextlib.contextmanager
def daemon(log: Path) -> Iterator[dict[str, Server]]:
    """Runs a daemon with both models within the block; yields it by protocol."""
    with tempfile.TemporaryDirectory(prefix="tensord-bench-") as folder:
        write_stateless(Path(folder))
        command = [sys.executable, "-m", "tensord", "serve", "--allow-metrics=false", "--model-control-mode=explicit"]
        command += [f"--model-repository={ROOT / 'bench/models'}", f"--model-repository={folder}"]
        command += ["--load-model=rnn", "--load-model=rnn_alone", f"--http-port={HTTP.rpartition(':')[2]}"]
        os.environ["TENSORD_EXPERT_SPIN_US"] = "0"
        with serving([*command, f"--grpc-port={GRPC.rpartition(':')[2]}"], HTTP, log) as pid:
            yield {"http": Server("http", 1, pid, HTTP, HTTP), "grpc": Server("grpc", 1, pid, GRPC, HTTP)}


def compare(server: Server, connections: int, rounds: int, seconds: float) -> list[tuple[Run, Run]]:
    """Measures stateless requests and steps in turn, ``rounds`` times after one that does not count."""
    loads = [closed(row, seconds) for row in rows(server.protocol, connections)]
    for load in loads:
        server.run(load)
    return [cast(tuple[Run, Run], tuple(server.run(load) for load in loads)) for _ in range(rounds)]


def probe(workers: int, rounds: int = 20) -> tuple[float, float]:
    """Measures finding the worker of a living sequence among ``workers`` workers.

    Returns microseconds of processor time of the best and of the median round.
    """
    keys, pages = SequenceKeys("m", 1), [SequencePage.create(_LIVE * 2) for _ in range(workers)]
    attached = [SequencePage.attach(os.dup(page.fd)) for page in pages]
    for who in range(1, workers * _LIVE + 1):
        key, page = keys.key(who), pages[who % workers]
        page.begin(key, page.admit(key, 1000))
    alive = {
        number: WorkerLink(number, f"cpu:{number}", *cast(Any, (None, None)), page)
        for number, page in enumerate(attached)
    }
    config = json.dumps({"sequence_batching": {"max_sequence_idle_microseconds": 1000}}).encode()
    state = ModelState("m", 1, "READY", workers=tuple(alive), config=config, repeatable=False, sticky=True)
    asked = [_pending(1 + number * 7919 % (workers * _LIVE)) for number in range(_LOOKS)]
    routing = SequenceRouting({}, alive, 100)
    took = []
    for _ in range(rounds):
        began = time.process_time_ns()
        for pending in asked:
            routing.find(pending, routing.model(state), "")
        took.append((time.process_time_ns() - began) / _LOOKS / 1000)
    for page in (*attached, *pages):
        page.close()
    return min(took), statistics.median(took)


def _pending(who: int) -> InFlight:
    kind = Numbered(0, PreparedRequest("m", 0, (PreparedTensor("x", "UINT8", (1,)),)))
    return InFlight(record=RequestRecord(who, 0, (b"1",), sequence_id=who), numbered=kind)


def main() -> int:
    """Parses the command line, measures and prints both tables."""
    parser = argparse.ArgumentParser(
        prog="bench.sequence_steps", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="length of one measurement")
    parser.add_argument("--connections", default="1,16")
    parser.add_argument("--log", type=Path, default=Path("/tmp/bench-sequence-steps.log"), help="the daemon's")
    arguments = parser.parse_args()
    with daemon(arguments.log) as servers:
        print("| load | worker: request us | step us | x | front: request us | step us | x |")
        print("| --- | --- | --- | --- | --- | --- | --- |")
        for protocol, server in servers.items():
            for connections in map(int, arguments.connections.split(",")):
                pairs = compare(server, connections, arguments.rounds, arguments.seconds)
                print(f"| {protocol}-c{connections} {_columns(pairs)} |", flush=True)
    print("| workers | us to find the one of a sequence: best | median |\n| --- | --- | --- |")
    for workers in (1, 2, 4):
        best, median = probe(workers)
        print(f"| {workers} | {best:.2f} | {median:.2f} |")
    return 0


def _columns(pairs: list[tuple[Run, Run]]) -> str:
    columns = []
    for of in (lambda run: run.worker_us, lambda run: run.fronts_us):
        request, step = (statistics.median(of(pair[which]) for pair in pairs) for which in (0, 1))
        columns.append(f"| {request:.1f} | {step:.1f} | {statistics.median(of(s) / of(r) for r, s in pairs):.2f}")
    return " ".join(columns)


if __name__ == "__main__":
    sys.exit(main())
