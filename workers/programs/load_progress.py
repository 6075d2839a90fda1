"""Compiles the programs of a model that is being loaded, reports progress, and counts the programs, their bytes and the time."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import jax

from tensord.shm.control_records import Footprint
from tensord.workers.programs.placement import CompiledProgram
from tensord.workers.programs.run_errors import memory_needed
from tensord.workers.threads.cancellation import Cancellation

_log = logging.getLogger(__name__)
T = TypeVar("T")
#: ``tell(number, total, compiled)``: executable ``number`` of ``total`` is begun, ``compiled`` were compiled by now.
Tell = Callable[[int, int, int], None]


class LoadProgress:
    """Makes the programs of a model version while it is loaded, reports the progress, and counts the programs and their bytes.

    Only the thread that loads the model version may use it.
    """

    def __init__(
        self, name: str, version: int, tell: Tell = lambda *_: None, cancellation: Cancellation | None = None
    ) -> None:
        """Starts to measure the duration of a model version's load. ``cancellation``: lets other threads cancel the load.

        ``tell``: called before each program is made, with its number, the number of programs, and the number compiled so far.
        """
        self.cancellation = cancellation or Cancellation()
        #: Called when the next executable is begun.
        self.renew: Callable[[], None] = lambda: None
        self._what = f"model '{name}' version {version}"
        self._tell = tell
        self._started_ns = time.monotonic_ns()
        self._total = 0
        self._compiled = 0
        self._parameter_byte_size = 0
        #: Bytes of the parameters on each device.
        self._part_byte_size = 0
        self._program_byte_size = 0
        #: Bytes and name of the program that takes most.
        self._largest: tuple[int, str] = (0, "")

    def through(
        self, wanted: Sequence[T], make: Callable[[T], tuple[CompiledProgram, bool]]
    ) -> Iterator[tuple[T, CompiledProgram, bool]]:
        """Makes a program for each item of ``wanted``. Yields the item, the program, and whether it was compiled.

        ``make``: compiles or loads one program.
        Raises Cancelled: the load was cancelled. Errors of ``make`` are raised unchanged.
        """
        self._total, started_ns = len(wanted), time.monotonic_ns()
        for number, one in enumerate(wanted, 1):
            self.cancellation.check()
            self.renew()
            began_ns = time.monotonic_ns()
            self._tell(number, self._total, self._compiled)
            program, compiled = make(one)
            seconds = (time.monotonic_ns() - began_ns) / 1e9
            yield one, program, compiled
            if compiled:
                self._compiled += 1
                _log.info("%s: %d of %d compiled in %.1f s: %s", self._what, number, self._total, seconds, one)
            self._program_byte_size += program.byte_size
            # By now the caller has placed the parameters.
            takes = memory_needed(program.call, self._part_byte_size) or 0
            self._largest = max(self._largest, (takes, str(one)))
        seconds = (time.monotonic_ns() - started_ns) / 1e9
        cached = self._total - self._compiled
        _log.info(
            "%s: %d executables compiled, %d from the cache, in %.1f s", self._what, self._compiled, cached, seconds
        )

    def parameters(self, parameters: Any) -> None:
        """Measures ``parameters``: stores how many bytes they have, altogether and on each device."""
        leaves = jax.tree.leaves(parameters)
        self._parameter_byte_size = sum(leaf.nbytes for leaf in leaves)
        self._part_byte_size = sum(_part(leaf) for leaf in leaves)

    def footprint(self) -> Footprint:
        """Returns the duration of the load, the number of programs, and the bytes of programs and parameters."""
        seconds = (time.monotonic_ns() - self._started_ns) / 1e9
        sizes = self._parameter_byte_size, self._program_byte_size
        return Footprint(seconds, self._total, self._compiled, *sizes, *self._largest)


def _part(leaf: Any) -> int:
    """Returns how many bytes of an array each of its devices holds."""
    if not isinstance(leaf, jax.Array):
        return int(leaf.nbytes)
    return math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
