"""Several requests of a model without a batch dimension in one call: a program that applies the model to each of them in turn.

    stack     | request 0 | request 1 | ... |     one aligned buffer an input, one slice a request
    program   made[i] = apply(parameters, {name: stack[name][i]}) for each i, stacked again

Nothing is batched inside the model: every request is computed by itself, as if it had come alone. What is saved is the cost of
a call, which for small models is most of the work. So a series is only run where single runs are quick and small, only of
requests that wait anyhow, and its programs are compiled beside the serving, when they have been missed a number of times.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from shm.arrays import Array
from workers.models.buckets import Shapes
from workers.models.executables import precision
from workers.models.gather_buffer import GatherBuffer
from workers.models.signature import Signature
from workers.request import Request

#: Lengths of series, longest first.
LENGTHS = (8, 4, 2)
#: Single runs that take longer, or whose inputs are larger, gain nothing worth their neighbours' waiting.
_QUICK_NS = 100_000
_SMALL_BYTE_SIZE = 16 << 10
#: So often requests have waited together before a program is compiled for them.
_MISSED = 32
_MAX_SHAPES = 32


class SeriesWanted(NamedTuple):
    """A program: how many requests of which shapes."""

    length: int
    shapes: Shapes


class SeriesExecutable:
    """One compiled program with the buffers its requests are stacked in. Used by the execution thread only."""

    __slots__ = ("_arguments", "_call", "_stacks", "wanted")

    def __init__(
        self, wanted: SeriesWanted, call: Callable[..., dict[str, Any]], stacks: dict[str, GatherBuffer]
    ) -> None:
        self.wanted = wanted
        self._call = call
        self._stacks = list(stacks.values())
        self._arguments = {name: stack.array for name, stack in stacks.items()}

    def gather(self, requests: Sequence[Request]) -> int:
        """Stacks the inputs; returns the bytes copied."""
        return sum([stack.fill(requests) for stack in self._stacks])

    def run(self, parameters: Any, names: Sequence[str]) -> dict[str, Array]:
        """Computes what was gathered; the first dimension of each output counts the requests."""
        made = self._call(parameters, self._arguments)
        return {name: np.asarray(made[name]) for name in names}


class _Shape:
    """What is known of requests of one shape."""

    __slots__ = ("compiling", "missed", "ready", "single_ns")

    def __init__(self, single_ns: int) -> None:
        #: Moving average of a single run.
        self.single_ns = single_ns
        self.missed = 0
        self.compiling = False
        self.ready: dict[int, SeriesExecutable] = {}


class Series:
    """The series programs of one model version. Everything but ``compile`` belongs to the execution thread."""

    def __init__(self, signature: Signature, apply: Callable[[Any, dict[str, Any]], dict[str, Any]]) -> None:
        self._signature = signature
        self._apply = apply
        self._shapes: dict[Hashable, _Shape] = {}
        #: The next program to compile, if one is missed; see ``take_wish``.
        self.wish: SeriesWanted | None = None

    def note(self, key: Hashable, arrays: Mapping[str, Array], single_ns: int) -> None:
        """A single run of that shape took so long."""
        shape = self._shapes.get(key)
        if shape is not None:
            shape.single_ns += (single_ns - shape.single_ns) // 8
        elif single_ns < _QUICK_NS and sum([array.nbytes for array in arrays.values()]) <= _SMALL_BYTE_SIZE:
            if len(self._shapes) >= _MAX_SHAPES:
                self._shapes.clear()
            self._shapes[key] = _Shape(single_ns)

    def length(self, key: Hashable, waiting: int) -> int:
        """How many of the waiting requests of that shape to run together now; 1: the first alone."""
        shape = self._shapes.get(key)
        if shape is None or waiting < 2 or shape.single_ns > _QUICK_NS:
            return 1
        fitting = [length for length in LENGTHS if length <= waiting]
        if fitting[0] not in shape.ready:
            self._miss(key, shape, fitting[0])
        return next((length for length in fitting if length in shape.ready), 1)

    def _miss(self, key: Hashable, shape: _Shape, length: int) -> None:
        shape.missed += 1
        if shape.missed >= _MISSED and not shape.compiling and self.wish is None:
            self.wish = SeriesWanted(length, key)  # type: ignore[arg-type]

    def take_wish(self) -> SeriesWanted | None:
        """Hands over the wish, once; no other is made for that shape until the program is added."""
        wish, self.wish = self.wish, None
        if wish is not None and (shape := self._shapes.get(wish.shapes)) is not None:
            shape.compiling = True
        return wish

    def find(self, key: Hashable, length: int) -> SeriesExecutable | None:
        """The program for so many requests of that shape."""
        shape = self._shapes.get(key)
        return None if shape is None else shape.ready.get(length)

    def add(self, made: SeriesExecutable) -> None:
        """A wished program is ready."""
        shape = self._shapes.get(made.wanted.shapes)
        if shape is not None:
            shape.ready[made.wanted.length] = made
            shape.compiling, shape.missed = False, 0

    def compile(self, wanted: SeriesWanted, parameters: Any) -> SeriesExecutable:
        """Makes a program; in any thread. Raises whatever tracing raises."""
        specs = [
            (spec, (wanted.length, *shape))
            for spec, shape in zip(self._signature.inputs.values(), wanted.shapes, strict=True)
            if shape is not None
        ]

        def series(parameters: Any, stacks: dict[str, Any]) -> dict[str, Any]:
            made = [
                self._apply(parameters, {name: stack[i] for name, stack in stacks.items()})
                for i in range(wanted.length)
            ]
            return {name: jnp.stack([outputs[name] for outputs in made]) for name in self._signature.outputs}

        with precision(self._signature):
            inputs = {spec.name: jax.ShapeDtypeStruct(full, spec.dtype) for spec, full in specs}
            known = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), parameters)
            call = jax.jit(series).lower(known, inputs).compile()
        stacks = {spec.name: GatherBuffer(spec.name, wanted.length, full[1:], spec.dtype, True) for spec, full in specs}
        return SeriesExecutable(wanted, call, stacks)

    def __repr__(self) -> str:
        return f"<Series {sum(len(shape.ready) for shape in self._shapes.values())} programs>"
