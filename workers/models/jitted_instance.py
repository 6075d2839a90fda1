"""Runs a jitted model in a thread that is not the worker's loop, with gather memory of that thread.

XLA runs programs without holding Python back, so the instances of a model run side by side. Code and parameters are shared, the
state of sequences is not: each sequence belongs to one instance. On a GPU each instance copies on a stream of its own, so that
inputs of one travel while another's batch is computed and the outputs of a third leave:

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
    """An instance of a jitted model; its thread alone uses it."""

    def __init__(self, model: JaxModel, device: ExecutionDevice) -> None:
        """``device``: the instance's thread's."""
        self._model = model
        self._device = device
        #: The state of the sequences that run here, if the model keeps any.
        self._carry = model.executables.carry()
        #: The model's executable -> this thread's; an entry goes with the model's.
        self._twins: weakref.WeakKeyDictionary[Executable, Executable] = weakref.WeakKeyDictionary()

    def initialize(self) -> None:
        """Does nothing: there is nothing to start."""

    def execute(self, execution: Execution) -> None:
        """Runs a batch. Raises as ``JaxModel.execute``."""
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
        """Frees its gather memory."""
        self._twins.clear()
        self._device.close()
