"""Runs a model version that computes requests step by step. Each step advances many requests at once on the device.

``SteppedModel.insert`` and ``SteppedModel.step`` start a run on the device and return a ``DeviceRun``. ``DeviceRun.read`` waits
until the run ends, and returns the outputs. The state of all requests stays on the device. Used by the worker's loop only.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import numpy as np

from tensord.shm.arrays import Array
from tensord.shm.errors import InvalidArgument
from tensord.workers.declarations.step_declaration import StepDeclaration
from tensord.workers.jax_internals.wide import precisions
from tensord.workers.parameters.parameter_set import ParameterSet
from tensord.workers.programs.carry import StateLost
from tensord.workers.programs.gather_buffer import copy_into
from tensord.workers.programs.row_probe import DEVICE_ROUNDING, TRIED_WORK, find_fault
from tensord.workers.programs.row_reading import read
from tensord.workers.programs.run_errors import describe_failure
from tensord.workers.programs.step_executables import DeviceCall, StepExecutables
from tensord.workers.programs.step_program import Rows
from tensord.workers.programs.weight import work_of
from tensord.workers.scheduling.step_batcher import EMITS
from tensord.workers.tensors.buckets import Buckets, RequestShapes, Shapes
from tensord.workers.tensors.request_tensors import RequestTensors
from tensord.workers.tensors.signature import Signature

#: How many requests are asked to find out whether they affect each other, and for how many steps.
_ASKED, _STEPS = 4, 3


class DeviceRun(NamedTuple):
    """A program's run on the device, which may not have ended. ``read`` waits for its end and returns the results."""

    made: Any
    #: Arrays that the device may still read.
    given: object

    @property
    def ready(self) -> bool:
        """True once the run has ended, so that ``read`` does not wait."""
        return bool(self.made.is_ready())

    def read(self) -> Array:
        """Waits until the run ends. Returns the results, UINT8[rows, bytes per row].

        Raises errors of the run unchanged. After such an error, the caller must call ``SteppedModel.lost``.
        """
        return np.asarray(self.made)


class SteppedModel:
    """A version of a model that computes many requests together, step by step. Each step advances all of these requests.

    A request has a slot, a numbered place in the arrays of each step, until the request ends.
    """

    def __init__(
        self,
        version: int,
        signature: Signature,
        buckets: Buckets,
        executables: StepExecutables,
        rows: Rows,
        declared: StepDeclaration,
        remote: bool,
    ) -> None:
        """Creates the model without requests. ``declared``: the settings in the model's file model.py.

        ``rows``: the layout of the bytes that a step returns for each request. ``remote``: False if the model runs on the CPU.
        """
        self._remote = remote
        self.rules = declared.rules
        self.gather = declared.gather
        self._version = version
        self._signature = signature
        self._precision = precisions(signature.wide)
        self._shapes = RequestShapes(signature, buckets)
        self._largest = {axis: sizes[-1] for axis, sizes in buckets.axes.items()}
        self._named = buckets.named
        self.executables = executables
        self._insert_rows = declared.insert_rows
        self._slots = declared.rules.slots
        self._sizes = declared.step_slots
        self.rows = rows
        #: None: the next insertion begins with a new one.
        self._carry: Any = None
        #: The size of a step and the slots that are masked, and what says so on the device. It is used again and again.
        self._unmasked: tuple[int, frozenset[int], Any] | None = None

    def key(self, arrays: Mapping[str, Array]) -> Shapes:
        """Returns the batching key of the input shapes of a request. Requests with equal keys may begin in one batch.

        ``arrays``: the request's inputs by name. Raises InvalidArgument if no program of the model fits these shapes.
        """
        key = self._shapes.key(arrays)
        if key not in self.executables.inserts:
            for axis, size in self._shapes.lengths(arrays).items():
                if size > self._largest[axis]:
                    raise InvalidArgument(
                        f"model '{self._signature.model}': axis '{axis}' of the request has size {size}, "
                        f"the largest of its buckets is {self._largest[axis]}"
                    )
            raise InvalidArgument(f"model '{self._signature.model}': no program takes inputs of {key}")
        return key

    # ---------------------------------------------------------------------------------------------------------- running

    def insert(
        self, requests: Sequence[RequestTensors], slots: Sequence[int], chosen: ParameterSet | None = None
    ) -> DeviceRun:
        """Starts a run of the model's ``insert`` function for new requests. Row i of the run's results is for request i.

        ``key`` must return the same value for all requests. One call takes at most ``StepDeclaration.insert_rows`` requests (1
        if it is 0). ``slots``: each request's slot. ``chosen``: the parameter set, or None for ``main``.
        Raises StateLost if the run failed and all slots' state is lost. After any other error, all slots are unchanged.
        """
        key = self._shapes.key(requests[0].arrays)
        inputs, numbers = self.executables.zeros(key)
        numbers.reshape(-1)[: len(slots)] = slots
        for row, request in enumerate(requests):
            arrays = request.arrays
            # As it was checked when the request came: a client's memory may say something else by now, but no other shapes.
            lengths = self._shapes.lengths(arrays) if self._named else {}
            for name, target in inputs.items():
                if name in lengths:
                    target.reshape(-1)[row] = lengths[name]
                else:
                    copy_into(target[row] if self._insert_rows else target, arrays[name])
        return self._run(self.executables.inserts[key], (inputs, numbers), chosen)

    def step(self, last: int, masked: frozenset[int], chosen: ParameterSet | None = None) -> DeviceRun:
        """Starts one step of the requests in slots 0 to ``last``. Returns the run, whose outputs may still be computing.

        ``masked``: the slots up to ``last`` whose requests are left out. ``chosen``: the parameter set, or None for ``main``.
        Raises StateLost if the step failed and all slots' state is lost. After any other error, all slots are unchanged.
        """
        count = self._sizes[bisect.bisect_right(self._sizes, last)]
        if self._unmasked is None or self._unmasked[:2] != (count, masked):
            unmasked = np.ones(self._slots, np.bool_)
            unmasked[list(masked)] = False
            self._unmasked = count, masked, jax.device_put(unmasked[:count], self.executables.device)
        return self._run(self.executables.steps[count], (self._unmasked[2],), chosen)

    def _run(self, call: DeviceCall, given: tuple[Any, ...], chosen: ParameterSet | None) -> DeviceRun:
        executables = self.executables
        parameters = (executables.sets.main if chosen is None else chosen).on(executables.at)
        with self._precision():
            if self._carry is None:
                self._carry = executables.init(parameters)
            carry = self._carry
            try:
                made, self._carry = call(parameters, *given, carry)
                if self._remote:
                    # The rows are on their way to the host as soon as they are there.
                    made.copy_to_host_async()
            except BaseException as error:
                # A buffer that was donated says that it is deleted. Where the device took none, all is as it was.
                if any(leaf.is_deleted() for leaf in jax.tree.leaves(carry)):
                    raise self.lost() from error
                raise
        return DeviceRun(made, given)

    def find_fault(self) -> str | None:
        """Runs the model on generated requests, to find whether a request's outputs depend on other requests or on its slot.

        Returns a sentence that names the fault, or None if the test finds no fault. Also returns None, without a test, if the
        model has ``while`` loops, side effects or custom calls, or if the test would take long. Raises the model's errors.
        Call it only during the load of the model, because the test drops the state of all sequences.
        """
        used, count = self.executables, min(self._slots, _ASKED)
        shapes, insert = next(iter(used.inserts.items()))
        step = used.steps[min(each for each in used.steps if each >= count)]
        readings = [read(each.jaxpr.jaxpr) for each in used.traced.values()]
        work = max(*work_of(insert), *work_of(step)) * (count + _STEPS)
        if not 0 <= work <= TRIED_WORK or any(each.loops or not each.may_be_tried for each in readings):
            return None

        def run(requests: int, inputs: Mapping[str, Array]) -> dict[str, Array]:
            self.lost()
            own: Any = [SimpleNamespace(arrays={name: inputs[name][at] for name in inputs}) for at in range(requests)]
            size = self._insert_rows or 1
            parts = [range(requests)[at : at + size] for at in range(0, requests, size)]
            begun = [self.insert([own[at] for at in part], part).read()[: len(part)] for part in parts]
            steps = [self.step(count - 1, frozenset()).read()[:requests] for _ in range(_STEPS)]
            self.lost()
            rows = np.stack([np.concatenate(begun), *steps], axis=1)
            rows *= rows[..., self.rows.says :] & EMITS != 0  # what no client gets
            cut = [[self.rows.cut(row) for row in slot] for slot in rows]
            return {name: np.array([[each[name] for each in slot] for slot in cut]) for name in self._signature.outputs}

        specs = zip(self._signature.inputs.values(), shapes, strict=True)
        inputs = [(spec.name, spec.dtype, (count, *(shape or ()))) for spec, shape in specs]
        epsilon = max(*(each.rounding for each in readings), DEVICE_ROUNDING if self._remote else 0.0)
        return find_fault({each: functools.partial(run, each) for each in (count, 1)}, inputs, count, epsilon)

    def lost(self) -> StateLost:
        """Drops the state of all sequences after a failed run. Returns the error that the caller raises."""
        self._carry = None
        return StateLost()

    def describe(self, error: BaseException) -> str:
        """Returns the sentence for clients after a failure of the model. It has no path and no traceback."""
        return describe_failure(self._signature.model, self._version, error)

    def __repr__(self) -> str:
        return f"<SteppedModel {self._signature.model!r} of {self._slots} slots>"
