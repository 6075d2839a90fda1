"""When several requests of a model without a batch dimension share one call, and which programs are made for that.

Nothing is batched inside the model: every request is computed by itself, as if it had come alone. What is saved is the cost of
a call, which for small models is most of the work. So a series is only run where single runs are quick and small, only of
requests that wait anyhow, and its programs are compiled beside the serving, when they have been missed a number of times.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

from tensord.workers.programs.executables import Apply
from tensord.workers.programs.placement import Placement
from tensord.workers.programs.series_program import SeriesProgram, SeriesWanted, compile_series
from tensord.workers.requests.request import Request
from tensord.workers.tensors.signature import Signature

#: Lengths of series, longest first. One of a single request saves nothing but arguments and results.
LENGTHS = (8, 4, 2, 1)
#: More than so many do not share a call.
MOST = LENGTHS[0]
#: By the number of requests that wait: the longest series of them.
_LONGEST = [max([length for length in LENGTHS if length <= waiting], default=0) for waiting in range(MOST + 1)]
#: Single runs that take longer, or whose inputs are larger, gain nothing worth their neighbours' waiting.
_QUICK_NS = 100_000
#: Single runs as short as this are mostly call: rather than two series, one that is not full.
_TINY_NS = 50_000
_SMALL_BYTE_SIZE = 16 << 10
#: So often requests have waited together before a program is compiled for them.
_MISSED = 32
_MAX_SHAPES = 32


class _Shape:
    """What is known of requests of one shape."""

    __slots__ = ("compiling", "fitting", "missed", "single_ns")

    def __init__(self, single_ns: int) -> None:
        #: Moving average of a single run.
        self.single_ns = single_ns
        self.missed = 0
        self.compiling = False
        #: By the number of requests that wait: the longest program for them that is ready.
        self.fitting: list[SeriesProgram | None] = [None] * (MOST + 1)

    def add(self, made: SeriesProgram) -> None:
        for waiting in range(made.wanted.length, MOST + 1):
            known = self.fitting[waiting]
            if known is None or known.wanted.length <= made.wanted.length:
                self.fitting[waiting] = made


class Series:
    """The series programs of one model version. Everything but ``compile`` belongs to the execution thread."""

    def __init__(self, signature: Signature, apply: Apply) -> None:
        self._signature = signature
        self._apply = apply
        self._shapes: dict[Hashable, _Shape] = {}
        #: The next program to compile, if one is missed; see ``take_wish``.
        self.wish: SeriesWanted | None = None

    def note(self, request: Request, single_ns: int) -> None:
        """That request alone took so long."""
        self.meet(request.key, single_ns, lambda: sum([array.nbytes for array in request.arrays.values()]))

    def meet(self, key: Hashable, single_ns: int, byte_size: Callable[[], int]) -> None:
        """Requests of that shape took so long, alone; ``byte_size``: of their inputs, asked of a shape that is not known."""
        shape = self._shapes.get(key)
        if shape is not None:
            # Of a run in which the processor was taken away nothing is learned but that it took long.
            shape.single_ns += (min(single_ns, 2 * shape.single_ns + 1000) - shape.single_ns) // 8
        elif single_ns < _QUICK_NS and byte_size() <= _SMALL_BYTE_SIZE:
            if len(self._shapes) >= _MAX_SHAPES:
                self._shapes.clear()
            self._shapes[key] = _Shape(single_ns)

    def pace(self, key: Hashable) -> int:
        """On which ``find`` depends besides the programs there are: 0 too slow for series, 1 quick, 2 tiny."""
        shape = self._shapes.get(key)
        if shape is None or shape.single_ns > _QUICK_NS:
            return 0
        return 2 if shape.single_ns <= _TINY_NS else 1

    def find(self, key: Hashable, waiting: int) -> SeriesProgram | None:
        """What to run so many waiting requests of that shape with, or the first of them; None: the first as it is.

        It may be for more than there are.
        """
        pace = self.pace(key)
        if not pace:
            return None
        shape = self._shapes[key]
        waiting = _padded(waiting, pace)
        program = shape.fitting[waiting]
        longest = _LONGEST[waiting]
        if program is None or program.wanted.length < longest:
            self._miss(key, shape, longest)
        return program

    def ready(self, key: Hashable, waiting: int) -> SeriesProgram | None:
        """What ``find`` would return, and nothing is missed by asking; None also where it would rather have another one."""
        pace = self.pace(key)
        if not pace:
            return None
        waiting = _padded(waiting, pace)
        program = self._shapes[key].fitting[waiting]
        return program if program is not None and program.wanted.length == _LONGEST[waiting] else None

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
        shape = self._shapes.get(made.wanted.shapes)
        if shape is not None:
            shape.add(made)
            shape.compiling, shape.missed = False, 0

    def compile(self, wanted: SeriesWanted, placement: Placement) -> SeriesProgram | None:
        """Makes a program; in any thread. None: the model has no series. Raises whatever tracing raises."""
        return compile_series(wanted, self._signature, self._apply, placement)

    def __repr__(self) -> str:
        return f"<Series of {len(self._shapes)} shapes>"


def _padded(waiting: int, pace: int) -> int:
    """For how many requests a program is looked for when so many wait."""
    if waiting > MOST // 2 and (waiting >= MOST or pace == 2):
        return MOST
    return waiting
