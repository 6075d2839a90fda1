"""Manages the parameter sets of one loaded model version: which values each set has, and where these values are stored.

A ``ParameterSet`` has the values of one push, or the values that were loaded with the model. ``ParameterSets.commit`` makes
requests use a pushed ``ParameterSet``. The ``ParameterSet`` that requests used before is kept, so that the push can be rolled
back. A ``ParameterSet`` that is no longer kept is freed when the last batch that uses it has ended.
If another ``ParameterSet`` needs the room, a ``ParameterSet`` leaves the device. Its values stay in host memory until a batch
needs them. Any thread may look up a ``ParameterSet``. Only the thread of the worker's event loop may call ``commit`` and
``drop``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from tensord.shm.arrays import Array
from tensord.shm.errors import InvalidArgument, NotFound
from tensord.shm.figures import ParameterFigures, SetFigures
from tensord.shm.messages import Parameter
from tensord.shm.operations import MAIN_SET
from tensord.workers.parameters.device_room import DeviceRoom
from tensord.workers.parameters.leaves import Leaves
from tensord.workers.parameters.set_stack import SetStack

#: Stands for the tree of parameters that are not on the device.
_ABSENT: Any = object()


class Placer:
    """Base class of objects that put the leaves of parameter sets where the programs of one loaded version read them.

    Leaves are in the order of the model's tree. None stands for a leaf that clients cannot push.
    """

    #: True if all of the model's programs run on a processor; only then may ``lay`` be called.
    lays = False
    #: True if parameters come back to the device faster from the page-locked copies that ``pin`` makes.
    pins = False

    def __init__(self, leaves: Leaves) -> None:
        self.leaves = leaves

    def place(self, host: Sequence[Any], main: ParameterSet) -> Any:
        """Copies leaves from host memory to the worker's devices. Returns the tree of the copies.

        ``main``: the ``main`` set that is in use, whose arrays show on which device the programs want each leaf. Errors of
        copying are raised unchanged.
        """
        raise NotImplementedError

    def byte_size_in_place(self, host: Sequence[Array | None]) -> int:
        """Returns the total bytes of the arrays in ``host`` that programs read without a copy. This base class returns 0."""
        return 0

    def lay(self, host: Sequence[Array | None]) -> Any:
        """Returns the model's parameter tree for the CPU. Copies only arrays that are misaligned or have another datatype.

        ``host``: an array for each leaf of the tree, or None for a leaf that clients cannot replace by a push.
        """
        raise NotImplementedError

    def pin(self, tree: Any) -> Sequence[Any] | None:
        """Copies a tree of leaves from a GPU to page-locked memory. Returns None if no such memory is left.

        Otherwise waits for the copies, and returns one entry for each leaf: None for a leaf that a push cannot replace.
        """
        raise NotImplementedError


class ParameterSet:
    """The parameters of a model, as loaded or as pushed. Their values never change. They may leave the device and return."""

    __slots__ = (
        "__weakref__",
        "_host",
        "_leaves",
        "_pinned",
        "_trees",
        "byte_size",
        "name",
        "number",
        "placed_byte_size",
        "sets",
        "stamp",
        "used",
    )

    def __init__(
        self, sets: ParameterSets, name: str, number: int, host: Sequence[Array | None] | None, tree: Any = _ABSENT
    ) -> None:
        """Makes a set that is not in use yet.

        Args:
          sets: all parameter sets of the model version.
          name: the name that requests give for the set.
          number: tells apart the sets that were pushed under one name.
          host: the leaves in host memory; None: they are not in host memory.
          tree: the tree of leaves on the device; default: they are not on the device.
        """
        self.sets = sets
        self.name = name
        self.number = number
        self._host: Sequence[Array | None] | None = None
        #: Its leaves in page-locked memory, once it has left a GPU.
        self._pinned: Sequence[Any] | None = None
        named = name != MAIN_SET
        #: True if it may leave the device for others while it is in use.
        self._leaves = named or sets.on_demand
        #: Bytes of its leaves, and of the leaves that take memory on the device for this set alone: others lie in a stack, or are
        #: used in the host's memory without a copy.
        self.byte_size = self.placed_byte_size = sets.leaves.byte_size_of(named)
        if sets.stack is not None:
            self.placed_byte_size -= sets.leaves.byte_size_of(named=True)
        if host is not None:
            self.fill(host)
        #: The parameters on the worker's device, and on the device for small programs.
        self._trees = [tree, _ABSENT]
        #: The number of its last use, which grows with each use of any set of the worker.
        self.used = 0
        #: Identifies the set, for as long as it is in use, in the response cache, which does not hold the set itself.
        self.stamp = object()

    def on(self, placement: int) -> Any:
        """Returns the tree of parameters on a device. If the parameters are not there, brings them there first.

        ``placement``: 0: the worker's device; 1: the CPU device that computes with one thread, for small programs.
        Raises Unavailable: the device has no room for the parameters.
        """
        if self._leaves:
            self.used = self.sets.room.use()
        tree = self._trees[placement]
        return tree if tree is not _ABSENT else self._come(placement)

    def _come(self, placement: int) -> Any:
        room = self.sets.room
        with room.lock:
            trees = self._trees
            if not self._is_placed:
                room.admit(self)
                first = placement if self.sets.placer.lays else 0
                try:
                    trees[first] = self._placed(first)
                except BaseException:
                    room.left(self)
                    raise
                self.sets.misses += self.is_newest
            if trees[placement] is _ABSENT:
                trees[placement] = self._shared(placement)
            return trees[placement]

    @property
    def _is_placed(self) -> bool:
        return any(tree is not _ABSENT for tree in self._trees)

    def _placed(self, placement: int) -> Any:
        if placement:
            assert self.sets.share is not None
            return self.sets.share(self.sets.placer.lay(self.hosted()))
        return self.sets.placer.place(self.hosted() if self._pinned is None else self._pinned, self.sets.main)

    def _shared(self, placement: int) -> Any:
        if placement:  # for the single-thread device, else for the worker's
            assert self.sets.share is not None
            return self.sets.share(self._trees[0])
        return self.sets.placer.place([np.asarray(leaf) for leaf in jax.tree.leaves(self._trees[1])], self.sets.main)

    @property
    def on_device(self) -> bool:
        """True while the parameters are on the device."""
        stack = self.sets.stack
        return self._is_placed if stack is None else stack.holds(self)

    @property
    def is_newest(self) -> bool:
        """True while requests that name this set get these values. A later push under the same name replaces them."""
        return self.sets.newest(self.name) is self

    @property
    def may_leave(self) -> bool:
        """True if the set may be removed from the device: it is also in host memory, and it is not being pushed.

        ``main`` may leave only if the model's parameters are loaded on demand.
        """
        moves = self.is_hosted and self.placed_byte_size > 0
        return moves and (self.sets.main is not self or self.sets.on_demand) and self not in self.sets.staged

    @property
    def is_hosted(self) -> bool:
        """True if the arrays of this parameter set are in host memory. The device may have copies of the arrays."""
        return self._host is not None

    def hosted(self) -> Sequence[Array | None]:
        """Returns the set's arrays in host memory. If they are only on the device, fetches them.

        None stands for an array that cannot be pushed, and for one that all sets share with ``main``.
        """
        if self._host is None:
            self._host = self.sets.leaves.hosted(jax.tree.leaves(self._trees[0]))
        return self._host

    def leave(self) -> object:
        """Takes the set's arrays off the device, and returns them, so that the caller can free them.

        Returns [] and changes nothing if the set has no copy in host memory, as its values would be lost.
        """
        with self.sets.room.lock:
            trees: list[Any] = []
            if self._host is not None:
                if self.sets.stack is not None:
                    self.sets.stack.forget(self)
                trees, self._trees = self._trees, [_ABSENT, _ABSENT]
                self.sets.room.left(self)
            return trees

    def evict(self) -> None:
        """Removes this set's parameters from the device to make room for other sets.

        The caller must hold ``self.sets.room.lock``. Parameters on a GPU are first copied to page-locked memory, if there is room
        for them.
        """
        placer, pinned, tree = self.sets.placer, self.sets.room.pinned, self._trees[0]
        kept = self.sets.keeps(self) and self._pinned is None and tree is not _ABSENT
        if placer.pins and kept and pinned.take(self.placed_byte_size):
            self._pinned = placer.pin(tree)
            if self._pinned is None:
                pinned.give_back(self.placed_byte_size)
        self.leave()

    def unpin(self) -> None:
        """Frees the set's page-locked memory. May be called more than once."""
        with self.sets.room.lock:
            if self._pinned is not None:
                self._pinned = None
                self.sets.room.pinned.give_back(self.placed_byte_size)

    def fill(self, host: Sequence[Array | None]) -> None:
        """Stores the set's arrays in host memory. Call it before ``prepare``.

        ``host`` has an entry for each leaf of the parameters: an array, or None if the set has no array of its own for the leaf.
        """
        self._host = host
        self.placed_byte_size -= self.sets.placer.byte_size_in_place(host)

    def prepare(self) -> None:
        """Places the parameters on the device before their first use.

        Raises Unavailable: the device has no room for them. Errors of copying are raised unchanged.
        """
        room = self.sets.room
        if not self._is_placed:
            with room.lock:
                room.admit(self)
            try:
                self._trees[0] = self._placed(0)
            except BaseException:
                with room.lock:
                    room.left(self)
                raise
        if self.sets.share is not None:
            self.on(1)

    def moved(self, tree: Any) -> None:
        """Replaces the set's arrays by ``tree``, which has the same values on other devices. Call it only while a model loads."""
        self._trees = [tree, _ABSENT]

    def said(self) -> dict[str, Parameter]:
        """Returns the response parameters that tell a client which set computed its answer: the set's name and number."""
        return {"parameter_set": self.name, "parameter_version": self.number}

    def __str__(self) -> str:
        return f"number {self.number} of parameter set '{self.name}' of model '{self.sets.leaves.model}'"

    def __repr__(self) -> str:
        return f"<ParameterSet {self.name!r} {self.number} of {self.sets.leaves.model!r}>"


class Unused(NamedTuple):
    """The objects whose memory can be freed after a parameter set was replaced."""

    #: Objects that only runs that have begun still use: their memory is freed when the list is emptied.
    unused: list[object]
    #: The version before, if it has to be copied to host memory before it leaves the device; None: it has left, or stays.
    leaves: ParameterSet | None = None


class ParameterSets:
    """All parameter sets of one loaded model version. Requests that name no set get ``main``."""

    def __init__(
        self,
        placer: Placer,
        tree: Any,
        room: DeviceRoom | None = None,
        host: Sequence[Array | None] | None = None,
        stack: SetStack | None = None,
        on_demand: bool = False,
    ) -> None:
        """Stores the values that the model was loaded with as the parameter set ``main``. There is no other set yet.

        Args:
          placer: copies parameters from host memory to the device.
          tree: the model's tree of parameters on the device, with None for each parameter in ``stack``. Ignored if ``on_demand``.
          room: limits how much device memory pushed parameters take. If it is None, they may take none.
          host: a flat list of the model's parameters in host memory. If it is None, no parameters are in host memory. It is
            required with ``stack`` or ``on_demand``.
          stack: device memory for several sets, so that rows of one batch can use different sets. None if a batch uses one set.
          on_demand: whether ``main`` may leave the device. If True, ``main`` begins in host memory.
        """
        self.placer = placer
        self.leaves = placer.leaves
        self.on_demand = on_demand
        self.stack = stack
        self._closed = False
        #: Returns parameters in the same memory, of a processor, for small programs, once there are any.
        self.share: Callable[[Any], Any] | None = None
        self.room = room or DeviceRoom(0)
        self.main = ParameterSet(self, MAIN_SET, 0, host, _ABSENT if on_demand else tree)
        #: The sets by their names, without main; this dict is never replaced, and changes in the worker's loop alone.
        self.named: dict[str, ParameterSet] = {}
        #: Name -> the version of the set that was in use before the newest.
        self._before: dict[str, ParameterSet] = {}
        #: Sets that were checked and placed, and are not in use yet.
        self.staged: set[ParameterSet] = set()
        #: True if a request has asked for the set that its answer was computed with.
        self.told = False
        #: Counters: pushes that were committed; sets that came back to the device, and that left it for others.
        self.pushes = 0
        self.misses = 0
        self.evictions = 0

    def share_by(self, share: Callable[[Any], Any]) -> None:
        """Lets programs on a CPU device with one thread use all parameter sets, without copying the sets' memory.

        ``share`` gets a tree of arrays, and returns arrays of the CPU device in the same memory. This method calls ``share``
        for ``main``. If this fails, the error is raised unchanged, and programs on the CPU device cannot use any set.
        """
        self.share = share
        try:
            self.main.on(1)
        except BaseException:
            self.share = None
            raise

    def newest(self, name: str) -> ParameterSet | None:
        """Returns the set that requests with this name use now; None: there is none."""
        return self.main if name == MAIN_SET else self.named.get(name)

    def find(self, name: str) -> ParameterSet:
        """Returns the set named ``name``, and records its use. Raises NotFound: there is no such set."""
        found = self.named.get(name)
        if found is None:
            if name == MAIN_SET:
                return self.main
            raise NotFound(f"parameter set '{name}' of model '{self.leaves.model}' is not found")
        found.used = self.room.use()
        return found

    def check_count(self, name: str, limit: int) -> None:
        """Raises InvalidArgument if there are ``limit`` sets already and none of them has this name."""
        names = {MAIN_SET, *self.named, *(each.name for each in self.staged)}
        if name not in names and len(names) >= limit:
            raise InvalidArgument(
                f"model '{self.leaves.model}' has {len(names)} parameter sets, workers.max_parameter_sets allows {limit}"
            )

    def commit(self, parameters: ParameterSet, stays: bool = False) -> Unused:
        """Replaces the parameter set of the same name by ``parameters``. Returns objects whose memory the caller must free.

        The replaced set is kept, so that the push can be rolled back. If ``stays`` is True, that set stays on the device, for
        requests that still use it. If ``stays`` is False, that set leaves the device, and ``unused`` of the result has its
        arrays. But if the set is not in host memory, ``leaves`` of the result is the set, and the caller must first call the
        set's method ``hosted`` and then ``leave``.
        """
        former = self.newest(parameters.name)
        parameters.stamp = object()
        if parameters.name == MAIN_SET:
            self.main = parameters
            if self.stack is not None:
                # Answers of the others may come of its leaves, too.
                for each in self.named.values():
                    each.stamp = object()
        else:
            parameters.used = self.room.use()
            self.named[parameters.name] = parameters
        self.staged.discard(parameters)
        self.pushes += 1
        if former is None or former is parameters:
            return Unused([])
        unused: list[object] = [self._before.get(parameters.name)]
        self.forget_before(self._before.get(parameters.name))
        self._before[parameters.name] = former
        if former.is_hosted and not stays:
            unused.append(former.leave())
        self.room.keep(former)
        return Unused(unused, None if stays or former.is_hosted else former)

    def drop(self, name: str) -> list[object]:
        """Removes the parameter set ``name``. The set's memory stays allocated until the caller drops the returned list.

        Raises NotFound if there is no such set. Raises InvalidArgument if the name is ``main``.
        """
        if name == MAIN_SET:
            raise InvalidArgument(f"parameter set '{MAIN_SET}' of model '{self.leaves.model}' cannot be dropped")
        self.find(name)
        if self.stack is not None:
            self.stack.forget(self.named[name])
        dropped = self.named.pop(name)
        unused: list[object] = [dropped, self._before.get(name)]
        dropped.unpin()
        self.forget_before(self._before.get(name))
        return unused

    def forget_before(self, before: ParameterSet | None) -> None:
        """Stops keeping ``before`` for the rollback of a push. Does nothing if ``before`` is None or is not kept."""
        if before is not None and self._before.get(before.name) is before:
            del self._before[before.name]
            before.unpin()
            self.room.forget(before)

    def keeps(self, parameters: ParameterSet) -> bool:
        """Returns whether ``parameters`` is the newest set of its name, or the former set to which a push can be rolled back."""
        newest, before = self.newest(parameters.name), self._before.get(parameters.name)
        return not self._closed and (parameters is newest or parameters is before)

    def close(self) -> None:
        """Frees page-locked copies, sets kept for a rollback, and ``self.stack``. Call it after the model was unloaded."""
        with self.room.lock:
            self._closed = True
        for each in (self.main, *self.named.values()):
            each.unpin()
        for before in list(self._before.values()):
            self.forget_before(before)
        if self.stack is not None:
            self.stack.clear()
            self.room.leave_stack(self.stack)

    def kept(self, name: str, number: int) -> ParameterSet:
        """Returns the set with this name and number. Raises NotFound unless it is the newest of its name or the one before."""
        for found in (self.newest(name), self._before.get(name)):
            if found is not None and found.number == number:
                return found
        raise NotFound(f"number {number} of parameter set '{name}' of model '{self.leaves.model}' is not kept")

    def figures(self) -> ParameterFigures:
        """Returns metrics: each set's size and whether it is on the device, and the numbers of pushes, misses and evictions.

        A miss means that a set had to be copied to the device for a batch.
        """
        sets = [self.main, *self.named.values()]
        return ParameterFigures(
            tuple([SetFigures(each.name, each.number, each.byte_size, each.on_device) for each in sets]),
            self.pushes,
            self.misses,
            self.evictions,
        )

    def __repr__(self) -> str:
        return f"<ParameterSets of {self.leaves.model!r}: {self.main!r}, {len(self.named)} more>"
