"""Provides JAX's CUDA plugin without a GPU: a back end named "cuda" that computes on the CPU, over the stand-in for the driver.

It is copied to a folder ``jax_plugins``, where JAX finds it as it finds the real one. Both back ends are one client, so that the
stand-in's device memory is known to either.

With ``$CUDA_STUB_DELAY_US`` a program's results are overwritten once XLA has finished, and restored by a stream of the
stand-in's, so code that reads them without waiting finds other bytes. numpy asks JAX for them, which waits, as on a GPU.
Functions that JAX compiles when they are called do not wait for results that they are given, so models that do that (all but
plain jitted ones) need ``$CUDA_STUB_XLA_AT_ONCE``.
"""

from __future__ import annotations

import ctypes
import functools
import os
import threading
from typing import Any

_TAKEN_AWAY = 0xA5
#: Where CPython's types keep the functions by which others read an object's memory (tp_as_buffer), in pointers.
_AS_BUFFER = 20


def initialize() -> None:
    """Registers the back ends "cpu" and "cuda". JAX calls this before a back end is open."""
    import jax
    from jax._src import hardware_utils, xla_bridge
    from jax.extend.backend import register_backend_factory

    if "cuda" not in os.environ.get("JAX_PLATFORMS", "cuda"):
        return  # a CPU worker beside GPU workers

    # There is no /dev/nvidia0, without which JAX does not even try.
    hardware_utils.has_visible_nvidia_gpu = lambda: True
    # Results are waited for by the thread that asks, as the stand-in has no stream of XLA's.
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    # A worker with several GPUs sees as many devices.
    jax.config.update("jax_num_cpu_devices", len(os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")))
    cpu = functools.cache(xla_bridge.make_cpu_client)

    def cuda() -> Any:
        if os.environ.get("CUDA_STUB_PLUGIN") == "broken":
            raise RuntimeError("the plugin needs CUDA 13 or later, the driver has 12.8")
        if ctypes.CDLL("libcuda.so.1").cuInit(0):
            raise RuntimeError("no visible GPU devices")
        # Not before: a process that computes on the CPU alone has no driver, and no device whose results come later.
        if int(os.environ.get("CUDA_STUB_DELAY_US", "0")) and "CUDA_STUB_XLA_AT_ONCE" not in os.environ:
            run_behind()
        return cpu()

    register_backend_factory("cpu", cpu, priority=0, fail_quietly=False)
    register_backend_factory("cuda", cuda, priority=500)


class XlaStream:
    """Delays the results of programs, in their order."""

    def __init__(self) -> None:
        self._driver = ctypes.CDLL("libcuda.so.1")
        context = ctypes.c_void_p()
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
        self._context, self._stream, self._event = context, ctypes.c_void_p(), ctypes.c_void_p()
        self._enter()
        self._call("cuStreamCreate", ctypes.byref(self._stream), 0)
        self._call("cuEventCreate", ctypes.byref(self._event), 0)
        self._lock = threading.Lock()
        #: Address -> the array that is still to come, and its bytes.
        self._coming: dict[int, tuple[Any, Any]] = {}

    def delay(self, array: Any) -> None:
        """Overwrites an array's bytes until the stream reaches it."""
        size, address = array.nbytes, array.unsafe_buffer_pointer()
        if size:
            content = ctypes.create_string_buffer(ctypes.string_at(address, size), size)
            ctypes.memset(address, _TAKEN_AWAY, size)
            self._enter()
            pointers = [ctypes.c_uint64(one) for one in (address, ctypes.addressof(content))]
            # What another thread finds here has been recorded, and is recorded in the order in which it is copied.
            with self._lock:
                if not self._driver.cuEventQuery(self._event):
                    # All have come, and who follows them on the device never settles them.
                    self._coming.clear()
                try:
                    self._call("cuMemcpyAsync", *pointers, ctypes.c_size_t(size), self._stream)
                    self._call("cuEventRecord", self._event, self._stream)
                finally:
                    self._coming[address] = array, content

    def follow(self, stream: int) -> None:
        """Makes another stream wait for all delayed results."""
        self._enter()
        self._call("cuStreamWaitEvent", ctypes.c_void_p(stream), self._event, 0)

    def settle(self, arrays: Any) -> None:
        """Waits until these arrays are restored."""
        coming = [array for array in arrays if id(array) in {id(one) for one, _ in list(self._coming.values())}]
        if coming:
            known = list(self._coming.items())
            self._enter()
            self._call("cuEventSynchronize", self._event)
            with self._lock:
                for address, one in known:
                    # Another thread may have settled it, and the next result have come to lie there.
                    if self._coming.get(address) is one:
                        del self._coming[address]

    def _enter(self) -> None:
        self._call("cuCtxSetCurrent", self._context)

    def _call(self, name: str, *arguments: Any) -> None:
        if code := getattr(self._driver, name)(*arguments):
            import jax

            raise jax.errors.JaxRuntimeError(f"INTERNAL: {name} failed with {code}")


def run_behind() -> None:
    """Delays the results of all programs from now on. JAX waits where it would on a GPU."""
    import jax
    from jax._src.array import ArrayImpl
    from jaxlib import _jax

    opening = threading.Lock()
    first = functools.cache(XlaStream)

    def opened() -> XlaStream:
        # The loader and the loop may both be the first, and there is one stream.
        with opening:
            return first()

    called, valued = jax.stages.Compiled.__call__, ArrayImpl._value.fget
    waited, exported = jax.block_until_ready, _jax.buffer_to_dlpack_managed_tensor

    def call(self: Any, *arguments: Any, **named: Any) -> Any:
        stream = opened()
        stream.settle(jax.tree.leaves((arguments, named)))
        # XLA copies large arguments that are not aligned in a thread of its own, and computes there, too.
        made = waited(called(self, *arguments, **named))
        for leaf in jax.tree.leaves(made):
            stream.delay(leaf)
        return made

    def wait(tree: Any) -> Any:
        opened().settle(jax.tree.leaves(tree))
        return waited(tree)

    def value(self: Any) -> Any:
        opened().settle([self])
        return valued(self)

    def export(array: Any, stream: int | None = None, **more: Any) -> Any:
        # What later versions of JAX say besides is about the capsule.
        if stream is not None:
            opened().follow(stream)
        return exported(array, stream=None, **more)

    jax.stages.Compiled.__call__ = call
    jax.block_until_ready = wait
    ArrayImpl._value = property(value)
    # Without the first of these functions numpy asks for the value, as it does where memory is a GPU's.
    functions = ctypes.c_void_p.from_address(id(ArrayImpl) + _AS_BUFFER * ctypes.sizeof(ctypes.c_void_p))
    ctypes.c_void_p.from_address(functions.value or 0).value = None
    _jax.buffer_to_dlpack_managed_tensor = export
