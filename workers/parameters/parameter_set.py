"""The parameter sets of one load of a model version: which is in use under which name, and where it lies.

    staged ──commit──▶ newest of its name ──the next commit──▶ the one before ──one more──▶ gone
                          │  ▲
                   evicted│  │a batch asks for it
                          ▼  │
                     in the host's memory, that of a GPU's page-locked

Whoever begins a run asks for a set once, and its answers are of that set, whatever is committed meanwhile. A set that is not in
use any more is freed when the last run with it has ended. The worker's loop changes what is in use; every thread may ask.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import jax
import numpy as np

from tensord.shm.arrays import Array
from tensord.shm.errors import InvalidArgument, NotFound
from tensord.shm.figures import ParameterFigures, SetFigures
from tensord.shm.messages import Parameter
from tensord.shm.operations import MAIN_SET
from tensord.workers.parameters.device_room import DeviceRoom
from tensord.workers.parameters.leaves import Leaves
from tensord.workers.parameters.set_stack import BatchSets, SetStack

#: In place of parameters that are not there.
_ABSENT: Any = object()
#: Places leaves, in the order of the model's tree, on the device; None for those that every set has of the model.
Place = Callable[[Sequence[Any]], Any]
#: Copies a tree from a GPU to page-locked memory. Returns the leaves, as ``Place`` takes them; None: there is no memory.
Pin = Callable[[Any], "Sequence[Any] | None"]
#: Returns the bytes of leaves that are used where they lie, so that they take no room on the device.
Lying = Callable[[Sequence[Array | None]], int]
#: Returns leaves as a tree in memory that programs on the processor use where it lies.
Lay = Callable[["Sequence[Array | None]"], Any]


class ParameterSet:
    """The parameters of one push, or those that the model was loaded with. What they are never changes, where they lie may."""

    __slots__ = (
        "__weakref__",
        "_host",
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
        """``host``: the leaves in the host's memory, if they are there; ``tree``: on the device, likewise."""
        self.sets = sets
        self.name = name
        self.number = number
        self._host: Sequence[Array | None] | None = None
        #: Its leaves in page-locked memory, once it has left a GPU.
        self._pinned: Sequence[Any] | None = None
        named = name != MAIN_SET
        #: Bytes of its leaves, and of those that take room on the device for it alone: others lie in a stack, or where the host
        #: has them in any case.
        self.byte_size = self.placed_byte_size = sets.leaves.byte_size_of(named)
        if sets.stack is not None:
            self.placed_byte_size -= sets.leaves.byte_size_of(named=True)
        if host is not None:
            self.fill(host)
        #: On the worker's device, and on the one for small programs.
        self._trees = [tree, _ABSENT]
        #: Grows with each use, over all sets of a worker.
        self.used = 0
        #: Stands for it, without keeping it, where answers are kept.
        self.stamp = object()

    def on(self, placement: int) -> Any:
        """Returns the parameters as programs of a placement take them: 0: on the worker's device, 1: on that of small ones.

        Raises: Unavailable: they had left the device, and there is no room for them.
        """
        if self.sets.on_demand:
            self.used = self.sets.room.use()
        tree = self._trees[placement]
        return tree if tree is not _ABSENT else self._come(placement)

    def _come(self, placement: int) -> Any:
        room = self.sets.room
        with room.lock:
            trees = self._trees
            if not self._is_placed:
                room.admit(self)
                first = 0 if self.sets.lay is None else placement
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
        """Brings its leaves to a placement; to that of small programs only where they can be laid for it."""
        if placement:
            assert self.sets.share is not None
            assert self.sets.lay is not None
            return self.sets.share(self.sets.lay(self.hosted()))
        return self.sets.place(self.hosted() if self._pinned is None else self._pinned)

    def _shared(self, placement: int) -> Any:
        """Returns the leaves of the other placement in the same memory."""
        if placement:
            assert self.sets.share is not None
            return self.sets.share(self._trees[0])
        return self.sets.place([np.asarray(leaf) for leaf in jax.tree.leaves(self._trees[1])])

    @property
    def on_device(self) -> bool:
        """True while it need not be brought there."""
        stack = self.sets.stack
        return self._is_placed if stack is None else stack.holds(self)

    @property
    def is_newest(self) -> bool:
        """True while requests that name its set get it."""
        return self.sets.newest(self.name) is self

    @property
    def may_leave(self) -> bool:
        """True where it may leave the device for others."""
        moves = self._host is not None and self.placed_byte_size > 0
        return moves and (self.sets.main is not self or self.sets.on_demand) and self not in self.sets.staged

    def hosted(self) -> Sequence[Array | None]:
        """Returns its leaves in the host's memory; those that it was loaded with are fetched once."""
        if self._host is None:
            leaves = zip(jax.tree.leaves(self._trees[0]), self.sets.leaves, strict=True)
            self._host = [np.asarray(leaf) if described.plain else None for leaf, described in leaves]
        return self._host

    def leave(self) -> object:
        """Leaves the device, but for runs that have it, if it is in the host's memory. Returns what was there, to be freed."""
        with self.sets.room.lock:
            trees: list[Any] = []
            if self._host is not None:
                if self.sets.stack is not None:
                    self.sets.stack.forget(self)
                trees, self._trees = self._trees, [_ABSENT, _ABSENT]
                self.sets.room.left(self)
            return trees

    def evict(self) -> None:
        """Leaves the device for others, by way of page-locked memory where there is some; the room's lock is held."""
        pin, pinned, tree = self.sets.pin, self.sets.room.pinned, self._trees[0]
        kept = self.sets.keeps(self) and self._pinned is None and tree is not _ABSENT
        if pin is not None and kept and pinned.take(self.placed_byte_size):
            self._pinned = pin(tree)
            if self._pinned is None:
                pinned.give_back(self.placed_byte_size)
        self.leave()

    def unpin(self) -> None:
        """Gives its page-locked memory back. Idempotent."""
        with self.sets.room.lock:
            if self._pinned is not None:
                self._pinned = None
                self.sets.room.pinned.give_back(self.placed_byte_size)

    def fill(self, host: Sequence[Array | None]) -> None:
        """Sets its leaves, before it is in use."""
        self._host = host
        self.placed_byte_size -= self.sets.lying(host)

    def prepare(self) -> None:
        """Has it on the device, for all programs. Raises as ``on``; or whatever placing it raises.

        Nobody waits for the lock meanwhile: it is not in use yet.
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
        """Notes that its arrays are elsewhere now, while its model is loaded."""
        self._trees = [tree, _ABSENT]

    def said(self) -> dict[str, Parameter]:
        """Returns what answers say of it that are asked to."""
        return {"parameter_set": self.name, "parameter_version": self.number}

    def __str__(self) -> str:
        return f"number {self.number} of parameter set '{self.name}' of model '{self.sets.leaves.model}'"

    def __repr__(self) -> str:
        return f"<ParameterSet {self.name!r} {self.number} of {self.sets.leaves.model!r}>"


class Asking(Protocol):
    """A request, as far as parameter sets know it."""

    #: The name of the set that it is for, or the very set; None: main.
    chosen: str | ParameterSet | None
    #: Whether its answer says which set it is of, and what it says.
    tells: bool
    told: Mapping[str, Parameter]


class ParameterSets:
    """The parameter sets of one load. ``main`` is what requests get that name none."""

    def __init__(
        self,
        leaves: Leaves,
        tree: Any,
        place: Place,
        room: DeviceRoom | None = None,
        host: Sequence[Array | None] | None = None,
        stack: SetStack | None = None,
        lying: Lying = lambda _: 0,
        on_demand: bool = False,
        pin: Pin | None = None,
        lay: Lay | None = None,
    ) -> None:
        """
        Args:
          tree: the parameters that the model was loaded with, on the device, where ``place`` puts others; those that lie in
            ``stack`` are None there.
          room: on the device, for parameters that are pushed; None: there is none.
          host: the leaves of ``tree`` in the host's memory, if they are there.
          stack: of a model that computes several sets in one batch.
          lying: says what of a set is used where it lies.
          on_demand: whether main leaves the device as the others do; then ``tree`` is placed by ``prepare``.
          pin: copies what leaves the device to page-locked memory; None: that is no faster there.
          lay: of programs that run on the processor, large ones and small ones (``share_by``).
        """
        self.leaves = leaves
        self.lying = lying
        self.on_demand = on_demand
        self.stack = stack
        self.place = place
        self.pin = pin
        self.lay = lay
        self._closed = False
        #: Returns parameters in the same memory, of a processor, for small programs, once there are any.
        self.share: Callable[[Any], Any] | None = None
        self.room = room or DeviceRoom(0)
        self.main = ParameterSet(self, MAIN_SET, 0, host, _ABSENT if on_demand else tree)
        self._named: dict[str, ParameterSet] = {}
        #: Name -> the one that was in use before.
        self._before: dict[str, ParameterSet] = {}
        #: Sets that are checked and placed, and not in use.
        self.staged: set[ParameterSet] = set()
        #: Whether any answer has said which set it is of.
        self.told = False
        #: Counters: pushes that were committed; sets that came back to the device, and that left it for others.
        self.pushes = 0
        self.misses = 0
        self.evictions = 0

    def share_by(self, share: Callable[[Any], Any]) -> None:
        """Has small programs use the memory of the parameters from now on. Raises whatever ``share`` raises for main's."""
        self.share = share
        try:
            self.main.on(1)
        except BaseException:
            self.share = None
            raise

    def newest(self, name: str) -> ParameterSet | None:
        """Returns the set of a name that is in use, or None."""
        return self.main if name == MAIN_SET else self._named.get(name)

    def find(self, name: str) -> ParameterSet:
        """Returns the set of a name, whose turn among those on the device begins anew. Raises NotFound."""
        found = self._named.get(name)
        if found is None:
            if name == MAIN_SET:
                return self.main
            raise NotFound(f"parameter set '{name}' of model '{self.leaves.model}' is not found")
        found.used = self.room.use()
        return found

    def chosen_by(self, requests: Sequence[Asking]) -> ParameterSet:
        """Returns the set that a batch is to be computed with, and notes it for answers that are asked to say it.

        Raises: NotFound: there is no set of that name any more.
        """
        chosen = requests[0].chosen
        found = self.main if chosen is None else chosen if isinstance(chosen, ParameterSet) else self.find(chosen)
        if self.told:
            for request in requests:
                if request.tells:
                    request.told = found.said()
        return found

    def each_chosen_by(self, requests: Sequence[Asking]) -> BatchSets:
        """Returns the set of each request of a batch that may mix them, where there is a stack. Otherwise as ``chosen_by``."""
        return BatchSets({request: self.chosen_by([request]) for request in requests})

    def check_count(self, name: str, limit: int) -> None:
        """Raises InvalidArgument if a new name would be one too many."""
        names = {MAIN_SET, *self._named, *(each.name for each in self.staged)}
        if name not in names and len(names) >= limit:
            raise InvalidArgument(
                f"model '{self.leaves.model}' has {len(names)} parameter sets, workers.max_parameter_sets allows {limit}"
            )

    def commit(self, parameters: ParameterSet, stays: bool = False) -> list[object]:
        """Puts a staged set into use. Returns what is not used any more, but by runs that have begun.

        ``stays``: the one before it stays on the device, because what has begun goes on with it.
        """
        former = self.newest(parameters.name)
        if parameters.name == MAIN_SET:
            self.main = parameters
            if self.stack is not None:
                # Answers of the others may come of its leaves, too.
                for each in self._named.values():
                    each.stamp = object()
        else:
            parameters.used = self.room.use()
            self._named[parameters.name] = parameters
        self.staged.discard(parameters)
        self.pushes += 1
        if former is None or former is parameters:
            return []
        unused: list[object] = [self._before.get(parameters.name)]
        self.forget_before(self._before.get(parameters.name))
        self._before[parameters.name] = former
        if not stays:
            unused.append(former.leave())
        self.room.keep(former)
        return unused

    def drop(self, name: str) -> list[object]:
        """Forgets a set. Returns as ``commit``. Raises NotFound; InvalidArgument: it is main."""
        if name == MAIN_SET:
            raise InvalidArgument(f"parameter set '{MAIN_SET}' of model '{self.leaves.model}' cannot be dropped")
        self.find(name)
        if self.stack is not None:
            self.stack.forget(self._named[name])
        dropped = self._named.pop(name)
        unused: list[object] = [dropped, self._before.get(name)]
        dropped.unpin()
        self.forget_before(self._before.get(name))
        return unused

    def forget_before(self, before: ParameterSet | None) -> None:
        """Forgets what was in use before the newest of its name."""
        if before is not None and self._before.get(before.name) is before:
            del self._before[before.name]
            before.unpin()
            self.room.forget(before)

    def keeps(self, parameters: ParameterSet) -> bool:
        """Returns whether a set may be asked for, or put into use, again."""
        newest, before = self.newest(parameters.name), self._before.get(parameters.name)
        return not self._closed and (parameters is newest or parameters is before)

    def close(self) -> None:
        """Forgets all that is kept beside what is in use, because the load has ended."""
        with self.room.lock:
            self._closed = True
        for each in (self.main, *self._named.values()):
            each.unpin()
        for before in list(self._before.values()):
            self.forget_before(before)
        if self.stack is not None:
            self.stack.clear()
            self.room.leave_stack(self.stack)

    def kept(self, name: str, number: int) -> ParameterSet:
        """Returns the set of a name and number that is in use, or was before the newest. Raises NotFound."""
        for found in (self.newest(name), self._before.get(name)):
            if found is not None and found.number == number:
                return found
        raise NotFound(f"number {number} of parameter set '{name}' of model '{self.leaves.model}' is not kept")

    def figures(self) -> ParameterFigures:
        """Returns its sets and counters."""
        sets = [self.main, *self._named.values()]
        return ParameterFigures(
            tuple([SetFigures(each.name, each.number, each.byte_size, each.on_device) for each in sets]),
            self.pushes,
            self.misses,
            self.evictions,
        )

    def __repr__(self) -> str:
        return f"<ParameterSets of {self.leaves.model!r}: {self.main!r}, {len(self._named)} more>"
