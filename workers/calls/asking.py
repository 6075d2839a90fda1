"""Calls other models from the code of host models and generators, with numpy arrays (``tensord.models``)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Unpack

import numpy as np

from tensord.shm.arrays import Array, as_strings, datatype_of
from tensord.shm.common.call import natural, read_arguments
from tensord.shm.common.scheduling import MAX_SEQUENCE_ID, Arguments
from tensord.shm.errors import InvalidArgument, ServingError
from tensord.shm.messages import PreparedRequest, RequestRecord
from tensord.workers.calls.call import ModelCall
from tensord.workers.calls.caller import asker
from tensord.workers.requests.result import Result


class Asked(Arguments, total=False):
    """The keyword arguments of a call to another model: those of any request, and the version."""

    #: 0: the newest.
    version: int


class BegunCall:
    """A call to another model that ``begin`` has sent; ``result`` waits for its outputs."""

    def __init__(self, call: ModelCall) -> None:
        self._call = call
        self._answer: Result | None = None

    def result(self) -> dict[str, Array]:
        """Waits for the outputs and returns them by name; they are read-only. Raises ServingError: the called model's error."""
        if self._answer is None:
            self._answer, _ = self._call.next()
        return _outputs(self._answer)

    def cancel(self) -> None:
        """Cancels the call, so that ``result`` raises Cancelled; does nothing if the called model has answered."""
        self._call.cancel()


def begin(model: str, inputs: Mapping[str, Any], outputs: Sequence[str] = (), **own: Unpack[Asked]) -> BegunCall:
    """Sends a request to another model and returns at once; ``result`` of the returned object waits for the outputs.

    ``outputs``: names of the wanted outputs; empty: all. ``own``: the version, parameters, priority, timeout, sequence.

    Raises InvalidArgument: an input is no array, or the caller is not the code of a model that works on a request.
    """
    call = _call(model, inputs, outputs, own, streams=False)
    call.begin()
    return BegunCall(call)


def stream(
    model: str, inputs: Mapping[str, Any], outputs: Sequence[str] = (), **own: Unpack[Asked]
) -> Iterator[dict[str, Array]]:
    """Sends a request to another model and returns at once: an iterator, which waits for each response and yields its outputs.

    ``outputs``: names of the wanted outputs; empty: all. ``own``: the version, parameters, priority, timeout, sequence.

    Raises InvalidArgument: an input is no array, or the caller is not the code of a model that works on a request. The iterator
    raises ServingError where a response is an error, and ends.
    """
    call = _call(model, inputs, outputs, own, streams=True)
    call.begin()
    return _responses(call)


def _responses(call: ModelCall) -> Iterator[dict[str, Array]]:
    final = False
    try:
        while not final:
            result, final = call.next()
            if result is not None:
                yield _outputs(result)
    finally:
        call.cancel()


def _call(model: str, inputs: Mapping[str, Any], outputs: Sequence[str], own: Asked, streams: bool) -> ModelCall:
    found = asker()
    if found is None or not found.may_call or found.port.server is None:
        raise InvalidArgument(f"model '{model}' can be called only by a model, while it works on a request")
    prepared, said = records(0, model, own)
    arrays = {name: _array(model, name, value) for name, value in inputs.items()}
    hint = f"model '{model}' answers with any number of responses: tensord.models.stream() gives them one by one"
    # A call that is made for a whole batch is traced with one of its traced requests.
    traced = next((request.timeline for request in found.requests if request.timeline is not None), None)
    return ModelCall(found, prepared, said, arrays, tuple(outputs), streams, hint, traced)


def records(number: int, model: str, own: Mapping[str, Any]) -> tuple[PreparedRequest, RequestRecord]:
    """Converts the keyword arguments of a call (``Asked``) to the two records (messages) of a request, without its tensors.

    ``number``: the request's id. Raises InvalidArgument: a value is of another type or out of range.  TypeError: a request has no
    such argument.
    """
    scheduling, said = read_arguments(own, version=natural)
    prepared = PreparedRequest(model, said.get("version", 0), parameters=said.get("parameters", {}))
    return prepared, RequestRecord.scheduled(scheduling, number, prepared, client_id=said.get("request_id", ""))


def _array(model: str, name: str, value: Any) -> Array:
    if not hasattr(value, "dtype") or datatype_of(np.dtype(value.dtype)) is None:
        raise InvalidArgument(f"input '{name}' of model '{model}' is {type(value).__name__}, an array is expected")
    # JAX's arrays are immutable and need no copy.
    return snapshot(value) if isinstance(value, np.ndarray) else np.asarray(value)


def _outputs(result: Result | None) -> dict[str, Array]:
    if isinstance(result, ServingError):
        raise result
    return {name: np.asarray(array) for name, array in (result or {}).items()}


def snapshot(array: Array) -> Array:
    """Returns a read-only copy of an array, because the array's owner or a client's next request may overwrite the original."""
    made = as_strings(array) if array.dtype.kind in "SUO" else np.array(array)
    made.flags.writeable = False
    return made


def check_sequence(sequence_id: int | str) -> None:
    """Raises InvalidArgument if the value cannot be a sequence's id: a number beyond 64 bits, or too long a text."""
    if isinstance(sequence_id, int) and not 0 <= sequence_id < 1 << 64:
        raise InvalidArgument(f"correlation ID {sequence_id} is no unsigned number of 64 bits")
    if isinstance(sequence_id, str) and (size := len(sequence_id.encode())) > MAX_SEQUENCE_ID:
        raise InvalidArgument(f"string correlation ID has {size} bytes, at most {MAX_SEQUENCE_ID} are taken")
