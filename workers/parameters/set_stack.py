"""Holds several parameter sets of a model side by side on the device, so that one batch can use several sets.

    leaf      | slot 0: main | slot 1: customer-7 | slot 2: customer-9 | ...    an array for each leaf that differs between sets
    index     | 1 | 1 | 2 | 0 |                                                  the slot of each row of a batch

A set gets a slot when a batch first needs the set. If no slot is free, the least recently used set loses its slot. One compiled
program serves all combinations of sets. Nothing is copied for a batch whose sets all have slots. The values of all sets,
including ``main``, are also in host memory. Only one thread at a time may use a stack.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Union

import jax
import numpy as np

from tensord.shm.arrays import Array
from tensord.shm.errors import InvalidArgument
from tensord.workers.parameters.leaves import Leaf, Leaves

if TYPE_CHECKING:
    from tensord.workers.parameters.parameter_set import ParameterSet, ParameterSets

#: Writes the leaves of a set to a slot: (arrays, leaves, slot) -> the arrays, in the same memory.
Put = Callable[[list[jax.Array], list[Array], Any], list[jax.Array]]
#: Makes the arrays of a stack on its device, from host memory.
Open = Callable[[Sequence[Array]], list[jax.Array]]


def put(arrays: list[jax.Array], leaves: list[Array], slot: Any) -> list[jax.Array]:
    """Writes one parameter set into the stacked arrays at index ``slot``. Returns the new stacked arrays.

    ``arrays``: for each leaf, the values of all sets. ``leaves``: for each leaf, the value to write. JAX compiles this
    function, with ``arrays`` donated.
    """
    return [
        jax.lax.dynamic_update_index_in_dim(array, leaf, slot, 0) for array, leaf in zip(arrays, leaves, strict=True)
    ]


class SetDeclaration(NamedTuple):
    """A model's settings for batches whose requests use different parameter sets."""

    #: Names of leaves, or of subtrees of leaves, that differ between sets; empty: all leaves.
    names: tuple[str, ...]
    #: How many sets lie side by side on the device.
    resident: int

    def is_shared(self, name: str) -> bool:
        """Returns whether all sets share the leaf with this name."""
        return bool(self.names) and not any(_is_in(name, own) for own in self.names)

    def check(self, model: str, names: Sequence[str]) -> None:
        """Raises InvalidArgument if a name in ``self.names`` is no leaf or subtree of the model, or if the model has no leaves.

        ``names``: the names of the model's leaves.
        """
        for own in self.names:
            if not any(_is_in(name, own) for name in names):
                raise InvalidArgument(
                    f"model '{model}': batch_sets names '{own}', and none of its parameters is called so or lies below it"
                )
        if not names:
            raise InvalidArgument(f"model '{model}': batch_sets is given, and it has no parameters that are arrays")


def _is_in(name: str, own: str) -> bool:
    return name == own or name.startswith(f"{own}.")


#: The parameters of a run: one parameter set, or that of each request or row of a batch that may mix sets; None: main.
Chosen = Union["ParameterSet", "BatchSets", "tuple[ParameterSet | None, ...]", None]


class BatchSets:
    """The parameter set of each request of a batch whose requests may name different sets."""

    __slots__ = ("_sets",)

    def __init__(self, sets: Mapping[Any, ParameterSet]) -> None:
        """Stores ``sets``: request -> its parameter set, in the order of the requests' rows in the batch."""
        self._sets = sets

    def of(self, request: Any) -> ParameterSet:
        return self._sets[request]

    def rows(self) -> list[ParameterSet]:
        """Returns the parameter set of each row of the batch. Padding rows at the end are not included."""
        return [each for request, each in self._sets.items() for _ in range(request.rows)]

    def __repr__(self) -> str:
        return f"<BatchSets {len(set(self._sets.values()))} of {len(self._sets)} requests>"


class SetStack:
    """Holds parameter sets of one loaded model version side by side on the device, so that the rows of a batch can mix them."""

    def __init__(self, leaves: Leaves, structure: Any, slots: int) -> None:
        """Creates an empty stack that can hold ``slots`` parameter sets of one model version at the same time.

        ``leaves``: describes the arrays of a parameter set. ``structure``: the ``jax.tree.structure`` of a parameter set.
        """
        self.slots = slots
        self._structure = structure
        self._leaves: list[Leaf] = list(leaves)
        self._own = [leaf for leaf in self._leaves if not leaf.shared]
        #: Bytes of all of its arrays.
        self.byte_size = slots * leaves.byte_size_of(named=True)
        self._at = 0
        self._open: Open | None = None
        self._put: Put | None = None
        #: The arrays, one for each leaf that differs between sets; None: the next batch makes them.
        self._arrays: list[jax.Array] | None = None
        #: Set -> slot; least recently used first.
        self._slots: OrderedDict[ParameterSet, int] = OrderedDict()
        self._free: list[int] = []
        #: The tree that programs take, and the main set whose shared leaves are in it.
        self._tree: Any = None
        self._tree_of: ParameterSet | None = None

    def open(self, at: int, open: Open, put: Put) -> None:
        """Sets the device on which the stack lies.

        Args:
          at: the device's number. 0 is the worker's usual device. 1 is a CPU device that computes with one thread.
          open: the function by which the stack makes its arrays there: it copies arrays of zeros to the device.
          put: the function by which the stack copies the values of one parameter set into these arrays.
        """
        self._at, self._open, self._put = at, open, put

    def specs(self, spec: Callable[[tuple[int, ...], Any], Any], rows: int) -> tuple[Any, Any]:
        """Describes the arguments of a program that computes each row with a parameter set of its own.

        Returns a tree and an array description. The tree describes the model's parameters: each parameter that is not the same in
        all sets has an additional first axis for the sets. The array has the index of each row's set.
        Args:
          spec: describes an array, given its shape and dtype.
          rows: the number of rows.
        """
        shapes = [leaf.shape if leaf.shared else (self.slots, *leaf.shape) for leaf in self._leaves]
        tree = [spec(shape, leaf.placed) for shape, leaf in zip(shapes, self._leaves, strict=True)]
        return jax.tree.unflatten(self._structure, tree), spec((rows,), np.dtype(np.int32))

    def put_specs(self, spec: Callable[[tuple[int, ...], Any], Any]) -> tuple[Any, ...]:
        """Returns descriptions of the arguments of the function ``set_stack.put``, with which JAX compiles this function.

        The arguments are a list of arrays that each hold one leaf of all sets in the stack, a list of the same leaves of one
        set, and an index in the stack. ``spec``: returns the description of an array with the given shape and dtype.
        """
        return (
            [spec((self.slots, *leaf.shape), leaf.placed) for leaf in self._own],
            [spec(leaf.shape, leaf.placed) for leaf in self._own],
            spec((), np.dtype(np.int32)),
        )

    def holds(self, parameters: ParameterSet) -> bool:
        """Returns whether ``parameters`` are in the stack now."""
        return parameters in self._slots

    def arguments(self, sets: ParameterSets, chosen: Chosen, rows: int) -> tuple[Any, Array]:
        """Returns the two arguments by which a program applies a different parameter set to each row of a batch.

        The first argument is the tree of the model's parameters. An array that differs between sets has an additional axis 0,
        with one index for each set in the stack. The second argument is INT32[rows], the index of each row's set.
        The next call of this method may overwrite the arrays in the tree, so the caller must run the program before that call.
        If a set cannot be copied to the device, removes all sets from the stack, and raises the error unchanged.
        Args:
          sets: all parameter sets of the model version.
          chosen: one set for all rows, a ``BatchSets``, or a tuple with a set for each row. None stands for ``main``.
          rows: the number of rows of the program. Padding rows get the set of the first row.
        """
        wanted: Sequence[ParameterSet | None]
        if isinstance(chosen, tuple):
            wanted = chosen
        elif isinstance(chosen, BatchSets):
            wanted = chosen.rows()
        else:
            wanted = (chosen,)
        slots = self._indices_of(sets, [each or sets.main for each in wanted])
        index = np.full(rows, slots[0], np.int32)
        index[: len(slots)] = slots
        return self._whole(sets), index

    def _indices_of(self, sets: ParameterSets, wanted: Sequence[ParameterSet]) -> list[int]:
        known = self._slots
        missing = [each for each in dict.fromkeys(wanted) if each not in known]
        for each in wanted:
            if each in known:
                known.move_to_end(each)
        for each in missing:
            self._place(sets, each)
        return [known[each] for each in wanted]

    def _place(self, sets: ParameterSets, parameters: ParameterSet) -> None:
        assert self._open is not None
        assert self._put is not None
        # First what may fail for lack of memory: a slot that was taken and not filled would be lost.
        host = zip(parameters.hosted(), self._leaves, strict=True)
        own = [np.asarray(array, leaf.placed) for array, leaf in host if not leaf.shared]
        if self._arrays is None:
            zeros = [np.zeros((self.slots, *leaf.shape), leaf.placed) for leaf in self._own]
            self._arrays, self._free = self._open(zeros), list(reversed(range(self.slots)))
        if self._free:
            slot = self._free.pop()
        else:
            _, slot = self._slots.popitem(last=False)
            sets.evictions += 1
        self._tree = None
        try:
            self._arrays = self._put(self._arrays, own, np.int32(slot))
        except BaseException:
            self.clear()
            raise
        self._slots[parameters] = slot
        sets.misses += 1

    def _whole(self, sets: ParameterSets) -> Any:
        """Returns the tree of parameters for programs. An array that differs between sets has a first axis for the sets."""
        if self._tree is None or self._tree_of is not sets.main:
            assert self._arrays is not None
            stacked, shared = iter(self._arrays), iter(jax.tree.leaves(sets.main.on(self._at)))
            self._tree = jax.tree.unflatten(
                self._structure, [next(shared) if leaf.shared else next(stacked) for leaf in self._leaves]
            )
            self._tree_of = sets.main
        return self._tree

    def forget(self, parameters: ParameterSet) -> None:
        """Removes a parameter set from the stack, if it is there."""
        slot = self._slots.pop(parameters, None)
        if slot is not None:
            self._free.append(slot)

    def clear(self) -> None:
        """Frees all arrays and removes all sets. The next batch makes new arrays."""
        self._arrays = self._tree = self._tree_of = None
        self._slots.clear()
        self._free = []

    def __repr__(self) -> str:
        return f"<SetStack {len(self._slots)} of {self.slots} slots>"
