"""Groups calls: several requests to a model without a batch dimension share one call of a program.

    argument   | inputs of request 0 | inputs of request 1 | ... |      one such array for each dtype of inputs
    argument   | the number of requests |
    result     | outputs of request 0 | outputs of request 1 | ... |    one such array for each dtype of outputs

A program for several requests applies the model's function to each request separately, with the same results as single calls.
Calls are grouped only for models with little work and small inputs. No request is delayed so that others can join its call.

These programs are compiled for each combination of input shapes: at load if the shapes are known then, else while the model
serves. On a CPU, one program runs any number of requests up to ``MOST``, in a loop. On a GPU, each number in ``LENGTHS`` has a
program of its own, without a loop.

A model that uses floats of 16 bits or fewer has no grouped calls, because XLA might round such floats differently in a grouped
call. From JAX 0.11 on, a model that contains a loop has no grouped calls either, for the same reason.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.xla_metadata import set_xla_metadata

from tensord.shm.arrays import Array, address_of
from tensord.workers.jax_internals.wide import precision
from tensord.workers.parameters.parameter_set import ParameterSet
from tensord.workers.programs.executable import Content, Executable, Inputs, specs_of
from tensord.workers.programs.executables import Apply
from tensord.workers.programs.gather_buffer import copy_into
from tensord.workers.programs.placement import CompiledProgram
from tensord.workers.programs.run_errors import memory_needed
from tensord.workers.programs.weight import Weight, weight_of
from tensord.workers.tensors.buckets import Shapes
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
#: Numbers of requests that share a call, descending. A call for one request saves only handling of arguments and results.
LENGTHS = (MOST, 4, 2, 1)
#: The number of requests that share a call, by the number that wait.
_LONGEST = [max([length for length in LENGTHS if length <= waiting], default=0) for waiting in range(MOST + 1)]
#: Requests with larger inputs gain little: what is saved is a call, and their inputs are better used where they lie.
_SMALL_BYTE_SIZE = 48 << 10
#: Makes the program of a shape for a number of requests, or finds it in the cache (``GroupedCalls.compile``).
Make = Callable[[Shapes, int | None, Callable[[int | None], CompiledProgram]], CompiledProgram]


class NotGroupable(Exception):
    """Raised if a program for several requests might compute other results than the program for a single request."""


class PackedTensor(NamedTuple):
    """Describes where a ``Packing`` stores one tensor: in array number ``row``, from element ``start`` to element ``stop``."""

    name: str
    #: The number of its row.
    row: int
    #: The offset in the row, in elements.
    start: int
    stop: int
    shape: tuple[int, ...]


class Packing:
    """Packs all tensors of a request that have the same dtype into one flat array, which is called a row."""

    # Each argument and result makes a call slower.
    __slots__ = ("parts", "rows")

    def __init__(self, tensors: Iterable[tuple[str, tuple[int, ...], np.dtype[Any]]]) -> None:
        """Plans where ``pack`` puts each tensor. ``tensors``: each tensor's name, shape and dtype, in the order of packing."""
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
        """Concatenates the elements of a request's tensors, one array for each dtype. Call it while JAX traces a function."""
        rows: list[list[Any]] = [[] for _ in self.rows]
        for part in self.parts:
            rows[part.row].append(jnp.ravel(tensors[part.name]))
        return tuple([jnp.concatenate(tensors_of_row) for tensors_of_row in rows])

    def unpack(self, rows: Any) -> dict[str, Any]:
        """Returns the tensors that ``rows`` contain, by name: views of numpy rows, or traced arrays if JAX traces the rows."""
        return {part.name: rows[part.row][part.start : part.stop].reshape(part.shape) for part in self.parts}


class _Place(NamedTuple):
    name: str
    array: Array
    #: The memory of the array, as bytes.
    content: memoryview


class GroupedMemory:
    """The memory in which the inputs of requests are laid side by side for one program.

    Only the thread that runs the program may use it.
    """

    def __init__(self, packing: Packing, inputs: Inputs) -> None:
        self.packing = packing
        self._inputs = inputs

    @functools.cached_property
    def stacks(self) -> list[Array]:
        """Returns one array for each dtype. Row i of an array holds all inputs of request i that have this dtype."""
        arrays = self._inputs.arrays
        return [arrays[str(number)] for number in range(len(self.packing.rows))]

    @functools.cached_property
    def places(self) -> list[list[_Place]]:
        """Returns a list for each request of one call. The list has the memory to which each input of the request is copied."""
        return [
            [
                _Place(name, array, array.reshape(-1).view(np.uint8).data)
                for name, array in self.packing.unpack([stack[i] for stack in self.stacks]).items()
            ]
            for i in range(MOST)
        ]

    @functools.cached_property
    def _count(self) -> Array:
        return self._inputs.arrays[_COUNT]

    def send(self, count: int) -> dict[str, Any]:
        """Returns the arguments for a run of ``count`` requests, whose inputs were gathered in this memory.

        If the program runs on a GPU, the inputs are first copied to the GPU. Raises Unavailable if the GPU has no memory left.
        Raises DeviceLost if the GPU has failed.
        """
        self._count[...] = count
        return self._inputs.send()


class GroupedProgram:
    """A program that computes up to ``rows`` requests in one call. Their inputs have the same shapes.

    Programs for inputs of the same shapes share the memory for inputs, so one thread must run all these programs.
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
        """Stores ``program``, which computes ``rows`` requests in one call. ``memory`` holds the inputs of these requests.

        ``outputs`` says where each output lies in a row of the program's results. ``read`` copies the results to host memory.
        ``room`` is the number of rows in the results. The rows after the first ``rows`` belong to no request.
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
        """The bytes of a run's outputs and temporary memory, without parameters and inputs; None: unknown."""
        return memory_needed(self._program.call)

    #: Rows of earlier requests behind the present ones are not read.
    clears = False

    @property
    def share(self) -> float:
        """The estimated work of one call, divided by the most work that the worker's event loop may do in one iteration."""
        return self.rows / 64

    @property
    def memory(self) -> list[tuple[str, int, int]]:
        """Each input's name, the address of the first request's value, and the bytes from there to the next request's value."""
        stacks, pairs = self._memory.stacks, zip(self._memory.places[0], self._memory.packing.parts, strict=True)
        return [(place.name, address_of(place.array), stacks[part.row].strides[0]) for place, part in pairs]

    def gather(self, requests: Sequence[RequestTensors]) -> int:
        """Copies the inputs of ``requests`` to the input memory of the program. Returns the number of bytes copied.

        Raises ValueError: there are more requests than the program runs in one call.
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
        """Runs the program on the inputs that the caller has copied, by ``gather`` or to the addresses in ``memory``.

        Returns the results in host memory. Each result holds all outputs of one dtype; row i is of request i. If there are
        fewer than ``rows`` requests, the rows after theirs mean nothing. ``chosen``: the parameter set; None: ``main``.
        Raises Unavailable: the device has no room for the parameters. Errors of the program are raised unchanged.
        """
        parameters = (chosen or self._sets.main).on(self._at)
        if self._signature.wide:
            with precision(self._signature.wide):
                return self._read(self._program.call(parameters, self._memory.send(self.rows))[0])
        return self._read(self._program.call(parameters, self._memory.send(self.rows))[0])

    def uncut(self, stacks: Sequence[Content]) -> BatchOutputs | None:
        """Converts ``stacks``, the results of ``run``, to bytes; None: they have more than ``UNCUT_BYTE_SIZE`` bytes."""
        return uncut(self._layout, stacks)

    def split(self, stacks: Sequence[Content]) -> list[dict[str, Array]]:
        """Divides the results of ``run`` into the outputs of each request."""
        arrays = [
            np.frombuffer(stack, dtype).reshape(self._room, size) if isinstance(stack, bytes) else stack
            for stack, (dtype, size) in zip(stacks, self._outputs.rows, strict=True)
        ]
        return [self._outputs.unpack([array[i] for array in arrays]) for i in range(self.rows)]

    def __repr__(self) -> str:
        return f"<GroupedProgram of {self.rows} requests>"


class GroupedProgramMaker:
    """Compiles the programs that run several requests of one shape in one call. Any thread may use it."""

    def __init__(self, single: Executable, signature: Signature, apply: Apply) -> None:
        """Stores the model's function ``apply`` and ``single``, the executable for one request. Compiles nothing yet."""
        self._single = single
        self._signature = signature
        self._apply = apply
        self._placement = single.placement
        self._inputs = Packing([(spec.name, shape, spec.dtype) for spec, shape in specs_of(signature, single.wanted)])

    @property
    def one_for_each(self) -> bool:
        return self._single.device.remote

    @property
    def arguments(self) -> list[tuple[str, np.dtype[Any], tuple[int, ...]]]:
        """Name, dtype and shape of each argument of the program, without the parameters."""
        stacks = [(str(number), dtype, (MOST, size)) for number, (dtype, size) in enumerate(self._inputs.rows)]
        return [*stacks, (_COUNT, np.dtype(np.uint32), ())]

    def compile(self, number: int | None) -> CompiledProgram:
        """Compiles the program for ``number`` requests; None: for any number up to ``MOST``.

        Raises NotGroupable: the program might compute other results than for a single request. Errors of tracing are raised
        unchanged.
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
        """Makes programs that run several requests in one call, or [] if the requests' inputs are too large for this.

        ``compiled``: the compiled program for each number of requests.
        """
        inputs = self._single.device.inputs(self.arguments)
        if not inputs.fit:
            return []
        made: Any = self._single.program.out_info
        memory, outputs = GroupedMemory(self._inputs, inputs), _packing(self._signature, made)
        read = self._single.device.contents_of
        return [
            GroupedProgram(
                length, self._signature, program, memory, outputs, read, length if self.one_for_each else MOST
            )
            for length, program in compiled.items()
        ]


def _apart(alone: Callable[..., Any], parameters: Any, tensors: dict[str, Any]) -> dict[str, Any]:
    if jax.default_backend() == "cpu":
        with set_xla_metadata(inlineable="false"):
            made: dict[str, Any] = alone(parameters, tensors)
        return made
    # Compilers for GPUs have no calls within a program.
    made = alone(parameters, jax.lax.optimization_barrier(tensors))
    return cast(dict[str, Any], jax.lax.optimization_barrier(made))


def _packing(signature: Signature, outputs: Any) -> Packing:
    return Packing([(name, outputs[name].shape, outputs[name].dtype) for name in signature.outputs])


def layout_of_rows(signature: Signature, packing: Packing) -> OutputLayout:
    """Returns where each output lies in the arrays that a program for several requests returns.

    There is one array for each dtype. Row i of the array holds all outputs of request i with this dtype, packed by ``packing``.
    """
    outputs: list[Output] = []
    for name, row, start, stop, shape in packing.parts:
        dtype, elements = packing.rows[row]
        item = dtype.itemsize
        datatype = signature.outputs[name].datatype
        outputs.append((name, datatype, row, start * item, elements * item, (stop - start) * item, shape))
    return OutputLayout(outputs, signature.batches)


class _Shape:
    __slots__ = ("fitting", "weight")

    def __init__(self, weight: Weight) -> None:
        self.weight = weight
        #: The program for each number of waiting requests; None: not compiled yet.
        self.fitting: list[GroupedProgram | None] = [None] * (MOST + 1)

    def add(self, programs: Sequence[GroupedProgram]) -> None:
        by_length = {program.rows: program for program in programs}
        for waiting in range(1, MOST + 1):
            self.fitting[waiting] = by_length.get(_LONGEST[_padded(waiting, self.weight)])


class GroupedCalls:
    """Compiles programs that run several requests in one call, and finds the program for requests that wait."""

    def __init__(self, signature: Signature, apply: Apply) -> None:
        self._signature = signature
        self._apply = apply
        self._shapes: dict[Hashable, _Shape] = {}

    def find(self, key: Hashable, waiting: int) -> GroupedProgram | None:
        """Returns the program that runs several of the waiting requests in one call, or None if each request must run alone.

        ``key``: the requests' shape. ``waiting``: how many requests wait. The program may have room for more or fewer requests.
        """
        shape = self._shapes.get(key)
        return None if shape is None else shape.fitting[min(waiting, MOST)]

    def wants(self, single: Executable) -> bool:
        """Returns whether to compile programs that run several requests with the input shapes of ``single`` in one call.

        Returns False if the work of ``single`` is large or unknown. Returns False if the inputs of ``single`` are large.
        Returns False if this method was called before for the same input shapes.
        """
        shapes = single.wanted.shapes
        if shapes in self._shapes:
            return False
        given = specs_of(self._signature, single.wanted)
        small = sum([math.prod(shape) * spec.dtype.itemsize for spec, shape in given]) <= _SMALL_BYTE_SIZE
        self._shapes[shapes] = _Shape(weight_of(single.program) if small else Weight.HEAVY)
        return self._shapes[shapes].weight > Weight.HEAVY

    def compile(
        self,
        single: Executable,
        make: Make = lambda _, number, compile_it: compile_it(number),
        lengths: Sequence[int] = LENGTHS,
    ) -> list[GroupedProgram]:
        """Compiles programs that run several requests with the input shapes of ``single`` in one call. Thread-safe.

        Returns one program for each number of requests in ``lengths``. Returns an empty list if the inputs are too large, or if
        a request might get another result than in a call of its own. Errors of ``make`` are raised unchanged.
        ``make(shapes, number, compile_it)`` returns a program for ``number`` requests with the input shapes ``shapes``, from a
        cache or from ``compile_it(number)``. If ``number`` is None, the program runs any number of requests up to ``MOST``.
        """
        maker = GroupedProgramMaker(single, self._signature, self._apply)
        shapes = single.wanted.shapes
        # On a CPU, one program runs any number of requests.
        numbers = {length: length if maker.one_for_each else None for length in lengths}
        try:
            compiled = {number: make(shapes, number, maker.compile) for number in dict.fromkeys(numbers.values())}
        except NotGroupable:
            return []
        return maker.programs({length: compiled[number] for length, number in numbers.items()})

    def add(self, single: Executable, programs: Sequence[GroupedProgram]) -> None:
        """Stores ``programs`` for requests with the input shapes of ``single``, so that ``self.find`` can return them."""
        shape = self._shapes.get(single.wanted.shapes)
        if shape is not None and programs:
            shape.add(programs)

    def forget(self, shapes: Shapes) -> None:
        """Removes the programs for several requests of these shapes."""
        self._shapes.pop(shapes, None)

    def __repr__(self) -> str:
        return f"<GroupedCalls of {len(self._shapes)} shapes>"


def _padded(waiting: int, weight: Weight) -> int:
    # One call is enough for a tiny program of which more than half is used.
    if waiting > MOST // 2 and (waiting >= MOST or weight is Weight.TINY):
        return MOST
    return waiting
