"""Wraps a JAX model with state as a program that reads the sequences' state from the carry and writes the new state to it.

    carry    | slot 0 | slot 1 | ... | slot S-1 | where sequences begin |     one array for each state, one row for each slot
                 └──────────┬──────┘                      │ start
                     rows of the batch ◀──────────────────┘
                            │ apply(parameters, inputs, rows)
                 ┌──────────┴──────┐
    carry    | slot 0 | slot 1 | ...     the same memory: the carry is donated

Slots and starts are inputs, so one program serves all sequences. Rows of a batch that no request fills begin with the initial
state, and their new state is dropped, because their slot lies outside of the carry.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tensord.shm.arrays import Array, datatype_of
from tensord.shm.errors import Internal
from tensord.workers.tensors.signature import Signature

#: Index of the carry among a program's arguments after the parameters.
CARRY = 2


def rows_argument(signature: Signature, rows: int, used: Sequence[tuple[int, bool]]) -> Array:
    """Returns the argument that tells a program the slot of each row, and whether its sequence begins: INT32[2, rows].

    Args:
      rows: how many rows the batch has.
      used: for each of the first rows its slot, and whether its sequence begins; no request fills the other rows.
    """
    nobody = range(signature.slots + 1, signature.slots + 1 + rows - len(used))
    return np.array(
        [[*(slot for slot, _ in used), *nobody], [*(start for _, start in used), *(True for _ in nobody)]], np.int32
    )


def carry_specs(signature: Signature) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shape and dtype of each array of the carry (the state of all sequences of an instance), by the state's name."""
    return {spec.name: jax.ShapeDtypeStruct((signature.slots + 1, *spec.dims), spec.dtype) for spec in signature.states}


def stepping(apply: Callable[..., Any], signature: Signature) -> Callable[..., tuple[Any, dict[str, Any]]]:
    """Wraps a model's function, which takes and returns one state for each row, so that it takes and returns the carry.

    The carry is the state of all slots. The wrapped function is what JAX traces: (parameters, inputs, slot and start of each row
    as INT32[2, rows], carry) -> (outputs, carry).
    """

    def step(parameters: Any, inputs: dict[str, Any], rows: Any, carry: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        slots, starts = rows[0], rows[1]
        taken = jnp.where(starts != 0, signature.slots, slots)
        state = {name: array.at[taken].get(mode="clip") for name, array in carry.items()}
        if not signature.batches:
            state = {name: array[0] for name, array in state.items()}
        outputs, made = checked(signature, slots.shape[0], apply(parameters, inputs, state))
        kept: dict[str, Any] = {}
        for spec in signature.states:
            new = made[spec.output] if signature.batches else made[spec.output][None]
            kept[spec.name] = carry[spec.name].at[slots].set(new, mode="drop", unique_indices=True)
        shown = {spec.output: made[spec.output] for spec in signature.states if spec.output in signature.outputs}
        return {**outputs, **shown}, kept

    return step


def checked(signature: Signature, rows: int, returned: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Checks what a model's function with state has returned; returns its outputs and its new state, each by name.

    Called while JAX traces the function. ``rows``: the batch size.

    Raises Internal: they are not as declared.
    """
    what = f"model '{signature.model}'"
    if not isinstance(returned, tuple) or len(returned) != 2:
        raise Internal(f"{what}: apply returned {type(returned).__name__}, a pair (outputs, state) is expected")
    outputs, made = returned
    for part, kind in ((outputs, "outputs"), (made, "state")):
        if not isinstance(part, dict):
            raise Internal(f"{what}: apply returned {type(part).__name__} as its {kind}, a dict of arrays is expected")
    arrays: dict[str, Any] = {}
    for spec in signature.states:
        if spec.output not in made:
            raise Internal(f"{what}: state '{spec.output}' is declared but not computed")
        array = arrays[spec.output] = jnp.asarray(made[spec.output])
        lead = (rows,) if signature.batches else ()
        shape = (*lead, *spec.dims)
        fits = array.shape[: len(lead)] == lead and spec.fits(array.shape[len(lead) :])
        if not fits or array.dtype != spec.dtype:
            raise Internal(
                f"{what}: state '{spec.output}' is computed as {datatype_of(array.dtype) or array.dtype}"
                f"{list(array.shape)}, declared as {spec.datatype}{list(shape)}"
            )
    if unknown := sorted(made.keys() - arrays.keys(), key=str):
        raise Internal(f"{what}: apply returned state {unknown[0]!r}, which is not declared")
    return outputs, arrays
