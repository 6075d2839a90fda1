"""Compiles and keeps the executables of a model version, each for one batch size and one shape of each input.

The executables for buckets are never evicted. A few executables for shapes without a bucket are kept as well. The arguments
of an executable are the parameters and the inputs. Any thread may call ``compile``. Only the thread of the worker's event
loop may call ``find``, ``add`` and ``limit``.
"""

from __future__ import annotations

import functools
import itertools
import logging
import math
import os
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import jax

from tensord.shm.arrays import Array
from tensord.shm.errors import Internal
from tensord.workers.devices import device_memory
from tensord.workers.devices.several_devices import SeveralDevices
from tensord.workers.jax_internals.wide import precision
from tensord.workers.parameters.parameter_set import ParameterSets
from tensord.workers.parameters.set_stack import SetStack, put
from tensord.workers.programs.carry import Carry, rows_argument
from tensord.workers.programs.executable import Executable, ExecutionDevice, Wanted
from tensord.workers.programs.executable_cache import ExecutableCache, text_of
from tensord.workers.programs.load_progress import LoadProgress
from tensord.workers.programs.lowering import Lowering, warn_of_undeclared
from tensord.workers.programs.placement import CompiledProgram, Placement
from tensord.workers.programs.purity import examine, leaks
from tensord.workers.programs.row_probe import probe, rows_apart
from tensord.workers.programs.weight import work_of
from tensord.workers.tensors.buckets import Buckets, Shapes
from tensord.workers.tensors.signature import Signature
from tensord.workers.threads.cancellation import Cancellation

#: Floating-point operations and bytes in the first runs of a version's executables; a core takes some milliseconds for as much.
_WARM_WORK = 1 << 26
_log = logging.getLogger(__name__)
Apply = Callable[[Any, dict[str, Any]], dict[str, Any]]


class Executables:
    """The executables of one model version: one for each bucket, and those used most recently for other shapes."""

    def __init__(
        self,
        signature: Signature,
        buckets: Buckets,
        apply: Apply,
        sets: ParameterSets,
        cache: ExecutableCache,
        source: bytes,
        max_unexpected: int,
        device: ExecutionDevice,
        initial: Mapping[str, Array] | None = None,
        several: SeveralDevices | None = None,
        rows_apart: bool = False,
    ) -> None:
        """Stores the arguments. No program is compiled yet.

        ``apply``: the model's function. ``max_unexpected``: how many executables for shapes without a bucket are kept.
        ``source``: the model's source code. ``initial``: the first state of each sequence; None: the model has no state.
        ``several``: the devices of a model that runs on several devices; None: the model runs on one device.
        ``rows_apart``: True: ``warm`` and ``compile`` raise Internal if the rows of a batch affect each other.
        """
        self._initial = initial
        self.device = device
        self.signature = signature
        self._buckets = buckets
        self._cache = cache
        #: The model's source code, as far as it is known.
        self.source = source
        self._max_unexpected = max_unexpected
        self.apply = apply
        self._lowering = Lowering(signature, apply, device.remote)
        self._rows_apart = rows_apart
        self.sets = sets
        self._usual = Placement(sets, None, several)
        self._small = device.small_programs(signature, sets)
        #: What ``warm`` found in the program of the smallest bucket (``examine``).
        self.examined = [""]
        #: Parts of the cache's keys that all programs of the version share.
        self._identity: tuple[str | bytes, ...] = (source, repr(signature))
        #: The executables of all buckets, which are never evicted.
        self.made: dict[Wanted, Executable] = {}
        #: Those of buckets that are compiled when a batch first needs one (``postpone``).
        self._postponed: set[Wanted] = set()
        #: The executable that was compiled last to try rows, until a batch needs it.
        self._spare: dict[Wanted, Executable] = {}
        #: The error of a function whose rows affect each other, which was found after the load.
        self._mixes: Internal | None = None
        #: Of these, what the cache had no program for.
        self.compiled: set[Wanted] = set()
        #: Executables that were compiled for a request, least recently used first.
        self._unexpected: OrderedDict[Wanted, Executable] = OrderedDict()

    @property
    def several(self) -> SeveralDevices | None:
        """The devices of a model that runs on several; None: it runs on the worker's device."""
        return self._usual.several

    def warm(self, progress: LoadProgress) -> None:
        """Compiles the executable of every bucket, or loads it from the cache, and runs the smallest one.

        Raises Internal: outputs are not as declared, a batch's rows affect each other, or memory is too small. Raises Cancelled:
        the load was cancelled. Errors of tracing and of the first runs are raised unchanged.
        """
        planned = [Wanted(rows, shapes) for rows, shapes in self._buckets.planned()]
        if self.signature.states or self.sets.stack is not None:
            self._place(planned)
        if self.sets.stack is not None:
            self._open(self.sets.stack)
            tree, _ = self.sets.stack.arguments(self.sets, self.sets.main, 1)
            progress.parameters(tree)
        else:
            progress.parameters(self._usual.parameters)
        # The program of the smallest shapes is part of every key: it changes with anything that ``apply`` closes over or calls,
        # which the source of model.py does not show.
        first = self._first(planned) if planned else None
        noted, apart = self._cache.key((*self._identity, "rows")), None
        if self._rows_apart and not self._cache.good_rows(noted):
            # A ragged batch has fewer elements than rows where it is small.
            order = -1 if self.signature.ragged else 1
            apart = next((each for each in planned[::order] if each.rows > 1), None)
            self._lowering.traced |= {} if apart is None or apart in self._lowering.traced else {apart: []}
        self._make(planned, first, progress)
        taken, several = progress.footprint(), self._usual.several
        what = f"besides its parameters, its program for {taken.largest} needs"
        devices = jax.local_devices()[:1] if several is None else several.devices
        device_memory.check(self.signature.model, what, taken.batch_byte_size, devices)
        self._run_once()
        if apart is not None:
            self._cache.good_rows(noted, found=self._are_apart(apart, progress.cancellation.check))
        self._lowering.traced.clear()

    def postpone(self, tried: Buckets) -> None:
        """Arranges that each bucket's program is compiled when a batch first needs the program. Evicts no such program.

        Lowers the program for the first bucket in ``tried`` now. Raises Internal: its outputs are not as declared. Errors of
        tracing are raised unchanged.
        """
        self._postponed = {Wanted(rows, shapes) for rows, shapes in self._buckets.planned()}
        for first in itertools.islice(tried.planned(), 1):
            self._lowering.check(*first, self._lowering.lower(*first, self._usual))

    def _are_apart(self, wanted: Wanted, check: Callable[[], None]) -> bool:
        if not self._lowering.traced[wanted]:  # the cache had the program
            self._lowering.lower(*wanted, self._usual)
        traced, why = self._lowering.traced[wanted][0], next(filter(None, self.examined[:2]), "")
        alike = [other for each, other in self.made.items() if each.shapes == wanted.shapes and each != wanted]

        def ask() -> str | None:
            made = self.made.get(wanted) or self._spare.get(wanted)
            if made is None:
                # One at a time: where one fails, those of the next shapes are tried.
                self._spare = {wanted: (made := self._compiled(wanted))}
            return probe(self.signature, [made, *alike[:1]], traced, self.device.remote, check)

        return rows_apart(self.signature.model, ask, self.device.check, traced, wanted.rows, "batch", why)

    def _first(self, planned: Sequence[Wanted]) -> jax.stages.Lowered:
        traces = self._lowering.traced[planned[0]] = []
        lower = functools.partial(self._lowering.lower, *planned[0], self._usual)
        first = lower()
        warn_of_undeclared(self.signature, first.out_info[0] if self.signature.states else first.out_info)
        self._identity = (*self._identity, text_of(first))
        # The key has the program's text: if it is known, an earlier start traced the same, and twice.
        if not self._cache.has(self._key((repr(planned[0]),))):
            # The default device is part of JAX's keys: inner functions are traced again, too.
            with jax.default_device(jax.local_devices()[0]):
                lower()
        self.examined = examine(self.signature.model, traces[0], traces[-1], len(planned))
        if self.examined[0]:
            _log.warning("model '%s': %s", self.signature.model, self.examined[0])
            self._identity = (*self._identity, os.urandom(16))  # so that the next start traces it twice
        return first

    def _make(self, planned: Sequence[Wanted], first: jax.stages.Lowered | None, progress: LoadProgress) -> None:
        several = self._usual.several

        def make(wanted: Wanted) -> tuple[CompiledProgram, bool]:
            lowered = first if wanted == planned[0] else None
            compiling = functools.partial(self._compile, wanted, lowered)
            return self._kept((repr(wanted),), f"program for {wanted}", compiling, progress.cancellation)

        for wanted, compiled, is_new in progress.through(planned, make):
            if not self.made and several is not None:
                # Puts the parameters where the first program wants them.
                with precision(self.signature.wide):
                    placed = several.place(self.signature.model, self._usual.parameters, compiled.call)
                self.sets.main.moved(placed)
                progress.parameters(self._usual.parameters)
            self.compiled |= {wanted} if is_new else set()
            self.made[wanted] = self.device.executable(wanted, self.signature, compiled)

    def _kept(
        self, parts: tuple[str, ...], what: str, make: Callable[[], CompiledProgram], cancellation: Cancellation
    ) -> tuple[CompiledProgram, bool]:
        # ``parts`` tell the program apart from the version's others.
        what = f"model '{self.signature.model}', {what}"
        return self._cache.found_or_made(self._key(parts), self._usual, self._small, what, make, cancellation)

    def _key(self, parts: tuple[str, ...]) -> str:
        return self._cache.key((*self._identity, *parts, f"{self._small} {self._usual.several}"))

    def kept_grouped(
        self,
        cancellation: Cancellation,
        shapes: Shapes,
        number: int | None,
        compile_it: Callable[[int | None], CompiledProgram],
    ) -> CompiledProgram:
        """Implements ``grouped_calls.Make``: takes the program from the cache, or compiles it and stores it there.

        Raises Cancelled if the load was cancelled. Errors of ``compile_it`` are raised unchanged.
        """
        parts = ("series", repr(shapes), str(number))
        what = f"program for {'several' if number is None else number} requests of {shapes}"
        return self._kept(parts, what, functools.partial(compile_it, number), cancellation)[0]

    def _place(self, planned: Sequence[Wanted]) -> None:
        small, self._small = self._small, None
        if small is not None and planned:
            lower = functools.partial(self._lowering.lower, *planned[-1])
            if (found := small.lowered(lower(self._usual), lower)) is not None:
                self._usual = found[1]

    def _open(self, stack: SetStack) -> None:
        name, usual = self.signature.model, self._usual
        device_memory.check(name, "its parameter sets need", stack.byte_size, jax.local_devices()[:1])
        with precision(self.signature.wide):
            lowered = jax.jit(put, donate_argnums=0).lower(*stack.put_specs(usual.spec))
            compiled = usual.compile(lowered)

        def made(zeros: Sequence[Array]) -> list[jax.Array]:
            with precision(self.signature.wide):
                return cast("list[jax.Array]", jax.device_put(list(zeros), usual.device))

        def written(arrays: list[jax.Array], leaves: list[Array], slot: Any) -> list[jax.Array]:
            with precision(self.signature.wide):
                return cast("list[jax.Array]", compiled(arrays, leaves, slot))

        stack.open(usual.at, made, written)

    def carry(self) -> Carry | None:
        """Creates a ``Carry``, which keeps a model instance's sequence states. Returns None if the model has no such states."""
        if self._initial is None:
            return None
        return Carry(self.signature, self._initial, self._usual.device)

    def _run_once(self) -> None:
        # A first run is slower (measured: the first of a process by 30 ms, the first of each executable by 3 ms), and a model
        # that cannot run at all fails before it serves. Further buckets are run while their total work is small.
        carry, work = self.carry(), 0.0
        for wanted, executable in self.made.items():
            own = work_of(executable.program)
            work += max(own) if min(own) >= 0 else math.inf
            if work > _WARM_WORK and executable is not next(iter(self.made.values())):
                return
            inputs = self._lowering.zeros(*wanted)
            with precision(self.signature.wide):
                step = functools.partial(executable.call, executable.parameters())
                rows = rows_argument(self.signature, wanted.rows, ())
                jax.block_until_ready(step(inputs) if carry is None else carry.run(step, inputs, rows, dict))

    def compile(self, wanted: Wanted) -> Executable:
        """Compiles and returns an executable that was not compiled at load. The caller must then call ``add`` with it.

        Raises Internal: outputs are not as declared, or rows affect each other. Errors of tracing are raised unchanged.
        """
        if self._mixes is not None:
            raise self._mixes
        if self._rows_apart and not (self.made and wanted not in self._postponed):
            self._check_rows(wanted)
        return self._spare.pop(wanted, None) or self._compiled(wanted)

    def _compiled(self, wanted: Wanted) -> Executable:
        with self._cache.compiles.compiling():
            return self.device.executable(wanted, self.signature, self._compile(wanted, None))

    def _check_rows(self, wanted: Wanted) -> None:
        asked = wanted
        if wanted.rows == 1:
            several = next((rows for rows in self._buckets.batch if rows > 1), 0)
            if not several:
                return
            asked = Wanted(several, wanted.shapes)
        self._lowering.traced[asked] = []
        try:
            text = text_of(self._lowering.lower(*asked, self._usual))
            noted = self._cache.key((*self._identity, text, "rows"))
            apart = self._cache.good_rows(noted) or self._are_apart(asked, self.device.check)
            self._cache.good_rows(noted, found=apart)
            self._rows_apart = not apart
        except Internal as error:
            self._mixes = error
            raise
        finally:
            self._lowering.traced.clear()

    def leaks(self) -> bool:
        """Traces one of the model's programs again. Returns whether the model's code keeps JAX tracers after that trace."""
        wanted = next(iter(self.made), None)
        return wanted is not None and leaks(functools.partial(self._lowering.lower, *wanted, self._usual))

    def find(self, wanted: Wanted) -> Executable | None:
        """Returns the executable for the shapes in ``wanted``, or None if there is none. Marks it as the last one used."""
        found = self.made.get(wanted)
        if found is None and (found := self._unexpected.get(wanted)) is not None:
            self._unexpected.move_to_end(wanted)
        return found

    def add(self, executable: Executable) -> list[Wanted]:
        """Adds an executable that was compiled for a request. Returns the shapes of executables that were evicted for it."""
        if executable.wanted in self._postponed:
            self.made[executable.wanted] = executable
            return []
        self._unexpected[executable.wanted] = executable
        gone = []
        while len(self._unexpected) > self._max_unexpected:
            gone.append(self._unexpected.popitem(last=False)[0])
        return gone

    @property
    def unexpected(self) -> set[Shapes]:
        """The shapes for which there are executables although no bucket has these shapes."""
        return {wanted.shapes for wanted in self._unexpected}

    def limit(self, shapes: Shapes) -> int:
        """Returns the largest batch size of the executables for these shapes, compiled or not yet; 0: there are none."""
        known = self.made, self._unexpected, self._postponed
        return max((wanted.rows for made in known for wanted in made if wanted.shapes == shapes), default=0)

    def _compile(self, wanted: Wanted, lowered: jax.stages.Lowered | None) -> CompiledProgram:
        lowered = lowered if lowered is not None else self._lowering.lower(*wanted, self._usual)
        self._lowering.check(*wanted, lowered)
        if self._small is not None:
            lower = functools.partial(self._lowering.lower, *wanted)
            zeros = functools.partial(self._lowering.zeros, *wanted)
            if (small := self._small.compile(lowered, lower, zeros)) is not None:
                return small
        with precision(self.signature.wide):
            return CompiledProgram(self._usual.compile(lowered), self._usual)

    def __repr__(self) -> str:
        return f"<Executables {len(self.made)} planned, {len(self._unexpected)} unexpected>"
