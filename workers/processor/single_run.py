"""Runs large prepared requests one at a time, for ``FastPath`` (``workers/dispatch/fast_path.py``).

The program reads inputs from regions and from the submitter's arena. The program writes large outputs to regions and to a block
of the worker's arena. A ``SingleRun`` holds no lease of a region. ``FastPath`` drops each ``SingleRun`` when a region changes,
and the thread that runs the programs is also the thread that unregisters regions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tensord.shm.arena import ALIGNMENT
from tensord.shm.arrays import DTYPES, Array, address_of
from tensord.shm.lane import WorkerLane
from tensord.shm.messages import PreparedTensor, RegionSlice, Slice
from tensord.shm.regions import Region
from tensord.workers.regions.region_table import check_intact

if TYPE_CHECKING:
    from tensord.workers.parameters.parameter_set import ParameterSet
    from tensord.workers.processor.processor import HostExecutable

#: An input's segment and offset in the submitter's arena, or its bytes.
Place = tuple[int, int] | bytes
#: Segment (-1: no lease), offset and generation of the lease, and the outputs that go into the record.
Outcome = tuple[int, int, int, list[Array]]
#: Marks an output that lies in the lease, in place of its index among the outputs in the record.
_LEASED = -1


class SingleOutput(NamedTuple):
    """One output of each request of a ``SingleRun``. Without ``at`` and ``region``, it goes into the answer's record."""

    name: str
    byte_size: int
    #: Where it begins in the answer's block in the response arena.
    at: int | None = None
    region: RegionSlice | None = None


class SingleRun:
    """Runs a program for requests of one submitter, one request at a time. All the requests have the same prepared part.

    Only the thread of the worker's event loop may use a ``SingleRun``.
    """

    def __init__(
        self,
        executable: HostExecutable,
        lane: WorkerLane,
        inputs: Iterable[tuple[PreparedTensor, int]],
        outputs: Iterable[SingleOutput],
        regions: Mapping[str, Region],
    ) -> None:
        """Makes arrays of the inputs that lie in regions, and finds where each output is written.

        Args:
          executable: the program.
          lane: the submitter's lane.
          inputs: the inputs that the prepared request describes, each with its number of bytes.
          outputs: the outputs of each request, in the order of the answer.
          regions: the regions that the prepared request names, by name.
        """
        self._executable = executable
        self._lane = lane
        self._regions = tuple(regions.values())
        #: Inputs that lie at a different place for each request; and inputs in regions, which are always at the same place.
        self._inputs: list[tuple[str, np.dtype[Any], tuple[int, ...], int]] = []
        self._fixed: dict[str, Array] = {}
        for tensor, size in inputs:
            dtype, place = DTYPES[tensor.datatype], tensor.region
            if place is None:
                self._inputs.append((tensor.name, dtype, tensor.shape, size))
            else:
                view = regions[place.region].view(place.offset, size)
                self._fixed[tensor.name] = np.frombuffer(view, dtype).reshape(tensor.shape)
        #: Outputs that travel in the record; large ones that lie in regions, and in the lease: offset and bytes.
        self._inside: list[str] = []
        self._placed: dict[str, memoryview] = {}
        self._leased: dict[str, tuple[int, int]] = {}
        #: Bytes of the lease; 0: there is none.
        self._leased_byte_size = 0
        #: For ``_native.FastPath.learn``, of each output that is in no region: its number among those in the record or -1, its
        #: offset, no step, its bytes, and no address.
        self.outputs: list[tuple[int, int, int, int, int]] = []
        for name, size, at, place in outputs:
            if place is not None:
                self._placed[name] = regions[place.region].view(place.offset, size)
            elif at is not None:
                self.outputs.append((_LEASED, at, 0, size, 0))
                self._leased[name] = at, size
                self._leased_byte_size = at + size
            else:
                self.outputs.append((len(self._inside), 0, 0, size, 0))
                self._inside.append(name)

    @property
    def inputs(self) -> list[tuple[int, int, int]]:
        """The size in bytes of each input, in order, between zeros, for ``learn``. Inputs that lie in regions are left out."""
        return [(0, size, 0) for *_, size in self._inputs]

    @property
    def is_aligned(self) -> bool:
        """True if all inputs in regions are aligned, so that the program can use them without a copy."""
        return not [array for array in self._fixed.values() if array.ctypes.data % ALIGNMENT]

    def __call__(self, places: Sequence[Place], chosen: ParameterSet | None = None) -> Outcome | None:
        """Runs one request. Returns the lease of the block that has the request's large outputs, and the small outputs.

        ``places``: for each input that is in no region, its bytes, or its segment and offset in the submitter's arena.
        ``chosen``: the parameter set; None: ``main``. Outputs that the request directs to regions are written to the regions.
        Returns None if no result was made, such as when the worker's arena is full. The request must then run in a batch.
        Raises InvalidArgument: an input is outside of the submitter's arena, or a region has lost its memory. Raises
        LookupError: XLA cannot write a large output directly to the output's memory. Raises the program's errors unchanged.
        """
        arguments = dict(self._fixed)
        for (name, dtype, shape, byte_size), place in zip(self._inputs, places, strict=True):
            content: bytes | memoryview
            if type(place) is bytes:
                content = place
            else:
                segment, offset = place
                if offset % ALIGNMENT:
                    return None
                content = self._lane.view(Slice(segment, offset, byte_size))
            arguments[name] = np.frombuffer(content, dtype).reshape(shape)
        if self._leased_byte_size or self._placed:
            return self._run_placed(arguments, chosen)
        inside = self._run_into(arguments, chosen, {})
        return None if inside is None else (-1, 0, 0, inside)

    def _run_placed(self, arguments: dict[str, Array], chosen: ParameterSet | None) -> Outcome | None:
        memory, lane = self._executable.memory_of_outputs, self._lane
        if memory is None:
            return None  # the ordinary path learns their allocation anew
        if not memory.offerable >= self._leased.keys() | self._placed.keys():
            raise LookupError("outputs are copied to their places")
        if not self._leased_byte_size:
            made = self._run_into(arguments, chosen, self._placed)
            return None if made is None else (-1, 0, 0, made)
        lease = lane.loan(self._leased_byte_size)
        if lease is None:
            return None
        inside: list[Array] | None = None
        try:
            if lane.is_announced(lease):
                leased = {name: lease.view[at : at + size] for name, (at, size) in self._leased.items()}
                inside = self._run_into(arguments, chosen, leased | self._placed)
        finally:
            if inside is None:
                lease.release()
        return None if inside is None else (*lease.key, inside)

    def _run_into(
        self, arguments: dict[str, Array], chosen: ParameterSet | None, memories: Mapping[str, memoryview]
    ) -> list[Array] | None:
        executable = self._executable
        addresses = {name: address_of(memory) for name, memory in memories.items()}
        outputs = _waited_for(executable.computed(executable.parameters(chosen), arguments, addresses))
        written = executable.written(outputs, addresses)
        inside = [outputs[name] for name in self._inside]
        del outputs
        for name, memory in memories.items():
            executable.give_up(addresses[name], memory)
        if self._regions:
            # After the last byte was read and written: a page that was missing meanwhile makes the answer void.
            check_intact(self._regions)
        # None: XLA has written an output elsewhere.
        return inside if len(written) == len(addresses) else None

    def __repr__(self) -> str:
        return f"<SingleRun of {self._executable.wanted}, {self._leased_byte_size} bytes out>"


def _waited_for(outputs: Mapping[str, Any]) -> dict[str, Array]:
    return {name: np.asarray(array) for name, array in outputs.items()}
