"""The module that Triton Python-backend models import as ``triton_python_backend_utils``, so that they run unchanged.

Names and behaviour follow the documented interface (triton-inference-server/python_backend, README). The worker installs this
module under that name.
"""

from __future__ import annotations

import numpy as np

from tensord.shm.arrays import Array, array, byte_content

# "as": what is defined beside this module is a part of it for models.
from tensord.workers.python_backend.configuration import (
    ModelConfig as ModelConfig,
)
from tensord.workers.python_backend.configuration import (
    get_input_config_by_name as get_input_config_by_name,
)
from tensord.workers.python_backend.configuration import (
    get_output_config_by_name as get_output_config_by_name,
)
from tensord.workers.python_backend.configuration import (
    using_decoupled_model_transaction_policy as using_decoupled_model_transaction_policy,
)
from tensord.workers.python_backend.errors import TritonError as TritonError
from tensord.workers.python_backend.errors import TritonModelException as TritonModelException
from tensord.workers.python_backend.request import (
    TRITONSERVER_MEMORY_CPU as TRITONSERVER_MEMORY_CPU,
)
from tensord.workers.python_backend.request import (
    TRITONSERVER_MEMORY_GPU as TRITONSERVER_MEMORY_GPU,
)
from tensord.workers.python_backend.request import (
    TRITONSERVER_REQUEST_FLAG_SEQUENCE_END as TRITONSERVER_REQUEST_FLAG_SEQUENCE_END,
)
from tensord.workers.python_backend.request import (
    TRITONSERVER_REQUEST_FLAG_SEQUENCE_START as TRITONSERVER_REQUEST_FLAG_SEQUENCE_START,
)
from tensord.workers.python_backend.request import (
    TRITONSERVER_REQUEST_RELEASE_ALL as TRITONSERVER_REQUEST_RELEASE_ALL,
)
from tensord.workers.python_backend.request import (
    TRITONSERVER_REQUEST_RELEASE_RESCHEDULE as TRITONSERVER_REQUEST_RELEASE_RESCHEDULE,
)
from tensord.workers.python_backend.request import (
    InferenceRequest as InferenceRequest,
)
from tensord.workers.python_backend.request import (
    InferenceTrace as InferenceTrace,
)
from tensord.workers.python_backend.request import (
    MemoryType as MemoryType,
)
from tensord.workers.python_backend.request import (
    PreferredMemory as PreferredMemory,
)
from tensord.workers.python_backend.response import InferenceResponse as InferenceResponse
from tensord.workers.python_backend.response_sender import (
    TRITONSERVER_RESPONSE_COMPLETE_FINAL as TRITONSERVER_RESPONSE_COMPLETE_FINAL,
)
from tensord.workers.python_backend.response_sender import (
    InferenceResponseSender as InferenceResponseSender,
)
from tensord.workers.python_backend.services import (
    COUNTER as COUNTER,
)
from tensord.workers.python_backend.services import (
    GAUGE as GAUGE,
)
from tensord.workers.python_backend.services import (
    HISTOGRAM as HISTOGRAM,
)
from tensord.workers.python_backend.services import Logger as Logger
from tensord.workers.python_backend.services import (
    Metric as Metric,
)
from tensord.workers.python_backend.services import (
    MetricFamily as MetricFamily,
)
from tensord.workers.python_backend.services import (
    MetricKind as MetricKind,
)
from tensord.workers.python_backend.services import (
    is_model_ready as is_model_ready,
)
from tensord.workers.python_backend.services import (
    load_model as load_model,
)
from tensord.workers.python_backend.services import (
    unload_model as unload_model,
)
from tensord.workers.python_backend.tensors import (
    TRITON_STRING_TO_NUMPY as TRITON_STRING_TO_NUMPY,
)
from tensord.workers.python_backend.tensors import (
    Tensor as Tensor,
)
from tensord.workers.python_backend.tensors import (
    np_to_triton_dtype as np_to_triton_dtype,
)
from tensord.workers.python_backend.tensors import (
    numpy_to_triton_type as numpy_to_triton_type,
)
from tensord.workers.python_backend.tensors import (
    triton_string_to_numpy as triton_string_to_numpy,
)
from tensord.workers.python_backend.tensors import (
    triton_to_np_dtype as triton_to_np_dtype,
)
from tensord.workers.python_backend.tensors import (
    triton_to_numpy_type as triton_to_numpy_type,
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
