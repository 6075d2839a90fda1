"""Places the parameters of a model version on devices: the parameters that it is loaded with, and those pushed later."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from typing import Any

import jax
import numpy as np

from tensord.shm.arena import ALIGNMENT
from tensord.shm.arrays import Array, address_of
from tensord.shm.errors import InvalidArgument, Unavailable
from tensord.workers.devices import device_memory
from tensord.workers.devices.host_put import host_put
from tensord.workers.devices.several_devices import SeveralDevices
from tensord.workers.jax_internals.wide import precision
from tensord.workers.parameters.device_room import DeviceRoom
from tensord.workers.parameters.leaves import Leaves, names_of
from tensord.workers.parameters.parameter_set import ParameterSet, ParameterSets, Placer
from tensord.workers.parameters.set_stack import SetDeclaration, SetStack
from tensord.workers.programs.gather_buffer import aligned
from tensord.workers.tensors.signature import Signature

_log = logging.getLogger(__name__)
#: The kind of memory, as JAX calls it, from which a device reads without help of the processor.
PINNED = "pinned_host"


def placed_sets(
    signature: Signature,
    parameters: Any,
    names: Sequence[str] | None = None,
    several: SeveralDevices | None = None,
    room: DeviceRoom | None = None,
    mixed: SetDeclaration | None = None,
    remote: bool = False,
    on_demand: bool = False,
    fixed: Collection[str] = (),
) -> ParameterSets:
    """Returns a model's parameter sets. If ``several`` is None, places the model's parameters on the worker's device.

    If ``several`` is given, the parameters stay where they are until the model's first program is compiled.
    Args:
      names: names of the leaves; None: their paths in ``parameters``.
      several: the devices of a model that runs on several devices; None: the model runs on the worker's device.
      room: limits the device memory that pushed parameters use; None: they may use none.
      mixed: which leaves differ between sets, if one batch of the model may use several sets; None: it may use one only.
      remote: whether the device has memory of its own, as a GPU has.
      on_demand: whether ``main`` may leave the device for other sets while no request needs it.
      fixed: names of constants: values in the model's tree of parameters that are no arrays. ``parameters`` has only arrays.
    Raises InvalidArgument: ``mixed`` names a leaf that does not exist, or ``room`` is too small for the sets of ``mixed`` or
    for ``main`` on demand. Raises Unsupported: ``mixed`` is given, and no leaf can be pushed or two leaves have the same name.
    Raises Internal: there is no memory for the parameters.
    """
    if several is None:
        fresh = sum(leaf.nbytes for leaf in jax.tree.leaves(parameters) if not isinstance(leaf, jax.Array))
        device_memory.check(signature.model, "its parameters need", fresh, jax.local_devices()[:1])
    names = names_of(parameters) if names is None else names
    if mixed is not None:
        return _stacked(signature, parameters, names, mixed, room, fixed)
    with precision(signature.wide):
        described = Leaves(signature.model, names, jax.tree.leaves(parameters), fixed=fixed)
        if several is None and not on_demand:
            parameters = jax.device_put(parameters)
    placer = DevicePlacer(signature, described, parameters, several, remote)
    if not on_demand:
        return ParameterSets(placer, parameters, room)
    host = described.hosted(jax.tree.leaves(parameters))
    del parameters
    sets = ParameterSets(placer, None, room, host, on_demand=True)
    # Nobody evicts it while it is placed.
    sets.staged.add(sets.main)
    try:
        sets.main.prepare()
    except Unavailable as error:
        raise InvalidArgument(error.message) from None
    finally:
        sets.staged.discard(sets.main)
    return sets


class DevicePlacer(Placer):
    """Places the parameters of a jitted model's parameter sets on the device or devices on which the model runs."""

    def __init__(
        self, signature: Signature, described: Leaves, parameters: Any, several: SeveralDevices | None, remote: bool
    ) -> None:
        """Stores those of the model's ``parameters`` that clients cannot replace by a push. All parameter sets share them.

        ``described``: name, shape and datatype of each parameter. ``several``: the model's devices if it runs on more than one.
        ``remote``: whether the device has memory of its own.
        """
        super().__init__(described)
        self._signature = signature
        self._several = several
        self._device = jax.local_devices()[0]
        leaves, self._structure = jax.tree.flatten(parameters)
        self._fixed = _fixed(described, leaves)
        if several is None:
            with precision(signature.wide):
                self._fixed = [None if array is None else jax.device_put(array) for array in self._fixed]
        self.lays = several is None and not remote and self._device.platform == "cpu"
        self.pins = remote and PINNED in [memory.kind for memory in self._device.addressable_memories()]

    def place(self, host: Sequence[Any], main: ParameterSet) -> Any:
        if self.lays:
            with precision(self._signature.wide):
                # They are used where they lie.
                leaves = host_put(jax.tree.leaves(self.lay(host)), self._device, committed=False)
                return jax.tree.unflatten(self._structure, leaves)
        arrays = _whole(host, self._fixed)
        with precision(self._signature.wide):
            if self._several is None and self._device.platform != "cpu":
                byte_size = self.leaves.byte_size_of(named=False)
                device_memory.check(self._signature.model, "pushed parameters need", byte_size, [self._device])
            if any(isinstance(given, jax.Array) for given in host):
                # Page-locked copies go back to the devices that they came from.
                memory = self._device.default_memory().kind
                placed = jax.device_put(arrays, [array.sharding.with_memory_kind(memory) for array in arrays])
            elif self._several is None:
                placed = jax.device_put(arrays)
            else:
                # As the programs want them, which main shows.
                placed = jax.device_put(arrays, [leaf.sharding for leaf in jax.tree.leaves(main.on(0))])
            return jax.tree.unflatten(self._structure, jax.block_until_ready(placed))

    def byte_size_in_place(self, host: Sequence[Array | None]) -> int:
        if not self.lays:
            return 0
        pairs = zip(host, self.leaves, strict=True)
        return sum([given.nbytes for given, leaf in pairs if given is not None and _lies(given, leaf.placed)])

    def lay(self, host: Sequence[Array | None]) -> Any:
        # Copies what is not aligned or has another datatype, because XLA's own copy takes three times as long.
        whole = zip(host, self._fixed, self.leaves, strict=True)
        laid = [own if given is None else _aligned(given, leaf.placed) for given, own, leaf in whole]
        return jax.tree.unflatten(self._structure, laid)

    def pin(self, tree: Any) -> list[jax.Array | None] | None:
        pairs = zip(jax.tree.leaves(tree), self.leaves, strict=True)
        arrays = [array if leaf.plain else None for array, leaf in pairs]
        try:
            with precision(self._signature.wide):
                copies = [
                    None if array is None else jax.device_put(array, array.sharding.with_memory_kind(PINNED))
                    for array in arrays
                ]
                # The device has no room for what comes instead before all of them are there.
                jax.block_until_ready(copies)
                return copies
        except jax.errors.JaxRuntimeError as error:
            model = self._signature.model
            _log.debug("parameters of model '%s' leave the device and are not page-locked: %s", model, error)
            return None


def _fixed(described: Leaves, leaves: Sequence[Any]) -> list[Any]:
    return [None if leaf.plain else array for leaf, array in zip(described, leaves, strict=True)]


def _whole(host: Sequence[Any], fixed: Sequence[Any]) -> list[Any]:
    return [own if given is None else given for given, own in zip(host, fixed, strict=True)]


def _lies(array: Array, dtype: Any) -> bool:
    """Returns whether XLA can use ``array`` where it lies, without a copy, for a parameter of this dtype."""
    return array.dtype == dtype and not address_of(array) % ALIGNMENT


def _aligned(array: Array, dtype: Any) -> Array:
    """Returns an aligned array of this dtype with the values of ``array``: if possible ``array`` itself, else a copy."""
    if _lies(array, dtype) and array.flags.c_contiguous:
        return array
    made = aligned(array.shape, np.dtype(dtype))
    np.copyto(made, array, casting="unsafe")
    return made


def _stacked(
    signature: Signature,
    parameters: Any,
    names: Sequence[str],
    mixed: SetDeclaration,
    room: DeviceRoom | None,
    fixed: Collection[str],
) -> ParameterSets:
    # Leaves that all sets share go to the device. Others stay in host memory until the stack has their set.
    mixed.check(signature.model, names)
    leaves, structure = jax.tree.flatten(parameters)
    room = room or DeviceRoom(0)
    with precision(signature.wide):
        plain = dict(zip(names, Leaves(signature.model, names, leaves), strict=True))

        def is_shared(name: str) -> bool:
            # What cannot be pushed is every set's.
            return mixed.is_shared(name) or not plain[name].plain

        described = Leaves(signature.model, names, leaves, is_shared, fixed)
    stack = SetStack(described, structure, mixed.resident)
    described.check_named()
    room.join_stack(stack, signature.model)
    placer = StackPlacer(signature, described, leaves, structure)
    host = described.hosted(leaves)
    return ParameterSets(placer, placer.shared(host), room, host, stack)


class StackPlacer(Placer):
    """Copies to the device the parameters that are the same in all parameter sets of a model. Copies no other parameters."""

    def __init__(
        self, signature: Signature, described: Leaves, leaves: Sequence[Any], structure: jax.tree_util.PyTreeDef
    ) -> None:
        super().__init__(described)
        self._signature = signature
        self._structure = structure
        self._fixed = _fixed(described, leaves)

    def place(self, host: Sequence[Any], main: ParameterSet) -> Any:
        return self.shared(host)

    def shared(self, host: Sequence[Any]) -> Any:
        """Copies to the worker's device the parameters whose values are the same in all parameter sets of the model.

        Returns the model's parameters as a tree. The tree has None in place of each parameter that may differ between sets.
        ``host``: all parameters in the tree's order, as arrays in host memory; None: a parameter that a push cannot replace.
        Raises Internal if the device has no memory left.
        """
        whole = zip(self.leaves, _whole(host, self._fixed), strict=True)
        shared = [array if leaf.shared else None for leaf, array in whole]
        with precision(self._signature.wide):
            byte_size = sum([array.nbytes for array in shared if array is not None])
            device_memory.check(self._signature.model, "its parameters need", byte_size, jax.local_devices()[:1])
            return jax.block_until_ready(jax.device_put(jax.tree.unflatten(self._structure, shared)))
