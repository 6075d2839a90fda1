"""Where programs of a model version run: on the worker's device, or the small ones on the single-thread device."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from tensord.workers.devices.several_devices import SeveralDevices


class Placement(NamedTuple):
    """A device with the version's parameters on it."""

    parameters: Any
    #: Where arrays are put for its programs, as JAX is told; None: the worker's own device.
    device: jax.Device | None = None
    #: Of a model that runs on several devices. Its parameters lie there once a program has said where.
    several: SeveralDevices | None = None
    #: As a program is lowered for that device; None: as JAX does it without being told.
    sharding: SingleDeviceSharding | None = None
    #: Options of XLA with which its programs are compiled.
    options: Mapping[str, str | bool] = MappingProxyType({})
    #: Whose executables are loaded for it; None: JAX's usual back end.
    client: Any = None

    def spec(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> jax.ShapeDtypeStruct:
        """An argument, as a program is lowered for it."""
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self.sharding)

    @property
    def is_single_thread(self) -> bool:
        """Whether it is the one for small programs, beside the worker's own device."""
        return bool(self.options)

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
        return lowered.compile({**self.options, **options} or None)


class CompiledProgram(NamedTuple):
    """What a compilation, or the cache, gave."""

    #: Of parameters and inputs.
    call: jax.stages.Compiled
    placement: Placement
    #: As it is kept; 0: it is not.
    byte_size: int = 0
