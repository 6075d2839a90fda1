"""Opens a second XLA:CPU client, with a single thread, in the worker's process, and runs small programs on this client.

The worker's usual XLA client divides each program among several threads. These threads wait for each other by spinning, so a
small program costs up to twice the processor time and is hardly faster (docs/measurements.md). The second client uses the
model's parameters in the memory of this process, without a copy.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from tensord.shm.arrays import address_of
from tensord.workers.devices.device_cpu import THREADS_VARIABLE, thread_count
from tensord.workers.devices.host_put import host_put
from tensord.workers.jax_internals.interfaces import CPU_CLIENT, Missing
from tensord.workers.jax_internals.wide import precision
from tensord.workers.parameters.parameter_set import ParameterSets
from tensord.workers.programs.placement import CompiledProgram, Placement
from tensord.workers.programs.weight import is_within
from tensord.workers.tensors.signature import Signature

_log = logging.getLogger(__name__)
#: The most bytes that a small program's operations read and write; more bytes are read faster by several cores.
_MAX_BYTE_SIZE = 8 << 20
#: Changes nothing for a client with one thread, but is part of the key of JAX's own cache, which ignores threads: a program that
#: was compiled for several threads must not be found for one thread, nor the reverse.
_OPTIONS: dict[str, str | bool] = {"xla_cpu_multi_thread_eigen": False}


class SingleThreadDevice:
    """An additional CPU device of the worker, with one thread, for small programs."""

    def __init__(self, max_flops: int) -> None:
        """Opens a CPU device with one thread. Call it before any model is loaded.

        Raises Missing if JAX lacks the function that opens the device. Errors of JAX are raised unchanged.
        ``max_flops``: the method ``suits`` returns False for a program with more floating-point operations than this.
        """
        self.max_flops = max_flops
        self.device = _opened()

    def suits(self, lowered: jax.stages.Lowered, compiled: jax.stages.Compiled | None = None) -> bool:
        """Returns whether a program does little enough work for this device. Returns False if the work is unknown.

        ``compiled``: the same program, compiled. It is required if an array in ``lowered`` has a dimension of unknown size.
        """
        return is_within(compiled or lowered, (self.max_flops, _MAX_BYTE_SIZE), lowered)

    def __repr__(self) -> str:
        return f"<SingleThreadDevice up to {self.max_flops} flops>"


@functools.cache
def _opened() -> jax.Device:
    """Opens a CPU device that computes with one thread."""
    known = os.environ.get(THREADS_VARIABLE)
    # Only for a moment: no other thread may read it, and no process inherit it.
    os.environ[THREADS_VARIABLE] = "1"
    try:
        device: jax.Device = CPU_CLIENT.find()().devices()[0]
        return device
    finally:
        del os.environ[THREADS_VARIABLE]
        if known is not None:
            os.environ[THREADS_VARIABLE] = known


def choose(device: jax.Device, max_flops: int) -> SingleThreadDevice | None:
    """Opens a second CPU device, with one thread, for programs of at most ``max_flops``. Call it before any model is loaded.

    Returns None if ``device`` is no CPU or has one thread, if ``max_flops`` is 0, or if JAX fails to open it.
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
    """Returns a tree of arrays as arrays of another CPU device, in the same memory.

    Raises ValueError: a parameter would be copied. Errors of numpy for an unknown dtype are raised unchanged.
    """

    arrays, structure = jax.tree.flatten(parameters)
    there = [np.asarray(array) for array in arrays]
    made = host_put(there, device)
    for here, array in zip(made, there, strict=True):
        if here.unsafe_buffer_pointer() != address_of(array):
            raise ValueError(f"a parameter of {array.dtype}{list(array.shape)} would be copied")
    return jax.tree.unflatten(structure, made)


class SmallPrograms:
    """Decides which programs of a model version run on a CPU device with only one thread, and compiles these programs.

    A program runs there if it is small and a test run has succeeded. All other programs run on the worker's usual device.
    Any thread may use this object.
    """

    def __init__(self, signature: Signature, device: SingleThreadDevice, sets: ParameterSets) -> None:
        self._signature = signature
        self._device = device
        self._sets = sets
        self._placement: Placement | None = None
        self._opening = threading.Lock()
        self._possible = True

    def open(self) -> Placement | None:
        """Returns the ``Placement`` for programs on the CPU device with one thread, or None if no program can run there."""
        with self._opening:
            if self._placement is None and self._possible:
                try:
                    device = self._device.device
                    self._sets.share_by(self._shared)
                    self._placement = Placement(
                        self._sets,
                        device,
                        None,
                        SingleDeviceSharding(device),
                        MappingProxyType(_OPTIONS),
                        device.client,
                    )
                except Exception as error:
                    self._give_up(error)
            return self._placement

    def _shared(self, parameters: Any) -> Any:
        with precision(self._signature.wide):
            return share(parameters, self._device.device)

    def lowered(
        self, usual: jax.stages.Lowered, lower: Callable[[Placement], jax.stages.Lowered]
    ) -> tuple[jax.stages.Lowered, Placement] | None:
        """Lowers a small program for a CPU device with one thread. Returns the lowered program and the device's ``Placement``.

        Returns None if the program is not known to be small, or if it cannot be lowered for this device.
        ``usual``: the program, lowered for the worker's usual device. ``lower``: lowers it for the device of a ``Placement``.
        """
        if self._is_small(usual) is not True or (placement := self.open()) is None:
            return None
        try:
            return lower(placement), placement
        except Exception as error:
            self._give_up(error)
            return None

    def _is_small(self, lowered: jax.stages.Lowered) -> bool | None:
        """Returns whether a program is small enough to run in one thread; None: that is not known before it is compiled."""
        # XLA raises an error for the cost of a program with open sizes, or (from JAX 0.11 on) ends the process.
        if _has_open_sizes(lowered):
            return None
        try:
            return self._device.suits(lowered)
        except jax.errors.JaxRuntimeError:
            return None

    def compile(
        self,
        lowered: jax.stages.Lowered,
        lower: Callable[[Placement], jax.stages.Lowered],
        zeros: Callable[[], dict[str, Any]],
    ) -> CompiledProgram | None:
        """Compiles a program for the CPU device that has one thread, and runs the program once.

        Returns None if the program is too large for one thread, or if the compilation or the run fails. After a failure,
        returns None for all later programs of the model.
        Args:
          lowered: the program, lowered for the worker's usual device.
          lower: lowers the same program for the device that a ``Placement`` describes.
          zeros: returns the inputs of the run.
        """
        try:
            small = self._is_small(lowered) if self._possible else False
            if small is False or (placement := self.open()) is None:
                return None
            with precision(self._signature.wide):
                made = placement.compile(lower(placement))
                if small is None and not self._device.suits(lowered, made):
                    return None
                jax.block_until_ready(made(placement.parameters, zeros()))
        except Exception as error:
            self._give_up(error)
            return None
        return CompiledProgram(made, placement)

    def _give_up(self, error: Exception) -> None:
        name, kind = self._signature.model, type(error).__name__
        _log.info("model '%s': its programs get all threads, whatever their size: %s: %s", name, kind, error)
        self._possible = False

    def __repr__(self) -> str:
        return f"<SmallPrograms of {self._device}>"


def _has_open_sizes(lowered: jax.stages.Lowered) -> bool:
    module: Any = lowered.compiler_ir("stablehlo")
    functions = [op for op in module.body.operations if "function_type" in op.attributes]
    return any("?" in str(function.attributes["function_type"]) for function in functions)
