"""What of the host's memory a GPU's driver may be handed.

A client may take its memory away at any time. The processor meets missing pages under the fault guard (``shm/guard.py``), and the
request is told. A driver that meets them may fail for good, and with it everybody's requests on that GPU. So it is handed a
client's memory only where it has locked the pages before; what lies elsewhere is copied by the host. Of locked pages the GPU goes
on seeing those that were there, so the host has a look whether they still are the object's.
"""

from __future__ import annotations

import numpy as np

from tensord.shm import guard
from tensord.shm.arrays import Array, address_of


def standing(array: Array) -> Array:
    """A contiguous array as the driver may read it: itself, or a copy in memory of ours."""
    if guard.may_be_missing(address_of(array)):
        return array.copy()
    if array.nbytes:
        _look(array.reshape(-1).view(np.uint8).data)
    return array


def may_be_written(memory: memoryview) -> bool:
    """Whether the driver may write there; else the host has to, out of memory of ours."""
    if guard.may_be_missing(address_of(memory)):
        return False
    _look(memory)
    return True


def _look(memory: memoryview) -> None:
    """Has the fault guard notice that an object was truncated: its last byte is gone then."""
    memory[-1]
