"""The server's services for models: log, metrics, loading of other models. Part of ``triton_python_backend_utils``.

Source: triton-inference-server/python_backend, README "Custom Metrics" and "Model Loading API"; src/metric.cc and
src/model_loader.cc; errors have the texts of these two.
"""

from __future__ import annotations

import contextlib
import enum
import logging
from collections.abc import Mapping, Sequence
from typing import ClassVar

from tensord.shm.errors import InvalidArgument
from tensord.workers.calls import other_models
from tensord.workers.calls.metric_registry import MetricKind as MetricKind
from tensord.workers.calls.metric_registry import Value
from tensord.workers.calls.own_metrics import HeldFamily
from tensord.workers.python_backend.errors import Saying, TritonModelException

_log = logging.getLogger("model")


class Logger:
    """Writes messages of four levels to the daemon's log, whose settings switch each level on or off."""

    class LogLevel(enum.Enum):
        """The levels of log messages, which are also attributes of ``Logger`` (``Logger.INFO``)."""

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
        """Logs a message. Raises TypeError: the message is no str, or the level is none of the four."""
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


COUNTER, GAUGE, HISTOGRAM = MetricKind.COUNTER, MetricKind.GAUGE, MetricKind.HISTOGRAM


class MetricFamily:
    """The metrics of one name. The daemon shows them as long as the model's code holds this object and the model is served."""

    COUNTER: ClassVar = MetricKind.COUNTER
    GAUGE: ClassVar = MetricKind.GAUGE
    HISTOGRAM: ClassVar = MetricKind.HISTOGRAM

    def __init__(self, name: str, description: str, kind: MetricKind) -> None:
        """Makes a family, or joins the family of that name.

        Raises TritonModelException: an argument is malformed, the family is of another kind, or no model's code is running.
        """
        if not isinstance(kind, MetricKind):
            raise TritonModelException("Error when creating MetricFamily: Unknown metric kind")
        with Saying("Error when creating MetricFamily"):
            self._held = HeldFamily(name, description, kind)

    def Metric(self, labels: Mapping[str, str] | None = None, buckets: Sequence[float] | None = None) -> Metric:
        """Returns the family's metric with these labels, which is made if there is none. ``buckets``: a histogram's upper bounds.

        Raises TritonModelException: labels or buckets are malformed, the buckets differ, or there are too many metrics.
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
    """One metric of a family; it may be used only as long as its ``MetricFamily`` object exists."""

    def __init__(self, held: HeldFamily, value: Value) -> None:
        self._held = held
        self._value = value

    def increment(self, value: float) -> None:
        """Adds ``value`` to the metric. Raises TritonModelException: a counter would fall, or the metric is a histogram."""
        with Saying("Failed to increment metric value"):
            self._held.registry.increment(self._held.kind, self._value, float(value))

    def set(self, value: float) -> None:
        """Sets a gauge to a value. Raises TritonModelException: the metric is no gauge."""
        with Saying("Failed to set metric value"):
            self._held.registry.set(self._held.kind, self._value, float(value))

    def observe(self, value: float) -> None:
        """Adds a value to a histogram. Raises TritonModelException: the metric is no histogram, or the value is NaN."""
        with Saying("Failed to observe metric value"):
            self._held.registry.observe(self._held.kind, self._value, float(value))

    def value(self) -> float:
        """Returns the metric's value. Raises TritonModelException: the metric is a histogram."""
        with Saying("Failed to get metric value"):
            return self._held.registry.value(self._held.kind, self._value)


def load_model(model_name: str, config: str = "", files: Mapping[str, bytes] | None = None) -> None:
    """Loads or reloads a model, and waits until it is loaded. Raises TritonModelException: it could not be loaded.

    Args:
      config: a configuration in JSON that is used instead of the model's config.pbtxt; "": none.
      files: ``file:<version>/<name>`` -> content, of which the model consists; None: its files in the repository.
    """
    if not isinstance(files, Mapping | None):
        raise TritonModelException(
            f"failed to load model '{model_name}', files should be a dictionary of file paths and file contents"
        )
    with _Asking("Failed to load model"):
        other_models.load(model_name, config, files)


def unload_model(model_name: str, unload_dependents: bool = False) -> None:
    """Begins to unload a model. ``unload_dependents``: if it is an ensemble, its models are unloaded too.

    Raises TritonModelException: the server refused, or the running code may not unload models.
    """
    with _Asking("Failed to unload model"):
        other_models.unload(model_name, unload_dependents)


def is_model_ready(model_name: str, model_version: str = "") -> bool:
    """Returns whether a version of a model answers requests; "": any version.

    Raises TritonModelException: ``model_version`` is no number above 0, or the running code may not ask.
    """
    number = 0
    if model_version:
        if not model_version.isdecimal() or int(model_version) < 1:
            raise TritonModelException(
                f"Failed to check model readiness: failed to get model version from specified version string '{model_version}', "
                "version should be an integral value > 0"
            )
        number = int(model_version)
    with _Asking("Failed to check model readiness"):
        return other_models.is_ready(model_name, number)


class _Asking(Saying):
    """A context manager that turns errors of loading or asking for models into TritonModelException.

    Where the running code may not load or ask (in ``auto_complete_config``, ``finalize``), the message is Triton's.
    """

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, other_models.NotAllowed):
            error = InvalidArgument(
                "the model loading API is not supported during the 'auto_complete_config' and 'finalize' functions."
            )
        super().__exit__(kind, error, traceback)
