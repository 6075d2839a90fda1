"""Provides buffers in which the inputs of several requests are laid one after another for one run of a program."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from tensord.shm.arena import ALIGNMENT
from tensord.shm.arrays import Array
from tensord.workers.devices.late_tensor import LateTensor
from tensord.workers.tensors.ragged import flat
from tensord.workers.tensors.request_tensors import RequestTensors


def aligned(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Returns a new array, not initialised, that begins at a multiple of ``ALIGNMENT`` bytes."""
    byte_size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    memory = np.empty(byte_size + ALIGNMENT, np.uint8)
    start = -memory.__array_interface__["data"][0] % ALIGNMENT
    return memory[start : start + byte_size].view(dtype).reshape(shape)


class HostInputs:
    """The arguments of a program in ordinary host memory, which is allocated when it is first used."""

    #: True if the memory has room for the arguments.
    fit = True

    def __init__(self, arguments: Sequence[tuple[str, np.dtype[Any], tuple[int, ...]]]) -> None:
        """Stores ``arguments``: the name, dtype and shape of each argument of a program. Allocates no memory for them yet."""
        self._arguments = arguments

    @functools.cached_property
    def arrays(self) -> dict[str, Array]:
        """The arrays for the program's arguments, by name. XLA reads their memory without a copy."""
        return {name: aligned(shape, dtype) for name, dtype, shape in self._arguments}

    def send(self) -> dict[str, Any]:
        return self.arrays


class GatherBuffer:
    """The memory of one argument of a program, with room for the rows of a batch.

    Only the thread that runs the program may use it.
    """

    __slots__ = ("_bytes", "_name", "_slot_byte_size", "_slots", "array")

    def __init__(self, name: str, array: Array, lead: bool) -> None:
        """Stores ``array``, in which the values of a program's argument ``name`` are gathered from several requests.

        ``lead``: whether the first axis of ``array`` counts rows. If it is False, ``array`` is a single row.
        """
        self._name = name
        self.array = array
        self._slots = array if lead else array[None]
        self._slot_byte_size = self._slots.nbytes // len(self._slots)
        self._bytes = self._slots.reshape(-1).view(np.uint8).data

    def fill(self, requests: Sequence[RequestTensors]) -> int:
        """Copies the requests' tensors into the batch's rows, and zeros the other rows. Returns the number of bytes copied."""
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


class RaggedBuffer:
    """The memory of one ragged argument: the elements of all requests one after another.

    Only the thread that runs the program may use it.
    """

    __slots__ = ("_name", "array")

    def __init__(self, name: str, array: Array) -> None:
        self._name = name
        self.array = array

    def fill(self, requests: Sequence[RequestTensors]) -> int:
        """Copies the requests' elements into the buffer, and zeros the rest. Returns the bytes copied, without the zeros."""
        at = 0
        for request in requests:
            array = flat(request.arrays[self._name])
            copy_into(self.array[at : at + len(array)], array)
            at += len(array)
        self.array[at:] = 0
        return at * self.array.itemsize


def copy_into(part: Array, array: Array) -> None:
    """Copies ``array`` to the start of each axis of ``part``, and zeros the rest. ``array`` may lack a first axis of size 1."""
    if len(array.shape) < part.ndim:
        part = part[0, ...]  # a view, also of a single number
    if array.shape != part.shape:
        part[...] = 0
        part[tuple(map(slice, array.shape))] = np.asarray(array)
    elif isinstance(array, LateTensor):
        array.copy_into(part)
    else:
        part[...] = array
