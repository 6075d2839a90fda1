"""Runs a worker's loop in the test's own process, iteration by iteration; the test is its supervisor and its only front."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jax._src import compilation_cache
from msgspec.structs import replace

from tensord.config import model_config
from tensord.config.options import ExecutablesOptions, Expert, Options
from tensord.shm.arena import Arena, Lease
from tensord.shm.channel import Channel, new_buffer, pair
from tensord.shm.control_records import (
    ControlCall,
    FromWorker,
    LaneClient,
    LaneClosed,
    LaneLimits,
    LaneOpened,
    Load,
    Loaded,
    Reply,
    ToWorkerControl,
)
from tensord.shm.lane import SubmitterLane
from tensord.shm.messages import AnswerRecord, Parameter, PreparedRequest, RequestedOutput
from tensord.shm.operations import Peer, ServeLoaded
from tensord.shm.prepared import Numbers
from tensord.shm.record import Record, decoder
from tensord.workers.devices.device import DeviceName
from tensord.workers.models.model_version import ModelVersion
from tensord.workers.scheduling.queue import RequestQueue
from tensord.workers.worker import Worker
from tests import run_folder
from tests.fakes import whole_answers
from tests.raw_lane import RawLane
from tests.records import Tensor, WholeAnswer, WholeRequest
from tests.work.counter import Work

#: It never looks, and in ``WorkerLoop`` it never sleeps: a turn takes what is there.
OPTIONS = Options(expert=Expert(spin_us=0), executables=ExecutablesOptions(cache_directory=run_folder.programs()))
PATIENCE_SECONDS = 240.0
LIMITS = LaneLimits(in_flight=16, segments=4, segment_byte_size=64 << 20, response_byte_size=32 << 20)
#: As a worker opens it, which decides how programs run here: before any test does it in another way.
DEVICE_NAME = DeviceName("cpu", 0)
DEVICE = DEVICE_NAME.open()


def ever_queued(queue: RequestQueue[Any]) -> int:
    """Returns how many requests of one user have ever waited in a queue, where no other user had any."""
    return sum(queue._last.values())


class WorkerLoop:
    """A worker's loop. Its methods run iterations until what they wait for has come."""

    def __init__(self, options: Options = OPTIONS) -> None:
        ours, theirs = pair()
        self.control = Channel(ours, decoder(FromWorker))
        channel = Channel(theirs, decoder(ToWorkerControl))
        self.worker = Worker(channel, options, DEVICE_NAME, DEVICE, beat_ns=0)
        arenas = options.arenas
        self.arena = Arena(arenas.byte_size, arenas.max_byte_size, arenas.keep_byte_size)
        self.front = self.open_lane(7)
        self.numbers: Numbers[PreparedRequest] = Numbers()
        self.number = 0
        self._buffer = new_buffer()

    def open_lane(self, peer: int) -> SubmitterLane:
        ours, theirs = pair()
        self.tell(LaneOpened(peer), theirs.fileno())
        theirs.close()
        return SubmitterLane(ours, self.arena)

    def open_client(self, peer: int, limits: LaneLimits = LIMITS, agree: bool = True, uid: int = 0) -> RawLane:
        """Opens a client's lane, of a client with that user id."""
        ours, theirs = pair()
        self.tell(LaneOpened(peer, client=LaneClient(Peer("unix", uid=uid), limits)), theirs.fileno())
        theirs.close()
        return RawLane(ours, agree, self._buffer)

    def client_answers(self, lane: RawLane, count: int) -> list[AnswerRecord]:
        """Runs the loop until so many answers have come on a client's lane; returns them."""
        answers: list[AnswerRecord] = []
        deadline = time.monotonic() + PATIENCE_SECONDS
        while len(answers) < count:
            assert time.monotonic() < deadline, f"{len(answers)} of {count} answers came"
            self.worker.iterate()
            while (received := lane.receive()) is not None:
                answers += received
        return answers

    def closed(self) -> list[int]:
        """Returns the lanes that the worker has reported as ended since the last call."""
        found: list[int] = []
        while (received := self.control.receive()) is not None:
            found += [record.peer for record in received[0] if isinstance(record, LaneClosed)]
        return found

    def tell(self, record: Record, *fds: int) -> None:
        """Sends a record as the supervisor, and runs an iteration, in which the worker reads it."""
        self.control.put(record, *fds)
        assert self.control.flush()
        self.worker.iterate()

    def hear(self, kind: type[Record]) -> Any:
        """Runs the loop until a record of that kind has come from the worker, and returns it."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < deadline:
            received = self.control.receive()
            for record in received[0] if received else ():
                for fd in received[1] if received else ():
                    os.close(fd)
                if isinstance(record, kind):
                    return record
            if received is None:
                self.worker.iterate()
                time.sleep(0.0005)  # what comes is made in another thread of this process
        raise AssertionError(f"no {kind.__name__} came")

    def load(self, path: Path) -> None:
        """Loads version 1 of a model, or loads it again. Fails if it is refused."""
        assert self.refused(path) == ""

    def version(self, name: str) -> ModelVersion:
        return self.worker._models.find(name, 1)

    def refused(self, path: Path) -> str:
        """Loads version 1 of a model, and has it served. Returns the reason why it does not load; "": it is served."""
        text = path / "config.pbtxt"
        config = (
            model_config.parse_pbtxt(text.read_text(), path.name) if text.exists() else model_config.empty(path.name)
        )
        self.tell(Load(path.name, 1, str(path), str(path / "1"), config.SerializeToString()))
        reason = self.hear(Loaded).reason
        assert isinstance(reason, str)
        if not reason:
            self.tell(ControlCall(0, ServeLoaded(path.name, 1)))
            self.hear(Reply)
        return reason

    def submit(
        self,
        model: str,
        inputs: Sequence[Tensor],
        outputs: tuple[RequestedOutput, ...] = (),
        lane: SubmitterLane | None = None,
        leases: Sequence[Lease] = (),
        own: Mapping[str, Any] | None = None,
        parameters: dict[str, Parameter] | None = None,
    ) -> int:
        """Queues a request whose prepared part has a number, as a front sends what a client repeats; ``answers`` sends it.

        Returns the request's id.

        Args:
          leases: the arena's memory that the inputs lie in.
          own: further fields of the request's record.
        """
        self.number += 1
        request = WholeRequest(self.number, model, 0, tuple(inputs), outputs, parameters or {})
        numbered = self.numbers.number(request.prepared)
        given = {"received_ns": time.monotonic_ns(), **(own or {})}
        for lease in leases:
            (lane or self.front).announce(lease.place.segment)
        (lane or self.front).submit(replace(request.of(numbered.number), **given), numbered)
        return self.number

    def submit_whole(self, model: str, inputs: Sequence[Tensor], parameters: dict[str, Parameter] | None = None) -> int:
        """Queues a request with its prepared part inside its record. Returns the request's id."""
        self.number += 1
        request = WholeRequest(
            self.number, model, 0, tuple(inputs), (), parameters or {}, received_ns=time.monotonic_ns()
        )
        self.front.submit(request.record)
        return self.number

    def answers(self, count: int, lane: SubmitterLane | None = None, work: Work | None = None) -> list[WholeAnswer]:
        """Runs the loop until so many answers have come; returns them. ``work``: counts the worker's part of it."""
        lane, answers = lane or self.front, list[WholeAnswer]()
        assert lane.flush()
        deadline = time.monotonic() + PATIENCE_SECONDS
        while len(answers) < count:
            assert time.monotonic() < deadline, f"{len(answers)} of {count} answers came"
            with work.counting() if work is not None else contextlib.nullcontext():
                self.worker.iterate()
            while (received := lane.receive()) is not None:
                answers += whole_answers(received)
        return answers

    def close(self) -> None:
        # What is still to be compiled is nobody's; and a thread that is in XLA when the process ends aborts it.
        compiler = self.worker._engine.compiler
        with contextlib.suppress(queue.Empty):
            while True:
                compiler._jobs.get_nowait()
        compiler.finish()
        # A thread that ends a paused generator for nobody still writes to the page.
        for version in self.worker._models.everyone():
            for instance in version.loaded.instances:
                if not instance.given:
                    rests = threading.Event()
                    instance._jobs.put(rests.set)
                    rests.wait(1)
        self.front.close()
        self.control.close()
        self.worker.close()
        self.arena.close()
        # A worker's loader has turned JAX's own cache on for the whole process. What that answers to another test's cache of
        # executables could not be loaded from there.
        compilation_cache._cache = None
