"""One of several executions of a jitted model at a time: the model's programs with gather buffers of its own, in its own thread.

XLA runs programs without holding Python back, so the instances of a model run side by side. Code and parameters are shared.
"""

from __future__ import annotations

import weakref

from workers.models.executables import Executable
from workers.models.execution import Execution
from workers.models.jax_model import JaxModel


class JittedInstance:
    """Everything is called from the instance's thread."""

    def __init__(self, model: JaxModel) -> None:
        self._model = model
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
                twin = self._twins[shared] = shared.twin()
            execution.executable = twin
        self._model.execute(execution)

    def describe(self, error: BaseException) -> str:
        return self._model.describe(error)

    def close(self) -> None:
        """Nothing to finish."""
