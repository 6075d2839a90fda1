"""``triton_python_backend_utils``: what a Triton Python-backend model imports, so that it runs here as it stands.

Names and behaviour follow the documented interface (triton-inference-server/python_backend, README). The worker installs this
module under that name. Not offered yet, with a clear error: response senders (decoupled models) and requests to other models.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from shm.arrays import Array, array, byte_content

# "as": what is defined beside this module is a part of it for models.
from workers.python_backend.configuration import (
    ModelConfig as ModelConfig,
)
from workers.python_backend.configuration import (
    get_input_config_by_name as get_input_config_by_name,
)
from workers.python_backend.configuration import (
    get_output_config_by_name as get_output_config_by_name,
)
from workers.python_backend.configuration import (
    using_decoupled_model_transaction_policy as using_decoupled_model_transaction_policy,
)
from workers.python_backend.errors import TritonError as TritonError
from workers.python_backend.errors import TritonModelException as TritonModelException
from workers.python_backend.logger import Logger as Logger
from workers.python_backend.response import InferenceResponse as InferenceResponse
from workers.python_backend.tensors import (
    TRITON_STRING_TO_NUMPY as TRITON_STRING_TO_NUMPY,
)
from workers.python_backend.tensors import (
    Tensor as Tensor,
)
from workers.python_backend.tensors import (
    np_to_triton_dtype as np_to_triton_dtype,
)
from workers.python_backend.tensors import (
    numpy_to_triton_type as numpy_to_triton_type,
)
from workers.python_backend.tensors import (
    triton_string_to_numpy as triton_string_to_numpy,
)
from workers.python_backend.tensors import (
    triton_to_np_dtype as triton_to_np_dtype,
)
from workers.python_backend.tensors import (
    triton_to_numpy_type as triton_to_numpy_type,
)

TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1
TRITONSERVER_REQUEST_RELEASE_ALL = 1
TRITONSERVER_REQUEST_RELEASE_RESCHEDULE = 2
TRITONSERVER_REQUEST_FLAG_SEQUENCE_START = 1
TRITONSERVER_REQUEST_FLAG_SEQUENCE_END = 2


class PreferredMemory:
    """Where the inputs of a request to another model should lie. Accepted and without meaning on the CPU."""

    def __init__(self, preferred_memory_type: int = 0, preferred_device_id: int = 0) -> None:
        self.preferred_memory_type = preferred_memory_type
        self.preferred_device_id = preferred_device_id


class InferenceRequest:
    """One request, as ``execute`` gets it."""

    def __init__(
        self,
        request_id: str = "",
        correlation_id: int | str = 0,
        inputs: Iterable[Tensor] = (),
        requested_output_names: Iterable[str] = (),
        model_name: str = "",
        model_version: int = -1,
        flags: int = 0,
        timeout: int = 0,
        preferred_memory: PreferredMemory | None = None,
        trace: Any = None,
        parameters: Mapping[str, Any] | str | None = None,
        cancelled: Callable[[], bool] | None = None,
    ) -> None:
        self._request_id = request_id
        self._correlation_id = correlation_id
        self._inputs = list(inputs)
        self._requested = list(requested_output_names)
        self._model_name = model_name
        self._flags = flags
        self._timeout = timeout
        self._parameters = parameters if isinstance(parameters, str) else json.dumps(dict(parameters or {}))
        self._cancelled = cancelled
        #: What is to become of it after ``execute``: it is done, or goes round again.
        self.release_flags = TRITONSERVER_REQUEST_RELEASE_ALL

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
        """Bit 0: the sequence starts; bit 1: it ends."""
        return self._flags

    def set_flags(self, flags: int) -> None:
        self._flags = flags

    def set_release_flags(self, flags: int) -> None:
        """RESCHEDULE: the response is None, and the request is in a later batch again (iterative sequences)."""
        self.release_flags = flags

    def timeout(self) -> int:
        """Microseconds the client is ready to wait in the queue; 0: not said."""
        return self._timeout

    def parameters(self) -> str:
        """The custom parameters, as JSON text."""
        return self._parameters

    def is_cancelled(self) -> bool:
        return self._cancelled is not None and self._cancelled()

    def trace(self) -> None:
        """No trace is taken."""

    def get_response_sender(self) -> Any:
        raise TritonModelException("response senders (decoupled models) are not supported by this server yet")

    def exec(self, decoupled: bool = False) -> Any:
        raise TritonModelException("requests from one model to another are not supported by this server yet")

    def async_exec(self, decoupled: bool = False) -> Any:
        return self.exec(decoupled)


def get_input_tensor_by_name(inference_request: InferenceRequest, name: str) -> Tensor | None:
    """None when the request has no such input."""
    return next((tensor for tensor in inference_request.inputs() if tensor.name() == name), None)


def get_output_tensor_by_name(inference_response: InferenceResponse, name: str) -> Tensor | None:
    """None when the response has no such output."""
    return next((tensor for tensor in inference_response.output_tensors() if tensor.name() == name), None)


def serialize_byte_tensor(input_tensor: Array) -> Array:
    """The BYTES encoding as an array of unsigned bytes; None-free, row-major."""
    return np.frombuffer(byte_content(input_tensor), np.uint8)


def deserialize_bytes_tensor(encoded_tensor: bytes) -> Array:
    """A flat object array of the elements of a BYTES encoding."""
    content = bytes(encoded_tensor)
    count, at = 0, 0
    while at + 4 <= len(content):
        at += 4 + int.from_bytes(content[at : at + 4], "little")
        count += 1
    return array(content, "BYTES", (count,))
