"""Makes arrays on GPUs that this process shares with workers. The daemon knows each array as a CUDA region.

Each array has a CUDA allocation of its own, whose IPC handle is registered with the daemon over HTTP. Requests name the region,
and workers use the array in place. Frameworks such as PyTorch and JAX can view an array of this module by DLPack.
``DeviceArray.copy_from`` copies a framework's array into an array of this module. The GPU memory of a garbage-collected array
is kept until the next array is made or the connection is closed.
"""

from __future__ import annotations

import base64
import ctypes
import json
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from tensord_client.common import dlpack
from tensord_client.common.results import Array
from tensord_client.errors import CLOSED, DeadlineExceeded, InvalidArgument, ServingError, Unavailable

#: DLPack's number of the legacy default stream, on which this module copies.
_DEFAULT_STREAM = 1
#: Seconds to wait for the daemon where it unregisters the memory of collected arrays, of all of them together.
_LONGEST = 10.0


class CudaLibrary:
    """The CUDA driver library. It uses each device's primary context, which frameworks use as well."""

    def __init__(self) -> None:
        """Loads and initializes the driver. Raises Unavailable if there is no CUDA driver or device."""
        try:
            self._library = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise Unavailable(f"this process has no CUDA driver: {error}") from None
        self._contexts: dict[int, ctypes.c_void_p] = {}
        self._call("cuInit", ctypes.c_uint(0))

    def _call(self, function: str, *arguments: Any) -> None:
        code = getattr(self._library, function)(*arguments)
        if code:
            name = ctypes.c_char_p()
            self._library.cuGetErrorName(code, ctypes.byref(name))
            raise Unavailable(f"{function} failed: {(name.value or b'').decode() or code}")

    @contextmanager
    def on(self, ordinal: int) -> Iterator[None]:
        """Makes the primary context of device ``ordinal`` current in a ``with`` block.

        Raises Unavailable if there is no such device.
        """
        context = self._contexts.get(ordinal)
        if context is None:
            device, context = ctypes.c_int(), ctypes.c_void_p()
            self._call("cuDeviceGet", ctypes.byref(device), ctypes.c_int(ordinal))
            self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
            self._contexts[ordinal] = context
        self._call("cuCtxPushCurrent_v2", context)
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def allocate(self, byte_size: int) -> tuple[int, bytes]:
        """Allocates memory on the current device. Returns its address and its CUDA IPC handle (64 bytes).

        Call it in a ``with`` block of ``on``. Raises Unavailable if the device has no memory left or cannot share its memory.
        """
        address, handle = ctypes.c_uint64(), (ctypes.c_ubyte * 64)()
        self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(byte_size))
        try:
            self._call("cuIpcGetMemHandle", ctypes.byref(handle), address)
        except BaseException:
            self.free(address.value)
            raise
        return address.value, bytes(handle)

    def free(self, address: int) -> None:
        self._call("cuMemFree_v2", ctypes.c_uint64(address))

    def to_device(self, address: int, source: int, byte_size: int) -> None:
        self._call("cuMemcpyHtoD_v2", ctypes.c_uint64(address), ctypes.c_void_p(source), ctypes.c_size_t(byte_size))

    def to_host(self, target: int, address: int, byte_size: int) -> None:
        self._call("cuMemcpyDtoH_v2", ctypes.c_void_p(target), ctypes.c_uint64(address), ctypes.c_size_t(byte_size))

    def within(self, address: int, source: int, byte_size: int) -> None:
        """Copies GPU memory from ``source`` to ``address``, and waits for the copy. Call it in a ``with`` block of ``on``."""
        self._call("cuMemcpyDtoD_v2", ctypes.c_uint64(address), ctypes.c_uint64(source), ctypes.c_size_t(byte_size))
        self._call("cuCtxSynchronize")


class DeviceArray:
    """An array in a GPU's memory, made by ``Client.empty``, for inputs or outputs of a model.

    Other libraries can view the array by DLPack.
    """

    def __init__(
        self, memory: DeviceMemory, name: str, ordinal: int, address: int, shape: tuple[int, ...], dtype: np.dtype
    ) -> None:
        self.memory = memory
        self._ordinal = ordinal
        self._address = address
        self.shape = shape
        self.dtype = dtype
        self.nbytes: int = math.prod(shape) * dtype.itemsize
        #: The region that workers know it by, and where in it the array lies.
        self.place = name, 0, self.nbytes
        #: numpy arrays in a segment have the segment's block as base; an array on a GPU has none.
        self.base = None

    @property
    def device(self) -> str:
        """Returns the GPU that the array lies on, such as "cuda:0"."""
        return f"cuda:{self._ordinal}"

    def copy_from(self, value: Any) -> None:
        """Copies the values of another array, on the host or on the same GPU, into this array.

        An array without DLPack is taken to be on the host.

        Raises: InvalidArgument: the other array has another shape or dtype, lies on another GPU, or lies on this GPU and is not
          contiguous.
        """
        kind, number = value.__dlpack_device__() if hasattr(value, "__dlpack_device__") else (1, 0)
        with self.memory.driver.on(self._ordinal):
            if int(kind) != dlpack.CUDA:
                made = np.asarray(value, order="C")
                self._check(made.shape, made.dtype == self.dtype, made.dtype)
                self.memory.driver.to_device(self._address, made.ctypes.data, self.nbytes)
                return
            if number != self._ordinal:
                raise InvalidArgument(f"an array on CUDA device {number} cannot be copied to {self.device} here")
            capsule = value.__dlpack__(stream=_DEFAULT_STREAM)
            tensor = dlpack.content(capsule)
            shape = tuple(tensor.shape[: tensor.ndim])
            alike = (tensor.code, tensor.bits, tensor.lanes) == (dlpack.code_of(self.dtype), 8 * self.dtype.itemsize, 1)
            self._check(shape, alike, f"kind {tensor.code} of {tensor.bits} bits")
            if tensor.strides and not _is_contiguous(shape, tensor.strides[: tensor.ndim]):
                raise InvalidArgument("an array on a device is copied in where its elements lie one behind the other")
            self.memory.driver.within(self._address, (tensor.data or 0) + tensor.byte_offset, self.nbytes)

    def _check(self, shape: tuple[int, ...], alike: bool, dtype: Any) -> None:
        if shape != self.shape or not alike:
            raise InvalidArgument(f"{dtype}{list(shape)} cannot be copied to {self.dtype}{list(self.shape)}")

    def numpy(self) -> Array:
        """Copies the values to the host. Returns them as a new numpy array of the same shape and dtype."""
        made = np.empty(self.shape, self.dtype)
        with self.memory.driver.on(self._ordinal):
            self.memory.driver.to_host(made.ctypes.data, self._address, self.nbytes)
        return made

    def __dlpack_device__(self) -> tuple[int, int]:
        return dlpack.CUDA, self._ordinal

    def __dlpack__(self, **_: Any) -> Any:
        """Exports a view of the array by DLPack, without a copy. The GPU's memory is kept as long as the view exists.

        The arguments are ignored, and no stream is synchronized.
        """
        return dlpack.DeviceView(self._address, self.dtype, self.shape, self.__dlpack_device__(), self).__dlpack__()

    def __repr__(self) -> str:
        return f"<DeviceArray {self.dtype}{list(self.shape)} on {self.device}>"

    def __del__(self) -> None:
        memory = getattr(self, "memory", None)
        if memory is not None:
            memory.returned.append((self.place[0], self._ordinal, self._address))


class DeviceMemory:
    """Makes one connection's arrays on GPUs, and frees those that are garbage-collected. Thread-safe.

    A child process has none of its parent's arrays after a fork.
    """

    def __init__(self, post: Callable[..., object]) -> None:
        """Starts without arrays. ``post`` is the method ``post`` of the connection to the daemon."""
        self._post = post
        self._lock = threading.Lock()
        self._driver: CudaLibrary | None = None
        self._pid = os.getpid()
        #: Arrays that were collected: region, device, address.
        self.returned: deque[tuple[str, int, int]] = deque()
        self._is_closed = False

    @property
    def driver(self) -> CudaLibrary:
        """Returns the CUDA driver, which is loaded at its first use. Raises Unavailable if there is no driver or device."""
        if self._driver is None or self._pid != os.getpid():
            self._pid, self._driver = os.getpid(), CudaLibrary()
            self.returned = deque()
        return self._driver

    def empty(self, shape: Sequence[int], dtype: Any, device: str) -> DeviceArray:
        """Allocates an array with undefined content on a GPU, and registers it with the daemon as a CUDA region.

        The arguments and errors are the same as for ``Connection.empty_on``.
        """
        kind, _, number = device.partition(":")
        if kind != "cuda" or not (number or "0").isdigit():
            raise InvalidArgument(f"'{device}' is no GPU such as 'cuda:0'")
        ordinal, dtype = int(number or 0), np.dtype(dtype)
        wanted = tuple(int(size) for size in shape)
        byte_size = math.prod(wanted) * dtype.itemsize
        if byte_size <= 0:
            raise InvalidArgument(f"an array of {byte_size} bytes has no memory on a GPU")
        if dlpack.code_of(dtype) is None:
            raise InvalidArgument(f"an array of {dtype} cannot lie on a GPU")
        with self._lock:
            if self._is_closed:
                raise Unavailable(CLOSED)
            driver = self.driver
            self._collect()
            with driver.on(ordinal):
                address, handle = driver.allocate(byte_size)
                name = f"tensord-client-{os.getpid()}-{os.urandom(8).hex()}"
                said = {
                    "raw_handle": {"b64": base64.b64encode(handle).decode()},
                    "device_id": ordinal,
                    "byte_size": byte_size,
                }
                try:
                    self._post(f"/v2/cudasharedmemory/region/{name}/register", json.dumps(said).encode())
                except BaseException:
                    driver.free(address)
                    raise
        return DeviceArray(self, name, ordinal, address, wanted, dtype)

    def _collect(self) -> None:
        """Unregisters the memory of garbage-collected arrays at the daemon, and frees it.

        If the daemon has not answered after ``_LONGEST`` seconds, the rest is left to the next call.
        """
        deadline = time.monotonic() + _LONGEST
        while self.returned:
            name, ordinal, address = self.returned.popleft()
            try:
                self._post(f"/v2/cudasharedmemory/region/{name}/unregister", b"", 0.0, deadline)
            except DeadlineExceeded:  # workers may have it still
                self.returned.appendleft((name, ordinal, address))
                return
            except ServingError:
                pass  # the daemon is gone, and has forgotten it
            with self.driver.on(ordinal):
                self.driver.free(address)

    def close(self) -> None:
        """Frees the GPU memory of garbage-collected arrays. Later calls of ``empty`` raise Unavailable. Idempotent.

        Arrays that are still in use, and those that the daemon does not unregister in time, keep their memory until the process
        ends. Raises Unavailable if memory cannot be freed.
        """
        with self._lock:
            is_first, self._is_closed = not self._is_closed, True
            if is_first and self._driver is not None and self._pid == os.getpid():
                self._collect()


def _is_contiguous(shape: Sequence[int], strides: Sequence[int]) -> bool:
    wanted = 1
    for size, stride in zip(reversed(shape), reversed(strides)):
        if size != 1 and stride != wanted:
            return False
        wanted *= size
    return True
