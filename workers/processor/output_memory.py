"""Has XLA on a CPU write a program's outputs directly to the answer's memory, so that the worker need not copy the outputs.

XLA allocates memory for each output during a run. In the first run of a program, this module finds the allocation of each
output. In later runs, this module gives XLA an address in a region or an arena instead. XLA may still write an output
elsewhere: the worker compares the addresses, and copies such an output. The C code is in ``_output_memory.c``.

``attach`` first runs a test program. If XLA does not use the given memory as expected, the worker copies all outputs.
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
#: Bytes from which an output is offered memory: copying a smaller one costs less.
WORTH = 1 << 16
#: Memory that is never unmapped, because an array still lies in it.
_kept: list[memoryview] = []
_attached = False


def attach() -> bool:
    """Redirects XLA's allocations, so that XLA can write outputs straight to memory that the worker chooses.

    Returns False if the redirection fails a test with a small program, or if the C extension is missing. Outputs must then be
    copied to their places, and the log says why. XLA's back end must be open already.
    """
    global _attached
    if not available:
        return False  # said at the start (workers/native/extensions.py)
    if not _attached:
        led = _native.redirect_allocations(f"{Path(jaxlib.__file__).parent}/")
        reason = (
            _tried() if led else "XLA's library does not take its memory from the C library in the way that is known"
        )
        _attached = not reason
        if _attached:
            _log.info("XLA writes large outputs straight to the memory of their clients, without a copy")
        else:
            _log.warning("outputs are copied to their places: %s", reason)
    return _attached


def _tried(byte_size: int = WORTH) -> str:
    """Tests whether XLA writes an output of ``byte_size`` bytes to memory that it is given. Returns "", or why it does not."""
    # Memory of the C library: it does no harm if XLA frees that itself.
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
    """Returns whether ``attach`` has redirected XLA's allocations."""
    return _attached


class OutputMemory:
    """Makes XLA write a program's outputs to given memory, by replacing XLA's own allocations for these outputs."""

    __slots__ = ("_skips", "sizes")

    def __init__(self, outputs: Mapping[str, Array], allocations: Iterable[tuple[int, int]]) -> None:
        """Finds the allocation of each output in a recorded run of the program.

        ``outputs`` are the outputs of the run. ``allocations`` lists the byte size and the address of every allocation of the
        run, oldest first.
        """
        #: Output name -> bytes, the same in every run.
        self.sizes = {name: array.nbytes for name, array in outputs.items()}
        #: Names in ``offerable`` -> how many allocations of the output's size come before its allocation.
        self._skips: dict[str, int] = {}
        counts: dict[int, int] = {}
        found: dict[tuple[int, int], int] = {}
        for byte_size, address in allocations:
            # The last allocation at an address is the one that was not freed.
            found[byte_size, address] = counts.get(byte_size, 0)
            counts[byte_size] = counts.get(byte_size, 0) + 1
        for name, array in outputs.items():
            skip = found.get((array.nbytes, address_of(array))) if array.nbytes else None
            if skip is not None and len(self._skips) < _native.MAX_OFFERS:
                self._skips[name] = skip

    @property
    def offerable(self) -> frozenset[str]:
        """Names of the outputs that XLA can write to memory that the worker chooses, such as the response arena."""
        return frozenset(self._skips)

    def refuse(self) -> None:
        """Stops giving XLA memory for the outputs of later runs. The worker then copies each output to the answer's memory."""
        self._skips.clear()

    def run(self, call: Callable[[], dict[str, Any]], addresses: Mapping[str, int]) -> dict[str, Any]:
        """Runs a program by ``call``, and returns its outputs.

        ``addresses``: output name -> the address where XLA should write it. XLA may write elsewhere nevertheless, so the caller
        must compare addresses.
        """
        try:
            for name, address in addresses.items():
                _native.offer(self.sizes[name], self._skips[name], address)
            return call()
        finally:
            _native.withdraw_offers()


def watched(call: Callable[[], dict[str, Any]], names: Iterable[str]) -> tuple[dict[str, Any], OutputMemory]:
    """Runs a program once, and records the memory that XLA allocates during the run.

    Returns the outputs, and an ``OutputMemory`` with which later runs can write the outputs ``names`` to given addresses.
    """
    _native.watch_allocations()
    try:
        made = call()
    finally:
        allocations = _native.watched_allocations()
    return made, OutputMemory({name: np.asarray(made[name]) for name in names}, allocations)


def given_up(address: int, view: memoryview) -> bool:
    """Returns True if XLA no longer uses the memory at ``address``. Otherwise keeps ``view`` forever, and returns False.

    ``view``: a view of this memory. The memory stays mapped as long as the view exists.
    """
    if not _native.holds(address):
        return True
    _log.warning("an output of %d bytes is kept beyond its answer: its memory stays mapped", len(view))
    _kept.append(view)
    return False
