"""Packs all small outputs of a program into one further output, so that they are copied from a GPU in one transfer.

packed    | output 0: row 0 | row 1 | ... | zeros | output 1: row 0 | row 1 | ...     each output is aligned to 64 bytes
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from tensord.workers.devices.host_staging import TOGETHER
from tensord.workers.tensors.signature import Signature

#: Name of the packed output, which no tensor can have.
PACKED = ""
_LINE = 64


def packing(apply: Callable[..., Any], signature: Signature) -> Callable[..., Any]:
    """Returns a function that calls ``apply`` and adds one output: a byte array with the bytes of all declared outputs.

    The byte array is named ``PACKED``. It is added only if two or more outputs are declared, with at most 256 KiB in total.
    """

    @functools.wraps(apply, updated=())
    def packed(*arguments: Any) -> Any:
        made = apply(*arguments)
        if signature.states:
            outputs, carry = made
            return _with_packed(outputs, signature), carry
        return _with_packed(made, signature)

    return packed


def starts(arrays: Mapping[str, Any]) -> dict[str, int]:
    """Returns the byte offset of each output in a buffer that holds all outputs of a program.

    ``arrays``: the outputs by name, in the order of the buffer.
    """
    found, at = dict[str, int](), 0
    for name, array in arrays.items():
        found[name] = at
        at += _room(array)
    return found


def _with_packed(made: Any, signature: Signature) -> Any:
    if not isinstance(made, dict) or len(signature.outputs) < 2 or not made.keys() >= signature.outputs.keys():
        return made
    arrays = [jnp.asarray(made[name]) for name in signature.outputs]
    declared = [spec.dtype for spec in signature.outputs.values()]
    byte_size = sum([_room(array) for array in arrays])
    if not 0 < byte_size <= TOGETHER or [array.dtype for array in arrays] != declared:
        return made
    # The barrier keeps XLA from fusing the packing with the outputs' computation, which would round them differently.
    arrays = jax.lax.optimization_barrier(arrays)
    padded = [jnp.pad(flat := as_bytes(array), (0, _room(array) - flat.size)) for array in arrays]
    return made | {PACKED: jnp.concatenate(padded)}


def _room(array: Any) -> int:
    byte_size: int = math.prod(array.shape) * array.dtype.itemsize
    return -(-byte_size // _LINE) * _LINE


def as_bytes(array: Any) -> Any:
    """Returns the bytes of a JAX array, which may be a traced one, as a flat array of uint8. A bool is one byte."""
    plain = array.astype(jnp.uint8) if array.dtype == jnp.bool_ else array
    return jnp.ravel(jax.lax.bitcast_convert_type(plain, jnp.uint8))
