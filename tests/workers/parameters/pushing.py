"""Provides a worker's loop to push parameters into, and models whose outputs show which set they were computed with.

Every leaf of set number n is n in all of its elements, so an answer of one set has the same value everywhere.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tensord.config.options import Options
from tensord.shm.arrays import Array
from tensord.shm.control_records import ControlCall, Reply
from tensord.shm.errors import from_code
from tensord.shm.messages import Parameter
from tensord.shm.operations import (
    AbortParameters,
    CommitParameters,
    DropParameters,
    MakeParameters,
    Operation,
    ParameterSource,
    StageParameters,
)
from tensord.workers.parameters.parameter_set import ParameterSets
from tests.records import Tensor, WholeAnswer
from tests.repositories import ensemble, write_model
from tests.workers.parameters.made_sets import sealed
from tests.workers.worker_loop import OPTIONS, PATIENCE_SECONDS, WorkerLoop

#: Elements of both leaves together.
WIDTH = 8
#: Adds one leaf to the first half of the input and one to the second.
APPLY = """
    import jax.numpy as jnp
    import numpy as np

    inputs = {{"x": "FP32[8]"}}
    outputs = {{"y": "FP32[8]"}}
    {more}

    def create(path, config, device):
        parameters = {{"w": np.zeros({half}, np.float32), "deep": [{{"v": np.zeros({half}, np.float32)}}]}}

        def apply(parameters, inputs):
            w, v = parameters["w"], parameters["deep"][0]["v"]
            return {{"y": inputs["x"] + jnp.repeat(jnp.stack([w.max(), v.min()]), 4)}}

        return apply, parameters
    """


def write_chain(repository: Path, name: str, *models: str) -> Path:
    """Writes an ensemble of models, each of which gets the output of the one before; returns its folder."""
    names = ["x", *(f"between{place}" for place in range(1, len(models))), "y"]
    steps = [(model, {"x": given}, {"y": made}) for model, given, made in zip(models, names, names[1:], strict=False)]
    return ensemble(repository, name, ["x FP32 8"], ["y FP32 8"], steps, 8)


def numbered(number: float, width: int = WIDTH) -> dict[str, Array]:
    """Returns the leaves of a set, all filled with its number."""
    half = np.full(width // 2, number, np.float32)
    return {"w": half, "deep.0.v": half}


def write_numbered(repository: Path, name: str, config: str = "", more: str = "", width: int = WIDTH) -> Path:
    """Writes a model whose output is its input plus the number of its set."""
    source = APPLY.format(half=width // 2, more=more)
    write_model(repository, name, source, f'name: "{name}"\n{config}' if config else "")
    return repository / name


class PushingLoop(WorkerLoop):
    """A worker's loop, with the test as the supervisor that pushes parameters."""

    def __init__(self, options: Options = OPTIONS) -> None:
        super().__init__(options)
        self.calls = self.pushes = 0
        #: Those that came and were not asked for yet, with their descriptors.
        self.replies: list[tuple[Reply, list[int]]] = []

    def close(self) -> None:
        models = self.worker._models
        for version in (*models.everyone(), *models.held.values()):
            if version.sets is not None:
                let_go(version.sets)
        super().close()

    def ask_for(self, operation: Operation, fd: int = -1) -> int:
        """Sends a call; returns its id. ``fd`` is sent with it, and closed here."""
        self.calls += 1
        self.control.put(ControlCall(self.calls, operation), *([fd] if fd >= 0 else []))
        if fd >= 0:
            os.close(fd)
        assert self.control.flush()
        return self.calls

    def reply(self, call: int) -> tuple[Reply, list[int]]:
        """Runs the loop until the next reply comes, which must be that of the call; returns it with its descriptors."""
        reply, fds = self.reply_any()
        assert reply.call_id == call
        return reply, fds

    def reply_any(self) -> tuple[Reply, list[int]]:
        """Runs the loop until any call is answered; returns the reply with its descriptors."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < deadline:
            if self.replies:
                return self.replies.pop(0)
            while (received := self.control.receive()) is not None:
                records, fds = received
                self.replies += [(record, fds) for record in records if isinstance(record, Reply)]
            self.worker.iterate()
            time.sleep(0.0002)  # it is made in a thread of this process
        raise AssertionError("no reply came")

    def call(self, operation: Operation, fd: int = -1) -> Any:
        """Sends a call and returns its result. Raises the error that it is answered with."""
        reply, fds = self.reply(self.ask_for(operation, fd))
        for each in fds:
            os.close(each)
        if reply.code:
            raise from_code(reply.code, reply.message)
        return json.loads(reply.result)

    def stage(self, model: str, leaves: Mapping[str, Array] | int, number: int, set: str = "main", **more: Any) -> int:
        """Stages parameters: leaves, or the memory of a descriptor. Returns the push's number."""
        self.pushes += 1
        fd = leaves if isinstance(leaves, int) else sealed(leaves)
        self.call(StageParameters(self.pushes, model, 1, set, number, **more), fd)
        return self.pushes

    def commit(self, push: int, move_sequences: bool = False) -> None:
        assert self.call(CommitParameters(push, move_sequences)) == {}

    def abort(self, push: int) -> None:
        assert self.call(AbortParameters(push)) == {}

    def push(self, model: str, leaves: Mapping[str, Array] | int, number: int, set: str = "main", **more: Any) -> None:
        """Stages parameters and commits them."""
        moves = more.pop("move_sequences", False)
        self.commit(self.stage(model, leaves, number, set, **more), moves)

    def drop(self, model: str, set: str) -> None:
        self.call(DropParameters(model, 1, set))

    def make(self, model: str, source: ParameterSource, fd: int = -1, **more: Any) -> int:
        """Has the worker make memory with parameters; returns its descriptor, which the caller closes."""
        reply, fds = self.reply(self.ask_for(MakeParameters(model, 1, source, **more), fd))
        if reply.code:
            raise from_code(reply.code, reply.message)
        (made,) = fds
        assert json.loads(reply.result) == {"byte_size": os.fstat(made).st_size}
        return made

    def ask_value(self, model: str, set: str | None = None, tells: bool = False, **own: Any) -> WholeAnswer:
        """Sends one request; returns its answer."""
        self.submit_value(model, 0.0, 1, set, tells, **own)
        (answer,) = self.answers(1)
        return answer

    def ask_value_of(self, model: str) -> WholeAnswer:
        """Sends one request to a model without a batch dimension; returns its answer."""
        self.submit_value(model, 0.0, batches=False)
        (answer,) = self.answers(1)
        return answer

    def submit_value(
        self,
        model: str,
        value: float,
        rows: int = 1,
        set: str | None = None,
        tells: bool = False,
        batches: bool = True,
        own: Mapping[str, Any] | None = None,
    ) -> int:
        parameters: dict[str, Parameter] = {"tensord_parameters": True} if tells else {}
        if set is not None:
            own = {**(own or {}), "parameter_set": set}
        shape = (rows, 8) if batches else (8,)
        tensor = Tensor("x", "FP32", shape, np.full(shape, value, np.float32).tobytes())
        return self.submit(model, [tensor], parameters=parameters, own=own)


def let_go(sets: ParameterSets) -> None:
    """Releases the memory of sets, because a worker's objects stay in a process that goes on."""
    for each in (sets.main, *sets.named.values(), *sets._before.values(), *sets.staged):
        each.leave()
        each._host = []


def values(answer: WholeAnswer) -> list[float]:
    """Returns the distinct values in an answer's output, sorted."""
    assert not answer.code, answer.message
    (tensor,) = answer.outputs
    assert isinstance(tensor.place, bytes)
    return sorted(set(np.frombuffer(tensor.place, np.float32).tolist()))


def value(answer: WholeAnswer) -> float:
    """Returns the one value that is everywhere in an answer, which was then computed with exactly one set."""
    (found,) = values(answer)
    return found


def said(answer: WholeAnswer) -> tuple[Any, Any]:
    """Returns the set's name and version that an answer states."""
    return answer.parameters.get("parameter_set"), answer.parameters.get("parameter_version")


def mapped() -> int:
    """Returns how many mappings of pushed parameters this process has."""
    with open("/proc/self/maps") as file:
        return sum("tensord-parameters" in line for line in file)
