"""Finds arrays that a model's function closes over: each program contains them as constants, while parameters exist once.

Such arrays make compiling slow and executables large, in memory and in the cache.
"""

from __future__ import annotations

import logging

import jax

_log = logging.getLogger(__name__)
#: Fewer bytes are not worth a warning: masks, tables, positions.
_MIN_BYTE_SIZE = 1 << 20


def constant_byte_size(traced: jax.stages.Traced) -> int:
    """Returns the bytes of a traced program's constant arrays, which are not arguments of the program."""
    return sum(int(getattr(array, "nbytes", 0)) for array in traced.jaxpr.consts)


def warn_of_constants(model: str, byte_size: int, programs: int) -> None:
    """Logs a warning if constant arrays in a model's programs are large: what they cost, and that they should be parameters.

    Args:
      byte_size: of the constants in one program.
      programs: how many programs the model has.
    """
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
