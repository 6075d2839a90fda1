"""Places the parameters of a model version: those that it is loaded with, and those that are pushed later."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from tensord.shm.arrays import Array
from tensord.workers.devices import device_memory
from tensord.workers.devices.several_devices import SeveralDevices
from tensord.workers.parameters.device_room import DeviceRoom
from tensord.workers.parameters.leaves import Leaves, names_of
from tensord.workers.parameters.parameter_set import ParameterSets
from tensord.workers.programs.precision import precision
from tensord.workers.tensors.signature import Signature


def placed_sets(
    signature: Signature,
    parameters: Any,
    names: Sequence[str] | None = None,
    several: SeveralDevices | None = None,
    room: DeviceRoom | None = None,
) -> ParameterSets:
    """Places parameters on the worker's device; on several ones they stay where they are until the first program is there.

    Args:
      names: of the leaves; None: those that they have in ``parameters``.
      room: for parameters that are pushed.
    """
    names = names_of(parameters) if names is None else names
    with precision(signature):
        described = Leaves(signature.model, names, jax.tree.leaves(parameters))
        if several is None:
            parameters = jax.device_put(parameters)
    leaves, structure = jax.tree.flatten(parameters)
    #: Leaves that every set has of the model: they cannot be pushed.
    fixed = [None if leaf.plain else array for leaf, array in zip(described, leaves, strict=True)]

    def place(host: Sequence[Array | None]) -> Any:
        arrays = [own if given is None else given for given, own in zip(host, fixed, strict=True)]
        with precision(signature):
            if several is None:
                here = jax.local_devices()[:1]
                if here[0].platform != "cpu":
                    device_memory.check(signature.model, "pushed parameters need", described.byte_size, here)
                # On a processor they are used where they lie, if they are aligned.
                placed = jax.device_put(arrays)
            else:
                # As the programs want them, which main shows.
                shardings = [leaf.sharding for leaf in jax.tree.leaves(sets.main.on(0))]
                placed = jax.device_put(arrays, shardings)
            return jax.tree.unflatten(structure, jax.block_until_ready(placed))

    sets = ParameterSets(described, parameters, place, room)
    return sets
