"""Compiles all programs of a stepped model while the model is loaded, or loads the programs from the cache.

init      one program: makes the model's state, which has a fixed number of slots, each with room for one request
insert    one program for each combination of the inputs' buckets: puts requests into slots
step      one program for each of several numbers n: computes the next step of the requests in slots 0 to n - 1
"""

from __future__ import annotations

import functools
import math
import os
import threading
from typing import Any, NamedTuple

import jax
import numpy as np

from tensord.shm.arrays import Array
from tensord.shm.errors import InvalidArgument
from tensord.workers.jax_internals.wide import precision
from tensord.workers.parameters.parameter_set import ParameterSets
from tensord.workers.programs.executable import ExecutionDevice
from tensord.workers.programs.executable_cache import ExecutableCache, text_of
from tensord.workers.programs.load_progress import LoadProgress
from tensord.workers.programs.lowering import traced_anew
from tensord.workers.programs.placement import CompiledProgram, Placement
from tensord.workers.programs.purity import examine, leaks
from tensord.workers.programs.step_program import INSERT_CARRY, STEP_CARRY, StepPrograms
from tensord.workers.tensors.buckets import Buckets, Shapes
from tensord.workers.tensors.signature import Signature

#: A program, which takes parameters first.
DeviceCall = jax.stages.Compiled


class _Wanted(NamedTuple):
    name: str  # "init", "insert" or "step"
    #: Number of slots that a step is for.
    slots: int = 0
    #: Shapes of one request's inputs, of an insertion.
    shapes: Shapes = ()

    def __str__(self) -> str:
        if self.name == "insert":
            return f"insert of {', '.join(str(list(shape or ())) for shape in self.shapes)}"
        return f"step of {self.slots} slots" if self.slots else self.name


class StepExecutables:
    """The programs of one version of a model that runs step by step."""

    def __init__(
        self,
        signature: Signature,
        buckets: Buckets,
        programs: StepPrograms,
        slots: int,
        step_slots: tuple[int, ...],
        insert_rows: int,
        sets: ParameterSets,
        cache: ExecutableCache,
        source: bytes,
        device: ExecutionDevice,
    ) -> None:
        """Stores the arguments. The method ``warm`` compiles the programs later.

        ``source``: the model's code, from which the keys of compiled programs in ``cache`` are made.
        ``slots``: how many requests can run at the same time. The model's state has a numbered slot for each request.
        ``step_slots``: numbers of slots, ascending up to ``slots``. For each number n, a ``step`` of slots 0 to n - 1 is made.
        ``insert_rows``: how many requests the model's function ``insert`` takes in one call. If it is 0, ``insert`` takes one
        request, whose arrays have no axis for requests.
        """
        self._step_slots = step_slots
        self._signature = signature
        self._slots = slots
        self._insert_rows = insert_rows
        self._cache = cache
        self._tracing = threading.Lock()
        #: What ``warm`` found in the programs of the largest step and of an insertion.
        self.examined = [""]
        #: What was traced last, by the function's name, until the model is loaded.
        self.traced: dict[str, jax.stages.Traced] = {}
        #: The key in the cache of the note that requests do not affect each other.
        self.noted = ""
        self._source = source
        self._shapes = [shapes for _, shapes in buckets.planned()]
        self._axes = buckets.named
        self._programs = programs
        self.sets = sets
        self._place = Placement(sets)
        #: Where they take their parameters from (``ParameterSet.on``).
        self.at = self._place.at
        self._small = device.small_programs(signature, sets)
        #: (parameters) -> carry.
        self.init: DeviceCall
        #: Shapes of one request's inputs -> program: (parameters, inputs, slots, carry) -> (rows, carry).
        self.inserts: dict[Shapes, DeviceCall] = {}
        #: Number of slots -> program: (parameters, unmasked, carry) -> (rows, carry).
        self.steps: dict[int, DeviceCall] = {}

    @property
    def device(self) -> jax.Device | None:
        """The device that the programs run on; None: JAX's default device."""
        return self._place.device

    def check_size(self, limit: int) -> None:
        """Raises InvalidArgument if the state from the model's ``init`` exceeds ``limit`` bytes. Raises errors of ``init``."""
        with precision(self._signature.wide):
            made = jax.eval_shape(self._programs.init, self._place.parameter_specs(1))
        byte_size = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(made))
        if byte_size > limit:
            raise InvalidArgument(
                f"model '{self._signature.model}': the carry of {self._slots} slots has {byte_size} bytes, "
                f"executables.max_state_byte_size allows {limit}"
            )

    def warm(self, progress: LoadProgress) -> None:
        """Compiles each of the model's programs, or loads it from the cache on disk. Then runs each program once.

        Raises Internal if the model's code returns other arrays than declared. Raises Cancelled if the load was cancelled.
        Errors of tracing and of the first runs are raised unchanged.
        """
        lower = functools.partial(self._lower, _Wanted("step", self._slots))
        step = lower(self._place)
        if self._small is not None and (found := self._small.lowered(step, lower)) is not None:
            step, self._place = found
            self.at = self._place.at
        wanted = [_Wanted("init"), *(_Wanted("step", count) for count in reversed(self._step_slots))]
        wanted += [_Wanted("insert", shapes=shapes) for shapes in self._shapes]
        known = {wanted[1]: step}
        for what in (wanted[0], wanted[-len(self._shapes)]):
            known[what] = self._lower(what, self._place)
        # A program of each kind is part of every key: they change with anything that the functions close over or call.
        text: list[str | bytes] = [text_of(lowered) for lowered in known.values()]

        def key_of(what: _Wanted) -> str:
            return self._cache.key((self._source, *text, repr(self._signature), repr(what), repr(self._place.device)))

        traced, self.noted = dict(self.traced), key_of(_Wanted("noted"))
        if not self._cache.has(key_of(wanted[1])):
            with jax.default_device(jax.local_devices()[0]):  # as in ``Executables``
                for what in known:
                    self._lower(what, self._place)
        model, programs = self._signature.model, len(wanted)
        told = [examine(model, each, self.traced[name], programs) for name, each in traced.items()]
        self.examined = [next(filter(None, each), "") for each in zip(*told, strict=True)]
        text += [os.urandom(16)] if self.examined[0] else []
        progress.parameters(self._place.parameters)

        def compiled(what: _Wanted) -> CompiledProgram:
            lowered = known.get(what) or self._lower(what, self._place)
            with precision(self._signature.wide):
                return CompiledProgram(self._place.compile(lowered), self._place)

        def make(what: _Wanted) -> tuple[CompiledProgram, bool]:
            said, once = f"model '{model}', program for {what}", functools.partial(compiled, what)
            return self._cache.found_or_made(key_of(what), self._place, None, said, once, progress.cancellation)

        for what, program, _ in progress.through(wanted, make):
            if what.name == "init":
                self.init = program.call
            elif what.name == "step":
                self.steps[what.slots] = program.call
            else:
                self.inserts[what.shapes] = program.call
        self.traced |= traced
        self._run_once()

    def leaks(self) -> bool:
        """Traces each of the model's functions again. Returns whether one of them keeps a tracer of JAX afterwards."""
        wanted = (_Wanted("init"), _Wanted("step", self._slots), _Wanted("insert", shapes=self._shapes[0]))
        return any(leaks(functools.partial(self._lower, what, self._place)) for what in wanted)

    def _lower(self, what: _Wanted, place: Placement) -> jax.stages.Lowered:
        def spec(array: Any) -> jax.ShapeDtypeStruct:
            return place.spec(array.shape, array.dtype)

        with self._tracing, precision(self._signature.wide):
            parameters = place.parameter_specs(1)
            if what.name == "init":
                return self._lowered(what, parameters)
            carry = jax.tree.map(spec, jax.eval_shape(self._programs.init, parameters))
            if what.name == "step":
                return self._lowered(what, parameters, spec(np.ones(what.slots, np.bool_)), carry)
            inputs, slots = self.zeros(what.shapes)
            return self._lowered(what, parameters, jax.tree.map(spec, inputs), spec(slots), carry)

    def _lowered(self, what: _Wanted, *arguments: Any) -> jax.stages.Lowered:
        carry = {"insert": INSERT_CARRY, "step": STEP_CARRY}.get(what.name, ())
        traced = self.traced[what.name] = traced_anew(getattr(self._programs, what.name), carry, *arguments)
        lowered: jax.stages.Lowered = traced.lower()
        return lowered

    def zeros(self, shapes: Shapes) -> tuple[dict[str, Array], Array]:
        """Returns the inputs, zeros of these ``shapes``, and the slot numbers for an ``insert`` that adds no request."""
        lead = (self._insert_rows,) if self._insert_rows else ()
        arrays: dict[str, Array] = {}
        for spec, shape in zip(self._signature.inputs.values(), shapes, strict=True):
            if shape is not None:
                arrays[spec.name] = np.zeros((*lead, *shape), spec.dtype)
        arrays |= {name: np.zeros(lead, np.int32) for name in self._axes}
        return arrays, np.full(lead, self._slots, np.int32)

    def _run_once(self) -> None:
        """Runs each program once on zeros, so that a model that fails is not served and no request waits for a slow first run."""
        parameters = self.sets.main.on(self.at)
        with precision(self._signature.wide):
            carry = self.init(parameters)
            for shapes, insert in self.inserts.items():
                _, carry = insert(parameters, *self.zeros(shapes), carry)
            for count, step in self.steps.items():
                _, carry = step(parameters, np.ones(count, np.bool_), carry)
            jax.block_until_ready(carry)

    def __repr__(self) -> str:
        return f"<StepExecutables of {self._signature.model!r}: {len(self.inserts)} inserts>"
