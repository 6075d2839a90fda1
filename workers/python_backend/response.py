"""Responses that ``execute`` returns: part of ``triton_python_backend_utils`` (see ``interface``)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from tensord.shm.messages import Parameter
from tensord.workers.python_backend.errors import TritonError, TritonModelException
from tensord.workers.python_backend.tensors import Tensor

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
