"""Grouped calls: several requests of a model without a batch dimension share one call of a program.

Nothing is batched inside the model: every request is computed by itself, as if it had come alone. What is saved is the cost of
a call, which for small models is most of the work. So calls are grouped only for programs that have little to do (``weight.py``)
with small inputs, and only of requests that wait anyhow. Programs are compiled for each shape, one for any number of requests or
on a GPU one for each: at load where the shape is known then, else beside the serving, once the program for one request is made.
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

#: Numbers of requests that share a call, the most first. A call for one request saves nothing but arguments and results.
LENGTHS = (MOST, 4, 2, 1)
#: By the number of requests that wait: the most of them that share a call.
_LONGEST = [max([length for length in LENGTHS if length <= waiting], default=0) for waiting in range(MOST + 1)]
#: Requests with larger inputs gain little: what is saved is a call, and their inputs are better used where they lie.
_SMALL_BYTE_SIZE = 48 << 10
#: Makes the program of a shape for a number of requests, or finds it in the cache. Takes and raises what
#: ``GroupedProgramMaker.compile`` does.
Make = Callable[[Shapes, int | None, Callable[[int | None], CompiledProgram]], CompiledProgram]


class _Shape:
    """The programs for grouped calls of requests of one shape."""

    __slots__ = ("fitting", "weight")

    def __init__(self, weight: Weight) -> None:
        self.weight = weight
        #: By the number of requests that wait: the program for them, once there is one.
        self.fitting: list[GroupedProgram | None] = [None] * (MOST + 1)

    def add(self, programs: Sequence[GroupedProgram]) -> None:
        by_length = {program.rows: program for program in programs}
        for waiting in range(1, MOST + 1):
            self.fitting[waiting] = by_length.get(_LONGEST[_padded(waiting, self.weight)])


class GroupedCalls:
    """The programs for one model version's grouped calls. All but ``compile`` and ``prepare`` is for the execution thread."""

    def __init__(self, signature: Signature, apply: Apply) -> None:
        self._signature = signature
        self._apply = apply
        self._shapes: dict[Hashable, _Shape] = {}

    def prepare(self, singles: Sequence[Executable], make: Make) -> None:
        """Makes the programs of shapes that are known while the model is loaded, before others use it.

        ``singles``: the executable for one request of each shape. Raises whatever tracing raises.
        """
        for single in singles:
            if self.wants(single):
                self.add(single, self.compile(single, make))

    def find(self, key: Hashable, waiting: int) -> GroupedProgram | None:
        """Returns the program for waiting requests of a shape, or for the first of them; None: the first runs by itself.

        It may be for more than there are.
        """
        shape = self._shapes.get(key)
        return None if shape is None else shape.fitting[min(waiting, MOST)]

    def wants(self, single: Executable) -> bool:
        """Returns whether an executable's requests should share calls, and the program for that is still to be made.

        It returns True once for a shape: the caller has the program made.
        """
        shapes = single.wanted.shapes
        if shapes in self._shapes:
            return False
        small = self._byte_size(shapes) <= _SMALL_BYTE_SIZE
        self._shapes[shapes] = _Shape(weight_of(single.program) if small else Weight.HEAVY)
        return self._shapes[shapes].weight > Weight.HEAVY

    def _byte_size(self, shapes: Shapes) -> int:
        """Returns the bytes of a request's inputs."""
        given = zip(self._signature.inputs.values(), shapes, strict=True)
        return sum([math.prod(shape) * spec.dtype.itemsize for spec, shape in given if shape is not None])

    def compile(
        self,
        single: Executable,
        make: Make = lambda _, number, compile_it: compile_it(number),
        lengths: Sequence[int] = LENGTHS,
    ) -> list[GroupedProgram]:
        """Makes the programs for an executable's requests, in any thread. Empty: the model's calls cannot be grouped.

        Raises whatever tracing raises.
        """
        maker = GroupedProgramMaker(single, self._signature, self._apply)
        numbers, shapes = maker.numbers(lengths), single.wanted.shapes
        try:
            compiled = {number: make(shapes, number, maker.compile) for number in dict.fromkeys(numbers.values())}
        except NotGroupable:
            return []
        return maker.programs({length: compiled[number] for length, number in numbers.items()})

    def add(self, single: Executable, programs: Sequence[GroupedProgram]) -> None:
        """Adds the programs for an executable's shape."""
        shape = self._shapes.get(single.wanted.shapes)
        if shape is not None and programs:
            shape.add(programs)

    def forget(self, shapes: Shapes) -> None:
        """Removes the programs of a shape."""
        self._shapes.pop(shapes, None)

    def __repr__(self) -> str:
        return f"<GroupedCalls of {len(self._shapes)} shapes>"


def _padded(waiting: int, weight: Weight) -> int:
    """Returns for how many requests a program is looked up when ``waiting`` ones wait."""
    if waiting > MOST // 2 and (waiting >= MOST or weight is Weight.TINY):
        return MOST
    return waiting
