"""Holds the carry: the state of all sequences of an instance, on the device, which each run passes to the next run.

    run n ── carry ──▶ run n+1 ── carry ──▶ run n+2        a run may be launched before the run before it has ended

If a run fails before the device has taken the carry, every sequence is as it was. If it fails later the carry is lost, and with
it the state of every sequence of the instance: their clients get an error, and a new carry is made. No run is repeated.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from tensord.shm.arrays import Array
from tensord.shm.errors import InvalidArgument
from tensord.workers.jax_internals.wide import precision
from tensord.workers.tensors.signature import Signature, StateSpec
from tensord.workers.tensors.state import InitialState

#: A program with its parameters: (inputs, rows, carry) -> (outputs, carry).
Step = Callable[..., Any]


class StateLost(Exception):
    """Raised if a failed run has lost the state of all sequences of a model's instance; ``__cause__`` is the error of the run."""


class Carry:
    """Holds the carry: the state of one instance's sequences, on the device, which each run reads and replaces.

    Used by the instance's thread only.
    """

    def __init__(self, signature: Signature, initial: InitialState, device: jax.Device | None = None) -> None:
        """Makes an empty carry (the arrays with the sequences' state); the first run makes the arrays.

        Each array has a row for every slot. A slot belongs to one sequence at a time, whose state is in that row.

        Args:
          signature: says how many slots an instance has, and the shape of the state in each.
          initial: the state with which a sequence begins.
          device: the device of the programs; None: JAX's default device.
        """
        self._signature = signature
        self._initial = initial
        self._device = device
        #: The carry; None: the next run makes it.
        self._arrays: dict[str, jax.Array] | None = None

    def run(self, step: Step, inputs: dict[str, Any], argument: Array) -> dict[str, Any]:
        """Launches a batch on the device. Returns its outputs, which may not be computed yet.

        The caller must call ``failed`` if waiting for the outputs fails.

        Args:
          step: the program with its parameters: (inputs, ``argument``, carry) -> (outputs, carry).
          argument: INT32[2, rows], the slot of each row, and 1 where its sequence begins (``state_program.rows_argument``).
        Raises StateLost: the run failed and the state of all sequences is lost. After any other error all state is as before.
        """
        with precision(self._signature.wide):
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
        """Drops the state of all sequences after a run has failed; the next run makes new state. Returns the error to raise."""
        self._arrays = None
        return StateLost()

    def _open(self) -> dict[str, jax.Array]:
        if self._arrays is None:
            self._arrays = {spec.name: self._begun(spec) for spec in self._signature.states}
        return self._arrays

    def _begun(self, spec: StateSpec) -> jax.Array:
        """Makes one array of a new carry: the state ``spec`` of all slots, and as the last row the initial state.

        The rows of the slots are zeros; each is written before it is read.
        """
        array = np.zeros((self._signature.slots + 1, *spec.dims), spec.dtype)
        array[-1] = self._initial.row(spec)
        made: jax.Array = jax.device_put(array, self._device)
        return made

    def __repr__(self) -> str:
        return f"<Carry of {self._signature.slots} slots, {carry_byte_size(self._signature)} bytes>"


def check_state_size(signature: Signature, instances: int, limit: int) -> None:
    """Checks the size of a model's state. Raises InvalidArgument: all instances together need more than ``limit`` bytes."""
    needed = instances * carry_byte_size(signature)
    if signature.states and needed > limit:
        raise InvalidArgument(
            f"model '{signature.model}': the state of {instances * signature.slots} sequences has {needed} bytes, "
            f"executables.max_state_byte_size allows {limit}"
        )


def carry_byte_size(signature: Signature) -> int:
    """Returns the bytes that the state of all sequences of one instance takes on the device."""
    return (signature.slots + 1) * sum(spec.dtype.itemsize * math.prod(spec.dims) for spec in signature.states)
