"""Which programs of a model version run on the single-thread device, and its parameters there.

A program goes there when it is small and has run there once. A version that cannot be there (a sharding, or what its function
calls, binds it to the worker's own device; its parameters would have to be copied) stays where it is with everything, which is
said once in the log.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import jax
from jax.sharding import SingleDeviceSharding

from tensord.workers.compiling.compilers import CompilerDied
from tensord.workers.processor.single_thread import SingleThreadDevice, share
from tensord.workers.programs.placement import CompiledProgram, Placement
from tensord.workers.programs.precision import precision
from tensord.workers.tensors.signature import Signature

_log = logging.getLogger(__name__)
#: Changes nothing for a client with one thread, but it is part of the key of JAX's own cache, which knows nothing of threads. A
#: program that was compiled for several must not come from there, nor go from here to a client with several.
_OPTIONS: dict[str, str | bool] = {"xla_cpu_multi_thread_eigen": False}


class SmallPrograms:
    """Of one version. Used by the threads that make its programs."""

    def __init__(self, signature: Signature, device: SingleThreadDevice, parameters: Any) -> None:
        """``parameters``: on the worker's own device. They must live as long as this."""
        self._signature = signature
        self._device = device
        self._given = parameters
        self._placement: Placement | None = None
        self._opening = threading.Lock()
        self._possible = True

    def open(self) -> Placement | None:
        """Where they run; None: this version has none."""
        with self._opening:
            if self._placement is None and self._possible:
                try:
                    with precision(self._signature):
                        self._placement = placed(self._given, self._device.device)
                except Exception as error:
                    self.give_up(error)
            return self._placement

    def suits(self, lowered: jax.stages.Lowered) -> bool:
        """Whether a program is known to be small."""
        return self._is_small(lowered) is True

    def _is_small(self, lowered: jax.stages.Lowered) -> bool | None:
        """None: its compilation will tell, which fills in the sizes of an exported program that it calls."""
        # Asked for the cost of one, XLA raises an error, or (from JAX 0.11 on) ends the process.
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
        """Makes a program and runs it once. None: it is not small, or cannot run there.

        Args:
          lowered: the program for the worker's own device.
          lower: makes that for another one.
          zeros: inputs for it.
        """
        try:
            small = self._is_small(lowered) if self._possible else False
            if small is False or (placement := self.open()) is None:
                return None
            with precision(self._signature):
                made = placement.compile(lower(placement))
                if small is None and not self._device.suits(lowered, made):
                    return None
                jax.block_until_ready(made(placement.parameters, zeros()))
        except CompilerDied:
            raise
        except Exception as error:
            self.give_up(error)
            return None
        return CompiledProgram(made, placement)

    def give_up(self, error: Exception) -> None:
        """No further program goes there; those that are there have run."""
        name, kind = self._signature.model, type(error).__name__
        _log.info("model '%s': its programs get all threads, whatever their size: %s: %s", name, kind, error)
        self._possible = False

    def __repr__(self) -> str:
        return f"<SmallPrograms of {self._device}>"


def placed(parameters: Any, device: jax.Device) -> Placement:
    """That device with the same memory as parameters. Raises as ``share``."""
    return Placement(
        share(parameters, device), device, None, SingleDeviceSharding(device), MappingProxyType(_OPTIONS), device.client
    )


def _has_open_sizes(lowered: jax.stages.Lowered) -> bool:
    """Whether a function of the program has sizes that are numbers only once it is compiled."""
    module: Any = lowered.compiler_ir("stablehlo")
    functions = [op for op in module.body.operations if "function_type" in op.attributes]
    return any("?" in str(function.attributes["function_type"]) for function in functions)
