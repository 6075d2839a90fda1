"""Describes the leaves (arrays) of a model's parameters: the names, datatypes and shapes that pushed parameters must have."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from tensord.shm.arrays import Array, described
from tensord.shm.common.datatypes import FILE_TYPES
from tensord.shm.errors import InvalidArgument, Unsupported

#: The element types that can be pushed, by their names in safetensors' layout.
DTYPES: Mapping[str, np.dtype[Any]] = {name: np.dtype(dtype) for name, dtype in FILE_TYPES.items()}
_PUSHED = frozenset(DTYPES.values())
#: Elements that are looked at in one piece.
_PIECE = 1 << 18


class Leaf(NamedTuple):
    """Describes one array of a model's parameters."""

    #: The keys on the path to the array in the tree of parameters, joined by dots.
    name: str
    #: The dtype that the model made it with, and the dtype on the device, which may be half as wide without JAX's 64-bit mode.
    made: Any
    placed: Any
    shape: tuple[int, ...]
    #: True if all sets use this leaf of ``main`` (the model's ``batch_sets`` names the leaves that differ).
    shared: bool = False

    @property
    def byte_size(self) -> int:
        """The number of bytes that the array takes on the device."""
        return int(self.placed.itemsize) * math.prod(self.shape)

    @property
    def plain(self) -> bool:
        """True if the array can be pushed. Arrays of types that safetensors lacks (JAX's random keys, int4) cannot."""
        return self.placed in _PUSHED


class Leaves:
    """Describes all leaves of a model version's parameters, in the order of their tree. It also checks pushed parameters."""

    def __init__(
        self,
        model: str,
        names: Sequence[str],
        made: Sequence[Any],
        shared: Callable[[str], bool] = lambda _: False,
        fixed: Collection[str] = (),
    ) -> None:
        """Describes the leaves of a model's parameters. The caller must have set JAX's 64-bit mode as the model needs it.

        Args:
          model: the model's name.
          names: the names of the leaves, in the order of their tree.
          made: the leaves in this order, as the model's ``create`` function returned them.
          shared: called with a leaf's name, returns whether this leaf is the same in all parameter sets.
          fixed: the names of the tree's other leaves, which are no arrays but constants of the model's programs. If a push
            has a scalar with such a name, the scalar is ignored.
        """
        self.model = model
        self.fixed = frozenset(fixed)
        self._leaves = [
            Leaf(name, _dtype(leaf), _placed(_dtype(leaf)), tuple(np.shape(leaf)), shared(name))
            for name, leaf in zip(names, made, strict=True)
        ]
        seen: set[str] = set()
        #: A name that several leaves have; None: all names differ.
        self._twice = next((name for name in names if name in seen or seen.add(name)), None)  # type: ignore[func-returns-value]

    def __iter__(self) -> Any:
        return iter(self._leaves)

    def __len__(self) -> int:
        return len(self._leaves)

    def byte_size_of(self, named: bool) -> int:
        """Returns how many bytes a parameter set takes on the device.

        ``named``: False for ``main``, True for any other set, for which the leaves shared with ``main`` do not count.
        """
        return sum([leaf.byte_size for leaf in self._leaves if not (named and leaf.shared)])

    def check_named(self) -> None:
        """Raises Unsupported if two leaves have the same name, or if no leaf has a datatype that clients can push."""
        if self._twice is not None:
            raise Unsupported(f"model '{self.model}': two of its parameters are called '{self._twice}'")
        if not any(leaf.plain for leaf in self._leaves):
            raise Unsupported(f"model '{self.model}' has no parameters that are arrays: there is nothing to push")

    def fitted(self, found: Mapping[str, Array], what: str, named: bool = False) -> list[Array | None]:
        """Checks that a client has pushed an array for each leaf of the model's parameters. Returns the arrays in leaf order.

        A leaf must not be pushed, and is None in the result, if safetensors lacks its datatype. In a push to another set than
        ``main`` (``named`` is True), the same applies to leaves that all sets share.
        Args:
          found: the pushed arrays by the leaf's name.
          what: a name for the push in error messages.
        Raises InvalidArgument if an array is missing, unknown or must not be pushed, or if its datatype or shape is wrong.
        Raises Unsupported if no leaf of the model can be pushed.
        """
        self.check_named()
        self.check_known(found, what)
        fitting: list[Array | None] = []
        for leaf in self._leaves:
            array = found.get(leaf.name)
            is_pushed = leaf.plain and not (named and leaf.shared)
            if is_pushed and array is None:
                raise InvalidArgument(f"{what}: leaf '{leaf.name}' of model '{self.model}' is missing")
            if not is_pushed and array is not None:
                if not (named and leaf.shared):
                    raise InvalidArgument(f"{what}: leaf '{leaf.name}' is of {leaf.placed}, which cannot be pushed")
                raise InvalidArgument(
                    f"{what}: leaf '{leaf.name}' of model '{self.model}' is not among its batch_sets: "
                    "all sets have it of 'main', to which it is pushed"
                )
            fitting.append(array)
        return fitting

    def check_known(self, found: Mapping[str, Any], what: str) -> None:
        """Checks the names, datatypes and shapes of pushed arrays. Some leaves may be missing.

        ``found``: leaf name -> array, or an object that has its dtype and shape. ``what`` names the push in errors.
        Raises InvalidArgument: the model has no leaf of this name, or has it with another dtype or shape.
        """
        self.check_names(found, what)
        for name in self.fixed & found.keys():
            if found[name].shape:
                raise InvalidArgument(
                    f"{what}: leaf '{name}' is no array in model '{self.model}', but part of its programs"
                )
        for leaf in self._leaves:
            given = found.get(leaf.name) if leaf.plain else None
            if given is not None and (given.dtype not in (leaf.placed, leaf.made) or given.shape != leaf.shape):
                raise InvalidArgument(
                    f"{what}: leaf '{leaf.name}' is {described(given.dtype, given.shape)}, model '{self.model}' has "
                    f"{described(leaf.placed, leaf.shape)}"
                )

    def hosted(self, arrays: Iterable[Any]) -> list[Array | None]:
        """Copies a model's parameter arrays to host memory. ``arrays`` has one array for each leaf, in the order of the leaves.

        In the returned list, None replaces an array of a type that safetensors lacks, such as int4 or JAX's random keys.
        """
        return [np.asarray(array) if leaf.plain else None for leaf, array in zip(self, arrays, strict=True)]

    def check_names(self, found: Iterable[str], what: str) -> None:
        """Raises InvalidArgument if a name in ``found`` is no leaf of the model. ``what`` names the parameters in the error."""
        known = self.fixed | {leaf.name for leaf in self._leaves}
        if unknown := sorted(name for name in found if name not in known):
            raise InvalidArgument(f"{what}: model '{self.model}' has no leaf '{unknown[0][:256]}'")

    def __repr__(self) -> str:
        return f"<Leaves {len(self._leaves)} of {self.model!r}>"


def _dtype(leaf: Any) -> Any:
    return leaf.dtype if hasattr(leaf, "dtype") else np.asarray(leaf).dtype


def _placed(dtype: Any) -> Any:
    # Without JAX's 64-bit mode 32 bits take the place of 64.
    return jax.dtypes.canonicalize_dtype(dtype) if isinstance(dtype, np.dtype) else dtype


def names_of(parameters: Any, kinds: tuple[type, ...] = (object,)) -> list[str]:
    """Returns the names of the leaves of the tree ``parameters`` whose type is among ``kinds``.

    A name is the keys on the leaf's path, joined by dots. A tree that is a single leaf has the name "array".
    """
    return [
        jax.tree_util.keystr(path, simple=True, separator=".") or "array"
        for path, leaf in jax.tree_util.tree_leaves_with_path(parameters)
        if isinstance(leaf, kinds)
    ]


def check_finite(leaves: Leaves, arrays: Sequence[Array | None], what: str) -> None:
    """Raises InvalidArgument if an array has an infinite element or NaN. The error names the leaf and the element's index.

    ``arrays``: one for each leaf; None: the leaf cannot be pushed. ``what`` names the push in the error.
    """
    for leaf, array in zip(leaves, arrays, strict=True):
        if array is None or array.dtype.kind in "biu":
            continue
        flat = array.reshape(-1)
        # In pieces, so that what is found takes little memory.
        for start in range(0, flat.size, _PIECE):
            piece = np.isfinite(flat[start : start + _PIECE])
            if not piece.all():
                at = np.unravel_index(start + int(np.argmin(piece)), array.shape)
                where = ", ".join(map(str, at))
                raise InvalidArgument(f"{what}: leaf '{leaf.name}' has a value that is not finite, at [{where}]")
