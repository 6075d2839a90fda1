"""Defines the interface of the device that programs run on: everything in which a processor and a GPU differ.

    Processor    workers/processor/    arguments and outputs lie in the host's memory, large outputs where they are wanted
    Gpu          workers/gpu/          arguments are sent, outputs fetched, or delivered to a client's memory

The device is chosen once, when the worker starts. Each thread that runs programs has a separate object for it (``beside``).
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

#: Name, dtype and shape of an argument.
Argument = tuple[str, np.dtype[Any], tuple[int, ...]]


class Inputs(Protocol):
    """Interface of the memory in which the host gathers the arguments of a program."""

    @property
    def fit(self) -> bool:
        """True if the host's memory for gathering had room for the arguments; if not, they cannot be gathered here."""

    @property
    def arrays(self) -> dict[str, Array]:
        """The arrays in which the arguments are gathered, by argument name."""

    def send(self) -> dict[str, Any]:
        """Returns the gathered arguments by name, as the program takes them; a GPU gets them in one transfer first.

        Raises Unavailable: the device has no memory left; DeviceLost: the device has failed.
        """


class ExecutionDevice(ABC):
    """Interface of a device that programs run on; each object is used by one thread only."""

    #: Whether arguments have to be sent to the device, and outputs to be fetched.
    remote: bool

    @abstractmethod
    def executable(self, wanted: Wanted, signature: Signature, program: CompiledProgram) -> Executable:
        """Makes an executable from a compiled program, with buffers for its batches, to be run by this object's thread."""

    @abstractmethod
    def inputs(self, arguments: Sequence[Argument]) -> Inputs:
        """Returns host memory for gathering these arguments of a program. If there is no room, ``fit`` of the result is False."""

    @abstractmethod
    def contents_of(self, made: Sequence[Any]) -> list[Content]:
        """Waits for outputs of a program and returns their contents in host memory. Raises what the run raised."""

    def small_programs(self, signature: Signature, sets: ParameterSets) -> SmallPrograms | None:
        """Returns the object through which a version's small programs run on one thread; None: they run like large programs."""
        return None

    @abstractmethod
    def beside(self) -> ExecutionDevice:
        """Returns an object for the same device, for use by another thread."""

    def check(self) -> None:
        """Checks the device. Raises DeviceLost: an error has made it unusable for this process, which happens to GPUs alone."""
        return

    def close(self) -> None:
        """Frees the memory that this thread's object has allocated for the device, if any. May be called more than once."""
        return
