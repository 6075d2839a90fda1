"""Outputs that XLA writes where they are wanted, on a CPU: what a program allocates is learned once, and offered from then on.

    first run     which allocation became which output       OutputMemory: name ─▶ byte size, the how-manyth of that size
    later runs    those are answered with an address of ours, in a region or an arena; seen by where the output then lies

XLA has no parameter for this; ``_output_memory.c`` says how it is done. Whatever does not come as learned is an ordinary
allocation, and its output is copied like any other.

That functions were found in XLA's tables does not say that they are those which XLA takes its outputs' memory with, and gives it
back. So a program of our own is run first, and only if its output lay where it was offered, and was given up there, is anything
offered to programs of models.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import jaxlib
import numpy as np

from tensord.shm.arrays import Array, address_of
from tensord.workers.native.extensions import available

if available:
    from tensord.workers.native import _native

_log = logging.getLogger(__name__)
#: An output of fewer bytes is copied sooner than it is arranged that it need not be.
WORTH = 1 << 16
#: What must stay as it is for ever, because an array that lies in it was not given up.
_kept: list[memoryview] = []
_attached = False


def attach() -> bool:
    """Leads XLA's allocations here and tries it; call when its back end is open. False: it does not work, outputs are copied."""
    global _attached
    if not available:
        return False  # said at the start (workers/native/extensions.py)
    if not _attached:
        reason = _led() or _tried()
        _attached = not reason
        if _attached:
            _log.info("XLA writes large outputs straight to the memory of their clients, without a copy")
        else:
            _log.warning("outputs are copied to their places: %s", reason)
    return _attached


def _led() -> str:
    """Why XLA's allocations do not come here; "": they do."""
    if not _native.redirect_allocations(f"{Path(jaxlib.__file__).parent}/"):
        return "XLA's library does not take its memory from the C library in the way that is known"
    return ""


def _tried(byte_size: int = WORTH) -> str:
    """Why an output that was offered a place was not found there, or its memory not given up; "": all is as it should be.

    The place is the C library's own memory: whoever gives it back to the C library directly, as XLA would if only its requests
    came here, does no harm.
    """
    library, place = ctypes.CDLL(None), ctypes.c_void_p()
    if library.posix_memalign(ctypes.byref(place), ctypes.c_size_t(64), ctypes.c_size_t(byte_size)) or not place.value:
        return "there is no memory to try it with"
    address = place.value
    try:
        reason = _tried_at(address, byte_size)
    except Exception as error:  # whatever it is, it must not keep the worker from serving
        reason = f"a first program failed with {type(error).__name__}: {error}"
    if _native.holds(address):
        return "XLA does not give back memory in the way that is known"
    library.free(place)
    return reason


def _tried_at(address: int, byte_size: int) -> str:
    given = jax.ShapeDtypeStruct((byte_size // 4,), np.float32)
    program = jax.jit(lambda x: {"y": x + 1}).lower(given).compile()
    x = jax.device_put(np.arange(byte_size // 4, dtype=np.float32))

    def call() -> dict[str, Any]:
        return dict(program(x))

    _, memory = watched(call, ["y"])
    if not memory.offerable:
        return "XLA does not request the memory of outputs in the way that is known"
    made = np.asarray(memory.run(call, {"y": address})["y"])
    if address_of(made) != address:
        return "XLA does not put outputs into the memory that it requests"
    if not np.array_equal(made, np.asarray(x) + 1):
        return "an output was wrong where it was offered a place"
    return ""


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
            if skip is not None and len(self._skips) < _native.MAX_OFFERS:
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
                _native.offer(self.sizes[name], self._skips[name], address)
            return call()
        finally:
            _native.withdraw_offers()


def watched(call: Callable[[], dict[str, Any]], names: Iterable[str]) -> tuple[dict[str, Any], OutputMemory]:
    """Runs a program and learns how its outputs of those names are allocated."""
    _native.watch_allocations()
    try:
        made = call()
    finally:
        allocations = _native.watched_allocations()
    return made, OutputMemory({name: np.asarray(made[name]) for name in names}, allocations)


def given_up(address: int, view: memoryview) -> bool:
    """Whether no array lies any more where one was made to. False: somebody keeps one, so the memory is never unmapped."""
    if not _native.holds(address):
        return True
    _log.warning("an output of %d bytes is kept beyond its answer: its memory stays mapped", len(view))
    _kept.append(view)
    return False
