"""Sends requests of models to other models (Triton's BLS): part of ``triton_python_backend_utils`` (see ``interface``).

Source: triton-inference-server/python_backend, src/pb_response_iterator.cc and src/request_executor.cc.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Sequence

import numpy as np

from tensord.shm.errors import Cancelled, InvalidArgument, NotFound, ServingError, Unavailable
from tensord.shm.messages import PreparedRequest, RequestRecord
from tensord.workers.calls.call import ModelCall
from tensord.workers.calls.caller import asker
from tensord.workers.python_backend.errors import ErrorCode, TritonError, TritonModelException
from tensord.workers.python_backend.response import InferenceResponse
from tensord.workers.python_backend.tensors import Tensor
from tensord.workers.requests.result import Response, Result
from tensord.workers.requests.timeline import RequestTimeline

_Answer = tuple[Result | None, bool]


def call_of(
    prepared: PreparedRequest,
    own: RequestRecord,
    inputs: Sequence[Tensor],
    outputs: tuple[str, ...],
    decoupled: bool,
    timeline: RequestTimeline | None,
) -> ModelCall | InferenceResponse:
    """Prepares a call of another model for an ``InferenceRequest``, to be sent by the caller.

    Returns an error response instead if two inputs have the same name.

    Args:
      prepared: model, version and parameters of the request.
      own: id, priority, timeout and sequence of the request.
      outputs: the names of the outputs that are asked for.
      decoupled: whether the called model may send any number of responses.
      timeline: the timeline of the traced request on whose behalf the call is made; None: it is not traced.

    Raises TritonModelException: no model may be called from the running code.
    """
    try:
        found = asker()
    except InvalidArgument as error:
        raise TritonModelException(error.message) from None
    if found is None or not found.may_call or found.port.server is None:
        raise TritonModelException("BLS is only supported during the 'execute' function.")
    arrays = {tensor.name(): tensor.for_call() for tensor in inputs}
    if len(arrays) < len(inputs):
        names = [tensor.name() for tensor in inputs]
        twice = next(name for name in names if names.count(name) > 1)
        message = f"Model {prepared.model} - Error when running inference: input '{twice}' already exists in request"
        return InferenceResponse(error=TritonError(message))
    hint = (
        f"Model {prepared.model} is using the decoupled. The current BLS request call doesn't support models using the decoupled "
        "transaction policy. Please use 'decoupled=True' argument to the 'exec' or 'async_exec' calls for decoupled models.'"
    )
    return ModelCall(found, prepared, own, arrays, outputs, decoupled, hint, timeline)


def response_of(result: Result | None) -> InferenceResponse:
    """Converts the result of a called model to the response that the calling model gets.

    ``result``: None: the response has no tensors.
    """
    if isinstance(result, ServingError):
        return InferenceResponse(error=TritonError(result.message, ErrorCode.of(result.code)))
    tensors = [Tensor.shared(name, np.asarray(array)) for name, array in (result or {}).items()]
    return InferenceResponse(tensors, parameters=result.parameters if isinstance(result, Response) else None)


def answer_of(call: ModelCall, first: _Answer) -> InferenceResponse | ResponseIterator:
    """Returns the value of ``InferenceRequest.exec``: the response, or an iterator over the responses if the call is decoupled.

    ``first``: the first response that has come, and whether it is the last.
    """
    if call.refused and isinstance(first[0], ServingError):
        return one_response(_refusal(call, first[0]), call.streams)
    return ResponseIterator(call, first) if call.streams else response_of(first[0])


def _refusal(call: ModelCall, error: ServingError) -> InferenceResponse:
    """Returns the error response, in Triton's words, for a call that could not be made because of ``error``."""
    why = "Failed for execute the inference request. " if isinstance(error, NotFound) else ""
    code = ErrorCode.of(error.code) if isinstance(error, Cancelled | Unavailable) else ErrorCode.INTERNAL
    message = f"Model {call.prepared.model} - Error when running inference: {why}{error.message}"
    return InferenceResponse(error=TritonError(message, code))


def one_response(response: InferenceResponse, decoupled: bool) -> InferenceResponse | ResponseIterator:
    """Returns the value of ``InferenceRequest.exec`` if no model was called: ``response``, as an iterator if ``decoupled``."""
    return ResponseIterator(None, (None, True), response) if decoupled else response


async def first_answer(call: ModelCall, first: asyncio.Task[_Answer]) -> InferenceResponse | ResponseIterator:
    return answer_of(call, await first)


class ResponseIterator:
    """Iterates over the responses to one call, waiting for each. It stores them, so that a second iteration gets them again."""

    def __init__(self, call: ModelCall | None, first: _Answer, response: InferenceResponse | None = None) -> None:
        """
        Args:
          call: the call, from which further responses come; None: no model was called.
          first: the first response, and whether it is the last.
          response: replaces the response in ``first``; None: that is used.
        """
        self._call = None if first[1] else call
        self._kept = [response or response_of(first[0])]
        self._at = 0
        self._lock = threading.Lock()

    def __iter__(self) -> ResponseIterator:
        if self._call is None and self._at >= len(self._kept):
            self._at = 0
        return self

    def __next__(self) -> InferenceResponse:
        with self._lock:
            if self._at >= len(self._kept):
                if self._call is None:
                    raise StopIteration
                result, final = self._call.next()
                self._kept.append(response_of(result))
                if final:
                    self._call = None
            self._at += 1
            return self._kept[self._at - 1]

    def cancel(self) -> None:
        """Asks the called model to stop. Responses that it sends after that still come; if it has not begun, an error comes."""
        call = self._call
        if call is not None:
            call.stop()

    def __del__(self) -> None:
        # The called model goes on, and its responses are discarded.
        with contextlib.suppress(AttributeError):
            if self._call is not None:
                self._call.abandon()
