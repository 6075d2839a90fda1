"""Runs a compiled program of a model version on batches, which are gathered in memory that belongs to the program.

What depends on the device is in ``workers/processor/processor.py`` and ``workers/gpu/gpu.py``.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import jax
import numpy as np

from tensord.shm.arrays import Array, address_of
from tensord.workers.jax_internals.wide import precisions
from tensord.workers.parameters.parameter_set import ParameterSet, ParameterSets
from tensord.workers.parameters.set_stack import Chosen
from tensord.workers.programs.placement import CompiledProgram, Placement
from tensord.workers.programs.run_errors import memory_needed
from tensord.workers.programs.weight import ITERATION, is_within, work_of
from tensord.workers.regions.places import Places
from tensord.workers.tensors.buckets import Shapes
from tensord.workers.tensors.output_layout import BatchOutputs, OutputLayout, layout_of, uncut
from tensord.workers.tensors.ragged import batch_input
from tensord.workers.tensors.request_tensors import RequestTensors
from tensord.workers.tensors.signature import Signature, TensorSpec

if TYPE_CHECKING:
    from tensord.workers.processor.single_thread import SmallPrograms

#: One output, or several, in host memory.
Content = Array | bytes


#: Name, dtype and shape of an argument.
Argument = tuple[str, np.dtype[Any], tuple[int, ...]]


class RunOutputs(NamedTuple):
    """The outputs of one run by name. ``contents`` is a copy in host memory, or None if the outputs stay on a GPU."""

    arrays: dict[str, Array]
    #: The same outputs in host memory, in the order of the signature or packed; None: they stay on a GPU.
    contents: Sequence[Content] | None


class Wanted(NamedTuple):
    """The batch size and the input shapes for which a program is compiled.

    ``rows``: the batch size; 1 if the model has no batch dimension. ``shapes``: each input's shape without the batch dimension.
    The shape of an input that is absent is None.
    """

    rows: int
    shapes: Shapes

    def __str__(self) -> str:
        inputs = ", ".join(str(list(shape)) for shape in self.shapes if shape is not None)
        return f"{self.rows} rows of {inputs}"


class Inputs(Protocol):
    """The memory in which the host gathers the arguments of a program."""

    @property
    def fit(self) -> bool:
        """True if the program's arguments can be gathered in this memory. For a GPU, they must have 1 byte to 256 KiB."""

    @property
    def arrays(self) -> dict[str, Array]:
        """The arrays into which the program's arguments are copied before a run, by argument name."""

    def send(self) -> dict[str, Any]:
        """Returns the program's arguments by name: the arrays in this memory, or new copies of these arrays on a GPU.

        Raises Unavailable: the GPU has no memory left. Raises DeviceLost: the GPU failed.
        """


class ExecutionDevice(ABC):
    """A device that programs run on: everything in which a processor and a GPU differ. Each object serves one thread."""

    #: True if arguments have to be sent to the device, and outputs to be fetched.
    remote: bool

    @abstractmethod
    def executable(self, wanted: Wanted, signature: Signature, program: CompiledProgram) -> Executable:
        """Makes an executable of ``program`` for the thread that uses this object. ``wanted``: the shapes of the program."""

    @abstractmethod
    def inputs(self, arguments: Sequence[Argument]) -> Inputs:
        """Returns host memory for a program's ``arguments``. If ``fit`` is False, they cannot be gathered there."""

    @abstractmethod
    def contents_of(self, arrays: Sequence[Any]) -> list[Content]:
        """Waits for outputs of a program, and returns their contents on the host. Errors of the run are raised unchanged."""

    def small_programs(self, signature: Signature, sets: ParameterSets) -> SmallPrograms | None:
        """Returns an object that compiles small programs for a CPU device with one thread, or None if no such device is open.

        ``signature``: the inputs and outputs of the model whose programs are compiled. ``sets``: the model's parameter sets.
        """
        return None

    @abstractmethod
    def beside(self) -> ExecutionDevice:
        """Returns an object for the same device, for use by another thread."""

    def check(self) -> None:
        """Raises DeviceLost if an error has made a GPU unusable for this process."""
        return

    def close(self) -> None:
        """Frees the memory that this object has allocated on the device. Idempotent."""
        return


class Gathering:
    """A program with the host memory in which callers gather the inputs of its batches. Only one thread may use it."""

    #: True if rows that no request fills have to be zero.
    clears = True

    def __init__(self, signature: Signature, rows: int, inputs: Inputs) -> None:
        """Stores the memory ``inputs``, for batches of ``rows`` rows. ``signature``: describes the program's inputs."""
        #: The rows of its batch.
        self.rows = rows
        self._signature = signature
        self._batches = signature.batches
        self._precision = precisions(signature.wide)
        self._inputs = inputs

    @property
    def gathers(self) -> bool:
        """True if a batch's inputs may be gathered in host memory. On a CPU they always may, on a GPU only if they are small."""
        return self._inputs.fit

    @functools.cached_property
    def gathered(self) -> dict[str, Array]:
        """The arrays in which the inputs are gathered, by input name."""
        return self._inputs.arrays

    @property
    def memory(self) -> list[tuple[str, int, int]]:
        """Returns where callers write each input: the input's name, the address of its first row, the size of a row in bytes."""
        return [(name, address_of(array), array.nbytes // self.rows) for name, array in self.gathered.items()]

    def arguments(self) -> dict[str, Any]:
        """Returns the program's inputs by name: the arrays in ``gathered``, or new copies of these arrays on a GPU.

        Raises Unavailable: the GPU has no memory left. Raises DeviceLost: the GPU failed.
        """
        with self._precision():
            return self._inputs.send()


class Executable(Gathering, ABC):
    """A compiled program with the memory in which its batches are gathered. Only one thread may use it."""

    #: True if a thread beside the loop may copy its outputs to their places.
    delivers = False

    def __init__(self, wanted: Wanted, signature: Signature, program: CompiledProgram, device: ExecutionDevice) -> None:
        """Makes an executable of ``program``, compiled for ``wanted``, for the thread that uses ``device``."""
        super().__init__(signature, wanted.rows, device.inputs(arguments_of(signature, wanted)))
        self.wanted = wanted
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
        #: The model's parameter sets.
        self.sets, self._at = program.placement.sets, program.placement.at
        #: The layout of its outputs, once a run has shown it.
        self._layout: OutputLayout | None = None
        self._specs = specs_of(signature, wanted)
        #: Elements of all inputs together.
        self.elements = sum(
            math.prod(shape) * (wanted.rows if self._batches and not spec.whole else 1) for spec, shape in self._specs
        )

    def twin(self, device: ExecutionDevice) -> Executable:
        """Returns an executable of the same program with memory of its own, for the thread that uses ``device``."""
        return device.executable(self.wanted, self._signature, self._compiled)

    @functools.cached_property
    def share(self) -> float:
        """The work of one run, as a fraction of the work that is allowed in one iteration of the worker's event loop.

        The work is floating-point operations plus bytes accessed. The value is inf if the work is unknown or above the limit.
        """
        share = sum(work_of(self.program)) / ITERATION
        return share if share <= 1 and is_within(self.program, (ITERATION, ITERATION)) else math.inf

    @functools.cached_property
    def memory_needed(self) -> int | None:
        """The bytes of a run's outputs and temporary memory, without parameters and inputs; None: unknown."""
        return memory_needed(self.program)

    def parameters(self, chosen: Chosen = None) -> Any:
        """Returns the parameters for a run, in the form that ``call`` takes. Moves them to the device if they are elsewhere.

        ``chosen``: the set, or the set of each request; None: ``main``.
        Raises Unavailable: the device has no room for them. Errors of the device are raised unchanged.
        """
        sets = self.sets
        if sets.stack is not None:
            return sets.stack.arguments(sets, chosen, self.rows)
        if chosen is None:
            return sets.main.on(self._at)
        assert isinstance(chosen, ParameterSet)
        return chosen.on(self._at)

    def run(self, chosen: Chosen = None) -> list[Content]:
        """Runs the program on the inputs that were gathered for it, and returns the outputs in host memory.

        After that the memory of the inputs may be used again. ``chosen``: the parameter set, or the set of each request; None:
        ``main``. Raises Unavailable if the device has no room for the parameters. Errors of the program are raised unchanged.
        """
        parameters = self.parameters(chosen)
        with self._precision():
            made = self.call(parameters, self._inputs.send())
        return self.read(made)

    def read(self, arrays: Mapping[str, Any]) -> list[Content]:
        """Waits for a run's outputs and returns them in host memory, in the order in which the model declares its outputs.

        ``arrays``: the outputs that ``call`` returned, by output name. Errors of the run are raised unchanged.
        """
        return self.device.contents_of([arrays[name] for name in self._signature.outputs])

    # ---------------------------------------------------------------------------------------------------- batches of requests

    @abstractmethod
    def gather(self, requests: Sequence[RequestTensors]) -> tuple[dict[str, Any], int]:
        """Copies the inputs of a batch side by side. Returns the arguments for ``compute``, and the number of bytes copied.

        A single request's inputs may be used where they lie.
        Raises Unavailable: the GPU has no memory left. Raises DeviceLost: the GPU failed.
        """

    def compute(
        self, parameters: Any, arguments: dict[str, Any], requests: Sequence[RequestTensors], places: Places | None
    ) -> RunOutputs:
        """Runs the program and waits for its outputs. Errors of the run are raised unchanged.

        Args:
          parameters: the result of the method ``parameters``.
          arguments: the result of ``gather``.
          requests: the requests of the batch.
          places: the memory reserved for the outputs, if the batch is a single request; None: no memory was reserved.
        """
        if self._signature.wide:
            with self._precision():
                return self._compute(parameters, arguments, requests, places)
        return self._compute(parameters, arguments, requests, places)

    @abstractmethod
    def _compute(
        self, parameters: Any, arguments: dict[str, Any], requests: Sequence[RequestTensors], places: Places | None
    ) -> RunOutputs:
        """Runs the program and waits for the outputs. ``compute`` sets JAX's 64-bit mode if needed, and calls this method."""

    @abstractmethod
    def outputs(self, arrays: Mapping[str, Any], requests: Sequence[RequestTensors]) -> RunOutputs:
        """Waits until the program has run, and returns its outputs. Large outputs stay on a GPU, others go to host memory.

        ``arrays``: returned by ``call``. If any request's ``stays`` is True, no output leaves the GPU. Raises the run's errors.
        """

    def uncut(self, outputs: RunOutputs) -> BatchOutputs | None:
        """Returns a run's outputs as bytes, not yet divided into answers, or None if they are too large or stay on a GPU."""
        if outputs.contents is None:
            return None
        if self._layout is None:
            self._layout = layout_of(self._signature, outputs.arrays, self._batches)
        return uncut(self._layout, outputs.contents)

    @abstractmethod
    def sizes(self, requests: Sequence[RequestTensors], whole: bool) -> Mapping[str, int] | None:
        """Returns how many bytes of memory to reserve for each output, by its name, before the program runs.

        Returns None if no memory is to be reserved. ``whole``: whether all rows of the program's outputs belong to one request.
        """

    def offer(self, places: Places) -> None:
        """Allows the next run to write outputs to ``places``. Subclasses may use this; here it does nothing."""
        return

    def settle(self, places: Places) -> None:
        """Stops later runs from writing outputs to ``places``, which was passed to ``offer``. This base class does nothing.

        The caller must have sent or dropped the request's answer before, and nobody may use the outputs any more.
        """
        return

    @property
    def output_sizes(self) -> dict[str, int]:
        """The bytes of each output of the program, by output name. Rows that no request fills are included."""
        info: Any = self.program.out_info
        made = info[0] if self._signature.states else info
        return {name: math.prod(made[name].shape) * made[name].dtype.itemsize for name in self._signature.outputs}

    def _batch_input(self, spec: TensorSpec, shape: tuple[int, ...], requests: Sequence[RequestTensors]) -> Array:
        assert spec.of_batch is not None
        return batch_input(spec, self._signature.inputs[spec.of_batch.source], shape, self.wanted.rows, requests)


def specs_of(signature: Signature, wanted: Wanted) -> list[tuple[TensorSpec, tuple[int, ...]]]:
    """Returns (specification, shape) for each input of the model whose shape in ``wanted.shapes`` is not None."""
    return [
        (spec, shape) for spec, shape in zip(signature.inputs.values(), wanted.shapes, strict=True) if shape is not None
    ]


def arguments_of(signature: Signature, wanted: Wanted) -> list[tuple[str, np.dtype[Any], tuple[int, ...]]]:
    """Returns the name, dtype and shape of each argument of a program that is compiled for ``wanted``.

    Parameters of the model are left out. A shape includes the batch dimension if the argument has a batch dimension.
    """
    lead = (wanted.rows,) if signature.batches else ()
    return [
        (spec.name, spec.dtype, shape if spec.whole else (*lead, *shape)) for spec, shape in specs_of(signature, wanted)
    ]
