"""Keeps the state of sequences for models whose state may vary in size. Each sequence has its own arrays, in host memory.

``FreeState.attach`` adds a sequence's state to the inputs of the sequence's next request. The model's program returns the new
state as further outputs. ``FreeState.keep`` stores the new state until the sequence's next request.

A failed run does not change the stored state. Only the worker's loop may call ``attach`` and ``keep``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from tensord.shm.arrays import Array
from tensord.shm.errors import InvalidArgument, ServingError, Unavailable, Unsupported
from tensord.workers.programs.carry import checked
from tensord.workers.requests.result import Result
from tensord.workers.scheduling.sequence import LiveSequence
from tensord.workers.tensors.buckets import Buckets, RequestShapes
from tensord.workers.tensors.request_tensors import RequestTensors
from tensord.workers.tensors.signature import Signature


class Unfit:
    """The batching key of a request whose inputs do not fit its sequence's state. It equals no other key."""

    def __init__(self, error: InvalidArgument) -> None:
        #: The error for which the request cannot run.
        self.error = error


def program_signature(described: Signature) -> Signature:
    """Returns the signature of a model's program, whose inputs and outputs include the state of sequences.

    ``described``: the signature that clients see. Raises Unsupported if the model has ragged inputs.
    """
    if described.ragged:
        name = described.states[0].name
        raise Unsupported(
            f"model '{described.model}': state '{name}' varies in size, which is not possible beside ragged inputs"
        )
    inputs = {spec.name: spec for spec in described.states}
    outputs = {spec.output: replace(spec, name=spec.output) for spec in described.states}
    return replace(
        described, inputs={**described.inputs, **inputs}, outputs={**outputs, **described.outputs}, states=(), slots=0
    )


def travelling(apply: Callable[..., Any], described: Signature) -> Callable[[Any, dict[str, Any]], dict[str, Any]]:
    """Wraps the model function ``apply`` so that its inputs include the old state, and its outputs include the new state.

    ``apply`` is called with parameters, inputs and state. ``described`` declares the names of the state's arrays.
    """
    names = [spec.name for spec in described.states]

    def step(parameters: Any, inputs: dict[str, Any]) -> dict[str, Any]:
        state = {name: inputs[name] for name in names}
        own = {name: array for name, array in inputs.items() if name not in state}
        outputs, made = checked(described, state[names[0]].shape[0], apply(parameters, own, state))
        return {**outputs, **made}

    return step


class FreeState:
    """Passes each sequence's state, whose shape may vary, from one request's result to the next request's inputs."""

    def __init__(self, described: Signature, buckets: Buckets, initial: Mapping[str, Array], limit: int) -> None:
        """Begins without sequences.

        Args:
          described: the inputs and outputs that clients send and get, and the state.
          buckets: the sizes to which inputs and state are padded.
          initial: state name -> the array with which a sequence begins; other states begin as zeros.
          limit: the most bytes that the state of all sequences together may have.
        """
        self._described = described
        self._shapes = RequestShapes(buckets.signature, buckets)
        self._initial = initial
        self._limit = limit
        #: The bytes of all sequences, with those of ended ones until they are counted again.
        self._byte_size = 0

    def attach(self, request: RequestTensors) -> None:
        """Adds the state of a request's sequence to the request's inputs, and sets ``request.key``.

        Requests with equal keys can run in one batch. If the state does not fit the inputs, the key is an ``Unfit``, which holds
        the error for the client.
        """
        kept = None if request.controls.start else request.live.kept
        try:
            states = self.begun(request.arrays, request.rows) if kept is None else self._fitting(request, kept)
            arrays = {**request.arrays, **states}
            request.key = self._shapes.key(arrays)
        except InvalidArgument as error:
            request.key = Unfit(InvalidArgument(request.label + error.message))
            return
        request.keep(arrays)

    def _fitting(self, request: RequestTensors, state: Mapping[str, Array]) -> Mapping[str, Array]:
        lengths = self._lengths(request.arrays)
        for spec in self._described.states:
            for axis, size in zip(spec.axes, state[spec.name].shape[self._described.batches :], strict=True):
                if axis is not None and lengths.get(axis, size) != size:
                    raise InvalidArgument(
                        f"axis '{axis}' has size {lengths[axis]} in a request to model '{self._described.model}', "
                        f"{size} in state '{spec.name}' of sequence {request.controls.correlation_id}"
                    )
        return state

    def _lengths(self, arrays: Mapping[str, Array]) -> dict[str, int]:
        return self._shapes.lengths({name: array for name, array in arrays.items() if name in self._described.inputs})

    def begun(self, arrays: Mapping[str, Array], rows: int) -> dict[str, Array]:
        """Returns the initial state of a new sequence, as arrays by state name.

        ``arrays``: the inputs of the sequence's first request, whose sizes are used for state axes without a declared size.
        ``rows``: the number of rows in the first request. Raises InvalidArgument if inputs have different sizes for one axis.
        """
        lengths = self._lengths(arrays)
        lead = (rows,) if self._described.batches else ()
        found: dict[str, Array] = {}
        for spec in self._described.states:
            axes = zip(spec.dims, spec.axes, strict=True)
            shape = tuple([lengths.get(axis or "", 1) if dim == -1 else dim for dim, axis in axes])
            value = self._initial.get(spec.name)
            if value is None or value.ndim == 0:
                value = np.full(shape, 0 if value is None else value, spec.dtype)
            found[spec.name] = np.broadcast_to(value, (*lead, *value.shape))
        return found

    def keep(
        self,
        requests: Sequence[RequestTensors],
        results: Sequence[Result],
        live: Callable[[], Iterable[LiveSequence[Any]]],
    ) -> list[Result]:
        """Stores the new state of each request's sequence after a run. Returns the results of the run without the states.

        ``live``: returns all sequences of the model. All their states together have a size limit. If a new state would exceed
        the limit, the state is not stored, and the result of its request is the error Unavailable.
        """
        return [
            result if isinstance(result, ServingError) else self._kept(request, result, live)
            for request, result in zip(requests, results, strict=True)
        ]

    def _kept(
        self, request: RequestTensors, result: Mapping[str, Array], live: Callable[[], Iterable[LiveSequence[Any]]]
    ) -> Result:
        sequence = request.live
        made: dict[str, Array] | None = None
        if not request.controls.end:
            # Of its own: what is cut from a batch would keep all of it.
            made = {spec.name: np.array(result[spec.output]) for spec in self._described.states}
        size, before = _byte_size(made), _byte_size(sequence.kept)
        if self._byte_size + size - before > self._limit:
            self._byte_size = sum(_byte_size(each.kept) for each in live())
        others = self._byte_size - before
        if others + size > self._limit:
            return Unavailable(
                f"{request.label}the state of sequence {request.controls.correlation_id} of model '{self._described.model}' "
                f"would have {size} bytes beside {others} of other sequences, "
                f"executables.max_state_byte_size allows {self._limit}"
            )
        sequence.kept, self._byte_size = made, others + size
        return {name: array for name, array in result.items() if name in self._described.outputs}

    def __repr__(self) -> str:
        return f"<FreeState {self._byte_size} of {self._limit} bytes>"


def _byte_size(state: Mapping[str, Array] | None) -> int:
    return sum(array.nbytes for array in state.values()) if state else 0
