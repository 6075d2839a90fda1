"""Requests that a model gets or sends to other models, and responses: part of ``triton_python_backend_utils`` (``interface``).

Source: triton-inference-server/python_backend. The classes are described in the README, "Business Logic Scripting" and
"Decoupled mode". Error texts are from src/infer_request.cc and src/response_sender.cc. src/pb_response_iterator.cc and
src/request_executor.cc show how a model's requests to other models (Triton's BLS) are sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import json
import threading
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, SupportsIndex

import numpy as np

from tensord.shm.common.call import plain_parameters
from tensord.shm.common.scheduling import set_named
from tensord.shm.errors import Cancelled, InvalidArgument, NotFound, ServingError, Unavailable
from tensord.shm.messages import Parameter, PreparedRequest, RequestRecord
from tensord.workers.calls.asking import check_sequence
from tensord.workers.calls.call import ModelCall
from tensord.workers.calls.caller import asker
from tensord.workers.python_backend.errors import ErrorCode, TritonError, TritonModelException
from tensord.workers.python_backend.tensors import Tensor
from tensord.workers.requests.response_sender import ResponseSender, SenderClosed
from tensord.workers.requests.result import Response, Result, checked_parameters
from tensord.workers.requests.timeline import RequestTimeline

if TYPE_CHECKING:
    from tensord.workers.requests.request import Request

TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1
TRITONSERVER_REQUEST_RELEASE_ALL = 1
TRITONSERVER_REQUEST_RELEASE_RESCHEDULE = 2
TRITONSERVER_REQUEST_FLAG_SEQUENCE_START = 1
TRITONSERVER_REQUEST_FLAG_SEQUENCE_END = 2


# ------------------------------------------------------------------------------------------------------------- responses


class InferenceResponse:
    """A response to one request: output tensors and parameters, or an error."""

    def __init__(
        self,
        output_tensors: Iterable[Tensor] = (),
        error: TritonError | Exception | str | None = None,
        parameters: Mapping[str, Parameter] | None = None,
    ) -> None:
        """Makes a response. ``error``: the client gets it instead of the tensors; None: the client gets the tensors.

        Raises TritonModelException: an output is None, or a parameter cannot be sent. Raises TypeError: an output is no
        ``Tensor``.
        """
        self._output_tensors = list(output_tensors)
        if None in self._output_tensors:
            raise TritonModelException("Output tensor for inference response should not be empty.")
        for tensor in self._output_tensors:
            if not isinstance(tensor, Tensor):
                raise TypeError(f"output_tensors are of type Tensor, found {type(tensor).__name__}")
        self._error = error
        self._parameters = _plain_parameters(parameters)

    def output_tensors(self) -> list[Tensor]:
        return self._output_tensors

    def has_error(self) -> bool:
        return self._error is not None

    def error(self) -> Any:
        return self._error

    def parameters(self) -> str:
        """Returns the response's parameters, as JSON text."""
        return json.dumps(self._parameters)


def parameters_of(response: InferenceResponse) -> dict[str, Parameter]:
    """Returns a response's parameters as they are sent to the client."""
    return response._parameters


def _plain_parameters(parameters: Any) -> dict[str, Parameter]:
    """Returns ``parameters``, a mapping from names to values, as a dict of plain values. None becomes an empty dict.

    Raises TritonModelException: ``parameters`` is no mapping, a name is no str, a value is no bool, 64-bit int or str, a str
    cannot be encoded in UTF-8, or all parameters together have more than 1 MiB as JSON.
    """
    if parameters is None:
        return {}
    if not isinstance(parameters, Mapping):
        raise TritonModelException(f"Expect parameters to have type dict, found type {type(parameters)}")
    for key, value in parameters.items():
        if not isinstance(key, str):
            raise TritonModelException(f"Expect parameters keys to have type str, found type {type(key)}")
        if not isinstance(value, bool | int | str):
            raise TritonModelException(f"Expect parameters values to have type bool/int/str, found type {type(value)}")
    try:
        return checked_parameters(parameters)
    except InvalidArgument as error:
        raise TritonModelException(error.message) from None


class InferenceResponseSender:
    """Sends the responses to one request. Any thread may use it, also after ``execute`` has returned."""

    def __init__(
        self,
        request: Request,
        sender: ResponseSender,
        decoupled: bool,
        answer: Callable[[Request, InferenceResponse], Result],
    ) -> None:
        """Makes a sender of responses to ``request``, by the worker's ``sender``. ``answer``: converts a model's response."""
        self._request = request
        self._sender = sender
        self._decoupled = decoupled
        self._answer = answer
        sender.hold()
        self._lock = threading.Lock()
        self._sent = 0
        self._closed = False

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        """Sends a response. The flag COMPLETE_FINAL closes the sender, and then ``response`` may be None.

        Raises TritonModelException: the sender is closed, there is nothing to send, or a model that is not decoupled sends more
        than one response.
        """
        if flags not in (0, TRITONSERVER_RESPONSE_COMPLETE_FINAL):
            raise TritonModelException("Unable to send response. Unsupported flag provided.")
        if response is None:
            if not flags:
                raise TritonModelException(
                    "Inference Response object must be provided when the response flags is set to zero."
                )
        elif not isinstance(response, InferenceResponse):
            raise TypeError(f"send() takes an InferenceResponse, not {type(response).__name__}")
        final = bool(flags)
        with self._lock:
            self._check(response, final)
            self._sent += 1
            self._closed = final
            if response is not None or self._decoupled:
                # One that was ended for the model sends to nobody.
                with contextlib.suppress(SenderClosed):
                    self._sender.send(None if response is None else self._answer(self._request, response), final)

    def _check(self, response: InferenceResponse | None, final: bool) -> None:
        if not self._decoupled:
            if response is not None and self._sent:
                raise TritonModelException(
                    "Unable to send response. Non-decoupled model cannot send more than one response."
                )
            if response is None and final and not self._sent:
                raise TritonModelException(
                    "Unable to send response. Non-decoupled model cannot send complete final before sending a response."
                )
        if self._closed:
            raise TritonModelException("Unable to send response. Response sender has been closed.")

    def is_cancelled(self) -> bool:
        return self._sender.is_cancelled or self._request.is_cancelled

    def __del__(self) -> None:
        # A model that has not sent its final response is done once it cannot send it any more.
        with contextlib.suppress(AttributeError):
            self._sender.let_go()


# -------------------------------------------------------------------------------------------------------------- requests


class MemoryType(enum.Enum):
    """The kinds of memory in which tensors may lie."""

    TRITONSERVER_MEMORY_GPU = enum.auto()
    TRITONSERVER_MEMORY_CPU = enum.auto()


TRITONSERVER_MEMORY_GPU = MemoryType.TRITONSERVER_MEMORY_GPU
TRITONSERVER_MEMORY_CPU = MemoryType.TRITONSERVER_MEMORY_CPU


class InferenceTrace:
    """The trace of a request. If a model passes it on with a request to another model, it covers that request as well."""

    def __init__(self, timeline: RequestTimeline | None = None) -> None:
        """Makes a trace. ``timeline``: the request's timeline; None: the request is not traced."""
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
    """The kind of memory that a model wants for the outputs of a model that it calls. It has no effect."""

    # Outputs are numpy arrays in any case.
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
    """A request that a model's ``execute`` gets, or that a model sends to another model."""

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
        given: Request | None = None,
        answering: Callable[[], InferenceResponseSender] | None = None,
    ) -> None:
        """Makes a request. A model must give ``inputs``, ``requested_output_names`` and ``model_name``.

        ``model_version``: the version to call; -1: the newest ready version. ``flags``: 1: the request starts a sequence; 2: it
        ends a sequence; 3: both. ``timeout``: the queue timeout in microseconds; 0: no timeout. ``trace``: the trace of the
        request on whose behalf this request is made. Only the worker gives ``given`` and ``answering``. ``given``: the request
        that the model is given. ``answering``: makes the sender of its responses.
        Raises TritonModelException: the request is malformed. Raises TypeError: an argument is missing or has another type.
        """
        if answering is None:
            arguments = locals()
            for name, kind in _TYPES.items():
                if not isinstance(arguments[name], kind):
                    raise TypeError(f"InferenceRequest: {name} cannot be {arguments[name]!r}")
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
        self._parameters = parameters if isinstance(parameters, str) else json.dumps(_plain_parameters(parameters))
        if answering is None:
            self._check(requested_output_names)
        self._given = given
        self._answering = answering
        self._trace = trace
        #: The response sender, once it was asked for.
        self.sender: InferenceResponseSender | None = None
        #: Says whether the request is done after ``execute``, or goes round again.
        self.release_flags = TRITONSERVER_REQUEST_RELEASE_ALL

    def _check(self, names: object) -> None:
        """Raises TypeError or TritonModelException if the request is malformed. ``names``: the requested outputs as given."""
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
        """Returns the request's sequence flags. Bit 0: the request starts its sequence. Bit 1: the request ends its sequence."""
        return self._flags

    def set_flags(self, flags: int) -> None:
        self._flags = flags

    def set_release_flags(self, flags: int) -> None:
        """Sets what happens to the request after ``execute`` has returned.

        The flag RESCHEDULE puts the request into a later batch again (iterative sequences). Then ``execute`` must return None
        instead of a response. Other flags have no effect.
        """
        self.release_flags = flags

    def timeout(self) -> int:
        """Returns the queue timeout that the client has set, in microseconds; 0: no timeout."""
        return self._timeout

    def parameters(self) -> str:
        """Returns the request's custom parameters, as JSON text."""
        return self._parameters

    def is_cancelled(self) -> bool:
        return self._given is not None and self._given.is_cancelled

    def trace(self) -> InferenceTrace:
        """Returns the request's trace, for requests that the model makes on behalf of this request."""
        if self._given is None or self._trace is not _NO_TRACE:
            return self._trace
        return InferenceTrace(self._given.timeline)

    def get_response_sender(self) -> InferenceResponseSender:
        """Returns the object that sends responses to this request.

        A decoupled model may send any number of responses, any other model exactly one.
        """
        if self.sender is None:
            if self._answering is None:
                raise TritonModelException("Only a request that execute() was given has a response sender.")
            self.sender = self._answering()
        return self.sender

    def exec(self, decoupled: bool = False) -> InferenceResponse | ResponseIterator:
        """Sends the request to the model that it names, waits for the first response, and returns this response.

        ``decoupled``: whether to return an iterator over all responses instead, which begins with the first response.
        Raises TritonModelException: the running code may not call models, or the request is malformed. Any other failure is
        returned as a response with an error.
        """
        call = self._call(decoupled)
        if not call.refused:
            call.begin()
        return answer_of(call, call.next())

    def async_exec(self, decoupled: bool = False) -> Awaitable[InferenceResponse | ResponseIterator]:
        """Sends the request immediately. Returns an awaitable of the response, for the running event loop.

        ``decoupled``: whether the awaitable's result is an iterator over all responses.
        Raises TritonModelException: the running code may not call models, or the request is malformed. Raises RuntimeError: no
        event loop runs in this thread.
        """
        asyncio.get_running_loop()
        call = self._call(decoupled)
        if not call.refused:
            call.begin(by_coroutine=True)
        return asyncio.ensure_future(first_answer(call, call.first()))

    def _call(self, decoupled: bool) -> ModelCall:
        if not self._model_name:
            raise TritonModelException("A request to a model needs its model_name.")
        sequence = self._correlation_id
        try:
            check_sequence(sequence)
            parameters, parameter_set = set_named(plain_parameters("parameters", json.loads(self._parameters)))
        except InvalidArgument as error:
            raise TritonModelException(error.message) from None
        except ValueError as error:
            raise TritonModelException(f"parameters are no JSON: {error}") from None
        if self._timeout < 0:
            raise TritonModelException(f"timeout is {self._timeout}, it cannot be negative")
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
        try:
            found = asker()
        except InvalidArgument as error:
            raise TritonModelException(error.message) from None
        if found is None or not found.may_call or found.port.server is None:
            raise TritonModelException("BLS is only supported during the 'execute' function.")
        arrays = {tensor.name(): tensor.for_call() for tensor in self._inputs}
        hint = (
            f"Model {self._model_name} is using the decoupled. The current BLS request call doesn't support models using the "
            "decoupled transaction policy. Please use 'decoupled=True' argument to the 'exec' or 'async_exec' calls for "
            "decoupled models.'"
        )
        outputs = tuple(map(_text, self._requested))
        call = ModelCall(found, prepared, own, arrays, outputs, decoupled, hint, self._trace.timeline)
        if len(arrays) < len(self._inputs):
            names = [tensor.name() for tensor in self._inputs]
            twice = next(name for name in names if names.count(name) > 1)
            call.refused = True
            call.answered(InvalidArgument(f"input '{twice}' already exists in request"), True)
        return call


def _text(name: str | bytes) -> str:
    return name.decode() if isinstance(name, bytes) else name


_Answer = tuple[Result | None, bool]


def response_of(result: Result | None) -> InferenceResponse:
    """Converts the result of a called model to a response. None becomes a response without tensors."""
    if isinstance(result, ServingError):
        return InferenceResponse(error=TritonError(result.message, ErrorCode.of(result.code)))
    tensors = [Tensor.shared(name, np.asarray(array)) for name, array in (result or {}).items()]
    made = InferenceResponse(tensors)
    if isinstance(result, Response):
        # As they are: one of a model that yields its responses may be a float.
        made._parameters = result.parameters
    return made


def answer_of(call: ModelCall, first: _Answer) -> InferenceResponse | ResponseIterator:
    """Returns the result of a call: a response, or an iterator if the call streams.

    ``first``: the first response, and whether it is the last.
    """
    error = first[0]
    if call.refused and isinstance(error, ServingError):
        why = "Failed for execute the inference request. " if isinstance(error, NotFound) else ""
        why = f"Model {call.prepared.model} - Error when running inference: {why}{error.message}"
        code = ErrorCode.of(error.code) if isinstance(error, Cancelled | Unavailable) else ErrorCode.INTERNAL
        response = InferenceResponse(error=TritonError(why, code))
        return ResponseIterator(None, (None, True), response) if call.streams else response
    return ResponseIterator(call, first) if call.streams else response_of(first[0])


async def first_answer(call: ModelCall, first: asyncio.Task[_Answer]) -> InferenceResponse | ResponseIterator:
    return answer_of(call, await first)


class ResponseIterator:
    """Iterates over the responses to one call, and waits for each. A second iteration gets the same responses again."""

    def __init__(self, call: ModelCall | None, first: _Answer, response: InferenceResponse | None = None) -> None:
        """Makes an iterator over the responses to ``call``. If ``call`` is None, there is only one response.

        ``first``: the first result of the called model, and whether this result is the last. ``response``: the first response
        that the iterator returns. If ``response`` is None, the iterator makes its first response from the first result.
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
        """Asks the called model to stop. The iterator still returns responses that the model sends afterwards.

        If the model has not begun to work on the request, the iterator returns an error.
        """
        call = self._call
        if call is not None:
            call.stop()

    def __del__(self) -> None:
        # The called model goes on until the caller's request ends, and its responses are discarded.
        with contextlib.suppress(AttributeError):
            if self._call is not None:
                self._call.abandon()
