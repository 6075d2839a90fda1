"""One compiled program of a model version, and the memory in which its batches are gathered.

in host memory    a buffer for each input (``gather_buffer.py``)
on a GPU          the device's staging buffer; small ones by way of page-locked memory (``device_inputs.py``)
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from tensord.shm.arena import ALIGNMENT
from tensord.shm.arrays import Array, address_of
from tensord.workers.devices.device_cuda import CudaDevice
from tensord.workers.jax_internals.wide import byte_size_of
from tensord.workers.native import output_memory
from tensord.workers.native.output_memory import OutputMemory
from tensord.workers.programs.device_inputs import DeviceInputs
from tensord.workers.programs.gather_buffer import GatherBuffer, RaggedBuffer
from tensord.workers.programs.packed_outputs import PACKED, starts
from tensord.workers.programs.placement import CompiledProgram, Placement
from tensord.workers.programs.plain_program import is_plain
from tensord.workers.programs.precision import precision
from tensord.workers.programs.run_errors import memory_needed
from tensord.workers.programs.weight import share_of
from tensord.workers.requests.request import Request
from tensord.workers.tensors.batch_outputs import OutputLayout, layout_of
from tensord.workers.tensors.buckets import Shapes
from tensord.workers.tensors.ragged import batch_input, flat
from tensord.workers.tensors.signature import Signature, TensorSpec

#: Outputs, one or several, in memory of the host.
Content = Array | bytes


class Wanted(NamedTuple):
    """The shapes of one executable: how many rows (1 without a batch dimension) and the inputs' shapes without them."""

    rows: int
    shapes: Shapes

    def __str__(self) -> str:
        inputs = ", ".join(str(list(shape)) for shape in self.shapes if shape is not None)
        return f"{self.rows} rows of {inputs}"


class Executable:
    """One compiled program with the buffers its batches are gathered in. Used by one execution thread only."""

    __slots__ = (
        "__weakref__",
        "_batches",
        "_buffers",
        "_cuts",
        "_fetched",
        "_gathered",
        "_inputs",
        "_laid",
        "_layout",
        "_plain",
        "_program",
        "_share",
        "_signature",
        "_specs",
        "call",
        "device",
        "elements",
        "memory_of_outputs",
        "wanted",
    )

    def __init__(
        self,
        wanted: Wanted,
        signature: Signature,
        program: CompiledProgram,
        device: CudaDevice | None = None,
    ) -> None:
        """``device``: where batches are gathered instead of in host memory; it belongs to the thread that runs this."""
        self.wanted = wanted
        self._program = program
        #: Takes the inputs; the parameters are those where the program runs.
        several, call = program.placement.several, functools.partial(program.call, program.placement.parameters)
        self.call: Callable[..., dict[str, Any]] = call if several is None else several.alone(call)
        self.device = device
        self._signature = signature
        self._batches = signature.batches
        #: Requests of several lengths are laid one behind the other.
        self._laid = signature.ragged
        self._layout: OutputLayout | None = None
        #: Of outputs that were fetched: which content, where it begins there, dtype and shape; and where in the one content.
        self._fetched: list[tuple[str, np.dtype[Any], tuple[int, ...]]] | None = None
        #: Where each output begins and ends among the packed ones.
        self._cuts: list[tuple[int, int]] | None = None
        #: How they are allocated, once it has run where that can be learned.
        self.memory_of_outputs: OutputMemory | None = None
        self._plain: bool | None = None
        self._share: float | None = None
        self._specs = [
            (spec, shape)
            for spec, shape in zip(signature.inputs.values(), wanted.shapes, strict=True)
            if shape is not None
        ]
        #: Of all inputs together.
        self.elements = sum(
            math.prod(shape) * (wanted.rows if self._batches and not spec.whole else 1) for spec, shape in self._specs
        )
        self._buffers: dict[str, GatherBuffer | RaggedBuffer] = {}
        self._gathered: dict[str, Array] | None = None
        self._inputs: DeviceInputs | None = None
        if device is not None:
            lead = (wanted.rows,) if signature.batches else ()
            inputs = [(spec.name, spec.dtype, shape if spec.whole else (*lead, *shape)) for spec, shape in self._specs]
            self._inputs = DeviceInputs(device, inputs)

    def twin(self, device: CudaDevice | None) -> Executable:
        """The same program for another thread: with buffers of its own, on the device as that thread has it."""
        return Executable(self.wanted, self._signature, self._program, device)

    @property
    def rows(self) -> int:
        """The rows of its batch."""
        return self.wanted.rows

    @property
    def program(self) -> jax.stages.Compiled:
        """As it was compiled: of parameters and inputs."""
        return self._program.call

    @property
    def placement(self) -> Placement:
        """Where it runs."""
        return self._program.placement

    @property
    def share(self) -> float:
        """As ``weight.share_of``."""
        if self._share is None:
            self._share = share_of(self._program.call)
        return self._share

    @property
    def memory_needed(self) -> int | None:
        """As ``run_errors.memory_needed``."""
        return memory_needed(self._program.call)

    #: Rows that no request fills are zero.
    clears = True

    @property
    def gathers(self) -> bool:
        """Whether anybody may gather its inputs in host memory: on a GPU, where they are small."""
        return self._inputs is None or self._inputs.fit

    @property
    def memory(self) -> list[tuple[str, int, int]]:
        """Where each input of the first row is gathered: name, address, and how far behind it the next row is."""
        return [(name, address_of(array), array.nbytes // self.wanted.rows) for name, array in self.gathered.items()]

    @property
    def gathered(self) -> dict[str, Array]:
        """The arrays in ``memory``."""
        if self._gathered is None:
            if self._inputs is not None:
                self._gathered = self._inputs.arrays
            else:
                self._gathered = {spec.name: self._buffer(spec, shape).array for spec, shape in self._specs}
        return self._gathered

    def arguments(self) -> dict[str, Any]:
        """What was gathered into ``memory``, as the program takes it."""
        if self._inputs is None:
            return self.gathered
        with precision(self._signature):
            return self._inputs.send()

    def run(self) -> list[Content]:
        """Computes what was gathered into ``memory``; returns the contents of its layout when nobody reads it any more."""
        arguments = self._gathered if self._inputs is None else self.arguments()
        with precision(self._signature):
            made = self.call(arguments)
        return self.read(made)

    def read(self, made: Mapping[str, Any]) -> list[Content]:
        """The contents of its layout when nobody reads the inputs any more. Raises what the run raised."""
        if self.device is not None and (found := self.fetch(self.device, made)) is not None:
            return [*found]
        return [np.asarray(made[name]) for name in self._signature.outputs]

    def fetch(self, device: CudaDevice, made: Mapping[str, Any]) -> list[bytes] | None:
        """The contents of its layout out of the device, in one transfer where the program has packed them.

        One for each output in any case: the layouts of a model's programs are alike, packed or not, whatever their rows.

        None: they are too large to be brought together. Raises as ``read``.
        """
        packed = made.get(PACKED)
        if packed is None:
            return device.take([made[name] for name in self._signature.outputs])
        if self._cuts is None:
            arrays = {name: made[name] for name in self._signature.outputs}
            self._cuts = [(at, at + byte_size_of(arrays[name])) for name, at in starts(arrays).items()]
        return device.take([packed], self._cuts)

    @property
    def output_sizes(self) -> dict[str, int]:
        """Bytes of each output, as compiled."""
        info: Any = self._program.call.out_info
        made = info[0] if self._signature.states else info
        return {name: math.prod(made[name].shape) * made[name].dtype.itemsize for name in self._signature.outputs}

    def arrays_in(self, contents: Sequence[bytes], made: Mapping[str, Any]) -> dict[str, Array]:
        """The outputs in what ``fetch`` gave; ``made``: what that was given."""
        if self._fetched is None:
            arrays = {name: made[name] for name in self._signature.outputs}
            self._fetched = [(name, np.dtype(array.dtype), array.shape) for name, array in arrays.items()]
        return {
            name: np.frombuffer(content, dtype).reshape(shape)
            for (name, dtype, shape), content in zip(self._fetched, contents, strict=True)
        }

    def layout_of(self, outputs: Mapping[str, Array]) -> OutputLayout:
        """How the rows of its outputs lie in their contents, the same in every run."""
        if self._layout is None:
            self._layout = layout_of(self._signature, outputs, self._batches)
        return self._layout

    def compute(self, arguments: dict[str, Any], addresses: Mapping[str, int]) -> dict[str, Any]:
        """Runs the program; ``addresses``: memory for outputs, which may come to lie there."""
        if self._signature.wide:
            with precision(self._signature):
                return self._compute(arguments, addresses)
        return self._compute(arguments, addresses)

    def _compute(self, arguments: dict[str, Any], addresses: Mapping[str, int]) -> dict[str, Any]:
        learned = self.memory_of_outputs
        if learned is None and self.device is None and self.placement.several is None and output_memory.attached():
            run = functools.partial(self.call, arguments)
            made, self.memory_of_outputs = output_memory.watched(run, self._signature.outputs)
            return made
        if learned is not None and addresses:
            return learned.run(functools.partial(self.call, arguments), addresses)
        return self.call(arguments)

    def written(self, outputs: Mapping[str, Array], addresses: Mapping[str, int]) -> list[str]:
        """Of a run with such addresses: the outputs that lie there. Unless all do, the next run learns how they are allocated."""
        found = [name for name, address in addresses.items() if address_of(outputs[name]) == address]
        if len(found) < len(addresses):
            self.memory_of_outputs = None
        return found

    def keep_outputs(self) -> None:
        """Its outputs are only ever copied from now on: somebody did not give one up."""
        if self.memory_of_outputs is not None:
            self.memory_of_outputs.refuse()

    @property
    def plain(self) -> bool:
        """Whether its program only computes (``workers/programs/plain_program.py``)."""
        if self._plain is None:
            self._plain = is_plain(self._program.call)
        return self._plain

    def gather(self, requests: Sequence[Request]) -> tuple[dict[str, Any], int]:
        """The arguments for a batch, and how many bytes were copied for them.

        A request that fills the bucket alone is used where it lies, unless that is in its record, which is never aligned; small
        unaligned arguments are left to XLA, which copies them anyway, but large ones faster by us.
        """
        if self.device is not None:
            return self._gather_on(self.device, requests)
        if len(requests) == 1 and requests[0].rows == self.wanted.rows and not (requests[0].small or self._laid):
            arguments, copied = dict(requests[0].arrays), 0
            for spec, shape in self._specs:
                array = arguments[spec.name]
                exact = (array.shape[1:] if self._batches else array.shape) == shape
                # What lies in a GPU's memory, for one: a program on several devices takes it from the host.
                late = not isinstance(array, np.ndarray)
                if not exact or late or (array.nbytes > 4096 and array.__array_interface__["data"][0] % ALIGNMENT):
                    arguments[spec.name], byte_size = self._fill(spec, shape, requests)
                    copied += byte_size
            return arguments, copied
        arguments, copied = {}, 0
        for spec, shape in self._specs:
            arguments[spec.name], byte_size = self._fill(spec, shape, requests)
            copied += byte_size
        return arguments, copied

    def _gather_on(self, device: CudaDevice, requests: Sequence[Request]) -> tuple[dict[str, Any], int]:
        rows = (self.wanted.rows,) if self._batches else ()
        parts: list[tuple[str, np.dtype[Any], tuple[int, ...], list[Array]]] = []
        for spec, shape in self._specs:
            if spec.of_batch is not None:
                parts.append((spec.name, spec.dtype, shape, [self._told(spec, shape, requests)]))
            elif spec.ragged:
                parts.append((spec.name, spec.dtype, shape, [flat(request.arrays[spec.name]) for request in requests]))
            else:
                arrays = [request.arrays[spec.name] for request in requests]
                parts.append((spec.name, spec.dtype, (*rows, *shape), arrays))
        with precision(self._signature):
            return device.gather(parts)

    def _fill(self, spec: TensorSpec, shape: tuple[int, ...], requests: Sequence[Request]) -> tuple[Array, int]:
        if self._laid and spec.of_batch is not None:
            return self._told(spec, shape, requests), 0
        buffer = self._buffer(spec, shape)
        return buffer.array, buffer.fill(requests)

    def _told(self, spec: TensorSpec, shape: tuple[int, ...], requests: Sequence[Request]) -> Array:
        assert spec.of_batch is not None
        return batch_input(spec, self._signature.inputs[spec.of_batch.source], shape, self.wanted.rows, requests)

    def _buffer(self, spec: TensorSpec, shape: tuple[int, ...]) -> GatherBuffer | RaggedBuffer:
        buffer = self._buffers.get(spec.name)
        if buffer is None:
            if spec.ragged:
                buffer = RaggedBuffer(spec.name, shape, spec.dtype)
            else:
                buffer = GatherBuffer(spec.name, self.wanted.rows, shape, spec.dtype, self._batches)
            self._buffers[spec.name] = buffer
        return buffer
