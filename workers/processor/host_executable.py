"""A program on the processor: takes arguments from host memory, and leaves outputs there, if it can at their places."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tensord.shm.arena import ALIGNMENT
from tensord.shm.arrays import Array, address_of
from tensord.shm.cuda_regions import CudaRegion
from tensord.shm.regions import Region
from tensord.shm.snapshot_region import SnapshotRegion
from tensord.workers.processor import output_memory
from tensord.workers.processor.output_memory import OutputMemory
from tensord.workers.processor.single_run import SingleRun, plan_single
from tensord.workers.programs.executable import Executable, RunOutputs, Wanted, specs_of
from tensord.workers.programs.execution_device import ExecutionDevice
from tensord.workers.programs.gather_buffer import GatherBuffer, RaggedBuffer
from tensord.workers.programs.placement import CompiledProgram
from tensord.workers.requests.places import Places
from tensord.workers.requests.request import Request
from tensord.workers.tensors.signature import Signature

if TYPE_CHECKING:
    from tensord.workers.models.execution import Execution
    from tensord.workers.requests.prepared import Preparation

#: A range of a file: which one, start, end.
_Range = tuple[tuple[int, int], int, int]


class _Buffers(dict[str, GatherBuffer | RaggedBuffer]):
    """The gather buffers of an executable by input, each made when it is first needed."""

    #: Whether the inputs can be gathered here.
    fit = True

    def __init__(self, wanted: Wanted, signature: Signature) -> None:
        self._rows = wanted.rows
        self._batches = signature.batches
        self._specs = {spec.name: (spec, shape) for spec, shape in specs_of(signature, wanted)}

    def __missing__(self, name: str) -> GatherBuffer | RaggedBuffer:
        spec, shape = self._specs[name]
        buffer: GatherBuffer | RaggedBuffer
        if spec.ragged:
            buffer = RaggedBuffer(name, shape, spec.dtype)
        else:
            buffer = GatherBuffer(name, self._rows, shape, spec.dtype, self._batches)
        self[name] = buffer
        return buffer

    @functools.cached_property
    def arrays(self) -> dict[str, Array]:
        """The arrays of all buffers, by input."""
        return {name: self[name].array for name in self._specs}

    def send(self) -> dict[str, Any]:
        """Returns the gathered inputs as arguments."""
        return self.arrays


class HostExecutable(Executable):
    """A compiled program that runs on the processor."""

    def __init__(self, wanted: Wanted, signature: Signature, program: CompiledProgram, device: ExecutionDevice) -> None:
        self._buffers = _Buffers(wanted, signature)
        super().__init__(wanted, signature, program, device, self._buffers)
        #: Whether requests of several lengths are laid one behind the other.
        self._laid = signature.ragged
        #: How XLA allocates its outputs, once a run has shown it.
        self.memory_of_outputs: OutputMemory | None = None

    def gather(self, requests: Sequence[Request]) -> tuple[dict[str, Any], int]:
        """Gathers the arguments of a batch. Returns them, and the bytes copied.

        A single request that fills the bucket is used where it lies, unless that is in its record, which is never aligned; XLA
        copies small unaligned arguments itself, but large ones are copied faster here.
        """
        arguments: dict[str, Any] = {}
        copied = 0
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
        """Returns whether a tensor may be used where it lies: it has the program's shape, in host memory, aligned if large."""
        if (array.shape[1:] if self._batches else array.shape) != shape or not isinstance(array, np.ndarray):
            return False
        return array.nbytes <= 4096 or not array.__array_interface__["data"][0] % ALIGNMENT

    def _compute(
        self, parameters: Any, arguments: dict[str, Any], requests: Sequence[Request], places: Places | None
    ) -> RunOutputs:
        made = self.computed(parameters, arguments, {} if places is None else places.addresses)
        outputs = self.outputs(made, requests)
        if places is not None:
            places.written = self.written(outputs.arrays, places.addresses)
        return outputs

    def computed(self, parameters: Any, arguments: dict[str, Any], addresses: Mapping[str, int]) -> dict[str, Any]:
        """Runs the program. ``addresses``: memory that is offered for outputs."""
        learned = self.memory_of_outputs
        if learned is None and self.placement.several is None and output_memory.attached():
            run = functools.partial(self.call, parameters, arguments)
            made, self.memory_of_outputs = output_memory.watched(run, self._signature.outputs)
            return made
        if learned is not None and addresses:
            return learned.run(functools.partial(self.call, parameters, arguments), addresses)
        return self.call(parameters, arguments)

    def outputs(self, made: Mapping[str, Any], requests: Sequence[Request]) -> RunOutputs:
        """Waits for all outputs and returns them: only then has the program read its last input."""
        arrays = {name: np.asarray(made[name]) for name in self._signature.outputs}
        return RunOutputs(arrays, [*arrays.values()])

    # -------------------------------------------------------------------------------------------------------- outputs in place

    def sizes(self, requests: Sequence[Request], whole: bool) -> Mapping[str, int] | None:
        """Returns the outputs' sizes if one is large and their allocation is known; else None."""
        if self.memory_of_outputs is None or not whole:
            return None
        sizes = self.memory_of_outputs.sizes
        return sizes if max(sizes.values(), default=0) >= output_memory.WORTH else None

    def offer(self, request: Request, places: Places) -> None:
        """Offers the program memory at the places of large and aligned outputs, to write there by itself.

        A region's owner may write to it while the program runs and reads it again, so only programs that leave nothing else in
        their outputs' memory may; nor may one write where it reads, or two outputs to the same bytes.
        """
        outputs = self.memory_of_outputs
        if outputs is None:
            return
        used, offerable = _ranges(request, places) if places.in_regions else [], outputs.offerable
        for name, size in places.sizes.items():
            memory = places.memory(name) if name in offerable and size >= output_memory.WORTH else None
            address = 0 if memory is None else address_of(memory)
            if memory is None or address % ALIGNMENT:
                continue
            if name in places.in_regions:
                place, region = places.in_regions[name]
                assert isinstance(region, Region)
                # It overlaps with its own range, which is one of those used.
                if not self.plain or _overlapping(_range(region, place.offset, size), used) > 1:
                    continue
            places.offered[name] = memory
            places.addresses[name] = address

    def written(self, outputs: Mapping[str, Array], addresses: Mapping[str, int]) -> list[str]:
        """Returns the outputs that lie at the offered addresses. Unless all do, the next run learns their allocation anew."""
        found = [name for name, address in addresses.items() if address_of(outputs[name]) == address]
        if len(found) < len(addresses):
            self.memory_of_outputs = None
        return found

    def settle(self, places: Places) -> None:
        """Passes the memory of outputs in place on to its next owner. If somebody keeps one, later outputs are copied."""
        for name, memory in places.offered.items():
            self.give_up(places.addresses[name], memory)
        places.offered.clear()

    def give_up(self, address: int, memory: memoryview) -> None:
        """Checks that no array lies in offered memory any more; else the program's outputs are copied from now on."""
        if not output_memory.given_up(address, memory) and self.memory_of_outputs is not None:
            self.memory_of_outputs.refuse()

    def single_run(
        self, execution: Execution, preparation: Preparation, regions: Mapping[str, Region]
    ) -> SingleRun | None:
        planned, checked, request = plan_single(execution, preparation), preparation.checked, execution.requests[0]
        if planned is None or checked is None:
            return None
        inputs, chosen = preparation.prepared.inputs, None if request.chosen is None else str(request.chosen)
        run = SingleRun(self, request.submitter.lane, inputs, checked.sizes, *planned, request.rows, regions, chosen)
        return run if run.is_aligned else None

    def __repr__(self) -> str:
        return f"<HostExecutable {self.wanted}>"


def _ranges(request: Request, places: Places) -> list[_Range]:
    """Returns the ranges of host regions that a request reads and writes."""
    files = {region.name: region for region in request.regions if not isinstance(region, CudaRegion)}
    read = [tensor.region for tensor in request.prepared.inputs if tensor.region is not None]
    used = [(place.region, place.offset, place.byte_size) for place in read]
    used += [(place.region, place.offset, places.sizes[name]) for name, (place, _) in places.in_regions.items()]
    return [_range(files[name], offset, size) for name, offset, size in used if name in files]


def _range(region: Region | SnapshotRegion, offset: int, byte_size: int) -> _Range:
    start = region.offset + offset
    return region.file, start, start + byte_size


def _overlapping(one: _Range, others: list[_Range]) -> int:
    file, start, end = one
    return sum([file == other and start < other_end and begin < end for other, begin, other_end in others])
