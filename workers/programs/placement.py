"""Where programs of a model version run: on the worker's device, or the small ones on the single-thread device."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from tensord.workers.devices.several_devices import SeveralDevices

#: Changes nothing for a client with one thread, but it is part of the key of JAX's own cache, which knows nothing of threads. A
#: program that was compiled for several must not come from there, nor go from here to a client with several.
_SINGLE_THREAD: dict[str, str | bool] = {"xla_cpu_multi_thread_eigen": False}


class Placement(NamedTuple):
    """A device with the version's parameters on it."""

    parameters: Any
    #: The single-thread device; None: the worker's own.
    device: jax.Device | None = None
    #: Of a model that runs on several devices. Its parameters lie there once a program has said where.
    several: SeveralDevices | None = None

    def spec(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> jax.ShapeDtypeStruct:
        """An argument, as a program is lowered for it."""
        where = None if self.device is None else SingleDeviceSharding(self.device)
        return jax.ShapeDtypeStruct(shape, dtype, sharding=where)

    @property
    def parameter_specs(self) -> Any:
        """The parameters, as a program is lowered for them."""
        several = self.several
        if several is None:
            return jax.tree.map(lambda leaf: self.spec(leaf.shape, leaf.dtype), self.parameters)

        def spec(leaf: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=several.sharding(leaf))

        return jax.tree.map(spec, self.parameters)

    def compile(
        self, lowered: jax.stages.Lowered, options: Mapping[str, str | bool] = MappingProxyType({})
    ) -> jax.stages.Compiled:
        """Compiles what was lowered for it. ``options``: of XLA, besides those of the device."""
        given = dict(options) if self.device is None else _SINGLE_THREAD | dict(options)
        return lowered.compile(given or None)


class CompiledProgram(NamedTuple):
    """What a compilation, or the cache, gave."""

    #: Of parameters and inputs.
    call: jax.stages.Compiled
    placement: Placement
    #: As it is kept; 0: it is not.
    byte_size: int = 0
