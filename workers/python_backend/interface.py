"""The module that Triton Python-backend models import as ``triton_python_backend_utils``, so that they run unchanged.

The worker installs it under that name. Names, behaviour and error texts follow triton-inference-server/python_backend: README
(also "Custom Metrics" and "Model Loading API"), src/metric.cc and src/model_loader.cc.
"""

from __future__ import annotations

import contextlib
import enum
import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from tensord.shm.arrays import Array, array, byte_content
from tensord.shm.errors import InvalidArgument, ServingError
from tensord.workers.calls import asking
from tensord.workers.calls.metric_registry import MetricKind, Value
from tensord.workers.calls.own_metrics import HeldFamily

# What is imported here is a part of this module for models.
# ruff: noqa: F401
from tensord.workers.python_backend.errors import TritonError, TritonModelException
from tensord.workers.python_backend.request import (
    TRITONSERVER_MEMORY_CPU,
    TRITONSERVER_MEMORY_GPU,
    TRITONSERVER_REQUEST_FLAG_SEQUENCE_END,
    TRITONSERVER_REQUEST_FLAG_SEQUENCE_START,
    TRITONSERVER_REQUEST_RELEASE_ALL,
    TRITONSERVER_REQUEST_RELEASE_RESCHEDULE,
    TRITONSERVER_RESPONSE_COMPLETE_FINAL,
    InferenceRequest,
    InferenceResponse,
    InferenceResponseSender,
    InferenceTrace,
    MemoryType,
    PreferredMemory,
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

_log = logging.getLogger("model")
COUNTER, GAUGE, HISTOGRAM = MetricKind.COUNTER, MetricKind.GAUGE, MetricKind.HISTOGRAM


# --------------------------------------------------------------------------------------------------------------- tensors


def get_input_tensor_by_name(inference_request: InferenceRequest, name: str) -> Tensor | None:
    """Returns the request's input with this name; None: the request has no such input."""
    return next((tensor for tensor in inference_request.inputs() if tensor.name() == name), None)


def get_output_tensor_by_name(inference_response: InferenceResponse, name: str) -> Tensor | None:
    """Returns the response's output with this name; None: the response has no such output."""
    return next((tensor for tensor in inference_response.output_tensors() if tensor.name() == name), None)


def serialize_byte_tensor(input_tensor: Array) -> Array:
    """Encodes byte strings as BYTES: UINT8[n], row-major, each element after its length (4 bytes, little-endian)."""
    return np.frombuffer(byte_content(input_tensor), np.uint8)


def deserialize_bytes_tensor(encoded_tensor: bytes) -> Array:
    """Decodes a BYTES tensor. Returns a one-dimensional object array of its elements."""
    content = bytes(encoded_tensor)
    count, at = 0, 0
    while at + 4 <= len(content):
        at += 4 + int.from_bytes(content[at : at + 4], "little")
        count += 1
    return array(content, "BYTES", (count,))


# ------------------------------------------------------------------------------------------------ a model's configuration


class ModelConfig:
    """A model's configuration as JSON. The model's ``auto_complete_config`` may complete it, but not contradict it."""

    def __init__(self, model_config: Mapping[str, Any] | str) -> None:
        self._config: dict[str, Any] = json.loads(model_config) if isinstance(model_config, str) else dict(model_config)

    def as_dict(self) -> dict[str, Any]:
        return self._config

    def set_max_batch_size(self, max_batch_size: int) -> None:
        """Sets max_batch_size, unless the configuration already has a value other than 0.

        Raises ValueError if the configuration and the argument have different values other than 0.
        """
        given = self._config.get("max_batch_size", 0)
        if given and max_batch_size and given != max_batch_size:
            raise ValueError(f"configuration specified max_batch_size {given}, the model set {max_batch_size}")
        self._config["max_batch_size"] = given or max_batch_size

    def set_dynamic_batching(self) -> None:
        """Adds ``dynamic_batching`` to the configuration, unless it has a dynamic, sequence or ensemble scheduler already."""
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


def get_input_config_by_name(model_config: Mapping[str, Any], name: str) -> Any:
    """Returns the entry of ``model_config["input"]`` with this name; None: no entry has it."""
    return _named(model_config.get("input", ()), name)


def get_output_config_by_name(model_config: Mapping[str, Any], name: str) -> Any:
    """Returns the entry of ``model_config["output"]`` with this name; None: no entry has it."""
    return _named(model_config.get("output", ()), name)


def _named(tensors: Sequence[Mapping[str, Any]], name: str) -> Any:
    return next((tensor for tensor in tensors if tensor["name"] == name), None)


def using_decoupled_model_transaction_policy(model_config: Mapping[str, Any]) -> bool:
    return bool(model_config.get("model_transaction_policy", {}).get("decoupled", False))


# ----------------------------------------------------------------------------------------- the log, metrics, other models


class Saying:
    """A context manager that turns a ServingError into a TritonModelException whose message begins with the given text."""

    # No generator function: an error that is raised inside a generator keeps alive the frames that it passed through until the
    # next garbage collection (Python 3.12 and newer), and with them objects that the model has released.
    __slots__ = ("_begins",)

    def __init__(self, begins: str) -> None:
        self._begins = begins

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, ServingError):
            raise TritonModelException(f"{self._begins}: {error.message}") from None


class _Asking(Saying):
    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, asking.NotAllowed):
            error = InvalidArgument(
                "the model loading API is not supported during the 'auto_complete_config' and 'finalize' functions."
            )
        super().__exit__(kind, error, traceback)


class Logger:
    """Writes messages of four levels to the daemon's log. The daemon's settings say which levels are logged."""

    class LogLevel(enum.Enum):
        """The levels of log messages."""

        INFO = enum.auto()
        WARNING = enum.auto()
        ERROR = enum.auto()
        VERBOSE = enum.auto()

    INFO = LogLevel.INFO
    WARNING = LogLevel.WARNING
    ERROR = LogLevel.ERROR
    VERBOSE = LogLevel.VERBOSE

    @staticmethod
    def log(message: str, level: LogLevel = LogLevel.INFO) -> None:
        """Logs a message. Raises TypeError: the message is not a str, or the level is not one of the four."""
        if not isinstance(message, str):
            raise TypeError(f"message is {message!r}, expected a str")
        if not isinstance(level, Logger.LogLevel):
            raise TypeError(f"level is {level!r}, expected Logger.INFO, Logger.WARNING, Logger.ERROR or Logger.VERBOSE")
        _log.log(_LEVELS[level], "%s", message)

    @staticmethod
    def log_info(message: str) -> None:
        Logger.log(message, Logger.INFO)

    @staticmethod
    def log_warn(message: str) -> None:
        Logger.log(message, Logger.WARNING)

    @staticmethod
    def log_error(message: str) -> None:
        Logger.log(message, Logger.ERROR)

    @staticmethod
    def log_verbose(message: str) -> None:
        Logger.log(message, Logger.VERBOSE)


_LEVELS = {
    Logger.INFO: logging.INFO,
    Logger.WARNING: logging.WARNING,
    Logger.ERROR: logging.ERROR,
    Logger.VERBOSE: logging.DEBUG,
}


class MetricFamily:
    """The metrics with one name. The daemon shows them while the model's code holds this object and the model is served."""

    COUNTER: ClassVar = MetricKind.COUNTER
    GAUGE: ClassVar = MetricKind.GAUGE
    HISTOGRAM: ClassVar = MetricKind.HISTOGRAM

    def __init__(self, name: str, description: str, kind: MetricKind) -> None:
        """Makes the family of metrics ``name``. If the family exists already, this object stands for the existing one.

        Raises TritonModelException: an argument is malformed, the existing family is of another kind, or no model's code is
        running.
        """
        if not isinstance(kind, MetricKind):
            raise TritonModelException("Error when creating MetricFamily: Unknown metric kind")
        with Saying("Error when creating MetricFamily"):
            self._held = HeldFamily(name, description, kind)

    def Metric(self, labels: Mapping[str, str] | None = None, buckets: Sequence[float] | None = None) -> Metric:
        """Returns the family's metric with these labels. Makes the metric if there is none. ``labels`` None: no labels.

        ``buckets``: a histogram's upper bounds; None for other kinds.
        Raises TritonModelException: labels or buckets are malformed, the existing metric has other buckets, or there are too
        many metrics.
        """
        if not isinstance(labels, Mapping | None):
            raise TritonModelException("Failed to create metric. Labels must be a dictionary.")
        if not isinstance(buckets, list | tuple | None):
            raise TritonModelException("Failed to create metric. Buckets must be a list.")
        with Saying("Error when creating Metric"):
            return Metric(self._held, self._held.metric(labels or {}, buckets))

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError):
            self._held.close()


class Metric:
    """One metric of a family. It may be used only as long as its ``MetricFamily`` object exists."""

    def __init__(self, held: HeldFamily, value: Value) -> None:
        self._held = held
        self._value = value

    def increment(self, value: float) -> None:
        """Adds ``value`` to the metric. Raises TritonModelException: a counter would decrease, or the metric is a histogram."""
        with Saying("Failed to increment metric value"):
            self._held.registry.increment(self._held.kind, self._value, float(value))

    def set(self, value: float) -> None:
        """Sets a gauge to a value. Raises TritonModelException: the metric is not a gauge."""
        with Saying("Failed to set metric value"):
            self._held.registry.set(self._held.kind, self._value, float(value))

    def observe(self, value: float) -> None:
        """Adds a value to a histogram. Raises TritonModelException: the metric is not a histogram, or the value is NaN."""
        with Saying("Failed to observe metric value"):
            self._held.registry.observe(self._held.kind, self._value, float(value))

    def value(self) -> float:
        """Returns the metric's value. Raises TritonModelException: the metric is a histogram."""
        with Saying("Failed to get metric value"):
            return self._held.registry.value(self._held.kind, self._value)


def load_model(model_name: str, config: str = "", files: Mapping[str, bytes] | None = None) -> None:
    """Loads or reloads a model, and waits until it is loaded. Raises TritonModelException: the model could not be loaded.

    ``config``: a configuration in JSON; "": the model's config.pbtxt. ``files``: the model's files, from
    ``file:<version>/<name>`` to content; None: the files in the repository.
    """
    if not isinstance(files, Mapping | None):
        raise TritonModelException(
            f"failed to load model '{model_name}', files should be a dictionary of file paths and file contents"
        )
    with _Asking("Failed to load model"):
        asking.load(model_name, config, files)


def unload_model(model_name: str, unload_dependents: bool = False) -> None:
    """Begins to unload a model. Returns before the model is unloaded.

    ``unload_dependents``: if the model is an ensemble, whether to unload also the models that only this ensemble uses.
    Raises TritonModelException if the daemon refuses, or if the caller is not code of a model that is being loaded or served.
    """
    with _Asking("Failed to unload model"):
        asking.unload(model_name, unload_dependents)


def is_model_ready(model_name: str, model_version: str = "") -> bool:
    """Returns whether a model answers requests now. If ``model_version`` is "", any version of the model counts.

    Raises TritonModelException if ``model_version`` is not a number above 0, or if the caller is not the code of a model.
    """
    number = 0
    if model_version:
        if not model_version.isdecimal() or len(model_version) > 19 or int(model_version) < 1:
            raise TritonModelException(
                f"Failed to check model readiness: failed to get model version from specified version string '{model_version}', "
                "version should be an integral value > 0"
            )
        number = int(model_version)
    with _Asking("Failed to check model readiness"):
        return asking.is_ready(model_name, number)
