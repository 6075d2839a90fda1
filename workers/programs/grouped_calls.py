"""Groups calls: several requests to a model without a batch dimension share one call of a program.

The model still computes every request separately. What is saved is the cost of a call, which is most of the work of a small
model. So calls are grouped only for programs with little work (``weight.py``) and small inputs, and only for requests that wait
anyway. Programs are compiled for each shape, one for any number of requests or on a GPU one for each number: at load if the shape
is known then, otherwise while the model serves, after the program for one request.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence

from tensord.workers.programs.executable import Executable
from tensord.workers.programs.executables import Apply
from tensord.workers.programs.grouped_program import MOST, GroupedProgram, GroupedProgramMaker, NotGroupable
from tensord.workers.programs.placement import CompiledProgram
from tensord.workers.programs.weight import Weight, weight_of
from tensord.workers.tensors.buckets import Shapes
from tensord.workers.tensors.signature import Signature

#: Numbers of requests that share a call, descending. A call for one request saves only handling of arguments and results.
LENGTHS = (MOST, 4, 2, 1)
#: For each number of waiting requests: how many of them share a call.
_LONGEST = [max([length for length in LENGTHS if length <= waiting], default=0) for waiting in range(MOST + 1)]
#: Requests with larger inputs gain little: what is saved is a call, and their inputs are better used where they lie.
_SMALL_BYTE_SIZE = 48 << 10
#: Makes the program of a shape for a number of requests, or finds it in the cache (``GroupedCalls.compile``).
Make = Callable[[Shapes, int | None, Callable[[int | None], CompiledProgram]], CompiledProgram]


class _Shape:
    """The programs that run several requests with the same input shapes in one call, by how many requests wait."""

    __slots__ = ("fitting", "weight")

    def __init__(self, weight: Weight) -> None:
        self.weight = weight
        #: For each number of waiting requests: the program for them; None: not compiled yet.
        self.fitting: list[GroupedProgram | None] = [None] * (MOST + 1)

    def add(self, programs: Sequence[GroupedProgram]) -> None:
        by_length = {program.rows: program for program in programs}
        for waiting in range(1, MOST + 1):
            self.fitting[waiting] = by_length.get(_LONGEST[_padded(waiting, self.weight)])


class GroupedCalls:
    """Compiles and finds one version's programs for grouped calls: a call runs several requests, each computed separately.

    ``compile`` and ``prepare`` may be called in other threads, everything else in the execution thread only.
    """

    def __init__(self, signature: Signature, apply: Apply) -> None:
        self._signature = signature
        self._apply = apply
        self._shapes: dict[Hashable, _Shape] = {}

    def prepare(self, singles: Sequence[Executable], make: Make) -> None:
        """Compiles the programs for calls that run several requests, for the shapes that are known when the model is loaded.

        ``singles``: the executable for one request of each shape. Raises whatever tracing the model raises.
        """
        for single in singles:
            if self.wants(single):
                self.add(single, self.compile(single, make))

    def find(self, key: Hashable, waiting: int) -> GroupedProgram | None:
        """Returns the program for one call that runs as many of ``waiting`` requests as it has room for, the oldest first.

        None: there is no such program, so each request runs in a separate call. The program may have room for more requests than
        are waiting. ``key``: the shapes of the requests' inputs.
        """
        shape = self._shapes.get(key)
        return None if shape is None else shape.fitting[min(waiting, MOST)]

    def wants(self, single: Executable) -> bool:
        """Returns whether the caller should have programs made for grouped calls (of several requests) of an executable's shape.

        Returns True only once for each shape, and only if its program has little work and small inputs.
        """
        shapes = single.wanted.shapes
        if shapes in self._shapes:
            return False
        small = self._byte_size(shapes) <= _SMALL_BYTE_SIZE
        self._shapes[shapes] = _Shape(weight_of(single.program) if small else Weight.HEAVY)
        return self._shapes[shapes].weight > Weight.HEAVY

    def _byte_size(self, shapes: Shapes) -> int:
        """Returns the bytes of all inputs of a request with these shapes."""
        given = zip(self._signature.inputs.values(), shapes, strict=True)
        return sum([math.prod(shape) * spec.dtype.itemsize for spec, shape in given if shape is not None])

    def compile(
        self,
        single: Executable,
        make: Make = lambda _, number, compile_it: compile_it(number),
        lengths: Sequence[int] = LENGTHS,
    ) -> list[GroupedProgram]:
        """Compiles the programs that run several requests of an executable's shape in one call. May be called in any thread.

        Returns an empty list if a grouped call might compute other results than single runs, or there is no memory for it.

        Args:
          single: the executable for one request.
          make: compiles a program or loads it from the cache; gets the input shapes, the number of requests in a call (None: any
            number), and a function that compiles the program for that number. By default it is compiled.
          lengths: the numbers of requests in a call for which a program is compiled.
        Raises whatever tracing the model raises.
        """
        maker = GroupedProgramMaker(single, self._signature, self._apply)
        numbers, shapes = maker.numbers(lengths), single.wanted.shapes
        try:
            compiled = {number: make(shapes, number, maker.compile) for number in dict.fromkeys(numbers.values())}
        except NotGroupable:
            return []
        return maker.programs({length: compiled[number] for length, number in numbers.items()})

    def add(self, single: Executable, programs: Sequence[GroupedProgram]) -> None:
        """Adds the programs that ``compile`` has made for an executable's shape, so that ``find`` returns them."""
        shape = self._shapes.get(single.wanted.shapes)
        if shape is not None and programs:
            shape.add(programs)

    def forget(self, shapes: Shapes) -> None:
        """Removes the programs for grouped calls of requests with these shapes."""
        self._shapes.pop(shapes, None)

    def __repr__(self) -> str:
        return f"<GroupedCalls of {len(self._shapes)} shapes>"


def _padded(waiting: int, weight: Weight) -> int:
    """Returns for how many requests a program is looked up when ``waiting`` requests wait: as many, but at most ``MOST``.

    ``MOST`` is the largest number of a grouped call. For a tiny program the result is ``MOST`` as soon as more than half as many
    requests wait, so that one call is enough.
    """
    if waiting > MOST // 2 and (waiting >= MOST or weight is Weight.TINY):
        return MOST
    return waiting
