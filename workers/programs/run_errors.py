"""Explains why a run failed: the device has failed, or it had no memory left for the run.

An error of the device may be raised by the call or when its outputs are awaited, so the device is checked after every failure.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import jax

from tensord.shm.errors import Internal, ServingError, Unavailable
from tensord.workers.tensors.request_tensors import RequestTensors

_log = logging.getLogger(__name__)

#: Checks the device. Raises DeviceLost: the device has failed and this process cannot use it any more.
CheckDevice = Callable[[], None]
_EXHAUSTED = "RESOURCE_EXHAUSTED"
#: Characters of XLA's message that are passed on; the rest are tables of its allocations.
_SHOWN = 300


def works() -> None:
    """Does nothing. A worker that cannot check whether its device has failed calls this function instead of a check."""


def is_out_of_memory(error: BaseException) -> bool:
    """Returns whether XLA has reported by this error that the device has too little memory."""
    return isinstance(error, jax.errors.JaxRuntimeError) and _EXHAUSTED in str(error)


def memory_needed(program: Any, held: int | None = None) -> int | None:
    """Returns how many bytes a run of a compiled program allocates for outputs and intermediate values, or None if unknown.

    ``held``: the bytes of arguments that are on the device already. If given, the result includes all further argument bytes.
    """
    try:
        found: Any = program.memory_analysis()
        arguments = 0 if held is None else max(0, found.argument_size_in_bytes - held)
        return int(arguments + found.temp_size_in_bytes + found.output_size_in_bytes)
    except Exception:  # not every back end has the figures, and another jaxlib may have others
        return None


def out_of_memory(error: BaseException, requests: Sequence[RequestTensors], program: int | None) -> Unavailable:
    """Returns the error for requests that need more memory than the device has. The message has their rows and input bytes.

    ``error``: the error of the run. ``program``: the bytes that the program needs besides its parameters, or None if unknown.
    """
    byte_size = sum([array.nbytes for request in requests for array in request.arrays.values()])
    rows = sum([request.rows for request in requests])
    needed = "" if program is None else f", a program that needs {program} bytes besides its parameters"
    said = next((line.strip() for line in str(error).splitlines() if line.strip()), "")[:_SHOWN]
    return Unavailable(
        f"model '{requests[0].prepared.model}': the device has no memory left for this request ({rows} rows, {byte_size} bytes "
        f"of inputs{needed}): {said}"
    )


def compile_error(error: Exception, requests: Sequence[RequestTensors], version: int, said: str) -> ServingError:
    """Makes the error for requests whose program could not be compiled: Unavailable if memory ran out, else Internal.

    A ServingError is returned unchanged. The cause of an Internal error is logged. ``version``: the model's version, for the log.
    ``said``: the description of ``error`` for clients.
    """
    if isinstance(error, ServingError):
        return error
    if is_out_of_memory(error):
        return out_of_memory(error, requests, None)
    name = requests[0].prepared.model
    _log.error("compiling model '%s' version %d failed", name, version, exc_info=error)
    return Internal(f"model '{name}' cannot be compiled for these shapes: {said}")


def describe_failure(model: str, version: int, error: BaseException) -> str:
    """Returns the sentence for clients when a model version failed. It has the error's type, and nothing of the message."""
    return f"model '{model}' version {version} failed with {type(error).__name__}"
