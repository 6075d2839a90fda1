"""The state of all sequences of one instance: on the device, handed from one run of a program to the next.

    run n ── carry ──▶ run n+1 ── carry ──▶ run n+2        a run may be given to the device before the one before it has ended

A run that fails before the device has the carry leaves every sequence as it was. After that the carry is gone, and every sequence
of the instance with it: they are told so, and a new carry is made. Nothing is ever run again.
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

#: A program with its parameters: of inputs, rows and carry, it gives outputs and carry.
Step = Callable[..., Any]


class StateLost(Exception):
    """A run has failed and taken the state of all sequences with it. Its cause says why."""


class Carry:
    """Of one instance; belongs to its thread."""

    def __init__(self, signature: Signature, initial: InitialState, device: jax.Device | None = None) -> None:
        """``device``: where the programs run; None: JAX's usual one."""
        self._signature = signature
        self._initial = initial
        self._device = device
        #: None: it is made by the next run.
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
        """As ``run``; ``argument``: what says of which sequences the rows are (``state_program.rows_argument``)."""
        with precision(self._signature):
            carry = self._open()
            try:
                made: dict[str, Any]
                made, self._arrays = step(inputs, argument, carry)
            except BaseException as error:
                # A buffer that was donated says that it is deleted. Where the device took none, all is as it was.
                if any(array.is_deleted() for array in carry.values()):
                    raise self.failed() from error
                raise
        return made

    def failed(self) -> StateLost:
        """To be raised from what became of a run that had the carry."""
        self._arrays = None
        self.losses += 1
        return StateLost()

    def _open(self) -> dict[str, jax.Array]:
        if self._arrays is None:
            self._arrays = {spec.name: self._begun(spec) for spec in self._signature.states}
        return self._arrays

    def _begun(self, spec: StateSpec) -> jax.Array:
        """One array of it: sequences begin with the last row, and what is in the others nobody reads before."""
        array = np.zeros((self._signature.slots + 1, *spec.dims), spec.dtype)
        array[-1] = self._initial.row(spec)
        made: jax.Array = jax.device_put(array, self._device)
        return made

    def __repr__(self) -> str:
        return f"<Carry of {self._signature.slots} slots, {carry_byte_size(self._signature)} bytes>"


def check_state_size(signature: Signature, instances: int, limit: int) -> None:
    """Raises InvalidArgument: the state of all instances would take more bytes than ``limit``."""
    needed = instances * carry_byte_size(signature)
    if signature.states and needed > limit:
        raise InvalidArgument(
            f"model '{signature.model}': the state of {instances * signature.slots} sequences has {needed} bytes, "
            f"executables.max_state_byte_size allows {limit}"
        )


def carry_byte_size(signature: Signature) -> int:
    """What the state of one instance takes on the device."""
    return (signature.slots + 1) * sum(spec.dtype.itemsize * math.prod(spec.dims) for spec in signature.states)
