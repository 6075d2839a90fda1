"""A jitted model in a thread that is not the worker's loop: the model's programs with memory of that thread's to gather in.

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
    """Everything is called from the one thread."""

    def __init__(self, model: JaxModel, device: ExecutionDevice) -> None:
        """``device``: as that thread has it."""
        self._model = model
        self._device = device
        #: The state of the sequences that run here, if the model keeps any.
        self._carry = model.executables.carry()
        #: The model's executable -> ours; an entry goes with the model's.
        self._twins: weakref.WeakKeyDictionary[Executable, Executable] = weakref.WeakKeyDictionary()

    def initialize(self) -> None:
        """Nothing to start."""

    def execute(self, execution: Execution) -> None:
        """Raises as ``JaxModel.execute``."""
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
        """Gives its memory to gather in back."""
        self._twins.clear()
        self._device.close()
