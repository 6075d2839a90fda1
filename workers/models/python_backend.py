"""``triton_python_backend_utils``: what a Triton Python-backend model imports, so that it runs here as it stands.

Names and behaviour follow the documented interface (triton-inference-server/python_backend, README). The worker installs this
module under that name. Not offered yet, with a clear error: response senders (decoupled models) and requests to other models.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from shm.arrays import DTYPES, Array, array, byte_content, datatype_of
from shm.datatypes import to_model_config

TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1
TRITONSERVER_REQUEST_FLAG_SEQUENCE_START = 1
TRITONSERVER_REQUEST_FLAG_SEQUENCE_END = 2

TRITON_STRING_TO_NUMPY: dict[str, Any] = {
    **{to_model_config(name): dtype.type for name, dtype in DTYPES.items()},
    "TYPE_BOOL": bool,
}

_log = logging.getLogger("model")


class TritonModelException(Exception):
    """What a model may raise to fail a whole batch."""


class TritonError:
    """An error of one response, with one of Triton's codes."""

    UNKNOWN = "UNKNOWN"
    INTERNAL = "INTERNAL"
    NOT_FOUND = "NOT_FOUND"
    INVALID_ARG = "INVALID_ARGUMENT"
    UNAVAILABLE = "UNAVAILABLE"
    UNSUPPORTED = "UNSUPPORTED"
    ALREADY_EXISTS = "ALREADY_EXISTS"
    CANCELLED = "CANCELLED"

    def __init__(self, message: str = "", code: str = INTERNAL) -> None:
        self._message = message
        self._code = code

    def message(self) -> str:
        return self._message

    def code(self) -> str:
        return self._code

    def __str__(self) -> str:
        return self._message


class Tensor:
    """A named array. BYTES are object arrays of ``bytes``; BF16 arrays have ml_dtypes' bfloat16."""

    def __init__(self, name: str, numpy_array: Array) -> None:
        if not isinstance(numpy_array, np.ndarray):
            raise TritonModelException(f"tensor '{name}': a numpy array is expected, not {type(numpy_array).__name__}")
        if datatype_of(numpy_array.dtype) is None:
            raise TritonModelException(f"tensor '{name}': dtype {numpy_array.dtype} has no name in the protocol")
        self._name = name
        self._array = numpy_array
        self._borrowed = False

    @classmethod
    def borrowed(cls, name: str, content: Array) -> Tensor:
        """An input whose bytes belong to a client or to an arena."""
        tensor = cls(name, content)
        tensor._borrowed = True
        return tensor

    @property
    def content(self) -> Array:
        """The array as it is, not to be written to."""
        return self._array

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> Array:
        """The model's own, to write to if it likes: the first call copies what is borrowed."""
        if self._borrowed:
            self._array = np.array(self._array)
            self._borrowed = False
        return self._array

    def triton_dtype(self) -> int:
        """The number of the datatype in ModelConfig's DataType."""
        name = to_model_config(str(datatype_of(self._array.dtype)))
        return list(TRITON_STRING_TO_NUMPY).index(name) + 1

    def shape(self) -> list[int]:
        return list(self._array.shape)

    def is_cpu(self) -> bool:
        return True

    def to_dlpack(self) -> Any:
        """A DLPack capsule; BF16 goes by way of jax, because numpy cannot export it."""
        content = self.as_numpy()
        if not content.flags.writeable:  # numpy exports nothing that is read-only
            content = np.array(content)
        return _exporter(content).__dlpack__()

    def __dlpack__(self, *, stream: Any = None, **_: Any) -> Any:
        return self.to_dlpack()

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)

    @staticmethod
    def from_dlpack(name: str, tensor: Any) -> Tensor:
        """From a capsule or from anything that exports DLPack (torch, jax, numpy, cupy)."""
        return Tensor(name, _imported(tensor))

    def __repr__(self) -> str:
        return f"<Tensor {self._name!r} {self._array.dtype}{list(self._array.shape)}>"


class _Capsule:
    """Gives a bare capsule the interface importers ask for."""

    def __init__(self, capsule: Any) -> None:
        self._capsule = capsule

    def __dlpack__(self, **_: Any) -> Any:
        return self._capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)


def _exporter(array: Array) -> Any:
    if array.dtype != ml_dtypes.bfloat16:
        return array
    import jax.numpy as jnp

    return jnp.array(array)


def _imported(tensor: Any) -> Array:
    source = tensor if hasattr(tensor, "__dlpack_device__") else _Capsule(tensor)
    if isinstance(source, np.ndarray):
        return source
    # jax reads every datatype of the protocol, BF16 included; its array is read-only and keeps the source alive.
    import jax

    with jax.enable_x64(True):
        return np.asarray(jax.dlpack.from_dlpack(source))


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


class InferenceResponse:
    """The answer to one request: tensors or an error."""

    def __init__(
        self,
        output_tensors: Iterable[Tensor] | None = None,
        error: TritonError | Exception | str | None = None,
        parameters: Mapping[str, Any] | None = None,
    ) -> None:
        self._output_tensors = list(output_tensors or ())
        self._error = error
        self._parameters = dict(parameters or {})

    def output_tensors(self) -> list[Tensor]:
        return self._output_tensors

    def has_error(self) -> bool:
        return self._error is not None

    def error(self) -> Any:
        return self._error

    def parameters(self) -> str:
        return json.dumps(self._parameters)


class Logger:
    """Messages of a model go into the worker's log."""

    @staticmethod
    def log(message: str, level: str = "INFO") -> None:
        _log.log({"WARNING": logging.WARNING, "ERROR": logging.ERROR, "VERBOSE": logging.DEBUG}.get(level, 20), message)

    @staticmethod
    def log_info(message: str) -> None:
        _log.info(message)

    @staticmethod
    def log_warn(message: str) -> None:
        _log.warning(message)

    @staticmethod
    def log_error(message: str) -> None:
        _log.error(message)

    @staticmethod
    def log_verbose(message: str) -> None:
        _log.debug(message)


class ModelConfig:
    """What ``auto_complete_config`` gets and returns: the configuration in its JSON form, completed but never contradicted."""

    def __init__(self, model_config: Mapping[str, Any] | str) -> None:
        self._config: dict[str, Any] = json.loads(model_config) if isinstance(model_config, str) else dict(model_config)

    def as_dict(self) -> dict[str, Any]:
        return self._config

    def set_max_batch_size(self, max_batch_size: int) -> None:
        """What the configuration says already may be kept or lowered to 0, not raised."""
        given = self._config.get("max_batch_size", 0)
        if given and max_batch_size and given != max_batch_size:
            raise ValueError(f"configuration specified max_batch_size {given}, the model set {max_batch_size}")
        self._config["max_batch_size"] = given or max_batch_size

    def set_dynamic_batching(self) -> None:
        """Unless a scheduler is configured already."""
        if not {"dynamic_batching", "sequence_batching", "ensemble_scheduling"} & self._config.keys():
            self._config["dynamic_batching"] = {}

    def set_model_transaction_policy(self, transaction_policy: Mapping[str, Any]) -> None:
        unknown = transaction_policy.keys() - {"decoupled"}
        if unknown:
            raise ValueError(f"unknown model transaction policy properties: {', '.join(sorted(unknown))}")
        self._config["model_transaction_policy"] = {"decoupled": bool(transaction_policy.get("decoupled"))}

    def add_input(self, tensor: Mapping[str, Any]) -> None:
        self._add("input", tensor, {"name", "data_type", "dims", "optional"})

    def add_output(self, tensor: Mapping[str, Any]) -> None:
        self._add("output", tensor, {"name", "data_type", "dims"})

    def _add(self, kind: str, tensor: Mapping[str, Any], known: set[str]) -> None:
        if tensor.keys() - known:
            raise ValueError(f"{kind} tensor has unknown properties: {', '.join(sorted(tensor.keys() - known))}")
        if "name" not in tensor:
            raise ValueError(f"{kind} tensor needs a name")
        tensors: list[dict[str, Any]] = self._config.setdefault(kind, [])
        for given in tensors:
            if given["name"] != tensor["name"]:
                continue
            for property in ("data_type", "dims"):
                wanted = tensor.get(property)
                said = given.get(property)
                if wanted and said and said != "TYPE_INVALID" and said != wanted:
                    raise ValueError(
                        f"unable to add {kind} '{tensor['name']}': {property} is {said} in the configuration, "
                        f"{wanted} in the model"
                    )
                given[property] = wanted or said
            return
        tensors.append({"dims": [], **tensor})


def get_input_tensor_by_name(inference_request: InferenceRequest, name: str) -> Tensor | None:
    """None when the request has no such input."""
    return next((tensor for tensor in inference_request.inputs() if tensor.name() == name), None)


def get_output_tensor_by_name(inference_response: InferenceResponse, name: str) -> Tensor | None:
    """None when the response has no such output."""
    return next((tensor for tensor in inference_response.output_tensors() if tensor.name() == name), None)


def get_input_config_by_name(model_config: Mapping[str, Any], name: str) -> Any:
    """The entry of ``model_config["input"]`` of that name, or None."""
    return _named(model_config.get("input", ()), name)


def get_output_config_by_name(model_config: Mapping[str, Any], name: str) -> Any:
    """The entry of ``model_config["output"]`` of that name, or None."""
    return _named(model_config.get("output", ()), name)


def _named(tensors: Sequence[Mapping[str, Any]], name: str) -> Any:
    return next((tensor for tensor in tensors if tensor["name"] == name), None)


def using_decoupled_model_transaction_policy(model_config: Mapping[str, Any]) -> bool:
    return bool(model_config.get("model_transaction_policy", {}).get("decoupled", False))


def triton_to_numpy_type(data_type: int) -> Any:
    """From the number in ModelConfig's DataType."""
    return list(TRITON_STRING_TO_NUMPY.values())[data_type - 1]


def numpy_to_triton_type(data_type: Any) -> int:
    """To the number in ModelConfig's DataType."""
    name = to_model_config(np_to_triton_dtype(data_type))
    return list(TRITON_STRING_TO_NUMPY).index(name) + 1


def triton_string_to_numpy(triton_type_string: str) -> Any:
    """``TYPE_FP32`` -> ``numpy.float32``; ``TYPE_STRING`` -> ``numpy.object_``."""
    return TRITON_STRING_TO_NUMPY[triton_type_string]


def np_to_triton_dtype(np_dtype: Any) -> str:
    """``numpy.float32`` -> ``FP32``."""
    name = datatype_of(np.dtype(np_dtype))
    if name is None:
        raise TritonModelException(f"dtype {np_dtype} has no name in the protocol")
    return name


def triton_to_np_dtype(dtype: str) -> Any:
    """``FP32`` -> ``numpy.float32``."""
    return TRITON_STRING_TO_NUMPY[to_model_config(dtype)]


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
