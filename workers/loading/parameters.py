"""Splits a model's parameters: arrays become arguments of its compiled programs, all other leaves become part of the programs.

A pytree of parameters may hold leaves that cannot be arguments: activation functions, flags that decide a Python branch, names.
Such a leaf never changes, so it is compiled into the programs. Equinox users know this as ``equinox.partition``.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tensord.workers.parameters.device_room import DeviceRoom
from tensord.workers.parameters.leaves import Leaves, names_of
from tensord.workers.parameters.parameter_set import ParameterSet, ParameterSets, Placer

_log = logging.getLogger(__name__)
_ARRAYS = (jax.Array, np.ndarray, np.generic)
#: Bytes of a thousand numbers: fewer are flags, sizes, rates.
_MIN_FIXED_BYTE_SIZE = 8000
#: Stands for an array among the other leaves.
_ARRAY = object()


def warn_of_leaves(model: str, parameters: Any) -> None:
    """Logs a warning if large parameters of a model are no arrays, because they become constants and slow down compiling."""
    leaves = jax.tree_util.tree_leaves_with_path(parameters)
    fixed = [(path, leaf) for path, leaf in leaves if not isinstance(leaf, _ARRAYS)]
    sizes = (getattr(leaf, "nbytes", 8 * isinstance(leaf, (int, float))) for _, leaf in fixed)
    byte_size = sum(
        size for size in sizes if isinstance(size, int)
    )  # of a type, such as numpy.float32, it is no number
    if byte_size < _MIN_FIXED_BYTE_SIZE:
        return
    path, leaf = fixed[0]
    _log.warning(
        "model '%s': %d of its parameters are no arrays (%d bytes, the first is '%s', of type %s), so each of its programs has "
        "them as constants and takes longer to compile: make arrays of them, as with numpy.asarray",
        model,
        len(fixed),
        byte_size,
        jax.tree_util.keystr(path, simple=True, separator="."),
        type(leaf).__name__,
    )


def host_sets(model: str, parameters: Any, room: DeviceRoom | None = None) -> ParameterSets:
    """Makes the parameter sets of a model that runs on the host. ``room``: limits the memory of all sets, if it is not None."""
    try:
        leaves, structure = jax.tree.flatten(parameters)
        names, fixed = array_names(parameters), fixed_names(parameters)
    except (TypeError, ValueError):  # dicts whose keys have no order are no tree to JAX
        leaves, structure, names, fixed = [parameters], jax.tree.structure(0), [], frozenset()
    arrays: list[Any] = [leaf for leaf in leaves if isinstance(leaf, _ARRAYS)]
    return ParameterSets(
        _HostPlacer(Leaves(model, names, arrays, fixed=fixed), leaves, structure), parameters, room, host=arrays
    )


class _HostPlacer(Placer):
    """Places pushed parameters of a model that runs on the host."""

    # A leaf that the model has as a JAX array becomes one; others stay numpy arrays.
    def __init__(self, described: Leaves, leaves: Sequence[Any], structure: jax.tree_util.PyTreeDef) -> None:
        super().__init__(described)
        self._structure = structure
        arrays = iter(described)
        self._fixed = [_ARRAY if isinstance(leaf, _ARRAYS) and next(arrays).plain else leaf for leaf in leaves]
        pairs = zip(leaves, self._fixed, strict=True)
        self._on_device = [isinstance(leaf, jax.Array) for leaf, fixed in pairs if fixed is _ARRAY]

    def place(self, host: Sequence[Any], main: ParameterSet) -> Any:
        pairs = zip([array for array in host if array is not None], self._on_device, strict=True)
        given = iter([jnp.asarray(array) if was else array for array, was in pairs])
        return jax.tree.unflatten(self._structure, [next(given) if leaf is _ARRAY else leaf for leaf in self._fixed])


def array_names(parameters: Any) -> list[str]:
    """Returns the names of the parameters that are arrays, in the order of their tree."""
    return names_of(parameters, _ARRAYS)


def fixed_names(parameters: Any) -> frozenset[str]:
    """Returns the names of the parameters that are no arrays."""
    return frozenset(names_of(parameters)).difference(array_names(parameters))


def parted(apply: Callable[..., Any], parameters: Any) -> tuple[Callable[..., Any], Any]:
    """Separates the arrays in the tree ``parameters`` from all other leaves.

    Returns a function and the list of the arrays. The function takes such a list, puts the arrays into the tree, and calls
    ``apply`` with the tree and all further arguments. If all leaves are arrays, ``apply`` and ``parameters`` are returned.
    """
    leaves, structure = jax.tree.flatten(parameters)
    arrays = [leaf for leaf in leaves if isinstance(leaf, _ARRAYS)]
    if len(arrays) == len(leaves):
        return apply, parameters
    fixed = [_ARRAY if isinstance(leaf, _ARRAYS) else leaf for leaf in leaves]
    del leaves, parameters

    @functools.wraps(apply)
    def apply_to_arrays(arrays: Sequence[Any], *more: Any) -> Any:
        rest = iter(arrays)
        return apply(jax.tree.unflatten(structure, [next(rest) if leaf is _ARRAY else leaf for leaf in fixed]), *more)

    return apply_to_arrays, arrays
