"""Implements the execution device for a processor (CPU): large programs use all threads, small programs one thread."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tensord.workers.parameters.parameter_set import ParameterSets
from tensord.workers.processor.host_executable import HostExecutable
from tensord.workers.processor.single_thread import SingleThreadDevice
from tensord.workers.processor.small_programs import SmallPrograms
from tensord.workers.programs.executable import Content, Executable, Wanted
from tensord.workers.programs.execution_device import Argument, ExecutionDevice, Inputs
from tensord.workers.programs.gather_buffer import HostInputs
from tensord.workers.programs.placement import CompiledProgram
from tensord.workers.tensors.signature import Signature


class Processor(ExecutionDevice):
    """Runs programs on the worker's CPU, on several devices, or on a GPU that only XLA can access; any thread may use it."""

    remote = False

    def __init__(self, single: SingleThreadDevice | None = None) -> None:
        """``single``: the device with one thread for small programs; None: small programs use all threads, too."""
        self._single = single

    def executable(self, wanted: Wanted, signature: Signature, program: CompiledProgram) -> Executable:
        return HostExecutable(wanted, signature, program, self)

    def inputs(self, arguments: Sequence[Argument]) -> Inputs:
        return HostInputs(arguments)

    def contents_of(self, made: Sequence[Any]) -> list[Content]:
        return [np.asarray(array) for array in made]

    def small_programs(self, signature: Signature, sets: ParameterSets) -> SmallPrograms | None:
        return None if self._single is None else SmallPrograms(signature, self._single, sets)

    def beside(self) -> Processor:
        return self

    def check(self) -> None:
        """Does nothing: a processor cannot become unusable as a GPU can."""

    def close(self) -> None:
        """Does nothing: this object has allocated no memory for the device."""

    def __repr__(self) -> str:
        return f"<Processor {self._single}>"
