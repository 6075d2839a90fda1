"""Arrays of BYTES as requests have them."""

from __future__ import annotations

import numpy as np

from tensord.shm.arrays import Array


def strings(array: Array) -> Array:
    """Objects, each of them bytes, in an array of its own."""
    made = np.empty(array.shape, np.object_)
    made.ravel()[:] = [value if isinstance(value, bytes) else str(value).encode() for value in array.ravel().tolist()]
    return made
