"""Compiles and runs programs for grouped calls: one call applies a model to several requests, to each of them separately.

    argument   | request 0: its inputs | request 1: its inputs | ... |      one for each dtype among the inputs (``Packing``)
               | how many requests there are |
    program    loop, so many times: unpack ▸ apply ▸ pack
    result     | request 0: its outputs | request 1: its outputs | ... |    one for each dtype among the outputs

One program is compiled for each shape, with room for ``MOST`` requests; each call says how many there are. On a GPU each number
of requests has a separate program, without the loop: there XLA asks the host after each round whether another round follows,
which takes longer than a small model (``docs/measurements.md``).

``apply`` remains a separate computation inside the loop. Otherwise XLA would fuse its operations with those around it and round
differently than for a single request (a product that is added to something is rounded, or not).
With floats of 16 bits or fewer that still happens on processors that compute with them, so such models have no grouped calls.
From JAX 0.11 on, XLA compiles small loops on a CPU together with their content as one function, with the same effect: this is
turned off for the loop here. Models that contain loops have no grouped calls then, because a single request runs with it.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.xla_metadata import set_xla_metadata

from tensord.shm.arrays import Array, address_of
from tensord.workers.jax_internals.wide import precision
from tensord.workers.parameters.parameter_set import ParameterSet
from tensord.workers.programs.executable import Content, Executable
from tensord.workers.programs.executables import Apply
from tensord.workers.programs.execution_device import Inputs
from tensord.workers.programs.gather_buffer import copy_into
from tensord.workers.programs.placement import CompiledProgram
from tensord.workers.programs.run_errors import memory_needed
from tensord.workers.tensors.output_layout import BatchOutputs, Output, OutputLayout, uncut
from tensord.workers.tensors.request_tensors import RequestTensors
from tensord.workers.tensors.signature import Signature

#: Requests that a program has room for.
MOST = 8
#: Name of the argument with the number of requests; names of stacks are numbers.
_COUNT = "count"
#: A value of such a type, as JAX prints what it traced.
_NARROW_FLOAT = re.compile(r"\b(bf16|f16|f8_\w+|f4_\w+)\[")
#: An operation that is a loop, as JAX prints what it traced.
_LOOP = re.compile(r"\b(while|scan)\[")
_JOINS_SMALL_LOOPS = jax.__version_info__[:2] > (0, 10)
_OPTIONS = {"xla_disable_hlo_passes": "small-while-loop-hoisting"} if _JOINS_SMALL_LOOPS else {}


class NotGroupable(Exception):
    """Raised if a program for several requests might compute other results than the program for a single request."""


class PackedTensor(NamedTuple):
    """Where a ``Packing`` puts one tensor: in which row (one array for each dtype), and in which of its elements."""

    name: str
    #: The number of its row.
    row: int
    #: In elements of the row.
    start: int
    stop: int
    shape: tuple[int, ...]


class Packing:
    """Packs a request's tensors into one array (row) for each dtype, in which they lie side by side.

    FP32    | a: 3 elements | b: 2 elements |
    INT64   | n: 1 element |

    Calling a program costs more with each argument and each result.
    """

    __slots__ = ("parts", "rows")

    def __init__(self, tensors: Iterable[tuple[str, tuple[int, ...], np.dtype[Any]]]) -> None:
        """Plans the rows. ``tensors``: name, shape and dtype of each tensor, in the order in which they are packed."""
        numbers: dict[np.dtype[Any], int] = {}
        sizes: list[int] = []
        #: Places of the tensors, in the order in which they were given.
        self.parts: list[PackedTensor] = []
        for name, shape, dtype in tensors:
            number = numbers.setdefault(dtype, len(numbers))
            if number == len(sizes):
                sizes.append(0)
            start = sizes[number]
            sizes[number] += int(np.prod(shape, dtype=np.int64))
            self.parts.append(PackedTensor(name, number, start, sizes[number], shape))
        #: dtype and number of elements of each row.
        self.rows = list(zip(numbers, sizes, strict=True))

    def pack(self, tensors: Mapping[str, Any]) -> tuple[Any, ...]:
        """Returns rows that hold these tensors; called while a function is traced."""
        rows: list[list[Any]] = [[] for _ in self.rows]
        for part in self.parts:
            rows[part.row].append(jnp.ravel(tensors[part.name]))
        return tuple([jnp.concatenate(tensors_of_row) for tensors_of_row in rows])

    def unpack(self, rows: Any) -> dict[str, Any]:
        """Returns the tensors in these rows, by name. In numpy rows the tensors are views; the rows may also be traced."""
        return {part.name: rows[part.row][part.start : part.stop].reshape(part.shape) for part in self.parts}

    def __repr__(self) -> str:
        return f"<Packing {len(self.parts)} tensors in {len(self.rows)} rows>"


class _Place(NamedTuple):
    """The memory for one input of one request."""

    name: str
    array: Array
    #: The same memory.
    content: memoryview


class GroupedMemory:
    """The memory in which the inputs of requests are laid side by side for one program. Used by the execution thread only."""

    def __init__(self, packing: Packing, inputs: Inputs) -> None:
        self._packing = packing
        self._inputs = inputs

    @functools.cached_property
    def stacks(self) -> list[Array]:
        """One array for each dtype among the inputs, with one row for each request."""
        arrays = self._inputs.arrays
        return [arrays[str(number)] for number in range(len(self._packing.rows))]

    @functools.cached_property
    def places(self) -> list[list[_Place]]:
        """For each request in turn, the memory for each of its inputs."""
        return [
            [
                _Place(name, array, array.reshape(-1).view(np.uint8).data)
                for name, array in self._packing.unpack([stack[i] for stack in self.stacks]).items()
            ]
            for i in range(MOST)
        ]

    @functools.cached_property
    def _count(self) -> Array:
        return self._inputs.arrays[_COUNT]

    def send(self, count: int) -> dict[str, Any]:
        """Returns as the program's arguments the inputs in this memory and ``count``; a GPU gets them in one transfer first.

        ``count``: the program computes the first ``count`` requests; what later rows hold does not matter.

        Raises Unavailable: the GPU has no memory left; DeviceLost: the GPU has failed.
        """
        self._count[...] = count
        return self._inputs.send()


class GroupedProgram:
    """A compiled program that computes ``rows`` requests in one call; used by the execution thread only.

    The programs for different numbers of requests of one shape share their input memory.
    """

    __slots__ = ("_at", "_layout", "_memory", "_outputs", "_program", "_read", "_room", "_sets", "_signature", "rows")

    def __init__(
        self,
        rows: int,
        signature: Signature,
        program: CompiledProgram,
        memory: GroupedMemory,
        outputs: Packing,
        read: Callable[[Sequence[Any]], list[Content]],
        room: int,
    ) -> None:
        """
        Args:
          memory: where the requests' inputs are gathered.
          outputs: the layout of a request's outputs in the results.
          read: copies results to host memory.
          room: the number of requests for which the results have room.
        """
        self.rows = rows
        self._signature = signature
        self._program = program
        self._sets, self._at = program.placement.sets, program.placement.at
        self._memory = memory
        self._outputs = outputs
        self._read = read
        self._room = room
        self._layout = layout_of_rows(signature, outputs)

    @property
    def memory_needed(self) -> int | None:
        """The bytes of a run's outputs and temporary memory together, without parameters and inputs; None: not known."""
        return memory_needed(self._program.call)

    #: Rows of earlier requests behind the present ones are not read.
    clears = False

    @property
    def share(self) -> float:
        """The estimated work of a call as a fraction of an iteration of the worker's loop.

        It is a fixed bound for each request, because XLA does not count the rounds of the program's loop over the requests.
        """
        return self.rows / 64

    @property
    def memory(self) -> list[tuple[str, int, int]]:
        """For each input: its name, its address for the first request, and the bytes from request to request."""
        stacks = self._memory.stacks
        steps = [stack.strides[0] for stack in stacks]
        starts = [address_of(stack) for stack in stacks]
        found: list[tuple[str, int, int]] = []
        for name, array, _ in self._memory.places[0]:
            at = address_of(array)
            (step,) = [step for start, step in zip(starts, steps, strict=True) if start <= at < start + step]
            found.append((name, at, step))
        return found

    def gather(self, requests: Sequence[RequestTensors]) -> int:
        """Copies the inputs of at most ``rows`` requests into the memory. Returns the bytes copied.

        Raises: ValueError: there are more requests than ``rows``.
        """
        if len(requests) > self.rows:
            raise ValueError(f"{len(requests)} requests for a program of {self.rows}")
        copied = 0
        for request, places in zip(requests, self._memory.places, strict=False):
            contents = request.contents
            for name, array, target in places:
                content = None if contents is None else contents[name]
                if isinstance(content, (bytes, memoryview)):
                    target[:] = content
                else:
                    copy_into(array, request.arrays[name])
                copied += len(target)
        return copied

    def run(self, chosen: ParameterSet | None = None) -> list[Content]:
        """Computes the gathered requests and waits for the results, whose first dimension counts the requests.

        ``chosen``: the parameter set; None: the main set.

        Raises: Unavailable: its parameters are not on the device and there is no room for them; or whatever the program raises.
        """
        parameters = (chosen or self._sets.main).on(self._at)
        if self._signature.wide:
            with precision(self._signature.wide):
                return self._read(self._program.call(parameters, self._memory.send(self.rows))[0])
        return self._read(self._program.call(parameters, self._memory.send(self.rows))[0])

    def uncut(self, stacks: Sequence[Content]) -> BatchOutputs | None:
        """Returns the results of ``run`` as bytes, from which each answer copies its part; None: they are too large for that."""
        return uncut(self._layout, stacks)

    def split(self, stacks: Sequence[Content]) -> list[dict[str, Array]]:
        """Splits the results of ``run`` into the outputs of each of the ``rows`` requests."""
        arrays = [
            np.frombuffer(stack, dtype).reshape(self._room, size) if isinstance(stack, bytes) else stack
            for stack, (dtype, size) in zip(stacks, self._outputs.rows, strict=True)
        ]
        return [self._outputs.unpack([array[i] for array in arrays]) for i in range(self.rows)]

    def __repr__(self) -> str:
        return f"<GroupedProgram of {self.rows} requests>"


class GroupedProgramMaker:
    """Compiles the programs for grouped calls of requests with one shape; any thread may use it."""

    def __init__(self, single: Executable, signature: Signature, apply: Apply) -> None:
        """``single``: the executable for one request.

        The programs get its placement (its device, and the parameters there), because another device might round differently.
        """
        self._single = single
        self._signature = signature
        self._apply = apply
        self._placement = single.placement
        given = [
            (spec.name, shape, spec.dtype)
            for spec, shape in zip(signature.inputs.values(), single.wanted.shapes, strict=True)
            if shape is not None
        ]
        self._inputs = Packing(given)

    def numbers(self, lengths: Sequence[int]) -> dict[int, int | None]:
        """Returns, for each number of requests in a call (``lengths``), the number with which ``compile`` must be called.

        On a GPU that is the same number. On a processor it is None: one program serves all numbers.
        """
        return {length: length if self._one_for_each else None for length in lengths}

    @property
    def _one_for_each(self) -> bool:
        return self._single.device.remote

    @property
    def arguments(self) -> list[tuple[str, np.dtype[Any], tuple[int, ...]]]:
        """Name, dtype and shape of each argument of the program, without the parameters."""
        stacks = [(str(number), dtype, (MOST, size)) for number, (dtype, size) in enumerate(self._inputs.rows)]
        return [*stacks, (_COUNT, np.dtype(np.uint32), ())]

    def compile(self, number: int | None) -> CompiledProgram:
        """Compiles the program for ``number`` requests; None: for any number up to ``MOST``, the largest of a grouped call.

        Raises NotGroupable: the program might compute other results than for a single request; or whatever tracing raises.
        """
        signature, placement, inputs = self._signature, self._placement, self._inputs

        def inner(parameters: Any, tensors: dict[str, Any]) -> dict[str, Any]:
            # What the model calls in turn is compiled as ever.
            with set_xla_metadata(inlineable=None):
                return self._apply(parameters, tensors)

        alone = jax.jit(inner)

        def grouped(parameters: Any, arguments: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
            stacks = [arguments[str(row)] for row in range(len(inputs.rows))]
            made: tuple[tuple[Any, ...], dict[str, Any]]

            def apply(request: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
                tensors = inputs.unpack([jax.lax.dynamic_index_in_dim(stack, request, 0, False) for stack in stacks])
                made = _apart(alone, parameters, tensors)
                # Undeclared outputs are kept in the loop: without them XLA would compile another program.
                undeclared = {name: result for name, result in made.items() if name not in signature.outputs}
                return _packing(signature, made).pack(made), undeclared

            def step(request: Any, made: Any) -> Any:
                def put(stack: Any, row: Any) -> Any:
                    return jax.lax.dynamic_update_index_in_dim(stack, row, request, 0)

                return jax.tree.map(put, made, apply(request))

            if number is not None:
                return jax.tree.map(lambda *rows: jnp.stack(rows), *[apply(request) for request in range(number)])  # type: ignore[no-any-return]
            # Unsigned, which spares a check of each index for negative values.
            first = jnp.uint32(0)
            rows = jax.eval_shape(apply, first)
            room = jax.tree.map(lambda row: jnp.zeros((MOST, *row.shape), row.dtype), rows)
            made = jax.lax.fori_loop(first, arguments[_COUNT], step, room)
            return made

        specs = {name: placement.spec(shape, dtype) for name, dtype, shape in self.arguments}
        with precision(signature.wide):
            traced = jax.jit(grouped).trace(placement.parameter_specs(1), specs)
            text = str(traced.jaxpr)
            # One of the loops may be that over the requests.
            if _NARROW_FLOAT.search(text) or (_JOINS_SMALL_LOOPS and len(_LOOP.findall(text)) > (number is None)):
                raise NotGroupable
            options = _OPTIONS if number is None else {}
            return CompiledProgram(placement.compile(traced.lower(), options), placement)

    def programs(self, compiled: Mapping[int, CompiledProgram]) -> list[GroupedProgram]:
        """Returns a ``GroupedProgram`` for each compiled program. They share memory for inputs; empty: there is no room for it.

        ``compiled``: number of requests in a call -> compiled program.
        """
        inputs = self._single.device.inputs(self.arguments)
        if not inputs.fit:
            return []
        made: Any = self._single.program.out_info
        memory, outputs = GroupedMemory(self._inputs, inputs), _packing(self._signature, made)
        read = self._single.device.contents_of
        return [
            GroupedProgram(
                length, self._signature, program, memory, outputs, read, length if self._one_for_each else MOST
            )
            for length, program in compiled.items()
        ]

    def __repr__(self) -> str:
        return f"<GroupedProgramMaker of {self._inputs}>"


def _apart(alone: Callable[..., Any], parameters: Any, tensors: dict[str, Any]) -> dict[str, Any]:
    """Applies the model to tensors so that XLA does not fuse its operations with other operations of the program.

    Returns the model's outputs by name. ``alone``: the jitted function of the model: (parameters, tensors) -> outputs.
    """
    if jax.default_backend() == "cpu":
        with set_xla_metadata(inlineable="false"):
            made: dict[str, Any] = alone(parameters, tensors)
        return made
    # Compilers for GPUs have no calls within a program.
    made = alone(parameters, jax.lax.optimization_barrier(tensors))
    return cast(dict[str, Any], jax.lax.optimization_barrier(made))


def _packing(signature: Signature, made: Any) -> Packing:
    """Returns the layout in which the outputs of a request lie side by side. ``made``: output name -> its shape and dtype."""
    return Packing([(name, made[name].shape, made[name].dtype) for name in signature.outputs])


def layout_of_rows(signature: Signature, packing: Packing) -> OutputLayout:
    """Returns the layout of a program's packed outputs. Each buffer holds all outputs of one dtype, one row for each request."""
    outputs: list[Output] = []
    for name, row, start, stop, shape in packing.parts:
        dtype, elements = packing.rows[row]
        item = dtype.itemsize
        datatype = signature.outputs[name].datatype
        outputs.append((name, datatype, row, start * item, elements * item, (stop - start) * item, shape))
    return OutputLayout(outputs, signature.batches)
