"""The processor (CPU) as an execution device: its programs, whose arguments and outputs lie in host memory."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tensord.shm.arena import ALIGNMENT
from tensord.shm.arrays import Array, address_of
from tensord.shm.cuda_regions import CudaRegion
from tensord.shm.regions import Region, SnapshotRegion
from tensord.workers.parameters.parameter_set import ParameterSets
from tensord.workers.processor import output_memory
from tensord.workers.processor.output_memory import OutputMemory
from tensord.workers.processor.single_thread import SingleThreadDevice, SmallPrograms
from tensord.workers.programs.executable import (
    Argument,
    Content,
    Executable,
    ExecutionDevice,
    Inputs,
    RunOutputs,
    Wanted,
)
from tensord.workers.programs.gather_buffer import GatherBuffer, HostInputs, RaggedBuffer
from tensord.workers.programs.placement import CompiledProgram
from tensord.workers.programs.plain_program import is_plain
from tensord.workers.regions.places import Places
from tensord.workers.tensors.request_tensors import RequestTensors
from tensord.workers.tensors.signature import Signature

#: A range of a file: which one, start, end.
_Range = tuple[tuple[int, int], int, int]


class HostExecutable(Executable):
    """A compiled program that runs on the processor, with the memory in which its batches are gathered."""

    def __init__(self, wanted: Wanted, signature: Signature, program: CompiledProgram, device: ExecutionDevice) -> None:
        super().__init__(wanted, signature, program, device)
        #: True if requests of several lengths are laid one behind the other.
        self._laid = signature.ragged
        #: How XLA allocates its outputs, once a run has shown it.
        self.memory_of_outputs: OutputMemory | None = None

    @functools.cached_property
    def _buffers(self) -> dict[str, GatherBuffer | RaggedBuffer]:
        """Returns input name -> the buffer in which this input is gathered from the requests of a batch."""
        arrays, found = self._inputs.arrays, dict[str, GatherBuffer | RaggedBuffer]()
        for spec, _ in self._specs:
            if spec.ragged:
                found[spec.name] = RaggedBuffer(spec.name, arrays[spec.name])
            elif spec.of_batch is None:
                found[spec.name] = GatherBuffer(spec.name, arrays[spec.name], self._batches)
        return found

    def gather(self, requests: Sequence[RequestTensors]) -> tuple[dict[str, Any], int]:
        arguments: dict[str, Any] = {}
        copied = 0
        # A request of as many rows as the program needs no copy, unless its tensors lie in its record, which is never aligned.
        # XLA copies small unaligned arguments itself; large ones are copied here, which is faster.
        whole = len(requests) == 1 and requests[0].rows == self.wanted.rows and not (requests[0].small or self._laid)
        for spec, shape in self._specs:
            if whole and self._fits(array := requests[0].arrays[spec.name], shape):
                arguments[spec.name] = array
            elif self._laid and spec.of_batch is not None:
                arguments[spec.name] = self._batch_input(spec, shape, requests)
            else:
                buffer = self._buffers[spec.name]
                arguments[spec.name] = buffer.array
                copied += buffer.fill(requests)
        return arguments, copied

    def _fits(self, array: Array, shape: tuple[int, ...]) -> bool:
        """Returns whether the program can use ``array`` without a copy."""
        if (array.shape[1:] if self._batches else array.shape) != shape or not isinstance(array, np.ndarray):
            return False
        return array.nbytes <= 4096 or not array.__array_interface__["data"][0] % ALIGNMENT

    def _compute(
        self, parameters: Any, arguments: dict[str, Any], requests: Sequence[RequestTensors], places: Places | None
    ) -> RunOutputs:
        made = self.computed(parameters, arguments, {} if places is None else places.addresses)
        outputs = self.outputs(made, requests)
        if places is not None:
            places.written = self.written(outputs.arrays, places.addresses)
        return outputs

    def computed(self, parameters: Any, arguments: dict[str, Any], addresses: Mapping[str, int]) -> dict[str, Any]:
        """Runs the program. The outputs may not be computed yet when this returns.

        ``addresses``: output name -> address of the memory that XLA should write the output to. XLA may write elsewhere
        nevertheless.
        """
        # The first run finds out how XLA allocates the outputs.
        learned = self.memory_of_outputs
        if learned is None and self.placement.several is None and output_memory.attached():
            run = functools.partial(self.call, parameters, arguments)
            made, self.memory_of_outputs = output_memory.watched(run, self._signature.outputs)
            return made
        if learned is not None and addresses:
            return learned.run(functools.partial(self.call, parameters, arguments), addresses)
        return self.call(parameters, arguments)

    def outputs(self, arrays: Mapping[str, Any], requests: Sequence[RequestTensors]) -> RunOutputs:
        # Waits for the run, after which its inputs may be changed.
        outputs = {name: np.asarray(arrays[name]) for name in self._signature.outputs}
        return RunOutputs(outputs, [*outputs.values()])

    # -------------------------------------------------------------------------------------------------------- outputs in place

    def sizes(self, requests: Sequence[RequestTensors], whole: bool) -> Mapping[str, int] | None:
        if self.memory_of_outputs is None or not whole:
            return None
        sizes = self.memory_of_outputs.sizes
        return sizes if max(sizes.values(), default=0) >= output_memory.WORTH else None

    def offer(self, places: Places) -> None:
        """Chooses the large outputs of a request that the program's next run may write directly to the memory in ``places``.

        ``places``: where each output of the request is written. For each chosen output, this method adds the memory to
        ``places.offered`` and the memory's address to ``places.addresses``, under the output's name.
        """
        # Only aligned memory. A client can read and change its region while the program runs: so a region is chosen only if the
        # program writes nothing but outputs to their memory, and no input and no other output of the request overlaps.
        outputs = self.memory_of_outputs
        if outputs is None:
            return
        used, offerable = _ranges(places) if places.in_regions else [], outputs.offerable
        for name, size in places.sizes.items():
            memory = places.memory(name) if name in offerable and size >= output_memory.WORTH else None
            address = 0 if memory is None else address_of(memory)
            if memory is None or address % ALIGNMENT:
                continue
            if name in places.in_regions:
                place, region = places.in_regions[name]
                assert isinstance(region, Region)
                # The range itself is one of the used ranges, so one overlap is always found.
                if not self._plain or _overlapping(_range(region, place.offset, size), used) > 1:
                    continue
            places.offered[name] = memory
            places.addresses[name] = address

    def written(self, outputs: Mapping[str, Array], addresses: Mapping[str, int]) -> list[str]:
        """Returns the names of the outputs that XLA has written directly to the memory at ``addresses``.

        ``outputs``: output name -> the computed array. ``addresses``: output name -> the memory address offered to XLA.
        """
        found = [name for name, address in addresses.items() if address_of(outputs[name]) == address]
        if len(found) < len(addresses):
            # The next run learns XLA's allocations anew.
            self.memory_of_outputs = None
        return found

    def settle(self, places: Places) -> None:
        """Empties ``places.offered``, the memory that XLA was allowed to write a request's outputs to.

        Call it after the answer was sent or dropped. Memory that XLA still uses is never unmapped.
        """
        for name, memory in places.offered.items():
            self.give_up(places.addresses[name], memory)
        places.offered.clear()

    def give_up(self, address: int, memory: memoryview) -> None:
        """Checks that XLA no longer uses ``memory``, which begins at ``address`` and was lent to XLA for an output.

        If XLA still uses this memory, the process never unmaps it, and the worker copies the outputs of later runs.
        """
        if not output_memory.given_up(address, memory) and self.memory_of_outputs is not None:
            self.memory_of_outputs.refuse()

    @functools.cached_property
    def _plain(self) -> bool:
        return is_plain(self.program)

    def __repr__(self) -> str:
        return f"<HostExecutable {self.wanted}>"


def _ranges(places: Places) -> list[_Range]:
    """Returns the ranges of host regions that a request reads and writes."""
    written = [(region, place.offset, places.sizes[name]) for name, (place, region) in places.in_regions.items()]
    used = [*places.read, *written]
    return [_range(region, offset, size) for region, offset, size in used if not isinstance(region, CudaRegion)]


def _range(region: Region | SnapshotRegion, offset: int, byte_size: int) -> _Range:
    start = region.offset + offset
    return region.file, start, start + byte_size


def _overlapping(one: _Range, others: list[_Range]) -> int:
    file, start, end = one
    return sum([file == other and start < other_end and begin < end for other, begin, other_end in others])


class Processor(ExecutionDevice):
    """Runs programs by JAX alone: on a CPU, on several devices, or on a GPU where CUDA is not called directly."""

    remote = False

    def __init__(self, single: SingleThreadDevice | None = None) -> None:
        """Makes the device. ``single`` runs small programs in one thread. If it is None, small programs run like all others."""
        self._single = single

    def executable(self, wanted: Wanted, signature: Signature, program: CompiledProgram) -> Executable:
        return HostExecutable(wanted, signature, program, self)

    def inputs(self, arguments: Sequence[Argument]) -> Inputs:
        return HostInputs(arguments)

    def contents_of(self, arrays: Sequence[Any]) -> list[Content]:
        return [np.asarray(array) for array in arrays]

    def small_programs(self, signature: Signature, sets: ParameterSets) -> SmallPrograms | None:
        return None if self._single is None else SmallPrograms(signature, self._single, sets)

    def beside(self) -> Processor:
        return self

    def __repr__(self) -> str:
        return f"<Processor {self._single}>"
