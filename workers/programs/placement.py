"""Describes where a model version's programs run: on the worker's device or devices, or on a CPU device with one thread."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.backend import backends
from jax.sharding import SingleDeviceSharding

from tensord.workers.devices.several_devices import SeveralDevices
from tensord.workers.parameters.parameter_set import ParameterSets
from tensord.workers.programs.gpu_programs import WITHOUT_GRAPHS, copies_memory


class Placement(NamedTuple):
    """Where the programs of a model version run: the device or devices, the parameters there, and options for compiling."""

    #: The version's parameter sets; each run says which of them it uses.
    sets: ParameterSets
    #: Device for ``jax.device_put``; None: the worker's own.
    device: jax.Device | None = None
    #: The devices of a model that runs on several, None: it runs on one; the program decides where its parameters lie.
    several: SeveralDevices | None = None
    #: Sharding with which programs are lowered; None: JAX's default.
    sharding: SingleDeviceSharding | None = None
    #: XLA's options with which programs are compiled.
    options: Mapping[str, str | bool] = MappingProxyType({})
    #: XLA's client that loads executables; None: JAX's usual back end.
    client: Any = None

    def spec(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> jax.ShapeDtypeStruct:
        """Describes an argument of a program on this device, for lowering."""
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self.sharding)

    @property
    def at(self) -> int:
        """Returns where the programs run. 0: on the worker's device or devices; 1: on the CPU device with one thread."""
        return int(self.is_single_thread)

    @property
    def parameters(self) -> Any:
        """The arrays of the parameter set ``main``, as the programs of this placement use them."""
        return self.sets.main.on(self.at)

    @property
    def is_single_thread(self) -> bool:
        """True if the programs run on a CPU device that has only one thread."""
        return bool(self.options)

    def parameter_specs(self, rows: int) -> Any:
        """Describes the parameters of a program for ``rows`` rows, for lowering: shapes, dtypes and shardings."""
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
        """Compiles a program that was lowered for this placement. ``options``: further XLA options."""
        options = {**self.options, **options}
        compiled = lowered.compile(options or None)
        if self.client is None and "cuda" in backends() and copies_memory(compiled.as_text() or ""):
            return lowered.compile({**options, **WITHOUT_GRAPHS})
        return compiled


class CompiledProgram(NamedTuple):
    """A program that is ready to be called, with the devices that it runs on and the parameter sets that a call can use."""

    #: Takes parameters and inputs.
    call: jax.stages.Compiled
    placement: Placement
    #: Bytes in the cache; 0: it is not stored.
    byte_size: int = 0
