"""Opens a device for programs that gain nothing from several threads: a second XLA:CPU client in this process, with one thread.

XLA divides a program among the threads of the client that compiles it, and these threads wait for each other by spinning. So a
small program costs up to twice the processor time and is hardly faster (docs/measurements.md). No option of a single program
changes that: neither ``xla_cpu_multi_thread_eigen`` nor the others of jaxlib 0.10 that were tried. Both clients compute in the
memory of this process, so parameters are shared and never copied.
"""

from __future__ import annotations

import functools
import logging
import os
from typing import Any

import jax
import numpy as np

from tensord.shm.arrays import address_of
from tensord.workers.devices.device_cpu import THREADS_VARIABLE, thread_count
from tensord.workers.devices.host_put import host_put
from tensord.workers.jax_internals.interfaces import CPU_CLIENT, Missing
from tensord.workers.programs.weight import Most, is_within

_log = logging.getLogger(__name__)
#: The most bytes that a small program's operations read and write; more bytes are read faster by several cores.
_MAX_BYTE_SIZE = 8 << 20


class SingleThreadDevice:
    """An additional CPU device of the worker that runs small programs with one thread; also knows which programs are small."""

    def __init__(self, max_flops: int) -> None:
        """Opens the device. Raises whatever JAX raises if it cannot have such a device.

        To be called before any model is loaded: an environment variable is set to one thread for a moment, which no other thread
        may read and no process may inherit.

        ``max_flops``: the most floating-point operations of a program that suits the device.
        """
        self.max_flops = max_flops
        self.device = _opened()

    def suits(self, lowered: jax.stages.Lowered, compiled: jax.stages.Compiled | None = None) -> bool:
        """Returns whether a program's cost is known and so small that one thread is enough.

        Args:
          compiled: the compiled program if only compilation shows its cost, as for an exported program with open sizes; None: the
            cost is taken from ``lowered``.
        """
        return is_within(compiled or lowered, Most(self.max_flops, _MAX_BYTE_SIZE), lowered)

    def __repr__(self) -> str:
        return f"<SingleThreadDevice up to {self.max_flops} flops>"


@functools.cache
def _opened() -> jax.Device:
    """Opens the device with one thread, once in a process even for several workers: its threads end only with the process."""
    known = os.environ.get(THREADS_VARIABLE)
    os.environ[THREADS_VARIABLE] = "1"
    try:
        device: jax.Device = CPU_CLIENT.find()().devices()[0]
        return device
    finally:
        del os.environ[THREADS_VARIABLE]
        if known is not None:
            os.environ[THREADS_VARIABLE] = known


def choose(device: jax.Device, max_flops: int) -> SingleThreadDevice | None:
    """Opens the single-thread device for a worker, if it is useful; to be called before any model is loaded.

    Returns None if ``device`` is no CPU or has only one thread, if ``max_flops`` is 0 (not wanted), or if this JAX version cannot
    have such a device, which is logged.

    ``device``: the worker's. ``max_flops``: the most floating-point operations of a program that suits the single-thread device.
    """
    if device.platform != "cpu" or thread_count() < 2 or not max_flops:
        return None
    try:
        return SingleThreadDevice(max_flops)
    except Missing:  # said as the worker starts
        return None
    except Exception as error:
        _log.info("every program gets all threads: %s: %s", type(error).__name__, error)
        return None


def share(parameters: Any, device: jax.Device) -> Any:
    """Returns parameters as arrays of another CPU device, in the same memory.

    ``parameters``: a tree of JAX or numpy arrays.

    Raises ValueError: a parameter would be copied; or whatever numpy raises for a dtype that it does not know.
    """

    arrays, structure = jax.tree.flatten(parameters)
    there = [np.asarray(array) for array in arrays]
    made = host_put(there, device)
    for here, array in zip(made, there, strict=True):
        if here.unsafe_buffer_pointer() != address_of(array):
            raise ValueError(f"a parameter of {array.dtype}{list(array.shape)} would be copied")
    return jax.tree.unflatten(structure, made)
