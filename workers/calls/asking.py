"""Lets a model's code call other models with numpy arrays, have them loaded and unloaded, and ask whether they are ready."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Unpack

import numpy as np

from tensord.shm.arrays import Array, as_strings, datatype_of
from tensord.shm.common.call import natural, read_arguments
from tensord.shm.common.scheduling import MAX_SEQUENCE_ID, Arguments
from tensord.shm.errors import InvalidArgument, ServingError
from tensord.shm.messages import PreparedRequest, RequestRecord
from tensord.shm.operations import LoadModel, ModelReady, UnloadModel
from tensord.workers.calls.call import ModelCall
from tensord.workers.calls.caller import CallerPhase, asker
from tensord.workers.requests.result import Result

#: A further argument of calls, with what checks it.
_VERSION = {"version": natural}
#: The most files, and bytes of them, of a model that another model loads.
_MAX_FILES, _MAX_BYTE_SIZE = 256, 128 << 20


class Asked(Arguments, total=False):
    """The keyword arguments with which a model calls another model: ``Arguments``, and the version of the called model."""

    #: 0: the newest.
    version: int


class BegunCall:
    """A request that ``begin`` has sent to another model. ``result`` waits for the outputs."""

    def __init__(self, call: ModelCall) -> None:
        self._call = call
        self._answer: Result | None = None

    def result(self) -> dict[str, Array]:
        """Waits for the outputs and returns them by name.

        The arrays are read-only.
        Raises ServingError: the called model's error.
        """
        if self._answer is None:
            self._answer, _ = self._call.next()
        return _outputs(self._answer)

    def cancel(self) -> None:
        """Cancels the call, so that ``result`` raises Cancelled. Has no effect once the called model has answered."""
        self._call.cancel()


def begin(model: str, inputs: Mapping[str, Any], outputs: Sequence[str] = (), **arguments: Unpack[Asked]) -> BegunCall:
    """Sends a request to another model without waiting for the answer.

    Implements ``tensord.models.begin``. ``inputs``: arrays by name. ``outputs``: names of the wanted outputs; empty: all.
    ``arguments``: other fields of the request, such as ``version``.
    """
    call = _call(model, inputs, outputs, arguments, streams=False)
    call.begin()
    return BegunCall(call)


def stream(
    model: str, inputs: Mapping[str, Any], outputs: Sequence[str] = (), **arguments: Unpack[Asked]
) -> Iterator[dict[str, Array]]:
    """Sends a request to another model and returns an iterator over the responses.

    Implements ``tensord.models.stream``. ``inputs``: arrays by name. ``outputs``: names of the wanted outputs; empty: all.
    ``arguments``: other fields of the request, such as ``version``.
    """
    call = _call(model, inputs, outputs, arguments, streams=True)
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


def _call(model: str, inputs: Mapping[str, Any], outputs: Sequence[str], arguments: Asked, streams: bool) -> ModelCall:
    found = asker()
    if found is None or not found.may_call or found.port.server is None:
        raise InvalidArgument(f"model '{model}' can be called only by the code of a model that is served")
    prepared, said = records(0, model, arguments)
    arrays = {name: _array(model, name, value) for name, value in inputs.items()}
    hint = f"model '{model}' answers with any number of responses: tensord.models.stream() gives them one by one"
    # A call that is made for a whole batch is traced with one of its traced requests.
    traced = next((request.timeline for request in found.requests if request.timeline is not None), None)
    return ModelCall(found, prepared, said, arrays, tuple(outputs), streams, hint, traced)


def records(number: int, model: str, arguments: Mapping[str, Any]) -> tuple[PreparedRequest, RequestRecord]:
    """Makes the two records of a request to ``model``, without tensors: the part that repeats, and the part that does not.

    ``number``: the request's number on its lane. ``arguments``: the fields of the request by name.
    Raises InvalidArgument: a value has the wrong type or is out of range. Raises TypeError: a key of
    ``arguments`` is not the name of a request's field.
    """
    scheduling, said = read_arguments(arguments, others=_VERSION)
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
    """Returns a read-only copy of an array."""
    made = as_strings(array) if array.dtype.kind in "SUO" else np.array(array)
    made.flags.writeable = False
    return made


def check_sequence(sequence_id: int | str) -> None:
    """Raises InvalidArgument if ``sequence_id`` is a number outside 0 to 2^64 - 1, or a text of more than 128 UTF-8 bytes."""
    if isinstance(sequence_id, int) and not 0 <= sequence_id < 1 << 64:
        raise InvalidArgument(f"correlation ID {sequence_id} is no unsigned number of 64 bits")
    if isinstance(sequence_id, str) and (size := len(sequence_id.encode(errors="replace"))) > MAX_SEQUENCE_ID:
        raise InvalidArgument(f"string correlation ID has {size} bytes, at most {MAX_SEQUENCE_ID} are taken")


class NotAllowed(InvalidArgument):
    """Raised if the running code may not load, unload or ask about other models."""


def load(name: str, config: str = "", files: Mapping[str, bytes] | None = None) -> None:
    """Asks the daemon to load the model ``name``, and waits until it is loaded.

    Implements ``tensord.models.load_model``. ``config``: the configuration as JSON; "": the one in the repository. ``files``:
    contents of files by path; the model then consists of these files only. None: the files in the repository.
    Raises NotAllowed if the caller is not the code of a model that is being loaded or served. Raises ServingError if the load
    fails.
    """
    given = {path.removeprefix("file:"): bytes(content) for path, content in (files or {}).items()}
    total = sum(map(len, given.values()))
    if len(given) > _MAX_FILES or total > _MAX_BYTE_SIZE:
        raise InvalidArgument(
            f"{len(given)} files of {total} bytes together are given, at most {_MAX_FILES} of {_MAX_BYTE_SIZE} are allowed"
        )
    _ask(LoadModel(name, config, given))


def unload(name: str, dependents: bool = False) -> None:
    """Begins to unload the model ``name``.

    Implements ``tensord.models.unload_model``. ``dependents``: True to unload also models that were loaded only as members of
    the ensemble ``name``.
    Raises NotAllowed: the caller is not the code of a model that is being loaded or served. Raises ServingError: the daemon
    refuses.
    """
    _ask(UnloadModel(name, dependents))


def is_ready(name: str, version: int = 0) -> bool:
    """Returns whether version ``version`` of a model answers requests. Version 0 stands for any version.

    Implements ``tensord.models.is_ready``.
    Raises NotAllowed: the caller is not the code of a model that is being loaded or served. Raises ServingError: the daemon
    cannot say.
    """
    return bool(json.loads(_ask(ModelReady(name, version))))


def _ask(operation: LoadModel | UnloadModel | ModelReady) -> bytes:
    found = asker()
    if found is None or found.port.server is None or found.phase is CallerPhase.APART:
        raise NotAllowed("models are loaded only by a model that is being loaded or served")
    return found.port.server.ask(operation, found.port)
