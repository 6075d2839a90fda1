"""Runs a real worker process, with the test as its supervisor and its only submitter."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from tensord.config.model_config import empty, parse_pbtxt
from tensord.config.options import Arenas, ExecutablesOptions, Options
from tensord.shm import child_process
from tensord.shm.arena import Arena
from tensord.shm.arrays import Array, array, byte_content, datatype_of
from tensord.shm.channel import Channel, ChannelClosed, pair
from tensord.shm.control_records import (
    ChildReady,
    ControlCall,
    FromWorker,
    LaneOpened,
    Load,
    Loaded,
    Reply,
    Start,
    Stop,
    Unload,
    Unloaded,
)
from tensord.shm.errors import from_code
from tensord.shm.lane import SubmitterLane
from tensord.shm.messages import RequestedOutput, Slice
from tensord.shm.operations import ServeLoaded
from tensord.shm.record import Record, decoder
from tensord.shm.sequence_page import SequencePage
from tensord.shm.status_page import StatusPage
from tests import prepared, run_folder
from tests.fakes import whole_answers
from tests.records import Tensor, WholeAnswer, WholeRequest
from tests.written_log import WrittenLog

#: Generous: these machines are shared, and no test decides by time.
PATIENCE_S = 240.0
#: What the submitter calls itself.
PEER = 7001


class WorkerProcess:
    """Starts a worker; the ``with`` block ends it. Every method waits for its result."""

    def __init__(self, cache: Path | None = None, cores: str = "", **sections: Any) -> None:
        """Starts the process.

        ``cores``: the cores near its device, in Linux's list format; "": any.
        """
        sections.setdefault("executables", ExecutablesOptions(cache_directory=str(cache or run_folder.programs())))
        self.options = Options(**sections)
        ours, theirs = pair()
        words = ["tensord.workers", "--control-fd", str(theirs.fileno()), "--device", "cpu:0"]
        words += ["--cores", cores] if cores else []
        self._log = WrittenLog()
        self.process = prepared.start(words, [theirs.fileno()], output=None, errors=self._log.fileno())
        theirs.close()
        self.channel = Channel(ours, decoder(FromWorker))
        self._records: list[tuple[Any, list[int]]] = []
        self._completions: dict[int, WholeAnswer] = {}
        self._calls = 0
        self._requests = 0
        self.arena = Arena(1 << 20, 64 << 20, 16 << 20)
        stack = child_process.create_stack_report()
        self.send(Start(42, "worker-0", msgspec.Raw(msgspec.msgpack.encode(self.options))), stack)
        os.close(stack)
        _, fds = self.wait(lambda record: isinstance(record, ChildReady) and record.incarnation == 42)
        self.page, self.sequences = StatusPage.attach(fds[0]), SequencePage.attach(fds[1])
        self.lane = self.open_lane(self.arena)

    def __enter__(self) -> WorkerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.channel.close()
        self.lane.close()
        self.arena.close()
        self.page.close()
        self.sequences.close()
        self.process.kill()
        self.process.wait()
        self._log.close()
        self.log = self._log.text
        for _, fds in self._records:
            for fd in fds:
                os.close(fd)

    # ---------------------------------------------------------------------------------------------------------- control

    def send(self, record: Record, *fds: int) -> None:
        self.channel.put(record, *fds)
        wait_until(self.channel.flush)

    def wait(self, wanted: Callable[[Any], bool]) -> tuple[Any, list[int]]:
        """Returns the next wanted record of the control channel, with its descriptors; other records are kept for later."""
        while True:
            for i, (record, _) in enumerate(self._records):
                if wanted(record):
                    return self._records.pop(i)
            self._readable(self.channel.fileno())
            try:
                received = self.channel.receive()
            except ChannelClosed:
                raise AssertionError(f"the worker is gone: {self.process.wait()}") from None
            if received is not None:
                records, fds = received
                self._records += [(record, fds if len(records) == 1 else []) for record in records]

    def _readable(self, fd: int) -> None:
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        assert poll.poll(PATIENCE_S * 1000), "the worker says nothing"

    def open_lane(self, arena: Arena, peer: int = PEER) -> SubmitterLane:
        ours, theirs = pair()
        self.send(LaneOpened(peer), theirs.fileno())
        theirs.close()
        return SubmitterLane(ours, arena)

    def load(self, repository: Path, name: str, version: int = 1) -> Loaded:
        """Loads a version, and has it served; returns the worker's answer to the load, also if it does not load."""
        folder = repository / name
        text = folder / "config.pbtxt"
        config = parse_pbtxt(text.read_text(), name) if text.exists() else empty(name)
        config.name = config.name or name
        self.send(Load(name, version, str(folder), str(folder / str(version)), config.SerializeToString()))
        record, _ = self.wait(
            lambda record: isinstance(record, Loaded) and (record.name, record.version) == (name, version)
        )
        assert isinstance(record, Loaded)
        if not record.reason:
            self.call(ServeLoaded(name, version))
        return record

    def serve(self, repository: Path, *names: str) -> None:
        """Loads models. Fails if one does not load."""
        for name in names:
            assert self.load(repository, name).reason == ""

    def unload(self, name: str, version: int = 1) -> None:
        self.send(Unload(name, version))
        self.wait(lambda record: record == Unloaded(name, version))

    def call(self, operation: Any, *fds: int) -> tuple[Reply, list[int]]:
        return self.reply(self.ask(operation, *fds))

    def ask(self, operation: Any, *fds: int) -> int:
        """Sends a call; returns its id."""
        self._calls += 1
        self.send(ControlCall(self._calls, operation), *fds)
        return self._calls

    def reply(self, number: int) -> tuple[Reply, list[int]]:
        """Waits for the reply to a call; returns it with its descriptors."""
        return self.wait(lambda record: isinstance(record, Reply) and record.call_id == number)

    def stop(self, grace_s: float = PATIENCE_S) -> int:
        """Sends Stop, waits for the process and returns its exit status."""
        self.send(Stop(int(grace_s * 1e9)))
        return self.process.wait(PATIENCE_S)

    # --------------------------------------------------------------------------------------------------------- requests

    def submit(
        self,
        model: str,
        inputs: dict[str, Array] | Sequence[Tensor],
        outputs: Sequence[RequestedOutput] = (),
        flush: bool = True,
        **fields: Any,
    ) -> int:
        """Sends a request; arrays travel inline when small and in the arena when not. Returns its id.

        ``flush``: False: it is sent with the next one, so that the worker gets both at once.
        """
        self._requests += 1
        tensors = (
            inputs if not isinstance(inputs, dict) else [self.place(name, value) for name, value in inputs.items()]
        )
        version = fields.pop("version", 0)
        request = WholeRequest(self._requests, model, version, tuple(tensors), tuple(outputs), **fields)
        for tensor in tensors:
            if isinstance(tensor.place, Slice) and tensor.place.segment in self.arena.segments:
                self.lane.announce(tensor.place.segment)
        self.lane.submit(request.record)
        if flush:
            wait_until(self.lane.flush)
        return self._requests

    def place(self, name: str, value: Array, *, inline: int = 2048) -> Tensor:
        """Makes a tensor of an array, inline or in leased memory. Leases live as long as the arena."""
        datatype = datatype_of(value.dtype)
        assert datatype is not None
        content = byte_content(value) if datatype == "BYTES" else value.tobytes()
        if len(content) <= inline:
            return Tensor(name, datatype, value.shape, content)
        lease = self.arena.loan(len(content))
        assert lease is not None
        lease.view[:] = content
        return Tensor(name, datatype, value.shape, lease.place)

    def answer(self, request_id: int) -> WholeAnswer:
        """Waits for the answer to a request."""
        while request_id not in self._completions:
            received = self.lane.receive()
            if received is None:
                self._readable(self.lane.fileno())
                continue
            for completion in whole_answers(received):
                assert completion.request_id not in self._completions, "answered twice"
                self._completions[completion.request_id] = completion
        return self._completions.pop(request_id)

    def arrays(self, completion: WholeAnswer) -> dict[str, Array]:
        """Copies an answer's outputs and gives its lease back. Raises the answer's error."""
        if completion.code:
            raise from_code(completion.code, completion.message)
        found = {}
        for tensor in completion.outputs:
            if isinstance(tensor.place, bytes):
                content: bytes | memoryview = tensor.place
            elif isinstance(tensor.place, Slice):
                content = self.lane.view(tensor.place)
            else:
                continue
            found[tensor.name] = np.array(array(content, tensor.datatype, tensor.shape))
        if completion.lease is not None:
            self.lane.release(completion.lease)
            wait_until(self.lane.flush)
        return found

    def infer(
        self, model: str, inputs: dict[str, Array] | Sequence[Tensor], *outputs: RequestedOutput, **fields: Any
    ) -> dict[str, Array]:
        """Sends a request and returns its outputs. Raises the ServingError of a refusal."""
        return self.arrays(self.answer(self.submit(model, inputs, outputs, **fields)))


def small_arenas(byte_size: int = 1 << 20, max_byte_size: int = 2 << 20, wait: float = PATIENCE_S) -> Arenas:
    """Returns options for arenas that are soon full."""
    return Arenas(byte_size, max_byte_size, 0, inline_byte_size=4096, wait=wait)


def wait_until(condition: Callable[[], object]) -> None:
    """Waits until the condition holds; fails after PATIENCE_S."""
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.005)
