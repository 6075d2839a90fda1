"""A worker's GPU: copies the inputs of a batch to it, copies outputs from it, and limits the GPU memory that XLA may use.

Most inputs are copied to a staging buffer, which is GPU memory. If they have together at most ``TOGETHER`` bytes, those in
host memory are copied in one transfer (``host_staging.py``). Two kinds of inputs are used without a copy if they fill a batch
alone: outputs of other models on the GPU, and tensors in a CUDA region of the same GPU, aligned to 256 bytes and not BOOL.
Each thread that runs programs has a ``CudaDevice`` with a staging buffer of its own. The thread waits until all inputs of a
batch are copied before it calls XLA. A batch is computed before the inputs of the next batch are copied.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

import jax
import numpy as np

from tensord.config.options import Workers
from tensord.shm.arrays import Array, address_of
from tensord.shm.common.dlpack import DeviceView
from tensord.shm.cuda_regions import Context, CudaError, CudaRegion, DeviceLost
from tensord.shm.errors import Unavailable
from tensord.workers.devices.device_array import GpuArray, may_be_written, standing
from tensord.workers.devices.host_staging import TOGETHER, HostStaging, StagingPool
from tensord.workers.devices.late_tensor import CudaTensor

#: Alignment of XLA's own buffers; it refuses or copies arguments with less, so the worker copies these itself.
ALIGNMENT = 256
_LEAST_STAGING = 1 << 20
#: Outputs begin at multiples of this in host memory.
_LINE = 64
_MAX_VIEWS = 1024
#: One input of a batch: its name, dtype, the shape the executable wants, and the requests' arrays (or ``CudaTensor``), which
#: follow each other along the first axis and are at most as large; what they do not fill is zeros.
GatheredPart = tuple[str, np.dtype[Any], tuple[int, ...], Sequence[Array]]


def prepare_environment(options: Workers) -> None:
    """Limits XLA's GPU memory by environment variables. Variables that are already set stay unchanged.

    Call it before JAX's back end starts.
    """
    if not os.environ.keys() & {"XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"}:
        # Workers that share a GPU take equal parts, however many of them run already.
        os.environ["XLA_CLIENT_MEM_FRACTION"] = f"{options.gpu_memory_fraction / options.per_gpu:g}"
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "true" if options.gpu_preallocate else "false")


class CudaDevice:
    """Copies inputs to a GPU and outputs from it, for one thread, which runs one program at a time."""

    def __init__(self, context: Context, device: jax.Device, pieces: StagingPool) -> None:
        self.context = context
        self._device = device
        self._pieces = pieces
        #: The device's DLDeviceType and number in XLA.
        self._dlpack_device = _dlpack_device_of(device)
        #: True if XLA can make the device wait, as its back end for GPUs does; True until a failure.
        self._waits = True
        self._staging = 0
        self._staging_byte_size = 0
        self._host: HostStaging | None = None
        #: (address, dtype, shape) -> array; addresses are all that an array of foreign memory is, so none is ever stale.
        self._views: OrderedDict[tuple[int, np.dtype[Any], tuple[int, ...]], jax.Array] = OrderedDict()

    def beside(self) -> CudaDevice:
        """Returns another ``CudaDevice`` for the same GPU, with staging memory of its own, for another thread."""
        return CudaDevice(self.context, self._device, self._pieces)

    # ------------------------------------------------------------------------------------------------------- inputs

    def gather(self, parts: Sequence[GatheredPart]) -> tuple[dict[str, jax.Array], int]:
        """Copies a batch's inputs to the GPU. Returns the program's arguments by name, and the number of bytes copied.

        Raises InvalidArgument: a region cannot be read any more. Raises Unavailable: there is no memory. Raises DeviceLost: the
        GPU failed.
        """
        arguments: dict[str, jax.Array] = {}
        needed, copied = 0, 0
        staged: list[tuple[GatheredPart, int]] = []
        for part in parts:
            name, dtype, shape, arrays = part
            only = arrays[0]
            whole = only.whole if len(arrays) == 1 and isinstance(only, GpuArray) and only.shape == shape else None
            if whole is not None:
                # An output of another model, such as in an ensemble, is used as it is.
                arguments[name] = whole
            elif (
                len(arrays) == 1
                and isinstance(only, CudaTensor)
                and only.shape == shape
                and only.pointer % ALIGNMENT == 0
                and only.nbytes
                and dtype != np.bool_
                and not only.region.peer
            ):
                arguments[name] = self._view(only.pointer, dtype, shape)
            else:
                staged.append((part, needed))
                needed += room(dtype, shape)
        if staged:
            self._reserve(needed)
            sources: list[Array] = []
            try:
                if needed <= TOGETHER:
                    copied = self._fill_together(staged, needed)
                else:
                    for (_, dtype, shape, arrays), at in staged:
                        copied += self._fill(self._staging + at, dtype, shape, arrays, sources)
            finally:
                # Also after an error: what is queued still reads the sources.
                self.context.synchronize()
            for (name, dtype, shape, _), at in staged:
                arguments[name] = self._view(self._staging + at, dtype, shape)
        return arguments, copied

    @property
    def host(self) -> HostStaging:
        """Host memory, page-locked if possible, through which small tensors are copied to and from the GPU.

        Raises DeviceLost if the GPU has failed.
        """
        if self._host is None:
            self._host = self._pieces.take()
        return self._host

    def send(
        self, parts: Sequence[tuple[str, np.dtype[Any], tuple[int, ...], int]], byte_size: int
    ) -> dict[str, jax.Array]:
        """Copies the first ``byte_size`` bytes of ``self.host`` to the GPU in one transfer. Returns the GPU arrays by name.

        ``parts``: the name, dtype and shape of each input, and its offset in the host memory in bytes, a multiple of
        ``ALIGNMENT``.
        """
        self._reserve(byte_size)
        self.context.to_device(self._staging, self.host.address, byte_size)
        self.context.synchronize()
        return {name: self._view(self._staging + at, dtype, shape) for name, dtype, shape, at in parts}

    def _reserve(self, byte_size: int) -> None:
        self.context.enter()
        if byte_size <= self._staging_byte_size:
            return
        self._free_staging()
        size = max(_LEAST_STAGING, 1 << (byte_size - 1).bit_length())
        try:
            self._staging = self.context.allocate(size)
        except Unavailable as error:
            if size == byte_size or isinstance(error, DeviceLost):
                raise
            # Tries again without spare room for larger batches.
            size = byte_size
            self._staging = self.context.allocate(size)
        self._staging_byte_size = size

    def _fill_together(self, staged: Sequence[tuple[GatheredPart, int]], byte_size: int) -> int:
        content, copied, of_host = self.host.content, 0, False
        of_device: list[tuple[int, CudaTensor | GpuArray]] = []
        for (_, dtype, shape, arrays), at in staged:
            size = _byte_size(dtype, shape)
            part = content[at : at + size].view(dtype).reshape(shape)
            if not shape:
                part[...] = arrays[0]
                copied, of_host = copied + size, True
                continue
            row, row_byte_size = 0, size // shape[0] if shape[0] else 0
            for array in arrays:
                rows = part[row : row + array.shape[0]]
                exact = array.shape[1:] == shape[1:]
                if exact and _lies_there(array):
                    of_device.append((self._staging + at + row * row_byte_size, array))
                else:
                    if not exact:
                        rows[...] = 0
                    rows[tuple(map(slice, array.shape))] = array
                    of_host = True
                row += len(rows)
                copied += rows.nbytes
            if row < shape[0]:
                part[row:] = 0
                of_host = True
        if of_host and byte_size:
            self.context.to_device(self._staging, self.host.address, byte_size)
        for pointer, tensor in of_device:
            self._copy_within(pointer, tensor)
        return copied

    def _fill(
        self, pointer: int, dtype: np.dtype[Any], shape: tuple[int, ...], arrays: Sequence[Array], sources: list[Array]
    ) -> int:
        total, at = _byte_size(dtype, shape), 0
        row_shape = shape[1:]
        for array in arrays:
            exact = array.shape == shape or (bool(shape) and array.shape[1:] == row_shape)
            if exact and _lies_there(array):
                self._copy_within(pointer + at, array)
                at += array.nbytes
                continue
            host = standing(np.ascontiguousarray(np.asarray(array)))
            if not exact:
                full = np.zeros((host.shape[0], *row_shape), dtype)
                full[tuple(map(slice, host.shape))] = host
                host = full
            # The caller keeps the sources until the copies are done.
            sources.append(host)
            if host.nbytes:
                self.context.to_device(pointer + at, host.__array_interface__["data"][0], host.nbytes)
            at += host.nbytes
        if at < total:
            self.context.clear(pointer + at, total - at)
        return at

    def _copy_within(self, pointer: int, tensor: CudaTensor | GpuArray) -> None:
        if isinstance(tensor, GpuArray):
            self.context.within_device(pointer, tensor.pointer, tensor.nbytes)
            return
        with tensor.region.guarded():
            self.context.within_device(pointer, tensor.pointer, tensor.nbytes)

    def _view(self, pointer: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> jax.Array:
        key = (pointer, dtype, shape)
        found = self._views.get(key)
        if found is not None:
            self._views.move_to_end(key)
            return found
        made: jax.Array = jax.dlpack.from_dlpack(DeviceView(pointer, dtype, shape, self._dlpack_device))
        if made.unsafe_buffer_pointer() != pointer:
            # JAX has made a copy, which must not be cached: it would not follow the memory's content.
            return made
        self._views[key] = made
        if len(self._views) > _MAX_VIEWS:
            self._views.popitem(last=False)
        return made

    # ------------------------------------------------------------------------------------------------------ outputs

    def keep(self, output: jax.Array) -> GpuArray:
        """Returns a computed output as an array that stays on the device. The caller has waited for ``output``."""
        kept = self._seen(output)
        if self._staging <= kept.pointer < self._staging + self._staging_byte_size:
            # The program has returned an input as it is, which the next batch will overwrite.
            return kept.copy()
        return kept

    def _seen(self, made: jax.Array) -> GpuArray:
        return GpuArray(self.context, made, made.unsafe_buffer_pointer(), np.dtype(made.dtype), made.shape)

    def take(self, outputs: Sequence[jax.Array], cuts: Sequence[tuple[int, int]] = ()) -> list[bytes] | None:
        """Waits until ``outputs`` are computed, and returns the bytes of each output.

        Returns None if the outputs together, each rounded up to a multiple of 64 bytes, have more than ``TOGETHER`` bytes.
        ``cuts``: ranges of bytes (begin, end) of the only output. If given, returns the bytes of each range instead.
        Raises DeviceLost if the GPU has failed. An error of the program's run is raised unchanged.
        """
        ends = list(itertools.accumulate([-(-array.nbytes // _LINE) * _LINE for array in outputs]))
        if ends and ends[-1] > TOGETHER:
            return None
        host, starts, kept = self.host, [0, *ends], []
        self.context.enter()
        try:
            for at, array in zip(starts, outputs, strict=False):
                if array.nbytes:
                    kept.append(self._follow(array))
                    self.context.to_host(host.address + at, array.unsafe_buffer_pointer(), array.nbytes)
        finally:
            self.context.synchronize()
        content = host.content.data
        cuts = cuts or [(at, at + array.nbytes) for at, array in zip(starts, outputs, strict=False)]
        return [bytes(content[start:stop]) for start, stop in cuts]

    def deliver(
        self, outputs: Mapping[str, jax.Array], places: Mapping[str, memoryview | tuple[CudaRegion, int]]
    ) -> dict[str, GpuArray | Array]:
        """Waits until a program has computed ``outputs``, and copies each output that has an item in ``places`` to this place.

        A place is host memory, or a region on the GPU with an offset in bytes. Returns all outputs by name. An output with a
        place is returned as an array on the device. The outputs without a place are returned as host arrays if they have
        together at most ``TOGETHER`` bytes, otherwise as arrays on the device.
        Raises InvalidArgument if a region cannot be written any more. Raises DeviceLost if the GPU has failed. An error of the
        program's run is raised unchanged.
        """
        left = [(name, array) for name, array in outputs.items() if name not in places and array.nbytes]
        little = sum([array.nbytes for _, array in left]) <= TOGETHER
        found: dict[str, GpuArray | Array] = {name: self._seen(outputs[name]) for name in places}
        kept: list[Any] = []
        brought: list[tuple[memoryview, Array]] = []
        self.context.enter()
        try:
            for name, array in outputs.items():
                kept.append(self._follow(array))
                pointer, place = array.unsafe_buffer_pointer(), places.get(name)
                if isinstance(place, tuple):
                    region, offset = place
                    region.copy(offset, pointer, array.nbytes)
                elif place is not None:
                    target: memoryview | Array = place
                    if not may_be_written(place):
                        target = np.empty(array.nbytes, np.uint8)
                        brought.append((place, target))
                    self.context.to_host(address_of(target), pointer, array.nbytes)
                elif little:
                    host = found[name] = np.empty(array.shape, array.dtype)
                    if host.nbytes:
                        self.context.to_host(address_of(host), pointer, host.nbytes)
        finally:
            self.context.synchronize()
        for memory, content in brought:
            memory[:] = content.data
        return {name: found[name] if name in found else self.keep(array) for name, array in outputs.items()}

    def _follow(self, output: jax.Array) -> Any:
        # By DLPack's stream argument: XLA's stream runs the program and its event; the worker's waits for the event, copies,
        # and records the one event that a thread waits for. The reverse, XLA waiting for copies, costs more than it saves: XLA
        # learns the stream only when memory is imported by DLPack, and an import takes longer than a small transfer.
        if self._waits:
            try:
                # The caller keeps it until the stream has waited.
                return output.__dlpack__(stream=self.context.stream())  # type: ignore[call-arg]
            except jax.errors.JaxRuntimeError as error:
                if "UNIMPLEMENTED" not in str(error):
                    raise
                self._waits = False
        return jax.block_until_ready(output)

    def close(self) -> None:
        """Frees the staging buffers. Call it once no batch uses them. Idempotent."""
        if self._host is not None:
            self._pieces.give_back(self._host)
            self._host = None
        self._free_staging()

    def _free_staging(self) -> None:
        self._views.clear()
        if self._staging:
            self.context.free(self._staging)
            self._staging = self._staging_byte_size = 0

    def check(self) -> None:
        """Raises DeviceLost if an error has made the GPU's context unusable."""
        with contextlib.suppress(CudaError):  # an error that passes
            self.context.check()

    def __repr__(self) -> str:
        return f"<CudaDevice staging {self._staging_byte_size} bytes, {len(self._views)} views>"


def room(dtype: np.dtype[Any], shape: tuple[int, ...]) -> int:
    """Returns the size in bytes of an array of this dtype and shape, rounded up to a multiple of ``ALIGNMENT``."""
    return -(-_byte_size(dtype, shape) // ALIGNMENT) * ALIGNMENT


def _dlpack_device_of(device: jax.Device) -> tuple[int, int]:
    kind, number = jax.device_put(np.zeros(1, np.float32), device).__dlpack_device__()
    return int(kind), int(number)


def _lies_there(array: object) -> TypeGuard[CudaTensor | GpuArray]:
    # Not a client's BOOL: the host turns any byte into 0 or 1.
    return isinstance(array, GpuArray) or (isinstance(array, CudaTensor) and array.dtype != np.bool_)


def _byte_size(dtype: np.dtype[Any], shape: tuple[int, ...]) -> int:
    size = dtype.itemsize
    for length in shape:
        size *= length
    return size
