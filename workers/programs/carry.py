"""The carry: state of all sequences of one instance, on the device, which each run passes on to the next.

    run n ── carry ──▶ run n+1 ── carry ──▶ run n+2        a run may be given to the device before the one before it has ended

A run that fails before the device has the carry leaves every sequence as it was. After that the carry is gone, and every sequence
of the instance with it: their clients get an error, and a new carry is made. Nothing is ever run again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from tensord.shm.arrays import Array
from tensord.shm.errors import InvalidArgument
from tensord.workers.programs.precision import precision
from tensord.workers.programs.state_program import rows_argument
from tensord.workers.requests.request import Request
from tensord.workers.tensors.signature import Signature, StateSpec
from tensord.workers.tensors.state import InitialState

#: A program with its parameters: (inputs, rows, carry) -> (outputs, carry).
Step = Callable[..., Any]


class StateLost(Exception):
    """Raised where a failed run has lost the state of all sequences; its cause says why."""


class Carry:
    """The state of one instance's sequences; belongs to its thread."""

    def __init__(self, signature: Signature, initial: InitialState, device: jax.Device | None = None) -> None:
        """Makes no arrays yet. ``device``: where the programs run; None: JAX's usual one."""
        self._signature = signature
        self._initial = initial
        self._device = device
        #: The carry; None: the next run makes it.
        self._arrays: dict[str, jax.Array] | None = None
        #: How often the state of all sequences was lost.
        self.losses = 0

    def run(self, step: Step, inputs: dict[str, Any], rows: int, requests: Sequence[Request]) -> dict[str, Any]:
        """Gives a batch to the device; returns its outputs, which may not be computed yet (``failed`` is for what comes then).

        ``requests``: one for each of the first rows; of a sample, which is of no sequence, none.

        Raises: StateLost: the run failed and the state is gone.  Or whatever else fails, while all state is as it was.
        """
        used = [(request.slot.number, request.controls.start) for request in requests if request.version is not None]
        return self.run_rows(step, inputs, rows_argument(self._signature, rows, used))

    def run_rows(self, step: Step, inputs: dict[str, Any], argument: Array) -> dict[str, Any]:
        """Runs a batch whose rows' sequences are given (``argument``: ``state_program.rows_argument``). Else as ``run``."""
        with precision(self._signature):
            carry = self._open()
            try:
                made: dict[str, Any]
                made, self._arrays = step(inputs, argument, carry)
            except BaseException as error:
                # A donated buffer is deleted. Where the device took none, all state is as it was.
                if any(array.is_deleted() for array in carry.values()):
                    raise self.failed() from error
                raise
        return made

    def failed(self) -> StateLost:
        """Drops the carry after a failed run. Returns the error to raise."""
        self._arrays = None
        self.losses += 1
        return StateLost()

    def _open(self) -> dict[str, jax.Array]:
        if self._arrays is None:
            self._arrays = {spec.name: self._begun(spec) for spec in self._signature.states}
        return self._arrays

    def _begun(self, spec: StateSpec) -> jax.Array:
        """Returns one array of a new carry: its last row is the initial state, the others are written before they are read."""
        array = np.zeros((self._signature.slots + 1, *spec.dims), spec.dtype)
        array[-1] = self._initial.row(spec)
        made: jax.Array = jax.device_put(array, self._device)
        return made

    def __repr__(self) -> str:
        return f"<Carry of {self._signature.slots} slots, {carry_byte_size(self._signature)} bytes>"


def check_state_size(signature: Signature, instances: int, limit: int) -> None:
    """Raises InvalidArgument if the state of all instances would take more bytes than ``limit``."""
    needed = instances * carry_byte_size(signature)
    if signature.states and needed > limit:
        raise InvalidArgument(
            f"model '{signature.model}': the state of {instances * signature.slots} sequences has {needed} bytes, "
            f"executables.max_state_byte_size allows {limit}"
        )


def carry_byte_size(signature: Signature) -> int:
    """Returns the bytes of one instance's state on the device."""
    return (signature.slots + 1) * sum(spec.dtype.itemsize * math.prod(spec.dims) for spec in signature.states)
