"""Keeps the state of sequences in device memory between the runs of a model's program.

A ``Carry`` has one array for each state that the model declares. Each sequence has one row in every array. The last row of an
array is the state with which sequences begin. A run reads the rows of the sequences in its batch, and replaces these rows.

The program gets the arrays as donated arguments (JAX), and updates the arrays in place. So a run that fails may lose the states
of all sequences. The clients of these sequences then get an error. A failed run is never repeated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from tensord.shm.arrays import Array, described
from tensord.shm.errors import Internal, InvalidArgument
from tensord.workers.jax_internals.wide import precision
from tensord.workers.tensors.signature import Signature, StateSpec

#: Index of the carry among a program's arguments after the parameters.
CARRY = 2
T = TypeVar("T")
#: A program with its parameters: (inputs, rows, carry) -> (outputs, carry).
Step = Callable[..., Any]


class StateLost(Exception):
    """Raised if a failed run has lost the state of all sequences of an instance. ``__cause__`` is the error of the run."""


class Carry:
    """Keeps the arrays on the device that hold the state of an instance's sequences. Only the instance's thread may use it."""

    def __init__(self, signature: Signature, initial: Mapping[str, Array], device: jax.Device | None = None) -> None:
        """Stores the arguments. The first run makes the arrays.

        ``initial``: the name of a state -> its value at the beginning of each sequence. A state that is not in ``initial``
        begins as zeros. ``device``: the device of the arrays; None: JAX's default device.
        """
        self._signature = signature
        self._initial = initial
        self._device = device
        #: The carry; None: the next run makes it.
        self._arrays: dict[str, jax.Array] | None = None

    def run(self, step: Step, inputs: dict[str, Any], argument: Array, read: Callable[[dict[str, Any]], T]) -> T:
        """Runs the model's program for one batch. Returns what ``read`` returns for the program's outputs by name.

        ``step``: calls the program with the model's parameters. ``argument``: the result of ``rows_argument`` for the batch.
        ``read``: waits for the outputs. Raises StateLost if the program has failed and the states of all sequences are lost. If
        this method raises a different error, no state has changed.
        """
        with precision(self._signature.wide):
            carry = self._open()
            try:
                made: dict[str, Any]
                made, self._arrays = step(inputs, argument, carry)
            except BaseException as error:
                # A donated buffer is deleted. Where the device took none, all state is as it was.
                if any(array.is_deleted() for array in carry.values()):
                    raise self._lost() from error
                raise
        try:
            return read(made)
        except BaseException as error:
            raise self._lost() from error

    def _lost(self) -> StateLost:
        self._arrays = None
        return StateLost()

    def _open(self) -> dict[str, jax.Array]:
        if self._arrays is None:
            self._arrays = {spec.name: self._begun(spec) for spec in self._signature.states}
        return self._arrays

    def _begun(self, spec: StateSpec) -> jax.Array:
        """Returns a new device array for a state: a row for each concurrent sequence, then a row with the initial state."""
        # Other rows are written before they are read.
        array = np.zeros((self._signature.slots + 1, *spec.dims), spec.dtype)
        array[-1] = self._initial.get(spec.name, 0)
        made: jax.Array = jax.device_put(array, self._device)
        return made

    def __repr__(self) -> str:
        return f"<Carry of {self._signature.slots} slots, {carry_byte_size(self._signature)} bytes>"


def check_state_size(signature: Signature, instances: int, limit: int) -> None:
    """Raises InvalidArgument if the state of all instances takes more than ``limit`` bytes."""
    needed = instances * carry_byte_size(signature)
    if signature.states and needed > limit:
        raise InvalidArgument(
            f"model '{signature.model}': the state of {instances * signature.slots} sequences has {needed} bytes, "
            f"executables.max_state_byte_size allows {limit}"
        )


def carry_byte_size(signature: Signature) -> int:
    """Returns how many bytes of device memory the state of all sequences of one instance takes."""
    return (signature.slots + 1) * sum(spec.dtype.itemsize * math.prod(spec.dims) for spec in signature.states)


def rows_argument(signature: Signature, rows: int, used: Sequence[tuple[int, bool]]) -> Array:
    """Returns an array INT32[2, rows], which tells a program where the state of each row of a batch is stored.

    [0, row] is the index of the state in the arrays of a ``Carry``. [1, row] is 1 if the program must start from the initial
    state instead. ``used``: these two values for each of the first rows of the batch. The remaining rows are padding.
    """
    nobody = range(signature.slots + 1, signature.slots + 1 + rows - len(used))
    return np.array(
        [[*(slot for slot, _ in used), *nobody], [*(start for _, start in used), *(True for _ in nobody)]], np.int32
    )


def carry_specs(signature: Signature) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shape and dtype of each state's array, by the state's name.

    The first axis of an array is the slot of a sequence. The last slot holds the initial state.
    """
    return {spec.name: jax.ShapeDtypeStruct((signature.slots + 1, *spec.dims), spec.dtype) for spec in signature.states}


def stepping(apply: Callable[..., Any], signature: Signature) -> Callable[..., tuple[Any, dict[str, Any]]]:
    """Returns a function (parameters, inputs, rows, carry) -> (outputs, new carry) that runs ``apply`` on a batch.

    ``carry``: the states of all sequences, one slot for each sequence. ``rows``: the slot of each row's sequence, and whether
    the sequence begins. The new carry is ``carry`` with the states that ``apply`` computed for the sequences of the batch.
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
    """Splits what a model's ``apply`` returned into the outputs and the new state, each by name. ``rows``: the batch's rows.

    Raises Internal: the outputs or the state are not as the model declares them.
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
                f"{what}: state '{spec.output}' is computed as {described(array.dtype, array.shape)}, "
                f"declared as {described(spec.dtype, shape)}"
            )
    if unknown := sorted(made.keys() - arrays.keys(), key=str):
        raise Internal(f"{what}: apply returned state {unknown[0]!r}, which is not declared")
    return outputs, arrays
