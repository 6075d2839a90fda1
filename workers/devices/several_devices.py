"""The devices of a model that runs on several devices. A worker never runs two programs of such models at the same time.

If two devices began two programs in different orders, each program would wait for the other one for ever.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tensord.workers.devices import device_memory

_RUNNING = threading.Lock()


class SeveralDevices:
    """The devices of a model version: several devices, or a single one that is not the worker's first."""

    def __init__(self, devices: Sequence[jax.Device]) -> None:
        self.devices = tuple(devices)
        self._everywhere = NamedSharding(Mesh(self.devices, ("devices",)), PartitionSpec())

    def sharding(self, leaf: Any) -> Any:
        """Returns the sharding that the model's author has set for the model's parameter ``leaf``, or None if none is set."""
        laid = isinstance(leaf, jax.Array) and (len(leaf.sharding.device_set) > 1 or leaf.committed)
        return leaf.sharding if laid else None

    def place(self, model: str, parameters: Any, compiled: jax.stages.Compiled) -> Any:
        """Copies parameters to the devices where the ``compiled`` program needs them. Returns them as JAX arrays.

        Parameters that the program does not use are copied to all devices. Parameters that the author has sharded keep their
        sharding. Raises Internal if a device has too little memory. ``model`` is the model's name, for the error.
        """
        ((wanted, *_), _) = compiled.input_shardings
        leaves, structure = jax.tree.flatten(parameters)
        # None stands for a parameter that is not used.
        places = [
            self.sharding(leaf) or where or self._everywhere
            for leaf, where in zip(leaves, jax.tree.leaves(wanted, is_leaf=lambda each: each is None), strict=True)
        ]
        fresh = [(leaf, where) for leaf, where in zip(leaves, places, strict=True) if self.sharding(leaf) is None]
        part = sum(math.prod(where.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf, where in fresh)
        device_memory.check(model, "its parameters need", part, self.devices)
        return jax.tree.unflatten(structure, jax.device_put(leaves, places))

    @staticmethod
    def order(compiled: jax.stages.Compiled) -> tuple[int, ...]:
        """Returns the ids of the devices that a compiled program uses, in the program's order.

        If this version of JAX does not have this information, any exception may be raised.
        """
        shardings = jax.tree.leaves((compiled.input_shardings, compiled.output_shardings))
        # The attribute is private but needed: a program that is loaded for another order ends the process when it is run.
        return tuple(device.id for device in shardings[0]._device_assignment)

    def ordered(self, ids: Any) -> list[jax.Device]:
        """Returns the devices with these ids, in this order. Raises KeyError if the model has no device with one of the ids."""
        known = {device.id: device for device in self.devices}
        return [known[number] for number in ids]

    def alone(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a function that calls ``call``, waits until the outputs are computed, and returns the outputs.

        Of all functions that ``alone`` has returned in this process, only one runs at a time.
        """

        @functools.wraps(call, updated=())
        def run(*arguments: Any) -> Any:
            with _RUNNING:
                return jax.block_until_ready(call(*arguments))

        return run

    def __repr__(self) -> str:
        return f"<SeveralDevices {[device.id for device in self.devices]}>"
