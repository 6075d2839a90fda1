"""Finds arrays that a model's function closes over: each of its programs has them as constants, where parameters exist once.

They make compiling slow and executables large, in memory and in the cache.
"""

from __future__ import annotations

import logging

import jax

_log = logging.getLogger(__name__)
#: Fewer bytes are not worth a warning: masks, tables, positions.
_MIN_BYTE_SIZE = 1 << 20


def constant_byte_size(traced: jax.stages.Traced) -> int:
    """Returns the bytes of arrays in a program that are none of its arguments."""
    return sum(int(getattr(array, "nbytes", 0)) for array in traced.jaxpr.consts)


def warn_of_constants(model: str, byte_size: int, programs: int) -> None:
    """Logs what large constants cost, and what to do."""
    if byte_size < _MIN_BYTE_SIZE:
        return
    _log.warning(
        "model '%s': its function has %d bytes of arrays that are no parameters, and each of its %d programs has them as "
        "constants: loading takes longer, and memory and cache hold about %d bytes more. "
        "Return them from create() with the parameters",
        model,
        byte_size,
        programs,
        byte_size * programs,
    )
