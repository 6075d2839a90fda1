"""A device for programs that gain nothing from several threads: a second client of XLA:CPU in this process, with one thread.

XLA cuts a program into parts for the threads of the client that compiles it, and they wait for each other by spinning. A small
program costs up to twice the processor time that way and is hardly done earlier (docs/measurements.md). No option of a single
program says otherwise: neither ``xla_cpu_multi_thread_eigen`` nor the others of jaxlib 0.10 that were tried. But both clients
compute in the memory of the one process, so parameters are shared and never copied.
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
from tensord.workers.jax_internals.interfaces import CPU_CLIENT, Missing
from tensord.workers.programs.weight import Most, is_within

_log = logging.getLogger(__name__)
#: Bytes that a program's operations read and write; more of them come faster to several cores.
_MAX_BYTE_SIZE = 8 << 20


class SingleThreadDevice:
    """A worker's device with one thread, for the loader's and the compiler's thread."""

    def __init__(self, max_flops: int) -> None:
        """Opens the device. Raises whatever a jax raises that cannot have it.

        Call before any model is loaded: for a moment the environment says one thread, which another thread must not read then,
        nor a process inherit.

        Args:
          max_flops: floating-point operations of a program that it takes at most.
        """
        self.max_flops = max_flops
        self.device = _opened()

    def suits(self, lowered: jax.stages.Lowered, compiled: jax.stages.Compiled | None = None) -> bool:
        """Returns whether a program is so small that one thread is enough, and its cost is known.

        Args:
          compiled: for a program whose cost only its compilation shows, such as an exported one of varying sizes.
        """
        return is_within(compiled or lowered, Most(self.max_flops, _MAX_BYTE_SIZE), lowered)

    def __repr__(self) -> str:
        return f"<SingleThreadDevice up to {self.max_flops} flops>"


@functools.cache
def _opened() -> jax.Device:
    """Opens the device, once in a process, whatever workers it has: a client's threads end only with the process."""
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
    """Opens a single-thread device beside a worker's device; call it before any model is loaded.

    None: the device is no CPU or has one thread itself, none is wanted (``max_flops`` is 0), or this jax, says the log, has none.
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
    """Returns parameters in the same memory for programs on another device. ``parameters``: JAX's arrays, or numpy's.

    Raises ValueError: a parameter would be copied; or whatever numpy says to elements that it does not know.
    """

    arrays, structure = jax.tree.flatten(parameters)
    there = [np.asarray(array) for array in arrays]
    made = jax.device_put(there, device)
    for here, array in zip(made, there, strict=True):
        if here.unsafe_buffer_pointer() != address_of(array):
            raise ValueError(f"a parameter of {array.dtype}{list(array.shape)} would be copied")
    return jax.tree.unflatten(structure, made)
