"""Chooses which programs of a model version run on the single-thread device, and shares its parameters with that device.

A program runs there if it is small and a test run there has succeeded. If a version cannot use the device (a sharding or a
function that it calls binds it to the worker's device, or its parameters would have to be copied), all its programs run on the
worker's device, which is logged once.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import jax
from jax.sharding import SingleDeviceSharding

from tensord.workers.jax_internals.wide import precision
from tensord.workers.parameters.parameter_set import ParameterSets
from tensord.workers.processor.single_thread import SingleThreadDevice, share
from tensord.workers.programs.placement import CompiledProgram, Placement
from tensord.workers.tensors.signature import Signature

_log = logging.getLogger(__name__)
#: Changes nothing for a client with one thread, but is part of the key of JAX's own cache, which ignores threads: a program that
#: was compiled for several threads must not be found for one thread, nor the reverse.
_OPTIONS: dict[str, str | bool] = {"xla_cpu_multi_thread_eigen": False}


class SmallPrograms:
    """Decides for one model version which programs run on the single-thread device (a CPU device for small programs).

    Compiles these programs. For any thread.
    """

    def __init__(self, signature: Signature, device: SingleThreadDevice, sets: ParameterSets) -> None:
        """``sets``: the version's parameter sets, which are on the worker's device."""
        self._signature = signature
        self._device = device
        self._sets = sets
        self._placement: Placement | None = None
        self._opening = threading.Lock()
        self._possible = True

    def open(self) -> Placement | None:
        """Returns the placement of small programs: the single-thread device, with the version's parameters, which are not copied.

        None: an attempt of this version to use that device has failed.
        """
        with self._opening:
            if self._placement is None and self._possible:
                try:
                    self._placement = placed(self._sets, self._device.device, self._signature)
                except Exception as error:
                    self.give_up(error)
            return self._placement

    def suits(self, lowered: jax.stages.Lowered) -> bool:
        """Returns whether a lowered program is known to be small (one thread is enough); False also if only compiling tells."""
        return self._is_small(lowered) is True

    def _is_small(self, lowered: jax.stages.Lowered) -> bool | None:
        """Returns whether a lowered program is small: one thread is enough for its work.

        None: only its compilation shows that, because its sizes are not known now.
        """
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
        """Compiles a program for the single-thread device and runs it once, if it is small.

        Returns None if the program is not small, or cannot run on that device.

        Args:
          lowered: the program, lowered for the worker's device.
          lower: lowers the program for another placement (device, and the parameters there).
          zeros: makes inputs for the test run.
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
            self.give_up(error)
            return None
        return CompiledProgram(made, placement)

    def give_up(self, error: Exception) -> None:
        """Logs an error, because of which all programs that this version compiles from now on use all threads.

        Programs that use one thread already stay.
        """
        name, kind = self._signature.model, type(error).__name__
        _log.info("model '%s': its programs get all threads, whatever their size: %s: %s", name, kind, error)
        self._possible = False

    def __repr__(self) -> str:
        return f"<SmallPrograms of {self._device}>"


def placed(sets: ParameterSets, device: jax.Device, signature: Signature | None = None) -> Placement:
    """Returns a placement on a CPU device ``device``, whose programs use the parameters in the memory of the worker's device.

    ``signature``: of a model, whose precision (JAX's 64-bit mode) is used; None: the default.

    Raises ValueError: a parameter would have to be copied; or what numpy raises for a dtype that it does not know.
    """

    def shared(parameters: Any) -> Any:
        with precision(signature is not None and signature.wide):
            return share(parameters, device)

    sets.share_by(shared)
    return Placement(sets, device, None, SingleDeviceSharding(device), MappingProxyType(_OPTIONS), device.client)


def _has_open_sizes(lowered: jax.stages.Lowered) -> bool:
    """Returns whether a function of a lowered program has sizes that are not known before the program is compiled."""
    module: Any = lowered.compiler_ir("stablehlo")
    functions = [op for op in module.body.operations if "function_type" in op.attributes]
    return any("?" in str(function.attributes["function_type"]) for function in functions)
