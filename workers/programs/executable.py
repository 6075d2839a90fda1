"""A compiled program of a model version, and the memory in which its batches are gathered.

Where that is, and how outputs leave it, depends on the device: ``workers/processor/host_executable.py``,
``workers/gpu/gpu_executable.py``.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np

from tensord.shm.arrays import Array, address_of
from tensord.workers.parameters.parameter_set import ParameterSet
from tensord.workers.parameters.set_stack import BatchSets
from tensord.workers.programs.execution_device import ExecutionDevice, Inputs
from tensord.workers.programs.placement import CompiledProgram, Placement
from tensord.workers.programs.plain_program import is_plain
from tensord.workers.programs.precision import precision
from tensord.workers.programs.run_errors import memory_needed
from tensord.workers.programs.weight import share_of
from tensord.workers.requests.places import Places
from tensord.workers.requests.request import Request
from tensord.workers.tensors.batch_outputs import BatchOutputs, OutputLayout, layout_of, uncut
from tensord.workers.tensors.buckets import Shapes
from tensord.workers.tensors.ragged import batch_input
from tensord.workers.tensors.signature import Signature, TensorSpec

if TYPE_CHECKING:
    from tensord.shm.regions import Region
    from tensord.workers.models.execution import Execution
    from tensord.workers.processor.single_run import SingleRun
    from tensord.workers.requests.prepared import Preparation

#: One output, or several, in host memory.
Content = Array | bytes


class RunOutputs(NamedTuple):
    """The outputs of a run."""

    arrays: dict[str, Array]
    #: The same in host memory, one by one; None: they stay on a GPU.
    contents: Sequence[Content] | None


class Wanted(NamedTuple):
    """The shapes of one executable: how many rows (1 without a batch dimension) and the inputs' shapes without them."""

    rows: int
    shapes: Shapes

    def __str__(self) -> str:
        inputs = ", ".join(str(list(shape)) for shape in self.shapes if shape is not None)
        return f"{self.rows} rows of {inputs}"


class Executable(ABC):
    """A compiled program with the buffers that its batches are gathered in; one execution thread uses it."""

    #: Whether a thread beside the loop may copy its outputs to their places.
    delivers = False
    #: Whether rows that no request fills have to be zero.
    clears = True

    def __init__(
        self, wanted: Wanted, signature: Signature, program: CompiledProgram, device: ExecutionDevice, inputs: Inputs
    ) -> None:
        """``device``: the running thread's. ``inputs``: memory in which the host gathers its inputs."""
        self.wanted = wanted
        #: The rows of its batch.
        self.rows = wanted.rows
        self._compiled = program
        #: The compiled program, which takes parameters and inputs.
        self.program: jax.stages.Compiled = program.call
        #: The device and parameters that the program runs with.
        self.placement: Placement = program.placement
        #: The device, as its thread uses it.
        self.device = device
        #: The program as it is to be called, with parameters and inputs.
        several = program.placement.several
        self.call: Callable[..., dict[str, Any]] = program.call if several is None else several.alone(program.call)
        self._sets, self._at = program.placement.sets, program.placement.at
        self._signature = signature
        self._batches = signature.batches
        self._inputs = inputs
        #: The layout of its outputs, once a run has shown it.
        self._layout: OutputLayout | None = None
        self._specs = specs_of(signature, wanted)
        #: Elements of all inputs together.
        self.elements = sum(
            math.prod(shape) * (wanted.rows if self._batches and not spec.whole else 1) for spec, shape in self._specs
        )

    def twin(self, device: ExecutionDevice) -> Executable:
        """Returns the program for another thread, with buffers of its own. ``device``: that thread's."""
        return device.executable(self.wanted, self._signature, self._compiled)

    @functools.cached_property
    def share(self) -> float:
        """The program's ``weight.share_of``."""
        return share_of(self.program)

    @functools.cached_property
    def memory_needed(self) -> int | None:
        """The program's ``run_errors.memory_needed``."""
        return memory_needed(self.program)

    # -------------------------------------------------------------------------------- gathered by whoever likes, in the host

    @property
    def gathers(self) -> bool:
        """True where its inputs may be gathered in host memory: on a GPU, if they are small."""
        return self._inputs.fit

    @functools.cached_property
    def gathered(self) -> dict[str, Array]:
        """The arrays in ``memory``."""
        return {spec.name: self._inputs.arrays[spec.name] for spec, _ in self._specs}

    @property
    def memory(self) -> list[tuple[str, int, int]]:
        """Name, address of the first row, and distance of rows, for each input's gather buffer."""
        return [(name, address_of(array), array.nbytes // self.wanted.rows) for name, array in self.gathered.items()]

    def arguments(self) -> dict[str, Any]:
        """Returns the inputs in ``memory`` as arguments of the program."""
        with precision(self._signature):
            return self._inputs.send()

    def parameters(self, chosen: ParameterSet | BatchSets | None = None) -> Any:
        """Returns the parameters of a set, as ``call`` takes them; None: those of requests that name no set."""
        sets = self._sets
        if chosen is None:
            chosen = sets.main
        if sets.stack is not None or isinstance(chosen, BatchSets):
            assert sets.stack is not None
            return sets.stack.arguments(sets, chosen, self.rows)
        return chosen.on(self._at)

    def named(self, name: str | None) -> Any:
        """Returns the parameters of a set by its name, as ``parameters``. Raises NotFound: there is none of that name."""
        sets = self._sets
        chosen = sets.main if name is None else sets.find(name)
        return chosen.on(self._at) if sets.stack is None else sets.stack.arguments(sets, chosen, self.rows)

    def run(self, name: str | None = None) -> list[Content]:
        """Computes the inputs in ``memory``. Returns the contents of its layout, once ``memory`` may be written again.

        ``name``: of the parameter set; None: requests name none. Raises NotFound: there is no set of that name any more.
        """
        parameters = self.named(name)
        with precision(self._signature):
            made = self.call(parameters, self._inputs.send())
        return self.read(made)

    def read(self, made: Mapping[str, Any]) -> list[Content]:
        """Waits for a run. Returns the contents of its layout. Raises what the run raised."""
        return self.device.contents_of([made[name] for name in self._signature.outputs])

    # ---------------------------------------------------------------------------------------------------- batches of requests

    @abstractmethod
    def gather(self, requests: Sequence[Request]) -> tuple[dict[str, Any], int]:
        """Gathers a batch. Returns the arguments, and how many bytes were copied."""

    def compute(
        self, parameters: Any, arguments: dict[str, Any], requests: Sequence[Request], places: Places | None
    ) -> RunOutputs:
        """Runs the program. ``places``: of a single request's outputs, which it may write there. Raises what the run raises."""
        if self._signature.wide:
            with precision(self._signature):
                return self._compute(parameters, arguments, requests, places)
        return self._compute(parameters, arguments, requests, places)

    @abstractmethod
    def _compute(
        self, parameters: Any, arguments: dict[str, Any], requests: Sequence[Request], places: Places | None
    ) -> RunOutputs:
        """Implements ``compute`` in the right precision."""

    @abstractmethod
    def outputs(self, made: Mapping[str, Any], requests: Sequence[Request]) -> RunOutputs:
        """Waits for a run. Returns its outputs, in host or device memory as the requests want them. Raises what that raised."""

    def uncut(self, outputs: RunOutputs) -> BatchOutputs | None:
        """Returns outputs as bytes that answers are cut from, or None where they are too large, or not in host memory."""
        if outputs.contents is None:
            return None
        if self._layout is None:
            self._layout = layout_of(self._signature, outputs.arrays, self._batches)
        return uncut(self._layout, outputs.contents)

    @abstractmethod
    def sizes(self, requests: Sequence[Request], whole: bool) -> Mapping[str, int] | None:
        """Returns output -> bytes, if places are worth finding before the run. ``whole``: one request gets them uncut."""

    @abstractmethod
    def offer(self, request: Request, places: Places) -> None:
        """Prepares the next run to write outputs to their places by itself."""

    @abstractmethod
    def settle(self, places: Places) -> None:
        """Ends ``offer``: the answer is announced, or there is none, and no code here has the outputs any more."""

    @abstractmethod
    def single_run(
        self, execution: Execution, preparation: Preparation, regions: Mapping[str, Region]
    ) -> SingleRun | None:
        """Returns an object that runs further single requests of a prepared one's kind directly, or None.

        ``regions``: those that it names.
        """

    @property
    def output_sizes(self) -> dict[str, int]:
        """Output -> its bytes in the compiled program."""
        info: Any = self.program.out_info
        made = info[0] if self._signature.states else info
        return {name: math.prod(made[name].shape) * made[name].dtype.itemsize for name in self._signature.outputs}

    @functools.cached_property
    def plain(self) -> bool:
        """True where its program only computes (``workers/programs/plain_program.py``)."""
        return is_plain(self.program)

    def _batch_input(self, spec: TensorSpec, shape: tuple[int, ...], requests: Sequence[Request]) -> Array:
        assert spec.of_batch is not None
        return batch_input(spec, self._signature.inputs[spec.of_batch.source], shape, self.wanted.rows, requests)


def specs_of(signature: Signature, wanted: Wanted) -> list[tuple[TensorSpec, tuple[int, ...]]]:
    """Returns specification and shape of each input of a program, without optional ones that are left out."""
    return [
        (spec, shape) for spec, shape in zip(signature.inputs.values(), wanted.shapes, strict=True) if shape is not None
    ]


def arguments_of(signature: Signature, wanted: Wanted) -> list[tuple[str, np.dtype[Any], tuple[int, ...]]]:
    """Returns name, dtype and shape of each argument of a program."""
    lead = (wanted.rows,) if signature.batches else ()
    return [
        (spec.name, spec.dtype, shape if spec.whole else (*lead, *shape)) for spec, shape in specs_of(signature, wanted)
    ]
