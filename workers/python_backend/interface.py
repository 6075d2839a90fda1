"""The module that Triton Python-backend models import as ``triton_python_backend_utils``, so that they run unchanged.

Names and behaviour follow the documented interface (triton-inference-server/python_backend, README). The worker installs this
module under that name.
"""

from __future__ import annotations

import numpy as np

from tensord.shm.arrays import Array, array, byte_content

# What is imported here is a part of this module for models.
# ruff: noqa: F401
from tensord.workers.python_backend.configuration import (
    ModelConfig,
    get_input_config_by_name,
    get_output_config_by_name,
    using_decoupled_model_transaction_policy,
)
from tensord.workers.python_backend.errors import TritonError, TritonModelException
from tensord.workers.python_backend.request import (
    TRITONSERVER_MEMORY_CPU,
    TRITONSERVER_MEMORY_GPU,
    TRITONSERVER_REQUEST_FLAG_SEQUENCE_END,
    TRITONSERVER_REQUEST_FLAG_SEQUENCE_START,
    TRITONSERVER_REQUEST_RELEASE_ALL,
    TRITONSERVER_REQUEST_RELEASE_RESCHEDULE,
    InferenceRequest,
    InferenceTrace,
    MemoryType,
    PreferredMemory,
)
from tensord.workers.python_backend.response import (
    TRITONSERVER_RESPONSE_COMPLETE_FINAL,
    InferenceResponse,
    InferenceResponseSender,
)
from tensord.workers.python_backend.services import (
    COUNTER,
    GAUGE,
    HISTOGRAM,
    Logger,
    Metric,
    MetricFamily,
    MetricKind,
    is_model_ready,
    load_model,
    unload_model,
)
from tensord.workers.python_backend.tensors import (
    TRITON_STRING_TO_NUMPY,
    Tensor,
    np_to_triton_dtype,
    numpy_to_triton_type,
    triton_string_to_numpy,
    triton_to_np_dtype,
    triton_to_numpy_type,
)


def get_input_tensor_by_name(inference_request: InferenceRequest, name: str) -> Tensor | None:
    """Returns the input of a request with this name, or None."""
    return next((tensor for tensor in inference_request.inputs() if tensor.name() == name), None)


def get_output_tensor_by_name(inference_response: InferenceResponse, name: str) -> Tensor | None:
    """Returns the output of a response with this name, or None."""
    return next((tensor for tensor in inference_response.output_tensors() if tensor.name() == name), None)


def serialize_byte_tensor(input_tensor: Array) -> Array:
    """Encodes an array of byte strings as BYTES (each element behind its length).

    Returns UINT8[n], elements in row-major order.
    """
    return np.frombuffer(byte_content(input_tensor), np.uint8)


def deserialize_bytes_tensor(encoded_tensor: bytes) -> Array:
    """Decodes a BYTES tensor. Returns a one-dimensional object array of its elements."""
    content = bytes(encoded_tensor)
    count, at = 0, 0
    while at + 4 <= len(content):
        at += 4 + int.from_bytes(content[at : at + 4], "little")
        count += 1
    return array(content, "BYTES", (count,))
