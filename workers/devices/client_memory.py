"""Decides which host memory a GPU's driver may be handed.

A client may take its memory away at any time. The processor meets missing pages under the fault guard (``shm/guard.py``), and the
request is answered with an error. A driver that meets them may fail for good, and with it everybody's requests on that GPU. So it
is handed a client's memory only where it has locked the pages before; the host copies all other memory. The GPU goes on seeing
locked pages that an object has lost, so the host checks whether they still are the object's.
"""

from __future__ import annotations

import numpy as np

from tensord.shm import guard
from tensord.shm.arrays import Array, address_of


def standing(array: Array) -> Array:
    """Returns a contiguous array that the driver may read: itself, or a copy in memory of ours."""
    if guard.may_be_missing(address_of(array)):
        return array.copy()
    if array.nbytes:
        _look(array.reshape(-1).view(np.uint8).data)
    return array


def may_be_written(memory: memoryview) -> bool:
    """Returns whether the driver may write to memory; else the host has to, out of memory of ours."""
    if guard.may_be_missing(address_of(memory)):
        return False
    _look(memory)
    return True


def _look(memory: memoryview) -> None:
    """Reads the last byte, so that the fault guard notices if an object was truncated."""
    memory[-1]
