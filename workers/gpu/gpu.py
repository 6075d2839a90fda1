"""Runs compiled programs on a GPU, with the copies of inputs to the GPU and of outputs from the GPU.

large inputs    copied to the GPU one by one
small inputs    gathered in page-locked host memory, then copied in one transfer (``DeviceInputs``)
outputs         copied to the host, copied directly into an arena or a region, or left on the GPU
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any, cast

import jax
import numpy as np

from tensord.shm.arrays import Array
from tensord.shm.cuda_regions import CudaError, DeviceLost
from tensord.workers.devices.device_cuda import CudaDevice, room
from tensord.workers.devices.host_staging import TOGETHER
from tensord.workers.jax_internals.wide import precision
from tensord.workers.programs.executable import (
    Argument,
    Content,
    Executable,
    ExecutionDevice,
    Inputs,
    RunOutputs,
    Wanted,
)
from tensord.workers.programs.packed_outputs import PACKED, starts
from tensord.workers.programs.placement import CompiledProgram
from tensord.workers.regions.places import Places
from tensord.workers.tensors.output_layout import UNCUT_BYTE_SIZE
from tensord.workers.tensors.ragged import flat
from tensord.workers.tensors.request_tensors import RequestTensors
from tensord.workers.tensors.signature import Signature


class Gpu(ExecutionDevice):
    """A GPU, for use by one thread. It makes executables that copy inputs to the GPU and outputs to the host."""

    remote = True

    def __init__(self, cuda: CudaDevice) -> None:
        self._cuda = cuda

    def executable(self, wanted: Wanted, signature: Signature, program: CompiledProgram) -> Executable:
        return GpuExecutable(wanted, signature, program, self, self._cuda)

    def inputs(self, arguments: Sequence[Argument]) -> Inputs:
        return DeviceInputs(self._cuda, arguments)

    def contents_of(self, arrays: Sequence[Any]) -> list[Content]:
        fetched = self._cuda.take(arrays)
        return [np.asarray(array) for array in arrays] if fetched is None else [*fetched]

    def beside(self) -> Gpu:
        return Gpu(self._cuda.beside())

    def check(self) -> None:
        self._cuda.check()

    def close(self) -> None:
        with contextlib.suppress(CudaError, DeviceLost):  # it goes with the process
            self._cuda.close()

    def __repr__(self) -> str:
        return f"<Gpu {self._cuda}>"


class DeviceInputs:
    """Host memory in which an executable's small inputs are gathered, before they are copied to the GPU in one transfer.

    All executables of a thread share this memory. Send one executable's inputs to the GPU before you gather the next one's.
    """

    __slots__ = ("_byte_size", "_device", "_parts")

    def __init__(self, device: CudaDevice, inputs: Sequence[tuple[str, np.dtype[Any], tuple[int, ...]]]) -> None:
        """Assigns each input an offset in the host memory of ``device``. ``inputs``: name, dtype and shape of each input."""
        self._device = device
        self._parts: list[tuple[str, np.dtype[Any], tuple[int, ...], int]] = []
        at = 0
        for name, dtype, shape in inputs:
            self._parts.append((name, dtype, shape, at))
            at += room(dtype, shape)
        self._byte_size = at

    @property
    def fit(self) -> bool:
        """True if all inputs together occupy at least one byte, and at most 256 KiB."""
        return 0 < self._byte_size <= TOGETHER

    @property
    def arrays(self) -> dict[str, Array]:
        """The host arrays, by name, in which inputs are gathered for the GPU. Raises DeviceLost if the GPU has failed."""
        content = self._device.host.content
        found: dict[str, Array] = {}
        for name, dtype, shape, at in self._parts:
            byte_size = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
            found[name] = content[at : at + byte_size].view(dtype).reshape(shape)
        return found

    def send(self) -> dict[str, jax.Array]:
        """Copies the inputs that were written into ``self.arrays`` to the GPU. Returns the copies by name.

        Raises Unavailable if the GPU has no memory left, or DeviceLost if the GPU has failed.
        """
        return self._device.send(self._parts, self._byte_size)

    def __repr__(self) -> str:
        return f"<DeviceInputs {len(self._parts)} inputs, {self._byte_size} bytes>"


class GpuExecutable(Executable):
    """A compiled program that runs on a GPU. It also copies the inputs to the GPU and the outputs from it."""

    delivers = True

    def __init__(
        self, wanted: Wanted, signature: Signature, program: CompiledProgram, device: ExecutionDevice, cuda: CudaDevice
    ) -> None:
        super().__init__(wanted, signature, program, device)
        self._cuda = cuda
        #: Name, dtype and shape of each output that is fetched.
        self._fetched: list[tuple[str, np.dtype[Any], tuple[int, ...]]] | None = None
        #: Start and end of each output among the packed ones.
        self._cuts: list[tuple[int, int]] | None = None

    def read(self, arrays: Mapping[str, Any]) -> list[Content]:
        found = self._fetch(arrays)
        return [np.asarray(arrays[name]) for name in self._signature.outputs] if found is None else [*found]

    def _fetch(self, arrays: Mapping[str, Any]) -> list[bytes] | None:
        """Copies outputs to the host, and returns the bytes of each. Returns None if all have together more than 256 KiB."""
        packed = arrays.get(PACKED)
        if packed is None:
            return self._cuda.take([arrays[name] for name in self._signature.outputs])
        if self._cuts is None:
            outputs = {name: arrays[name] for name in self._signature.outputs}
            self._cuts = [(at, at + outputs[name].nbytes) for name, at in starts(outputs).items()]
        return self._cuda.take([packed], self._cuts)

    def _arrays_in(self, contents: Sequence[bytes], arrays: Mapping[str, Any]) -> dict[str, Array]:
        """Makes an array of the bytes of each output. Returns the arrays by output name.

        ``contents``: the bytes of each output, in the order of the signature's outputs.
        ``arrays``: for each output name, an array that has the output's dtype and shape.
        """
        if self._fetched is None:
            outputs = {name: arrays[name] for name in self._signature.outputs}
            self._fetched = [(name, np.dtype(array.dtype), array.shape) for name, array in outputs.items()]
        return {
            name: np.frombuffer(content, dtype).reshape(shape)
            for (name, dtype, shape), content in zip(self._fetched, contents, strict=True)
        }

    def gather(self, requests: Sequence[RequestTensors]) -> tuple[dict[str, Any], int]:
        rows = (self.wanted.rows,) if self._batches else ()
        parts: list[tuple[str, np.dtype[Any], tuple[int, ...], list[Array]]] = []
        for spec, shape in self._specs:
            if spec.of_batch is not None:
                parts.append((spec.name, spec.dtype, shape, [self._batch_input(spec, shape, requests)]))
            elif spec.ragged:
                parts.append((spec.name, spec.dtype, shape, [flat(request.arrays[spec.name]) for request in requests]))
            else:
                arrays = [request.arrays[spec.name] for request in requests]
                parts.append((spec.name, spec.dtype, (*rows, *shape), arrays))
        with precision(self._signature.wide):
            return self._cuda.gather(parts)

    def _compute(
        self, parameters: Any, arguments: dict[str, Any], requests: Sequence[RequestTensors], places: Places | None
    ) -> RunOutputs:
        made = self.call(parameters, arguments)
        return self.outputs(made, requests) if places is None else self._delivered(made, requests[0], places)

    def outputs(self, arrays: Mapping[str, Any], requests: Sequence[RequestTensors]) -> RunOutputs:
        contents = None if any(request.stays for request in requests) else self._fetch(arrays)
        if contents is not None:
            return RunOutputs(self._arrays_in(contents, arrays), contents)
        outputs = jax.block_until_ready([arrays[name] for name in self._signature.outputs])
        # They stay on the device: their places decide how they leave it.
        kept = cast(list[Array], [self._cuda.keep(output) for output in outputs])
        return RunOutputs(dict(zip(self._signature.outputs, kept, strict=True)), None)

    def _delivered(self, arrays: Mapping[str, Any], request: RequestTensors, places: Places) -> RunOutputs:
        reached = places.reached()
        outputs = self._cuda.deliver({name: arrays[name] for name in self._signature.outputs}, reached)
        places.written = reached.keys()
        request.copied_byte_size += sum([places.sizes[name] for name in reached])
        return RunOutputs(cast(dict[str, Array], outputs), None)

    def sizes(self, requests: Sequence[RequestTensors], whole: bool) -> Mapping[str, int] | None:
        if not whole:
            return None
        sizes = self.output_sizes
        return sizes if sum(sizes.values()) > UNCUT_BYTE_SIZE or requests[0].stays else None

    def __repr__(self) -> str:
        return f"<GpuExecutable {self.wanted}>"
