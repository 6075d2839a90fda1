"""The GPU as an execution device: the programs of one thread, and their copies to and from the GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from tensord.shm.cuda_regions import CudaError, DeviceLost
from tensord.workers.devices.device_cuda import CudaDevice
from tensord.workers.gpu.gpu_executable import DeviceInputs, GpuExecutable, stays
from tensord.workers.parameters.parameter_set import ParameterSets
from tensord.workers.programs.executable import Content, Executable, Wanted
from tensord.workers.programs.execution_device import Argument, ExecutionDevice, Inputs
from tensord.workers.programs.placement import CompiledProgram
from tensord.workers.requests.request import Request
from tensord.workers.tensors.signature import Signature


class Gpu(ExecutionDevice):
    """A GPU as one thread uses it: makes the thread's executables, and copies inputs to the GPU and outputs from there."""

    remote = True

    def __init__(self, cuda: CudaDevice) -> None:
        self._cuda = cuda

    def executable(self, wanted: Wanted, signature: Signature, program: CompiledProgram) -> Executable:
        return GpuExecutable(wanted, signature, program, self, self._cuda)

    def inputs(self, arguments: Sequence[Argument]) -> Inputs:
        return DeviceInputs(self._cuda, arguments)

    def contents_of(self, made: Sequence[Any]) -> list[Content]:
        fetched = self._cuda.take(made)
        return [np.asarray(array) for array in made] if fetched is None else [*fetched]

    def small_programs(self, signature: Signature, sets: ParameterSets) -> None:
        """Returns None: on a GPU small programs run on the GPU, like all others."""

    def keeps(self, request: Request) -> bool:
        return stays(request)

    def beside(self) -> Gpu:
        return Gpu(self._cuda.beside())

    def check(self) -> None:
        self._cuda.check()

    def close(self) -> None:
        with contextlib.suppress(CudaError, DeviceLost):  # it goes with the process
            self._cuda.close()

    def __repr__(self) -> str:
        return f"<Gpu {self._cuda}>"
