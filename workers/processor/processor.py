"""The processor of this host as what programs run on: all its threads for large ones, one for small ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from tensord.workers.processor import single_thread
from tensord.workers.processor.host_executable import HostExecutable
from tensord.workers.processor.single_thread import SingleThreadDevice
from tensord.workers.processor.small_programs import SmallPrograms
from tensord.workers.programs.executable import Content, Executable, Wanted
from tensord.workers.programs.execution_device import Argument, ExecutionDevice, Inputs
from tensord.workers.programs.gather_buffer import HostInputs
from tensord.workers.programs.placement import CompiledProgram
from tensord.workers.requests.request import Request
from tensord.workers.tensors.signature import Signature


class Processor(ExecutionDevice):
    """Every thread may have the same one. It also stands for several devices, and for a GPU that XLA alone can reach."""

    remote = False

    def __init__(self, single: SingleThreadDevice | None = None) -> None:
        """``single``: where small programs run, if not on all threads."""
        self._single = single

    @classmethod
    def opened(cls, device: jax.Device, single_thread_flops: int) -> Processor:
        """As the configuration says. ``device``: as JAX has it. Call before any model is loaded."""
        return cls(single_thread.choose(device, single_thread_flops))

    def executable(self, wanted: Wanted, signature: Signature, program: CompiledProgram) -> Executable:
        return HostExecutable(wanted, signature, program, self)

    def inputs(self, arguments: Sequence[Argument]) -> Inputs:
        return HostInputs(arguments)

    def contents_of(self, made: Sequence[Any]) -> list[Content]:
        return [np.asarray(array) for array in made]

    def small_programs(self, signature: Signature, parameters: Any) -> SmallPrograms | None:
        return None if self._single is None else SmallPrograms(signature, self._single, parameters)

    def keeps(self, request: Request) -> bool:
        return False

    def beside(self) -> Processor:
        return self

    def check(self) -> None:
        """It works."""

    def close(self) -> None:
        """Nothing was taken."""

    def __repr__(self) -> str:
        return f"<Processor {self._single}>"
