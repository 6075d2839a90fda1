"""The outputs of a program side by side, as one further output of it: so they leave a GPU in one transfer, however many they are.

    packed    | output 0: row 0 | row 1 | ... | zeros | output 1: row 0 | row 1 | ...        each begins at a multiple of 64

A program has it where its outputs are several and small. They are made as ever, and their bytes copied afterwards.
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

#: Its name among the outputs, which no tensor can have.
PACKED = ""
_LINE = 64


def packing(apply: Callable[..., Any], signature: Signature) -> Callable[..., Any]:
    """The function to be traced, of whose outputs ``PACKED`` is one where that pays. What is not as declared is left as it is."""

    @functools.wraps(apply, updated=())
    def packed(*arguments: Any) -> Any:
        made = apply(*arguments)
        if signature.states:
            outputs, carry = made
            return _with_packed(outputs, signature), carry
        return _with_packed(made, signature)

    return packed


def starts(arrays: Mapping[str, Any]) -> dict[str, int]:
    """Where each output begins."""
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
    # As they are: what follows must not be computed together with them, or they would be rounded otherwise.
    arrays = jax.lax.optimization_barrier(arrays)
    return made | {PACKED: jnp.concatenate([_bytes(array) for array in arrays])}


def _room(array: Any) -> int:
    byte_size: int = math.prod(array.shape) * array.dtype.itemsize
    return -(-byte_size // _LINE) * _LINE


def _bytes(array: Any) -> Any:
    flat = jnp.ravel(array)
    if flat.dtype == jnp.bool_:
        flat = flat.astype(jnp.uint8)
    flat = jnp.ravel(jax.lax.bitcast_convert_type(flat, jnp.uint8))
    return jnp.pad(flat, (0, _room(array) - flat.size))
