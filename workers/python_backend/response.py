"""Responses, and what sends any number of them to a request: part of ``triton_python_backend_utils`` (see ``interface``).

Source: triton-inference-server/python_backend, README "Decoupled mode" and src/response_sender.cc; errors have the texts of that.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from tensord.shm.messages import Parameter
from tensord.workers.python_backend.errors import TritonError, TritonModelException
from tensord.workers.python_backend.tensors import Tensor

if TYPE_CHECKING:
    from tensord.workers.models.python_model import ResponseWriter


#: Bytes of one response's parameters, as JSON.
_MAX_BYTE_SIZE = 1 << 20
#: Largest value of gRPC's int64_param.
_MAX_INTEGER = (1 << 63) - 1


class InferenceResponse:
    """A response to one request: output tensors and parameters, or an error."""

    def __init__(
        self,
        output_tensors: Iterable[Tensor] = (),
        error: TritonError | Exception | str | None = None,
        parameters: Mapping[str, Parameter] | None = None,
    ) -> None:
        """Makes a response.

        Raises TritonModelException: an output is None, or a parameter cannot be sent; TypeError: the outputs are None, or one is
        no ``Tensor``.
        """
        self._output_tensors = list(output_tensors)
        if None in self._output_tensors:
            raise TritonModelException("Output tensor for inference response should not be empty.")
        for tensor in self._output_tensors:
            if not isinstance(tensor, Tensor):
                raise TypeError(f"output_tensors are of type Tensor, found {type(tensor).__name__}")
        self._error = error
        self._parameters = checked_parameters(parameters)

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


def checked_parameters(parameters: Any) -> dict[str, Parameter]:
    """Returns parameters as plain values that can be sent; None: {}. Raises TritonModelException: some cannot be sent."""
    if parameters is None:
        return {}
    if not isinstance(parameters, Mapping):
        raise TritonModelException(f"Expect parameters to have type dict, found type {type(parameters)}")
    checked: dict[str, Parameter] = {}
    for key, value in parameters.items():
        if not isinstance(key, str):
            raise TritonModelException(f"Expect parameters keys to have type str, found type {type(key)}")
        checked[_text(key)] = _value(key, value)
    size = len(json.dumps(checked, ensure_ascii=False).encode())
    if size > _MAX_BYTE_SIZE:
        raise TritonModelException(f"the parameters of a response are {size} bytes, at most {_MAX_BYTE_SIZE} are sent")
    return checked


def _value(key: str, value: Any) -> Parameter:
    """Returns a parameter's value as plain bool, int or str, also if it is of a subclass (an enumeration's, numpy's).

    Raises TritonModelException: the value is of another type, or cannot be sent.
    """
    if isinstance(value, bool):
        return value
    if isinstance(value, int):
        if not -_MAX_INTEGER - 1 <= value <= _MAX_INTEGER:
            raise TritonModelException(
                f"parameter '{key}' is an integer of {value.bit_length()} bits, those that fit into 64 with a sign are sent"
            )
        return int(value)
    if isinstance(value, str):
        return _text(value)
    raise TritonModelException(f"Expect parameters values to have type bool/int/str, found type {type(value)}")


def _text(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise TritonModelException(f"a parameter's text cannot be sent as UTF-8: {error.reason}") from None
    return str.__str__(text)


TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1


class InferenceResponseSender:
    """Sends the responses to one request. It may be used from any thread, and after ``execute`` has returned."""

    def __init__(self, writer: ResponseWriter) -> None:
        self._writer = writer
        self._lock = threading.Lock()
        self._sent = 0
        self._closed = False

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        """Sends a response. With COMPLETE_FINAL in ``flags`` it is the last, the sender is closed, and ``response`` may be None.

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
            if response is not None or self._writer.decoupled:
                self._writer.send(response, final)

    def _check(self, response: InferenceResponse | None, final: bool) -> None:
        if not self._writer.decoupled:
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
        return self._writer.is_cancelled()

    def __del__(self) -> None:
        # A model that has not sent its final response is done once it cannot send it any more.
        with contextlib.suppress(AttributeError):
            self._writer.give_up()
