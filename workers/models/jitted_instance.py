"""Runs a jitted model in an instance's thread, beside the worker's loop, with memory of that thread for the inputs of batches.

XLA runs programs without Python's lock, so the instances of a model run in parallel. They share code and parameters, but not the
state of sequences: each sequence belongs to one instance. On a GPU each instance copies on a stream of its own, so that the
inputs of one instance are copied while a second one computes and the outputs of a third one are copied back:

    instance 0    | in | run | out |     | in | run | out |
    instance 1         | in |     run | out |     | in | ...
"""

from __future__ import annotations

import weakref

from tensord.workers.models.execution import Execution
from tensord.workers.models.jax_model import JaxModel
from tensord.workers.programs.executable import Executable
from tensord.workers.programs.execution_device import ExecutionDevice


class JittedInstance:
    """Runs the batches of one instance of a jitted model, with its own memory for inputs; used by the instance's thread only."""

    def __init__(self, model: JaxModel, device: ExecutionDevice) -> None:
        """``device``: the device with the memory and the stream of the instance's thread."""
        self._model = model
        self._device = device
        #: The state of the sequences that run here, if the model keeps any.
        self._carry = model.executables.carry()
        #: The model's executable -> this thread's; an entry goes with the model's.
        self._twins: weakref.WeakKeyDictionary[Executable, Executable] = weakref.WeakKeyDictionary()

    def initialize(self) -> None:
        """Does nothing: a jitted instance needs no initialisation."""

    def execute(self, execution: Execution) -> None:
        """Runs a batch with this thread's copy of the executable.

        Raises LookupError: no executable for the batch is compiled; StateLost: the run failed and sequence state is lost with it;
        or what else the run raises.
        """
        shared = execution.executable or self._model.find(execution.requests)
        if isinstance(shared, Executable):
            twin = self._twins.get(shared)
            if twin is None:
                twin = self._twins[shared] = shared.twin(self._device)
            execution.executable = twin
        self._model.execute(execution, self._carry)

    def describe(self, error: BaseException) -> str:
        return self._model.describe(error)

    def close(self) -> None:
        """Frees the thread's memory for inputs."""
        self._twins.clear()
        self._device.close()
