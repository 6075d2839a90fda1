"""Outputs that XLA writes where they are wanted, on a CPU: what a program allocates is learned once, and offered from then on.

    first run     which allocation became which output       OutputMemory: name ─▶ byte size, the how-manyth of that size
    later runs    those are answered with an address of ours, in a region or an arena; seen by where the output then lies

XLA has no parameter for this; ``workers/_output_memory.c`` says how it is done. Whatever does not come as learned is an ordinary
allocation, and its output is copied like any other.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import jaxlib
import numpy as np

from shm.arrays import Array, address_of

try:
    from workers import _output_memory
except ImportError:  # no compiler at installation
    available = False
else:
    available = True

_log = logging.getLogger(__name__)
#: An output of fewer bytes is copied sooner than it is arranged that it need not be.
WORTH = 1 << 16
#: What must stay as it is for ever, because an array that lies in it was not given up.
_kept: list[memoryview] = []
_attached = False


def attach() -> None:
    """Leads XLA's allocations here; call when its back end is open. Where nothing can be led here outputs are copied."""
    global _attached
    if not available:
        return  # said at the start (workers/extensions.py)
    _attached = _output_memory.attach(f"{Path(jaxlib.__file__).parent}/")
    if not _attached:
        _log.info("outputs are copied to their places: XLA's library takes its memory in another way")


def attached() -> bool:
    """Whether outputs can be made to lie elsewhere."""
    return _attached


class OutputMemory:
    """The outputs of one program, and which of its allocations they are."""

    __slots__ = ("_skips", "sizes")

    def __init__(self, outputs: Mapping[str, Array], allocations: Iterable[tuple[int, int]]) -> None:
        """``allocations``: byte size and address of each that a run made, in order; ``outputs``: what came of that run."""
        #: Output -> bytes, the same in every run.
        self.sizes = {name: array.nbytes for name, array in outputs.items()}
        #: Output -> how many allocations of its size come before its own. Without those that XLA did not allocate as a whole, and
        #: those of which there are too many.
        self._skips: dict[str, int] = {}
        seen: dict[int, int] = {}
        found: dict[tuple[int, int], int] = {}
        for byte_size, address in allocations:
            # The last one at an address is the one that was not freed.
            found[byte_size, address] = seen.get(byte_size, 0)
            seen[byte_size] = seen.get(byte_size, 0) + 1
        for name, array in outputs.items():
            skip = found.get((array.nbytes, address_of(array))) if array.nbytes else None
            if skip is not None and len(self._skips) < _output_memory.OFFERS:
                self._skips[name] = skip

    @property
    def offerable(self) -> frozenset[str]:
        """The outputs that can be made to lie elsewhere."""
        return frozenset(self._skips)

    def refuse(self) -> None:
        """From now on nothing is offered."""
        self._skips.clear()

    def run(self, call: Callable[[], dict[str, Any]], addresses: Mapping[str, int]) -> dict[str, Any]:
        """Runs the program with the memory at those addresses offered for those outputs, as many bytes as they have."""
        try:
            for name, address in addresses.items():
                _output_memory.offer(self.sizes[name], self._skips[name], address)
            return call()
        finally:
            _output_memory.withdraw()


def watched(call: Callable[[], dict[str, Any]], names: Iterable[str]) -> tuple[dict[str, Any], OutputMemory]:
    """Runs a program and learns how its outputs of those names are allocated."""
    _output_memory.watch()
    try:
        made = call()
    finally:
        allocations = _output_memory.watched()
    return made, OutputMemory({name: np.asarray(made[name]) for name in names}, allocations)


def given_up(address: int, view: memoryview) -> bool:
    """Whether no array lies any more where one was made to. False: somebody keeps one, so the memory is never unmapped."""
    if not _output_memory.held(address):
        return True
    _log.warning("an output of %d bytes is kept beyond its answer: its memory stays mapped", len(view))
    _kept.append(view)
    return False
