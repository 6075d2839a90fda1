"""Measures what an ensemble costs beside its programs: requests through a worker's loop, and the three programs in a bare loop.

    python -m bench.ensemble [--rounds N]     784 pixels ─▶ pre ─▶ mlp ─▶ post (bench/models); all in turn, medians are printed

All run in this process and one thread. A request arrives on a lane and its answer leaves on it; writing the request and reading
the answer is not counted. Printed are wall time, and processor time of the thread, which a busy machine changes less.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tensord.config import model_config
from tensord.config.options import Expert, Options
from tensord.shm.arena import Arena
from tensord.shm.channel import Channel, pair
from tensord.shm.control_records import FromWorker, LaneOpened, Load, Loaded, ToWorkerControl
from tensord.shm.lane import SubmitterLane
from tensord.shm.messages import PreparedRequest, PreparedTensor, RequestRecord
from tensord.shm.prepared import Numbers
from tensord.shm.record import Record, decoder
from tensord.workers.devices.device import DeviceName
from tensord.workers.models.model_version import ModelVersion
from tensord.workers.worker import Worker

MODELS = Path(__file__).parent / "models"
MEMBERS = (("pre", "pixels", "x"), ("mlp", "x", "logits"), ("post", "logits", "probabilities"))
PIXELS = (np.arange(784) % 256).astype(np.uint8).reshape(1, 784)


class Bench:
    """A worker's loop with these models, for which this object plays the supervisor and the front."""

    def __init__(self) -> None:
        ours, theirs = pair()
        self._control = Channel(ours, decoder(FromWorker))
        device_name = DeviceName("cpu", 0)
        options = Options(expert=Expert(spin_us=0))
        channel = Channel(theirs, decoder(ToWorkerControl))
        self._worker = Worker(channel, options, device_name, device_name.open(), turn_ns=0)
        mine, its = pair()
        self._tell(LaneOpened(7), its.fileno())
        its.close()
        self._lane = SubmitterLane(mine, Arena(1 << 20, 1 << 20, 0))
        self._numbers: Numbers[PreparedRequest] = Numbers()
        self._number = 0
        for name in (*(member for member, _, _ in MEMBERS), "pipeline"):
            self._load(name, (MODELS / name / "config.pbtxt").read_text())
        self._calls = [(self._program(name), given, made) for name, given, made in MEMBERS]

    def _tell(self, record: Record, *fds: int) -> None:
        self._control.put(record, *fds)
        assert self._control.flush()
        self._worker.turn()

    def _load(self, name: str, config: str) -> None:
        message = model_config.parse_pbtxt(config, name)
        path = MODELS / name
        with tempfile.TemporaryDirectory() as folder:
            path = path if path.exists() else Path(folder)
            self._tell(Load(name, 1, str(path), str(path / "1"), message.SerializeToString()))
            while True:
                received = self._control.receive()
                for record in received[0] if received else ():
                    if isinstance(record, Loaded):
                        assert record.reason == "", record.reason
                        return
                self._worker.turn()

    def _version(self, name: str) -> ModelVersion:
        return self._worker._models.find(name, 0)

    def _program(self, name: str) -> Any:
        model = self._version(name).jitted
        assert model is not None
        (shape,) = [spec.model_dims for spec in self._version(name).signature.inputs.values()]
        executable: Any = next(program for program in model.programs((shape,), 1) if program is not None)
        return functools.partial(executable.call, executable.parameters())

    def bare(self) -> Any:
        """Runs the three programs one after the other, without the worker. Returns the output."""
        tensor: Any = PIXELS
        for call, given, made in self._calls:
            tensor = call({given: tensor})[made]
        return np.asarray(tensor)

    def submit(self, model: str) -> None:
        """Sends the worker a request to a model, on the lane."""
        self._number += 1
        kind = self._numbers.number(PreparedRequest(model, 0, (PreparedTensor("pixels", "UINT8", (1, 784)),)))
        record = RequestRecord(self._number, kind.number, (PIXELS.tobytes(),), received_ns=time.monotonic_ns())
        self._lane.submit(record, kind)
        assert self._lane.flush()

    def turn(self) -> None:
        """Runs one iteration of the worker's loop."""
        self._worker.turn()

    def answer(self) -> bytes:
        """Runs the worker's loop until the request is answered; returns the bytes of the output."""
        while not (received := self._lane.receive()):
            self._worker.turn()
        ((_, own),) = received
        (content,) = own.contents
        assert isinstance(content, bytes), own.message
        return content

    def copied(self) -> dict[str, int]:
        """Returns how many bytes were copied so far: model -> bytes."""
        return {version.name: version.statistics.copied_byte_size for version in self._worker._models}


def measure(bench: Bench, what: str, count: int) -> tuple[float, float]:
    """Returns the median microseconds of one request: wall time, and processor time of this thread.

    ``what``: the model to ask; "": its programs without the worker.
    """
    wall, processor = [], []
    for _ in range(count):
        bench.submit(what or "pipeline")
        if not what:
            # So that the caches hold as much of the programs as when a request comes.
            bench.answer()
        call: Callable[[], Any] = bench.turn if what else bench.bare
        began, began_here = time.perf_counter_ns(), time.thread_time_ns()
        call()
        processor.append(time.thread_time_ns() - began_here)
        wall.append(time.perf_counter_ns() - began)
        if what:
            bench.answer()
    return statistics.median(wall) / 1000, statistics.median(processor) / 1000


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="bench.ensemble", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=10)
    rounds = parser.parse_args().rounds
    bench = Bench()
    expected = bench.bare()
    bench.submit("pipeline")
    np.testing.assert_allclose(np.frombuffer(bench.answer(), np.float32).reshape(1, 10), expected, rtol=1e-5)
    kinds = {"": "three programs", "pipeline": "ensemble"}
    for kind in kinds:
        measure(bench, kind, 300)
    figures = [{kind: measure(bench, kind, 200) for kind in kinds} for _ in range(rounds)]
    for number, what in enumerate(("wall", "processor")):
        told = [
            f"{name} {statistics.median(each[kind][number] for each in figures):.1f} us" for kind, name in kinds.items()
        ]
        more = statistics.median(each["pipeline"][number] - each[""][number] for each in figures)
        print(f"{what:10} {', '.join(told)}; the ensemble costs {more:.1f} us more than its programs")
    before = bench.copied()
    bench.submit("pipeline")
    bench.answer()
    bench.turn()
    print("bytes copied for one request:", {name: size - before[name] for name, size in bench.copied().items()})


if __name__ == "__main__":
    main()
