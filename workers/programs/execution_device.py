"""The interface of the device that programs run on, processor or GPU, for one thread: all in which the two differ.

    Processor    workers/processor/    arguments and outputs lie in the host's memory, large outputs where they are wanted
    Gpu          workers/gpu/          arguments are sent, outputs fetched, or delivered to a client's memory

It is chosen once, as the worker starts. Each thread that runs programs has one of its own (``beside``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from tensord.shm.arrays import Array
from tensord.workers.parameters.parameter_set import ParameterSets
from tensord.workers.programs.placement import CompiledProgram
from tensord.workers.tensors.signature import Signature

if TYPE_CHECKING:
    from tensord.workers.processor.small_programs import SmallPrograms
    from tensord.workers.programs.executable import Content, Executable, Wanted
    from tensord.workers.requests.request import Request

#: Name, dtype and shape of an argument.
Argument = tuple[str, np.dtype[Any], tuple[int, ...]]


class Inputs(Protocol):
    """The arguments of a program, gathered by the host."""

    @property
    def fit(self) -> bool:
        """True where the gather memory has room for them."""

    @property
    def arrays(self) -> dict[str, Array]:
        """The memory that arguments are gathered in, by name."""

    def send(self) -> dict[str, Any]:
        """Returns the gathered inputs as arguments. Raises Unavailable: no memory on the device.  DeviceLost."""


class ExecutionDevice(ABC):
    """A device that programs run on; belongs to one thread."""

    #: Whether arguments have to be sent to the device, and outputs to be fetched.
    remote: bool

    @abstractmethod
    def executable(self, wanted: Wanted, signature: Signature, program: CompiledProgram) -> Executable:
        """Makes an executable of a compiled program, to be run by this thread."""

    @abstractmethod
    def inputs(self, arguments: Sequence[Argument]) -> Inputs:
        """Makes memory for the host to gather arguments in."""

    @abstractmethod
    def contents_of(self, made: Sequence[Any]) -> list[Content]:
        """Copies outputs of a program to host memory. Raises what the run raised."""

    @abstractmethod
    def small_programs(self, signature: Signature, sets: ParameterSets) -> SmallPrograms | None:
        """Returns the placement of a version's small programs; None: that of all programs."""

    @abstractmethod
    def keeps(self, request: Request) -> bool:
        """Returns whether a request's outputs may be wanted on the device, so that they should not be copied to the host."""

    @abstractmethod
    def beside(self) -> ExecutionDevice:
        """Returns the device for another thread."""

    @abstractmethod
    def check(self) -> None:
        """Raises DeviceLost if an error has made the device unusable."""

    @abstractmethod
    def close(self) -> None:
        """Frees this thread's memory of the device. Idempotent."""
