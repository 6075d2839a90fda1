"""What programs run on, as one thread uses it: the host's processor or a GPU. All that differs between the two is asked here.

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
        """Whether there is room for them."""

    @property
    def arrays(self) -> dict[str, Array]:
        """The memory they are gathered in."""

    def send(self) -> dict[str, Any]:
        """What was gathered, as the program takes it. Raises: Unavailable: no memory on the device.  DeviceLost."""


class ExecutionDevice(ABC):
    """Belongs to one thread."""

    #: Whether arguments have to be sent to it, and outputs to be fetched.
    remote: bool

    @abstractmethod
    def executable(self, wanted: Wanted, signature: Signature, program: CompiledProgram) -> Executable:
        """A compiled program, to be run by this thread."""

    @abstractmethod
    def inputs(self, arguments: Sequence[Argument]) -> Inputs:
        """Memory for the host to gather such arguments in."""

    @abstractmethod
    def contents_of(self, made: Sequence[Any]) -> list[Content]:
        """Brings arrays that a program made to the host. Raises what the run raised."""

    @abstractmethod
    def small_programs(self, signature: Signature, parameters: Any) -> SmallPrograms | None:
        """Where small programs of a version run; None: where all of them do."""

    @abstractmethod
    def keeps(self, request: Request) -> bool:
        """Whether outputs of that request may be wanted on it, so that they are better not brought to the host."""

    @abstractmethod
    def beside(self) -> ExecutionDevice:
        """The same for another thread."""

    @abstractmethod
    def check(self) -> None:
        """Raises DeviceLost: what just failed has taken the device along."""

    @abstractmethod
    def close(self) -> None:
        """Gives back what this thread took of it. Idempotent."""
