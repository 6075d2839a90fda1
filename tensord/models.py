"""Functions for the authors of models: parameters from files, model folders without Python, other models, metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from tensord.parameter_files import load
from tensord.shm.arrays import Array
from tensord.shm.errors import Cancelled, InvalidArgument, NotFound, ServingError, Unavailable

if TYPE_CHECKING:
    from tensord.workers.calls.asking import Asked, Pending
    from tensord.workers.calls.own_metrics import Counter, Gauge, Histogram

__all__ = [
    "Cancelled",
    "InvalidArgument",
    "NotFound",
    "ServingError",
    "Unavailable",
    "begin",
    "call",
    "counter",
    "export",
    "gauge",
    "histogram",
    "is_ready",
    "load",
    "load_model",
    "span",
    "stream",
    "unload_model",
]


def export(
    folder: str | Path,
    function: Callable[..., Any],
    parameters: Any,
    inputs: Any,
    max_batch_size: int = 0,
    buckets: Mapping[str, Sequence[int]] | None = None,
    platforms: Sequence[str] | None = None,
) -> Path:
    """Writes a model folder that any tensord serves, without Python files.

    Args:
      folder: of the model; its name is the model's. Version 1 is written, which must not be there.
      function: ``function(parameters, inputs)`` returns a dict of named arrays, or a tree of them. With ``max_batch_size`` above
        0 all of them have the batch as first dimension.
      parameters: a pytree. Its arrays are written beside the program; everything else in it becomes part of that.
      inputs: name -> datatype and dims without the batch, such as ``{"x": "FP32[4]", "ids": "INT64[sequence]"}``; or a tree of
        those, as the function takes it: an array is named by the keys on the way to it, joined by dots.
      buckets: named axis -> sizes that are compiled when the model is loaded; requests are padded to them with zeros.
      platforms: what it may run on, such as ``("cpu", "cuda")``. None: the one that runs this.

    Returns: the folder.

    Raises: tensord.shm.errors.InvalidArgument: a declaration is wrong, or the function cannot be exported; it says why.
    """
    # Imported here: ``load`` needs no JAX.
    from tensord.workers.declarations.exporting import export_model

    return export_model(folder, function, parameters, inputs, max_batch_size, buckets, platforms)


def call(model: str, inputs: Mapping[str, Any], outputs: Sequence[str] = (), **own: Unpack[Asked]) -> dict[str, Array]:
    """Calls another model of the server, from within a host model or a generator, and waits for its outputs.

    Args:
      inputs: name -> array, in the shapes that clients send: with the batch dimension.
      outputs: which are wanted; none: all.
      own: what else the request says: ``version``, ``parameters``, ``request_id``, ``priority``, ``timeout_us``,
        ``sequence_id``, ``sequence_start``, ``sequence_end``, ``replace_key``.

    Returns: name -> numpy array, not to be written to.

    Raises: ServingError: what the other model answered, or why it could not be asked. Not caught, it is this model's answer.
    """
    return begin(model, inputs, outputs, **own).result()


def begin(model: str, inputs: Mapping[str, Any], outputs: Sequence[str] = (), **own: Unpack[Asked]) -> Pending:
    """Begins a call without waiting; ``result()`` waits. Several calls share batches of the model they are for.

    Arguments as for ``call``.
    """
    from tensord.workers.calls.asking import begin as begun

    return begun(model, inputs, outputs, **own)


def stream(
    model: str, inputs: Mapping[str, Any], outputs: Sequence[str] = (), **own: Unpack[Asked]
) -> Iterator[dict[str, Array]]:
    """Calls a model with any number of responses, and yields them as they come; closing ends the call.

    Arguments as for ``call``.
    """
    from tensord.workers.calls.asking import stream as streamed

    return streamed(model, inputs, outputs, **own)


def load_model(name: str, config: str = "", files: Mapping[str, bytes] | None = None) -> None:
    """Has the server load another model, or load it anew, from within a model, and waits for that. ``create`` may, too.

    Args:
      config: a configuration in JSON that takes the place of its config.pbtxt.
      files: ``file:<version>/<name>`` -> content; the model consists of these.

    Raises: ServingError: why it could not be loaded; or no model of a server runs this.
    """
    from tensord.workers.calls.other_models import load

    load(name, config, files)


def unload_model(name: str, dependents: bool = False) -> None:
    """Begins to unload another model, and with ``dependents`` its members. Raises as ``load_model``."""
    from tensord.workers.calls.other_models import unload

    unload(name, dependents)


def is_ready(name: str, version: int = 0) -> bool:
    """Returns whether the server answers requests for that version of a model, or for any (0). Raises as ``load_model``."""
    from tensord.workers.calls.other_models import is_ready

    return is_ready(name, version)


def span(name: str, **attributes: bool | int | float | str) -> AbstractContextManager[None]:
    """Names what a block of a host model or generator does, in the traces of the requests that it works on.

        with tensord.models.span("tokenize", words=len(words)):
            ...

    Blocks within it are parts of it, and an exception that leaves it is its error. Of a request that is not traced nothing is
    kept; so it is in threads that the model has started itself. A request has at most 128 spans, of at most 16 attributes each,
    and the first 256 characters of a text are told.
    """
    from tensord.workers.calls.own_spans import span

    return span(name, attributes)


def counter(name: str, description: str = "", labels: Mapping[str, str] | None = None) -> Counter:
    """Makes a metric of this model that only grows: ``increment(by=1)``, ``value``. Shown as long as the model keeps the object.

    Raises: InvalidArgument: the name or a label cannot be one, or it is there as another kind; or no model runs this.
    """
    from tensord.workers.calls.own_metrics import Counter

    return Counter(name, description, labels)


def gauge(name: str, description: str = "", labels: Mapping[str, str] | None = None) -> Gauge:
    """Makes a metric of something that goes up and down, with ``set(to)`` besides; otherwise as ``counter``."""
    from tensord.workers.calls.own_metrics import Gauge

    return Gauge(name, description, labels)


def histogram(
    name: str, buckets: Sequence[float], description: str = "", labels: Mapping[str, str] | None = None
) -> Histogram:
    """Makes a metric of values by size: ``observe(value)``. ``buckets``: their growing upper bounds. Otherwise as ``counter``."""
    from tensord.workers.calls.own_metrics import Histogram

    return Histogram(name, description, labels, buckets)
