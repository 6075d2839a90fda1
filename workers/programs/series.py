"""When several requests of a model without a batch dimension share one call, and which programs are made for that.

Nothing is batched inside the model: every request is computed by itself, as if it had come alone. What is saved is the cost of
a call, which for small models is most of the work. So a series is only run of programs that have little to do (``weight.py``)
with small inputs, and only of requests that wait anyhow. Its programs are compiled at load with those of the shapes that are
known then; of other shapes beside the serving, when they have been missed a number of times.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from typing import cast

import jax

from tensord.workers.programs.executables import Apply
from tensord.workers.programs.placement import Placement
from tensord.workers.programs.series_program import SeriesProgram, SeriesWanted, compile_series
from tensord.workers.programs.weight import Weight, weight_of
from tensord.workers.tensors.buckets import Shapes
from tensord.workers.tensors.signature import Signature

#: Lengths of series, longest first. One of a single request saves nothing but arguments and results.
LENGTHS = (8, 4, 2, 1)
#: More than so many do not share a call.
MOST = LENGTHS[0]
#: By the number of requests that wait: the longest series of them.
_LONGEST = [max([length for length in LENGTHS if length <= waiting], default=0) for waiting in range(MOST + 1)]
#: Requests with larger inputs gain nothing worth their neighbours' waiting.
_SMALL_BYTE_SIZE = 16 << 10
#: So often requests have waited together before a program is compiled for a shape that was not known at load.
_MISSED = 32
#: Of shapes that were not known at load.
_MAX_SHAPES = 32


class _Shape:
    """The series programs for requests of one shape."""

    __slots__ = ("compiling", "fitting", "known_at_load", "missed", "weight")

    def __init__(self, weight: Weight, known_at_load: bool) -> None:
        self.weight = weight
        self.known_at_load = known_at_load
        self.missed = 0
        #: Nothing is wished for: a program is being made, or none could be.
        self.compiling = known_at_load
        #: By the number of requests that wait: the longest program for them that is ready.
        self.fitting: list[SeriesProgram | None] = [None] * (MOST + 1)

    def add(self, made: SeriesProgram) -> None:
        for waiting in range(made.wanted.length, MOST + 1):
            known = self.fitting[waiting]
            if known is None or known.wanted.length <= made.wanted.length:
                self.fitting[waiting] = made


class Series:
    """The series programs of one model version. Everything but ``compile`` and ``prepare`` belongs to the execution thread."""

    def __init__(
        self, signature: Signature, apply: Apply, single: Callable[[Shapes], jax.stages.Compiled | None]
    ) -> None:
        """``single``: the program that runs one request of those shapes, if it is compiled."""
        self._signature = signature
        self._apply = apply
        self._single = single
        self._shapes: dict[Hashable, _Shape] = {}
        #: The next program to compile, if one is missed; see ``take_wish``.
        self.wish: SeriesWanted | None = None

    def prepare(self, shapes: Sequence[Shapes], placement: Callable[[Shapes], Placement]) -> None:
        """Makes the programs for shapes that are known as the model is loaded, before anybody else has it.

        Raises whatever tracing raises.
        """
        for key in shapes:
            shape = self._meet(key, known_at_load=True)
            if shape is None or not shape.weight:
                continue
            for length in LENGTHS:
                made = self.compile(SeriesWanted(length, key), placement(key))
                if made is None:
                    break
                shape.add(made)

    def find(self, key: Hashable, waiting: int) -> SeriesProgram | None:
        """What to run so many waiting requests of that shape with, or the first of them; None: the first as it is.

        It may be for more than there are.
        """
        shape = self._shapes.get(key) or self._meet(key)
        if shape is None or not shape.weight:
            return None
        waiting = _padded(waiting, shape.weight)
        program = shape.fitting[waiting]
        longest = _LONGEST[waiting]
        if program is None or program.wanted.length < longest:
            self._miss(key, shape, longest)
        return program

    def ready(self, key: Hashable, waiting: int) -> SeriesProgram | None:
        """What ``find`` would return, and nothing is missed by asking; None also where it would rather have another one."""
        shape = self._shapes.get(key) or self._meet(key)
        if shape is None or not shape.weight:
            return None
        waiting = _padded(waiting, shape.weight)
        program = shape.fitting[waiting]
        return program if program is not None and program.wanted.length == _LONGEST[waiting] else None

    def shares(self, key: Hashable) -> bool:
        """Whether requests of that shape are to share calls."""
        shape = self._shapes.get(key) or self._meet(key)
        return shape is not None and shape.weight > Weight.HEAVY

    def _meet(self, key: Hashable, known_at_load: bool = False) -> _Shape | None:
        """Learns of a shape. None: no program for it is compiled yet, or it is no shape."""
        single = self._single(cast(Shapes, key))
        if single is None:
            return None
        if not known_at_load and sum([not shape.known_at_load for shape in self._shapes.values()]) >= _MAX_SHAPES:
            self._shapes = {key: shape for key, shape in self._shapes.items() if shape.known_at_load}
        small = self._byte_size(cast(Shapes, key)) <= _SMALL_BYTE_SIZE
        self._shapes[key] = shape = _Shape(weight_of(single) if small else Weight.HEAVY, known_at_load)
        return shape

    def _byte_size(self, shapes: Shapes) -> int:
        """The bytes of a request's inputs."""
        given = zip(self._signature.inputs.values(), shapes, strict=True)
        return sum([math.prod(shape) * spec.dtype.itemsize for spec, shape in given if shape is not None])

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

    def add(self, made: SeriesProgram) -> None:
        """A wished program is ready."""
        shape = self._shapes.get(made.wanted.shapes) or self._meet(made.wanted.shapes)
        if shape is not None:
            shape.add(made)
            shape.compiling, shape.missed = False, 0

    def compile(self, wanted: SeriesWanted, placement: Placement) -> SeriesProgram | None:
        """Makes a program; in any thread. None: the model has no series. Raises whatever tracing raises."""
        return compile_series(wanted, self._signature, self._apply, placement)

    def __repr__(self) -> str:
        return f"<Series of {len(self._shapes)} shapes>"


def _padded(waiting: int, weight: Weight) -> int:
    """For how many requests a program is looked for when so many wait."""
    if waiting > MOST // 2 and (waiting >= MOST or weight is Weight.TINY):
        return MOST
    return waiting
