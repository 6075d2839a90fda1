"""Requests that a model gets, or sends to other models: part of ``triton_python_backend_utils`` (see ``interface``).

Source: triton-inference-server/python_backend, README "Business Logic Scripting"; src/infer_request.cc has the errors' words, and
src/pb_response_iterator.cc and src/request_executor.cc say how requests of models (Triton's BLS) are sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import json
import threading
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, SupportsIndex

import numpy as np

from tensord.shm.common.scheduling import set_named
from tensord.shm.errors import Cancelled, InvalidArgument, NotFound, ServingError, Unavailable
from tensord.shm.messages import PreparedRequest, RequestRecord
from tensord.workers.calls.asking import check_sequence
from tensord.workers.calls.call import ModelCall
from tensord.workers.calls.caller import asker
from tensord.workers.python_backend.errors import ErrorCode, TritonError, TritonModelException
from tensord.workers.python_backend.response import InferenceResponse, InferenceResponseSender, checked_parameters
from tensord.workers.python_backend.tensors import Tensor
from tensord.workers.requests.result import Response, Result
from tensord.workers.requests.timeline import RequestTimeline

if TYPE_CHECKING:
    from tensord.workers.models.python_model import ResponseWriter


TRITONSERVER_REQUEST_RELEASE_ALL = 1
TRITONSERVER_REQUEST_RELEASE_RESCHEDULE = 2
TRITONSERVER_REQUEST_FLAG_SEQUENCE_START = 1
TRITONSERVER_REQUEST_FLAG_SEQUENCE_END = 2


class MemoryType(enum.Enum):
    """The kinds of memory that tensors may be in: that of the processor, and that of a GPU."""

    TRITONSERVER_MEMORY_GPU = enum.auto()
    TRITONSERVER_MEMORY_CPU = enum.auto()


TRITONSERVER_MEMORY_GPU = MemoryType.TRITONSERVER_MEMORY_GPU
TRITONSERVER_MEMORY_CPU = MemoryType.TRITONSERVER_MEMORY_CPU


class InferenceTrace:
    """The trace of a request. A model passes it to its requests to other models, which are then part of that trace."""

    def __init__(self, timeline: RequestTimeline | None = None) -> None:
        """``timeline``: the traced request's timeline; None: the request is not traced."""
        self.timeline = timeline

    def get_context(self) -> str | None:
        """Returns the OpenTelemetry context for spans in the request's trace, as JSON: ``{"traceparent": ...}``.

        None: the request is not traced, or its trace goes to a file.
        """
        context = None if self.timeline is None else self.timeline.context
        if context is None or not context.span_id:
            return None
        return json.dumps({"traceparent": f"00-{context.trace_id}-{context.span_id}-01"})


class PreferredMemory:
    """The kind of memory that another model's outputs should be in. It has no effect: outputs are always numpy arrays."""

    def __init__(self, preferred_memory_type: MemoryType, preferred_device_id: int = 0) -> None:
        self.preferred_memory_type = preferred_memory_type
        self.preferred_device_id = preferred_device_id


_CPU_MEMORY = PreferredMemory(TRITONSERVER_MEMORY_CPU)
_NO_TRACE = InferenceTrace()
#: The types of arguments of ``InferenceRequest``.
_TYPES: dict[str, Any] = {
    "request_id": str | bytes,
    "inputs": Iterable,
    "requested_output_names": Iterable,
    "model_name": str | bytes,
    "model_version": SupportsIndex,
    "flags": SupportsIndex,
    "timeout": SupportsIndex,
    "preferred_memory": PreferredMemory,
    "trace": InferenceTrace,
}


class InferenceRequest:
    """A request that a model's ``execute`` gets, or that a model makes to another model."""

    def __init__(
        self,
        request_id: str = "",
        correlation_id: int | str = 0,
        inputs: Iterable[Tensor] | None = None,
        requested_output_names: Iterable[str] | None = None,
        model_name: str | bytes | None = None,
        model_version: int = -1,
        flags: int = 0,
        timeout: int = 0,
        preferred_memory: PreferredMemory = _CPU_MEMORY,
        trace: InferenceTrace = _NO_TRACE,
        parameters: Mapping[str, Any] | str | None = None,
        cancelled: Callable[[], bool] | None = None,
        writer: Callable[[], ResponseWriter] | None = None,
        timeline: RequestTimeline | None = None,
    ) -> None:
        """Makes a request. Models leave out the last three arguments: the worker sets them for requests that ``execute`` gets.

        A model has to give ``inputs``, ``requested_output_names`` and ``model_name``; no argument but ``parameters`` may be None.

        Args:
          trace: the trace of the request on whose behalf this one is made.
          cancelled: returns whether the client has cancelled the request.
          writer: makes the object that a response sender writes to.
          timeline: the request's timeline, if it is traced.

        Raises TritonModelException: the request is malformed; TypeError: an argument is missing or of another type.
        """
        if writer is None:
            given = locals()
            for name, kind in _TYPES.items():
                if not isinstance(given[name], kind):
                    raise TypeError(f"InferenceRequest: {name} cannot be {given[name]!r}")
        assert inputs is not None
        assert requested_output_names is not None
        assert model_name is not None
        self._request_id = request_id
        self._correlation_id = correlation_id
        self._inputs = list(inputs)
        self._requested = sorted(set(requested_output_names))
        self._model_name = _text(model_name)
        self._model_version = model_version
        self._flags = flags
        self._timeout = timeout
        self._parameters = parameters if isinstance(parameters, str) else json.dumps(checked_parameters(parameters))
        if writer is None:
            self._check(requested_output_names)
        self._cancelled = cancelled
        self._writer = writer
        self._trace = trace
        self._timeline = timeline
        #: The response sender, once it was asked for.
        self.sender: InferenceResponseSender | None = None
        #: Whether the request is done after ``execute``, or goes round again.
        self.release_flags = TRITONSERVER_REQUEST_RELEASE_ALL

    def _check(self, names: object) -> None:
        """Checks what a model has given. ``names``: the requested outputs. Raises what the constructor raises."""
        if self._correlation_id is None:
            raise TypeError("InferenceRequest: correlation_id cannot be None")
        if not isinstance(self._correlation_id, int | str):
            raise TritonModelException("Correlation ID must be integer or string")
        of = f"for request with id '{self._request_id}' and model name '{self._model_name}' should not be empty."
        for tensor in self._inputs:
            if tensor is None:
                raise TritonModelException(f"Input tensor {of}")
            if not isinstance(tensor, Tensor):
                raise TypeError(f"inputs are of type Tensor, found {type(tensor).__name__}")
        for name in (names,) if isinstance(names, str | bytes) else self._requested:
            if name is names or not isinstance(name, str | bytes):
                raise TypeError(f"requested_output_names are a list of str, found {name!r}")
        if "" in self._requested:
            raise TritonModelException(f"Requested output name {of}")

    def inputs(self) -> list[Tensor]:
        return self._inputs

    def request_id(self) -> str:
        return self._request_id

    def correlation_id(self) -> int | str:
        return self._correlation_id

    def requested_output_names(self) -> list[str]:
        return self._requested

    def model_name(self) -> str:
        return self._model_name

    def flags(self) -> int:
        """Returns the request's sequence flags. Bit 0: the request starts its sequence; bit 1: the request ends it."""
        return self._flags

    def set_flags(self, flags: int) -> None:
        self._flags = flags

    def set_release_flags(self, flags: int) -> None:
        """Sets what happens to the request after ``execute``.

        With the flag RESCHEDULE a later batch has the request again (iterative sequences), and ``execute`` must return None for
        it; other flags change nothing.
        """
        self.release_flags = flags

    def timeout(self) -> int:
        """Returns the client's queue timeout in microseconds; 0: none."""
        return self._timeout

    def parameters(self) -> str:
        """Returns the request's custom parameters, as JSON text."""
        return self._parameters

    def is_cancelled(self) -> bool:
        return self._cancelled is not None and self._cancelled()

    def trace(self) -> InferenceTrace:
        """Returns the trace to pass to requests that a model makes on behalf of this one."""
        return InferenceTrace(self._timeline) if self._trace is _NO_TRACE else self._trace

    def get_response_sender(self) -> InferenceResponseSender:
        """Returns the sender of responses to this request: any number of them if the model is decoupled, else one."""
        if self.sender is None:
            if self._writer is None:
                raise TritonModelException("Only a request that execute() was given has a response sender.")
            self.sender = InferenceResponseSender(self._writer())
        return self.sender

    def exec(self, decoupled: bool = False) -> InferenceResponse | ResponseIterator:
        """Sends the request to the model that it names, and waits for the response, or if ``decoupled`` for the first one.

        Raises TritonModelException: the running code may not call models, or the request is malformed. Any other failure is an
        error of the response.
        """
        call = self._call(decoupled)
        if isinstance(call, InferenceResponse):
            return one_response(call, decoupled)
        call.begin()
        return answer_of(call, call.next())

    def async_exec(self, decoupled: bool = False) -> Awaitable[InferenceResponse | ResponseIterator]:
        """Sends the request as ``exec`` does, and returns an awaitable for what ``exec`` returns.

        Raises what ``exec`` raises; RuntimeError: no event loop runs in this thread.
        """
        loop = asyncio.get_running_loop()
        call = self._call(decoupled)
        if isinstance(call, InferenceResponse):
            done: asyncio.Future[InferenceResponse | ResponseIterator] = loop.create_future()
            done.set_result(one_response(call, decoupled))
            return done
        call.begin(by_coroutine=True)
        return asyncio.ensure_future(first_answer(call, call.first()))

    def _call(self, decoupled: bool) -> ModelCall | InferenceResponse:
        """Prepares the call for this request, to be sent by the caller. Returns an error response if its inputs are wrong.

        Raises TritonModelException: the request is malformed, or the running code may not call models.
        """
        if not self._model_name:
            raise TritonModelException("A request to a model needs its model_name.")
        sequence = self._correlation_id
        try:
            check_sequence(sequence)
        except InvalidArgument as error:
            raise TritonModelException(error.message) from None
        if self._timeout < 0:
            raise TritonModelException(f"timeout is {self._timeout}, it cannot be negative")
        try:
            parameters, parameter_set = set_named(json.loads(self._parameters))
        except InvalidArgument as error:
            raise TritonModelException(error.message) from None
        prepared = PreparedRequest(self._model_name, max(0, self._model_version), parameters=parameters)
        own = RequestRecord(
            0,
            prepared,
            client_id=_text(self._request_id),
            timeout_us=self._timeout,
            sequence_id=sequence,
            sequence_start=bool(self._flags & TRITONSERVER_REQUEST_FLAG_SEQUENCE_START),
            sequence_end=bool(self._flags & TRITONSERVER_REQUEST_FLAG_SEQUENCE_END),
            parameter_set=parameter_set,
        )
        outputs = tuple(map(_text, self._requested))
        return call_of(prepared, own, self._inputs, outputs, decoupled, self._trace.timeline)


def _text(given: str | bytes) -> str:
    """Returns a name as text; models may pass names as bytes, taken from BYTES tensors."""
    return given.decode() if isinstance(given, bytes) else given


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
