"""Provides buffers in which the inputs of several requests are laid side by side for one run of a program.

slots    | request 0: its rows | request 1: its rows | ... | zeros |     one aligned buffer for each input
ragged   | request 0: its elements | request 1 | ... | zeros |
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tensord.shm.arena import ALIGNMENT
from tensord.shm.arrays import Array
from tensord.workers.devices.late_tensor import LateTensor
from tensord.workers.tensors.ragged import flat
from tensord.workers.tensors.request_tensors import RequestTensors


def aligned(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Returns a new uninitialised array whose memory starts at a multiple of ``ALIGNMENT`` bytes."""
    byte_size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    memory = np.empty(byte_size + ALIGNMENT, np.uint8)
    start = -memory.__array_interface__["data"][0] % ALIGNMENT
    return memory[start : start + byte_size].view(dtype).reshape(shape)


class HostInputs:
    """The arguments of a program, gathered in ordinary host memory; used by the execution thread only."""

    #: Whether the memory has room for the arguments.
    fit = True

    def __init__(self, inputs: Sequence[tuple[str, np.dtype[Any], tuple[int, ...]]]) -> None:
        """Allocates memory for each input. ``inputs``: name, dtype, and shape in the program."""
        self.arrays = {name: aligned(shape, dtype) for name, dtype, shape in inputs}

    def send(self) -> dict[str, Any]:
        """Returns the arrays of the gathered inputs by name: the program's arguments, which XLA reads where they lie."""
        return self.arrays

    def __repr__(self) -> str:
        return f"<HostInputs {len(self.arrays)} inputs>"


class GatherBuffer:
    """The buffer in which one input of one program is gathered; used by the execution thread only."""

    __slots__ = ("_bytes", "_name", "_slot_byte_size", "_slots", "array")

    def __init__(
        self,
        name: str,
        slots: int,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        lead: bool,
        memory: Array | None = None,
    ) -> None:
        """Makes a buffer with a slot of the given shape for each of ``slots`` rows.

        Args:
          name: the input's.
          lead: whether the slots are the first dimension of the program's input; if not, there is one slot.
          memory: where the slots lie; None: newly allocated memory.
        """
        self._name = name
        self._slots = aligned((slots, *shape), dtype) if memory is None else memory.reshape((slots, *shape))
        #: The program's argument.
        self.array = self._slots if lead else self._slots[0, ...]  # a view, also of a single number
        self._slot_byte_size = self._slots.nbytes // slots
        self._bytes = self._slots.reshape(-1).view(np.uint8).data

    def fill(self, requests: Sequence[RequestTensors]) -> int:
        """Copies the requests' tensors for this input into the slots, one for each row, and zeros the rest.

        Returns the bytes copied.
        """
        name, size, flat = self._name, self._slot_byte_size, self._bytes
        row = at = copied = 0
        for request in requests:
            end = at + request.rows * size
            content = None if request.contents is None else request.contents[name]
            # The bytes are copied as they are, unless the shape is padded: then there are fewer.
            if isinstance(content, (bytes, memoryview)) and len(content) == end - at:
                flat[at:end] = content
                copied += end - at
            else:
                array = request.arrays[name]
                copy_into(self._slots[row : row + request.rows], array)
                copied += array.nbytes
            row += request.rows
            at = end
        if row < len(self._slots):
            self._slots[row:] = 0
        return copied

    def __repr__(self) -> str:
        return f"<GatherBuffer {self._name!r} {self.array.dtype}{list(self.array.shape)}>"


class RaggedBuffer:
    """The buffer for one ragged input: the elements of all requests one after another; used by the execution thread only."""

    __slots__ = ("_name", "array")

    def __init__(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self._name = name
        #: The program's argument.
        self.array = aligned(shape, dtype)

    def fill(self, requests: Sequence[RequestTensors]) -> int:
        """Copies each request's elements for this input into the buffer, one request after the other, and zeros the rest.

        Returns the bytes copied.
        """
        at = 0
        for request in requests:
            array = flat(request.arrays[self._name])
            copy_into(self.array[at : at + len(array)], array)
            at += len(array)
        self.array[at:] = 0
        return at * self.array.itemsize

    def __repr__(self) -> str:
        return f"<RaggedBuffer {self._name!r} {self.array.dtype}{list(self.array.shape)}>"


def copy_into(part: Array, array: Array) -> None:
    """Copies an array into part of a buffer, and zeros the elements of the part that the array does not cover.

    An array without a batch dimension goes into the part's first slot (the memory of one row).
    """
    if len(array.shape) < part.ndim:
        part = part[0, ...]  # a view, also of a single number
    if array.shape != part.shape:
        part[...] = 0
        part[tuple(map(slice, array.shape))] = np.asarray(array)
    elif isinstance(array, LateTensor):
        array.copy_into(part)
    else:
        part[...] = array
