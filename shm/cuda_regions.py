"""CUDA regions: memory on a GPU that a client allocated, and that workers open by its IPC handle.

    client      cudaMalloc ─▶ cudaIpcGetMemHandle ─▶ 64 bytes over the protocol ─▶ register
    worker      cuIpcOpenMemHandle ─▶ address range checked ─▶ copies on the worker's own streams ─▶ cuIpcCloseMemHandle

``Driver`` is the CUDA driver in one process. ``Context`` is the primary context of one GPU, which XLA uses too, with a stream
for each thread. ``CudaRegion`` is a registered region. A copy is queued on the calling thread's stream and is certain to be
done only after ``synchronize``. The client may free its memory or exit while a worker has the region open. A copy then reads
undefined bytes, but does no other harm.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import weakref
from collections.abc import Callable
from ctypes import byref, c_size_t, c_ubyte, c_uint, c_uint64, c_void_p
from typing import Any

from tensord.shm.errors import InvalidArgument, Unavailable
from tensord.shm.regions import Leased, check_range, refused

_HANDLE_SIZE = 64
#: The driver's sticky errors, after which nothing in this process's context works any more.
_STICKY = """
    ASSERT CONTEXT_IS_DESTROYED DEINITIALIZED ECC_UNCORRECTABLE EXTERNAL_DEVICE HARDWARE_STACK_ERROR ILLEGAL_ADDRESS
    ILLEGAL_INSTRUCTION INVALID_ADDRESS_SPACE INVALID_PC LAUNCH_FAILED LAUNCH_TIMEOUT MISALIGNED_ADDRESS
    MPS_CLIENT_TERMINATED NVLINK_UNCORRECTABLE
"""
_SONAME = "libcuda.so.1"


class LastingCalls:
    """Functions of the CUDA driver that may take long. They release the GIL, so other Python threads run meanwhile."""

    def __init__(self, code: Callable[[int], Any]) -> None:
        """Loads the library of the CUDA driver, libcuda.so.1.

        ``code`` converts an integer that a driver function returned to a CUresult. It raises ValueError for unknown integers.
        """
        self._code = code
        library = ctypes.CDLL(_SONAME)
        self.synchronize_stream = self._function(library.cuStreamSynchronize, c_void_p)
        self.synchronize_context = self._function(library.cuCtxSynchronize)
        self.host_to_device = self._function(library.cuMemcpyHtoDAsync_v2, c_uint64, c_void_p, c_size_t, c_void_p)
        self.device_to_host = self._function(library.cuMemcpyDtoHAsync_v2, c_void_p, c_uint64, c_size_t, c_void_p)
        self.within_device = self._function(library.cuMemcpyDtoDAsync_v2, c_uint64, c_uint64, c_size_t, c_void_p)
        self.clear = self._function(library.cuMemsetD8Async, c_uint64, c_ubyte, c_size_t, c_void_p)
        self.free = self._function(library.cuMemFree_v2, c_uint64)
        self.register_host = self._function(library.cuMemHostRegister_v2, c_void_p, c_size_t, c_uint)
        self.unregister_host = self._function(library.cuMemHostUnregister, c_void_p)
        self._allocate = self._function(library.cuMemAlloc_v2, c_void_p, c_size_t)

    def allocate(self, byte_size: int) -> tuple[Any, int]:
        """Allocates GPU memory in the current CUDA context. Returns cuMemAlloc's result code and the address (0 on failure)."""
        pointer = c_uint64(0)
        (code,) = self._allocate(byref(pointer), byte_size)
        return code, pointer.value

    def _function(self, function: Any, *types: Any) -> Callable[..., tuple[Any]]:
        function.argtypes, function.restype = types, ctypes.c_int

        def call(*arguments: Any) -> tuple[Any]:
            found = function(*arguments)
            try:
                return (self._code(found),)
            except ValueError:
                return (found,)

        return call


class NoCuda(Exception):
    """Raised when the CUDA driver, its Python bindings or the device is missing."""


class CudaError(Exception):
    """Raised when a call of the driver fails. ``name`` is the driver's name for the error, such as CUDA_ERROR_INVALID_VALUE."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


class DeviceLost(Unavailable):
    """Raised when the device has failed for good. Every later call of this process on the device fails, too."""


class Driver:
    """The CUDA driver in this process. A GPU's context is opened when it is first used, and stays open until ``close``."""

    def __init__(self) -> None:
        self._contexts: dict[int, Context] = {}
        #: The error after which every call fails; "": the driver works. Whoever owns the process has to end it.
        self.lost = ""

    def context(self, ordinal: int) -> Context:
        """Returns the context of device ``ordinal``. Raises NoCuda if the device does not exist or cannot be used."""
        found = self._contexts.get(ordinal)
        if found is None:
            found = self._contexts[ordinal] = Context(self, _bindings(), ordinal)
        return found

    def close(self) -> None:
        """Closes all contexts and their streams. Idempotent."""
        for context in self._contexts.values():
            context.close()
        self._contexts.clear()

    def __repr__(self) -> str:
        return f"<Driver {sorted(self._contexts)} lost={self.lost!r}>"


def _bindings() -> Any:
    """Returns the module ``cuda.bindings.driver``, or raises NoCuda."""
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise NoCuda("cuda-python is not installed") from error
    try:
        (code,) = driver.cuInit(0)
    except Exception as error:  # its loader's own exceptions: no library, or one without the function
        raise NoCuda(f"the CUDA driver cannot be loaded ({type(error).__name__})") from error
    if code != driver.CUresult.CUDA_SUCCESS:
        raise NoCuda(f"the CUDA driver found no device ({_name(driver, code)})")
    return driver


def driver_version() -> int:
    """Returns the newest CUDA version that the driver supports, such as 12080 for CUDA 12.8. It is 0 without a driver."""
    try:
        driver = _bindings()
    except NoCuda:
        return 0
    code, version = driver.cuDriverGetVersion()
    return int(version) if code == driver.CUresult.CUDA_SUCCESS else 0


def _name(driver: Any, code: Any) -> str:
    return getattr(code, "name", f"CUDA error {code}")


class Context:
    """The primary context of one device. Every thread may use it, and each thread has its own stream.

    A thread's work neither delays another thread's copies nor raises errors in another thread. The methods raise CudaError
    if the driver refuses a call or queued work has failed. They raise DeviceLost if the device has failed for good.
    """

    def __init__(self, owner: Driver, driver: Any, ordinal: int) -> None:
        """Retains the primary context of device ``ordinal``. Raises NoCuda if that is impossible.

        ``driver`` is the module of the CUDA bindings. If the device fails, the error's name is stored in ``owner.lost``.
        """
        self._owner = owner
        self.driver = driver
        self._closed = False
        try:
            count = self.call(driver.cuDeviceGetCount)
            if not 0 <= ordinal < count:
                raise NoCuda(f"GPU {ordinal} does not exist, the process sees {count}")
            self._device = self.call(driver.cuDeviceGet, ordinal)
            self._handle = self.call(driver.cuDevicePrimaryCtxRetain, self._device)
            self._lasting = LastingCalls(driver.CUresult)
            self._own = threading.local()
            self._streams: weakref.WeakSet[_Stream] = weakref.WeakSet()
            self.enter()
            self.stream()
        except CudaError as error:
            raise NoCuda(f"GPU {ordinal} cannot be used ({error.name})") from error
        except DeviceLost as error:
            raise NoCuda(f"GPU {ordinal} has failed ({owner.lost})") from error

    def call(self, function: Any, *arguments: Any) -> Any:
        """Calls a driver function. Returns its only result, else a tuple of all. Raises DeviceLost or CudaError if it fails."""
        code, *results = function(*arguments)
        if code != self.driver.CUresult.CUDA_SUCCESS:
            name = _name(self.driver, code)
            if name.removeprefix("CUDA_ERROR_") in _STICKY.split():
                self._owner.lost = name
                raise DeviceLost(f"the GPU failed ({name}); its worker is being restarted")
            raise CudaError(name)
        return results[0] if len(results) == 1 else tuple(results)

    def enter(self) -> None:
        """Makes this context current in the calling thread. Copies, ``clear``, ``synchronize`` and ``stream`` need that."""
        self.call(self.driver.cuCtxSetCurrent, self._handle)

    def stream(self) -> int:
        """Returns the handle of the calling thread's stream for DLPack. The first call creates the stream."""
        found: _Stream | None = getattr(self._own, "stream", None)
        if found is None:
            found = self._own.stream = _Stream(self)
            self._streams.add(found)
        return found.handle

    # ------------------------------------------------------------------------------------------------------- copies

    def to_device(self, pointer: int, address: int, byte_size: int) -> None:
        """Queues a copy from host ``address`` to device ``pointer``. Do not change the source until ``synchronize`` returns."""
        self.call(self._lasting.host_to_device, pointer, address, byte_size, self.stream())

    def to_host(self, address: int, pointer: int, byte_size: int) -> None:
        """Queues a copy from device ``pointer`` to host ``address``. ``synchronize`` waits for the copy."""
        self.call(self._lasting.device_to_host, address, pointer, byte_size, self.stream())

    def within_device(self, to: int, pointer: int, byte_size: int) -> None:
        """Queues a copy of device memory from ``pointer`` to ``to``, both addresses on this device."""
        self.call(self._lasting.within_device, to, pointer, byte_size, self.stream())

    def clear(self, pointer: int, byte_size: int) -> None:
        """Queues filling ``byte_size`` bytes of device memory at ``pointer`` with zeros."""
        self.call(self._lasting.clear, pointer, 0, byte_size, self.stream())

    def synchronize(self) -> None:
        """Waits until the calling thread's CUDA stream is empty. Does not wait for work that other threads have queued."""
        self.call(self._lasting.synchronize_stream, self.stream())

    def check(self) -> None:
        """Waits until all work that was queued in this CUDA context is done. Raises DeviceLost if the device has failed."""
        self.enter()
        self.call(self._lasting.synchronize_context)

    # ------------------------------------------------------------------------------------------------------- memory

    def allocate(self, byte_size: int) -> int:
        """Allocates device memory, aligned to 256 bytes. Returns its address. Raises Unavailable if no memory is left."""
        self.enter()
        try:
            return int(self.call(self._lasting.allocate, byte_size))
        except CudaError as error:
            raise Unavailable(f"the GPU has no {byte_size} bytes left for inputs ({error.name})") from error

    def free(self, pointer: int) -> None:
        """Frees the device memory at ``pointer``. No queued work may use the memory."""
        self.enter()
        self.call(self._lasting.free, pointer)

    def pin(self, address: int, byte_size: int) -> None:
        """Page-locks host memory at ``address``. The driver then copies it without a staging buffer.

        This process must be allowed to write to the memory, because many drivers refuse read-only memory.
        """
        self.enter()
        self.call(self._lasting.register_host, address, byte_size, int(self.driver.CU_MEMHOSTREGISTER_PORTABLE))

    def unpin(self, address: int) -> None:
        """Ends the page-lock of ``pin``. Call it before the memory is unmapped."""
        self.enter()
        self.call(self._lasting.unregister_host, address)

    # ----------------------------------------------------------------------------------------- memory of other processes

    def open(self, raw_handle: bytes) -> tuple[int, int]:
        """Opens another process's allocation by its IPC handle. Returns the device address and the number of bytes."""
        self.enter()
        driver = self.driver
        handle = driver.CUipcMemHandle()
        # Newer bindings give only the struct's address by this call; older ones have it as well.
        ctypes.memmove(handle.getPtr(), raw_handle, _HANDLE_SIZE)
        flags = driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
        pointer = int(self.call(driver.cuIpcOpenMemHandle, handle, flags.value))
        try:
            start, byte_size = self.call(driver.cuMemGetAddressRange, pointer)
        except BaseException:
            self.close_opened(pointer)
            raise
        return pointer, int(start) + int(byte_size) - pointer

    def close_opened(self, pointer: int) -> None:
        """Closes an allocation that ``open`` has opened. Errors are ignored."""
        with contextlib.suppress(CudaError, DeviceLost):
            self.enter()
            self.call(self.driver.cuIpcCloseMemHandle, pointer)

    def close(self) -> None:
        """Destroys the CUDA stream of each thread and releases the device's primary context. Idempotent."""
        if self._closed:
            return
        self._closed = True
        for stream in list(self._streams):
            stream.close()
        with contextlib.suppress(CudaError, DeviceLost):
            self.call(self.driver.cuDevicePrimaryCtxRelease, self._device)


class _Stream:
    """One thread's CUDA stream. It is destroyed when the thread ends or the context is closed."""

    def __init__(self, context: Context) -> None:
        self._call, self.driver = context.call, context.driver
        # The stream waits for no other one: XLA's and the client's are ordered by events and synchronization.
        made = self._call(self.driver.cuStreamCreate, self.driver.CUstream_flags.CU_STREAM_NON_BLOCKING)
        self._made: Any | None = made
        self.handle = int(made)

    def close(self) -> None:
        """Destroys the stream after its queued work. Idempotent."""
        made, self._made = self._made, None
        if made is not None:
            with contextlib.suppress(CudaError, DeviceLost):
                self._call(self.driver.cuStreamDestroy, made)

    def __del__(self) -> None:
        # A thread's own values are dropped when it ends, in that thread.
        self.close()


# No generator function: an error raised inside one keeps alive the frames that it passed through, and all that they hold, until
# the next garbage collection (Python 3.12 and newer).
class _Guarded:
    __slots__ = ("_name",)

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, CudaError):
            raise InvalidArgument(
                f"shared memory region '{self._name}' cannot be used ({error.name}): its owner has freed it or is gone; "
                "unregister the region and register it again"
            ) from error


class CudaRegion(Leased):
    """A client's registered GPU memory, opened in this worker. Its content can be copied, but not accessed directly.

    Offsets count from the region's start. Methods that copy raise InvalidArgument if the bytes to copy are not inside the
    region, if the region was closed, or if the driver refuses the copy. They raise DeviceLost if the device has failed.
    """

    #: Always 0: no page of GPU memory can be missing here.
    faults = 0

    def __init__(
        self, name: str, context: Context, raw_handle: bytes, byte_size: int, elsewhere: tuple[int, int] | None = None
    ) -> None:
        """Opens GPU memory that a client has allocated, by its IPC handle. ``name`` is the region's name.

        Args:
          context: the context of the GPU that the worker uses.
          raw_handle: the cudaIpcMemHandle_t, 64 bytes.
          byte_size: how many bytes of the allocation, from its start, are registered.
          elsewhere: None if the allocation is on the GPU of ``context``. If the allocation is on another GPU, the number of
            that GPU and the number of the GPU of ``context``, as errors name them.
        Raises: InvalidArgument: the handle cannot be opened, ``byte_size`` is not positive, or the allocation has fewer bytes.
          DeviceLost: the device has failed.
        """
        try:
            pointer, available = context.open(raw_handle)
        except CudaError as error:
            if elsewhere is not None:
                there, here = elsewhere
                raise InvalidArgument(
                    f"shared memory region '{name}' is on GPU {there}, and the model runs on GPU {here}, which cannot open it "
                    f"({error.name}): the two have no access to each other, or its owner has freed it or is gone"
                ) from error
            raise refused(name, f"the CUDA handle cannot be opened ({error.name})") from error
        if byte_size < 1 or byte_size > available:
            context.close_opened(pointer)
            raise refused(name, f"invalid args: {byte_size} bytes, the allocation has {available}")
        self.name = name
        self.byte_size = byte_size
        self.context = context
        #: True if the memory is another GPU's.
        self.peer = elsewhere is not None
        self._start: int | None = pointer

    def pointer(self, offset: int, byte_size: int) -> int:
        """Returns the device address of the byte at ``offset`` in the region.

        Raises InvalidArgument if ``byte_size`` bytes from ``offset`` on are not inside the region, or if the region was closed.
        """
        check_range(offset, byte_size, self.byte_size, self.name)
        if self._start is None:
            raise InvalidArgument(f"shared memory region '{self.name}' is not registered any more")
        return self._start + offset

    def read(self, address: int, offset: int, byte_size: int) -> None:
        """Copies a range of the region to host memory at ``address``, and waits for the copy."""
        pointer = self.pointer(offset, byte_size)
        with self.guarded():
            self.context.enter()
            self.context.to_host(address, pointer, byte_size)
            self.context.synchronize()

    def write(self, offset: int, address: int, byte_size: int) -> None:
        """Queues a copy from host memory at ``address`` to ``offset`` in the region. ``settle`` waits for the copy."""
        pointer = self.pointer(offset, byte_size)
        with self.guarded():
            self.context.enter()
            self.context.to_device(pointer, address, byte_size)

    def copy(self, offset: int, pointer: int, byte_size: int) -> None:
        """Queues a copy from device memory at ``pointer`` to ``offset`` in the region. ``settle`` waits for the copy."""
        target = self.pointer(offset, byte_size)
        with self.guarded():
            self.context.enter()
            self.context.within_device(target, pointer, byte_size)

    def settle(self) -> None:
        """Waits until this thread's copies by ``write`` and ``copy`` are done."""
        with self.guarded():
            self.context.enter()
            self.context.synchronize()

    def guarded(self) -> _Guarded:
        """Returns a context manager for copies. It converts a CudaError in its ``with`` block to an InvalidArgument."""
        return _Guarded(self.name)

    def close(self) -> None:
        """Closes the client's allocation in this process. The client's memory stays. Idempotent."""
        pointer, self._start = self._start, None
        if pointer is not None:
            self.context.close_opened(pointer)

    def __repr__(self) -> str:
        return f"<CudaRegion {self.name!r} {self.byte_size} leases={self.leases}>"
