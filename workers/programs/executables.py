"""The compiled executables of one model version: ahead of time for its buckets, on demand for a bounded number of other shapes.

    executable    one per (batch bucket, shapes): jit(apply).lower(parameters, inputs).compile()
                  on the worker's device; a small program on the single-thread device, which shares the parameters' memory

The programs of a model with state share the carry (``state_program.py``), so all of them are on the one device or on the other.

Parameters are arguments, never constants: a constant would be copied into every executable. Compiling may happen in any thread;
``find``, ``add`` and ``limit`` belong to the worker's loop.
"""

from __future__ import annotations

import functools
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from shm.arena import ALIGNMENT
from shm.arrays import Array, address_of
from workers.devices.device_cuda import CudaDevice
from workers.devices.single_thread import SingleThreadDevice
from workers.native import output_memory
from workers.native.output_memory import OutputMemory
from workers.programs.carry import Carry
from workers.programs.executable_cache import ExecutableCache
from workers.programs.gather_buffer import GatherBuffer
from workers.programs.load_progress import LoadProgress
from workers.programs.lowering import Lowering
from workers.programs.placement import CompiledProgram, Placement
from workers.programs.plain_program import is_plain
from workers.programs.precision import precision
from workers.programs.run_errors import memory_needed
from workers.programs.small_programs import SmallPrograms
from workers.regions.region_tensor import LateTensor
from workers.requests.request import Request
from workers.tensors.batch_outputs import OutputLayout
from workers.tensors.buckets import Buckets, Shapes
from workers.tensors.signature import Signature, TensorSpec
from workers.tensors.state import InitialState

#: For the first runs of a version's executables.
_WARM_NS = 20_000_000
Apply = Callable[[Any, dict[str, Any]], dict[str, Any]]


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
        "_plain",
        "_program",
        "_signature",
        "_specs",
        "call",
        "device",
        "layout",
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
        self.call: Callable[..., dict[str, Any]] = functools.partial(program.call, program.placement.parameters)
        self.device = device
        self._signature = signature
        self._batches = signature.batches
        #: How its outputs lie, once it has run.
        self.layout: OutputLayout | None = None
        #: How they are allocated, once it has run where that can be learned.
        self.memory_of_outputs: OutputMemory | None = None
        self._plain: bool | None = None
        self._specs = [
            (spec, shape)
            for spec, shape in zip(signature.inputs.values(), wanted.shapes, strict=True)
            if shape is not None
        ]
        self._buffers: dict[str, GatherBuffer] = {}

    def twin(self, device: CudaDevice | None) -> Executable:
        """The same program for another thread: with buffers of its own, on the device as that thread has it."""
        return Executable(self.wanted, self._signature, self._program, device)

    @property
    def rows(self) -> int:
        """The rows of its batch."""
        return self.wanted.rows

    @property
    def placement(self) -> Placement:
        """Where it runs."""
        return self._program.placement

    @property
    def memory_needed(self) -> int | None:
        """As ``run_errors.memory_needed``."""
        return memory_needed(self._program.call)

    #: Rows that no request fills are zero.
    clears = True

    @property
    def memory(self) -> list[tuple[str, int, int]]:
        """Where each input of the first row is gathered: name, address, and how far behind it the next row is."""
        found: list[tuple[str, int, int]] = []
        for spec, shape in self._specs:
            buffer = self._buffer(spec, shape)
            found.append((spec.name, address_of(buffer.array), buffer.array.nbytes // self.wanted.rows))
        return found

    def run(self) -> list[Array]:
        """Computes what was gathered into ``memory``; returns the outputs, readable, when nobody reads it any more."""
        arguments = {name: buffer.array for name, buffer in self._buffers.items()}
        with precision(self._signature):
            made = self.call(arguments)
        return [np.asarray(made[name]) for name in self._signature.outputs]

    def compute(self, arguments: dict[str, Any], addresses: Mapping[str, int]) -> dict[str, Any]:
        """Runs the program; ``addresses``: memory for outputs, which may come to lie there."""
        if self._signature.wide:
            with precision(self._signature):
                return self._compute(arguments, addresses)
        return self._compute(arguments, addresses)

    def _compute(self, arguments: dict[str, Any], addresses: Mapping[str, int]) -> dict[str, Any]:
        learned = self.memory_of_outputs
        if learned is None and self.device is None and output_memory.attached():
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
        if len(requests) == 1 and requests[0].rows == self.wanted.rows and not requests[0].small:
            arguments, copied = dict(requests[0].arrays), 0
            for spec, shape in self._specs:
                array = arguments[spec.name]
                exact = (array.shape[1:] if self._batches else array.shape) == shape
                late = isinstance(array, LateTensor)
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
        parts = [
            (spec.name, spec.dtype, (*rows, *shape), [request.arrays[spec.name] for request in requests])
            for spec, shape in self._specs
        ]
        with precision(self._signature):
            return device.gather(parts)

    def _fill(self, spec: TensorSpec, shape: tuple[int, ...], requests: Sequence[Request]) -> tuple[Array, int]:
        buffer = self._buffer(spec, shape)
        return buffer.array, buffer.fill(requests)

    def _buffer(self, spec: TensorSpec, shape: tuple[int, ...]) -> GatherBuffer:
        buffer = self._buffers.get(spec.name)
        if buffer is None:
            buffer = GatherBuffer(spec.name, self.wanted.rows, shape, spec.dtype, self._batches)
            self._buffers[spec.name] = buffer
        return buffer


class Executables:
    """Finds, compiles and forgets the executables of one model version."""

    def __init__(
        self,
        signature: Signature,
        buckets: Buckets,
        apply: Apply,
        parameters: Any,
        cache: ExecutableCache,
        source: bytes,
        max_unexpected: int,
        device: CudaDevice | None = None,
        single_thread: SingleThreadDevice | None = None,
        initial: InitialState | None = None,
    ) -> None:
        """``single_thread``: where small programs run, if they can. ``initial``: of a model with state, where that begins."""
        self._initial = initial
        self.device = device
        self._signature = signature
        self._buckets = buckets
        self._cache = cache
        self._source = source
        self._max_unexpected = max_unexpected
        self.apply = apply
        self._lowering = Lowering(signature, apply)
        with precision(signature):
            self._usual = Placement(jax.device_put(parameters))
        self._small = None if single_thread is None else SmallPrograms(signature, single_thread, self._usual.parameters)
        self._planned: dict[Wanted, Executable] = {}
        #: Those compiled because a request asked, least recently used first.
        self._unexpected: OrderedDict[Wanted, Executable] = OrderedDict()

    def warm(self, progress: LoadProgress) -> None:
        """Makes every planned executable: from the cache, or by compiling. Raises Internal: wrong outputs."""
        planned = [Wanted(rows, shapes) for shapes in self._buckets.planned() for rows in self._buckets.batch]
        if self._signature.states:
            self._place(planned)
        program: bytes | None = None
        for wanted in progress.through(planned):
            lowered = None
            if program is None:
                # The program of the smallest shapes is part of every key: it changes with anything that ``apply`` closes over
                # or calls, which the source of model.py does not tell.
                lowered = self._lowering.lower(*wanted, self._usual)
                program = lowered.as_text().encode()
            key = self._cache.key((self._source, program, repr(self._signature), repr(wanted), repr(self._small)))
            compiled = self._cache.load(key, self._usual, self._small)
            if compiled is None:
                compiled = self._cache.compile(functools.partial(self._compile, wanted, lowered))
                progress.compiled(wanted)
                self._cache.store(key, compiled)
            self._planned[wanted] = Executable(wanted, self._signature, compiled, self.device)
        self._run_once()

    def _place(self, planned: Sequence[Wanted]) -> None:
        """One place for all programs, because they share the carry: where the largest one belongs."""
        small, self._small = self._small, None
        # Kept, because the parameters here are those of the worker's own device.
        self._shared = small
        if small is None or not planned or not small.suits(self._lowering.lower(*planned[-1], self._usual)):
            return
        if (placement := small.open()) is not None:
            try:
                self._lowering.lower(*planned[-1], placement)
            except Exception as error:
                small.give_up(error)
            else:
                self._usual = placement

    def carry(self) -> Carry | None:
        """The state of an instance's sequences as they begin. None: the model keeps none."""
        if self._initial is None:
            return None
        return Carry(self._signature, self._initial, self._usual.device)

    def _run_once(self) -> None:
        """Runs the planned executables on zeros, smallest first, for a bounded time.

        A program's first run is slower (measured: the first of a process by 30 ms, the first of each executable by 3 ms), and a
        model that cannot run at all is found out before it serves.
        """
        end_ns = time.monotonic_ns() + _WARM_NS
        carry = self.carry()
        for wanted, executable in self._planned.items():
            inputs = self._lowering.zeros(*wanted)
            with precision(self._signature):
                made = executable.call(inputs) if carry is None else carry.run(executable.call, inputs, wanted.rows, ())
                jax.block_until_ready(made)
            if time.monotonic_ns() > end_ns:
                return

    def compile(self, wanted: Wanted) -> Executable:
        """Makes an executable nobody planned. Raises Internal: wrong outputs; or whatever tracing raises."""
        return Executable(wanted, self._signature, self._compile(wanted, None), self.device)

    def find(self, wanted: Wanted) -> Executable | None:
        """A ready executable, or None."""
        found = self._planned.get(wanted)
        if found is None and (found := self._unexpected.get(wanted)) is not None:
            self._unexpected.move_to_end(wanted)
        return found

    def planned(self, wanted: Wanted) -> Executable | None:
        """One that was made before the version was ready, and stays."""
        return self._planned.get(wanted)

    def add(self, executable: Executable) -> list[Wanted]:
        """Adopts an unplanned executable; returns those that made room for it."""
        self._unexpected[executable.wanted] = executable
        gone = []
        while len(self._unexpected) > self._max_unexpected:
            gone.append(self._unexpected.popitem(last=False)[0])
        return gone

    def limit(self, shapes: Shapes) -> int:
        """The most rows of those shapes that a ready executable takes; 0: none is ready."""
        ready = (
            wanted.rows for made in (self._planned, self._unexpected) for wanted in made if wanted.shapes == shapes
        )
        return max(ready, default=0)

    def placement(self, shapes: Shapes) -> Placement:
        """Where a request of those shapes is run when it is alone, and a series of them as well."""
        found = self.find(Wanted(1, shapes))
        return self._usual if found is None else found.placement

    def _compile(self, wanted: Wanted, lowered: jax.stages.Lowered | None) -> CompiledProgram:
        lowered = lowered if lowered is not None else self._lowering.lower(*wanted, self._usual)
        self._lowering.check(wanted.rows, lowered)
        if self._small is not None:
            lower = functools.partial(self._lowering.lower, *wanted)
            zeros = functools.partial(self._lowering.zeros, *wanted)
            if (small := self._small.compile(lowered, lower, zeros)) is not None:
                return small
        with precision(self._signature):
            return CompiledProgram(self._usual.compile(lowered), self._usual)

    def __repr__(self) -> str:
        return f"<Executables {len(self._planned)} planned, {len(self._unexpected)} unexpected>"
