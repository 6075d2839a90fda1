"""Placements of a model version's programs: the worker's device, or for small ones the single-thread device."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from tensord.workers.devices.several_devices import SeveralDevices
from tensord.workers.parameters.parameter_set import ParameterSets


class Placement(NamedTuple):
    """A device with a version's parameters on it."""

    #: The version's parameter sets; which one programs run with is said with each run.
    sets: ParameterSets
    #: Device for ``jax.device_put``; None: the worker's own.
    device: jax.Device | None = None
    #: The devices of a model that runs on several; a program decides where its parameters lie.
    several: SeveralDevices | None = None
    #: Sharding with which programs are lowered; None: JAX's default.
    sharding: SingleDeviceSharding | None = None
    #: XLA's options with which programs are compiled.
    options: Mapping[str, str | bool] = MappingProxyType({})
    #: XLA's client that loads executables; None: JAX's usual back end.
    client: Any = None

    def spec(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> jax.ShapeDtypeStruct:
        """Returns an argument's shape and dtype, for lowering."""
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self.sharding)

    @property
    def at(self) -> int:
        """Returns the index at which each parameter set keeps its arrays for this placement (``ParameterSet.on``)."""
        return int(self.is_single_thread)

    @property
    def parameters(self) -> Any:
        """The parameters that requests get which name no set."""
        return self.sets.main.on(self.at)

    @property
    def is_single_thread(self) -> bool:
        """True for the placement on the single-thread device."""
        return bool(self.options)

    def parameter_specs(self, rows: int) -> Any:
        """Returns shapes and dtypes of what a program of so many rows takes as parameters, for lowering."""
        several, stack = self.several, self.sets.stack
        if stack is not None:
            return stack.specs(self.spec, rows)
        if several is None:
            return jax.tree.map(lambda leaf: self.spec(leaf.shape, leaf.dtype), self.parameters)

        def spec(leaf: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=several.sharding(leaf))

        return jax.tree.map(spec, self.parameters)

    def compile(
        self, lowered: jax.stages.Lowered, options: Mapping[str, str | bool] = MappingProxyType({})
    ) -> jax.stages.Compiled:
        """Compiles a program that was lowered for this placement. ``options``: XLA's, besides those of the placement."""
        return lowered.compile({**self.options, **options} or None)


class CompiledProgram(NamedTuple):
    """A program from a compilation or from the cache."""

    #: Takes parameters and inputs.
    call: jax.stages.Compiled
    placement: Placement
    #: Bytes in the cache; 0: it is not stored.
    byte_size: int = 0
