"""Decides which host memory may be passed to a GPU's driver.

A client may take its memory away at any time. When the processor accesses missing pages, the fault guard (``shm/guard.py``) has
the request answered with an error. When the driver accesses missing pages, it may fail for good, and with it everybody's requests
on that GPU. So the driver is given a client's memory only where the pages are locked; the host copies all other memory. The GPU
goes on seeing locked pages after their object has lost them, so the host checks whether the object still has them.
"""

from __future__ import annotations

import numpy as np

from tensord.shm import guard
from tensord.shm.arrays import Array, address_of


def standing(array: Array) -> Array:
    """Returns an array that the GPU's driver may read: the given one, or a copy if a client may take the array's memory away.

    ``array`` must be contiguous.
    """
    if guard.may_be_missing(address_of(array)):
        return array.copy()
    if array.nbytes:
        _look(array.reshape(-1).view(np.uint8).data)
    return array


def may_be_written(memory: memoryview) -> bool:
    """Returns whether the GPU's driver may write to memory; False: a client may take the memory away, so the host must copy."""
    if guard.may_be_missing(address_of(memory)):
        return False
    _look(memory)
    return True


def _look(memory: memoryview) -> None:
    """Reads the last byte of memory, so that the request fails if a client has truncated the memory's object.

    The SIGBUS handler of ``shm.guard`` then counts a fault.
    """
    memory[-1]
