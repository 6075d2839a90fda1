"""Functions for authors of models: read parameters, make random keys, export model folders, call models, make metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from tensord.parameter_files import load
from tensord.shm.arrays import Array
from tensord.shm.errors import Cancelled, InvalidArgument, NotFound, ServingError, Unavailable

if TYPE_CHECKING:
    import jax

    from tensord.workers.calls.asking import Asked, BegunCall
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
    "keys",
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
    buckets: Mapping[str, Sequence[int] | str] | None = None,
    platforms: Sequence[str] | None = None,
    derivatives: int = 0,
) -> Path:
    """Writes a model folder that any tensord serves, without Python files in it.

    If an input has a 64-bit datatype, or if ``jax_enable_x64`` is set, the function computes with 64-bit types.

    Args:
      folder: the model's folder. Its name is the model's name. Version 1 is written, which must not exist yet.
      function: ``function(parameters, inputs)`` returns a dict of named arrays, or a tree of arrays. If ``max_batch_size`` is
        above 0, the first dimension of every array is the batch.
      parameters: a pytree. Its arrays are written to a file of parameters. Everything else in it becomes part of the program.
      inputs: the datatype and dims of each input by its name, without the batch, such as
        ``{"x": "FP32[4]", "ids": "INT64[sequence]"}``. It may also be a tree of such texts. An array's name is then the keys
        on the way to it, joined by dots.
      max_batch_size: the most rows of one batch, or 0 if the arrays have no batch dimension.
      buckets: the sizes of a named axis that are compiled when the model is loaded, or "auto" for powers of two, compiled when
        a request first needs them. Requests are padded to them with zeros.
      platforms: the platforms that the program may run on, such as ``("cpu", "cuda")``. None means this process's platform.
      derivatives: how many orders of derivatives, in reverse mode, the model has: 0, 1 or 2.

    Returns: the folder.

    Raises: tensord.shm.errors.InvalidArgument: an argument is wrong, or the function cannot be exported; the message says why.
    """
    # Imported here: ``load`` needs no JAX.
    from tensord.workers.loading.exporting import export_model

    return export_model(folder, function, parameters, inputs, max_batch_size, buckets, platforms, derivatives)


def keys(seeds: Array | jax.Array, raw: bool = False) -> jax.Array:
    """Makes a random key for each row from the row's seed. A row's random values then do not depend on the rest of the batch.

        own = tensord.models.keys(request["seed"])  # model.py declares: request = {"seed": ("INT64", 0)}
        noise = jax.vmap(lambda key: jax.random.normal(key, (4,)))(own)

    The keys are those of ``jax.random.key`` with threefry2x32, whatever ``jax_default_prng_impl`` is. A seed that is not
    negative has the same key in every datatype.

    Args:
      seeds: INT32, UINT32, INT64 or UINT64, of shape [rows] or [rows, 1]. A model without a batch dimension has one row.
      raw: True for keys of UINT32[rows, 2], as ``jax.random.PRNGKey`` makes them, or False for typed keys of shape [rows].

    Raises: InvalidArgument: ``seeds`` is no array, or has another datatype or shape.
    """
    import jax
    import jax.numpy as jnp

    dtype, shape = str(getattr(seeds, "dtype", type(seeds).__name__)), tuple(getattr(seeds, "shape", ()))
    if dtype not in ("int32", "uint32", "int64", "uint64") or not shape or shape[1:] not in ((), (1,)):
        expected = "32 or 64-bit integers of shape [rows] or [rows, 1] are expected"
        raise InvalidArgument(f"the seeds are {dtype}{list(shape)}; {expected}")
    seeds = seeds.reshape(shape[0])
    low = jnp.asarray(seeds.astype("uint32"))
    # Shifted as they are: outside of 64-bit mode JAX would cut numpy's 64 bits to 32.
    high = (seeds >> 32).astype("uint32") if seeds.dtype.itemsize == 8 else jnp.zeros_like(low)
    words = jnp.stack([high, low], axis=1)
    return words if raw else jax.random.wrap_key_data(words, impl="threefry2x32")


def call(model: str, inputs: Mapping[str, Any], outputs: Sequence[str] = (), **own: Unpack[Asked]) -> dict[str, Array]:
    """Calls another model of the server and waits for its outputs. Only model code that runs in Python may use it.

    Args:
      inputs: the arrays by input name, in the shapes that clients send: with the batch dimension.
      outputs: the names of the outputs to return, or none for all outputs.
      own: further fields of the request, such as ``version`` and ``priority``. ``Asked`` has them all.

    Returns: the outputs by name, as read-only numpy arrays.

    Raises: ServingError: the error of the other model, or why it could not be called. If the calling model does not catch it,
      the calling model's client gets it.
    """
    return begin(model, inputs, outputs, **own).result()


def begin(model: str, inputs: Mapping[str, Any], outputs: Sequence[str] = (), **own: Unpack[Asked]) -> BegunCall:
    """Begins a call of another model and returns at once. ``result()`` of the returned object waits for the outputs.

    Calls that are in flight together may share a batch of the called model.

    Args:
      inputs: the arrays by input name, in the shapes that clients send: with the batch dimension.
      outputs: the names of the outputs to return, or none for all outputs.
      own: further fields of the request, such as ``version`` or ``priority``.
    Raises: InvalidArgument: an input is no array, a field in ``own`` is wrong, or the caller is not the code of a loaded
      model, or is its ``is_ready`` or ``finalize``. ``result()`` raises the errors of the called model.
    """
    from tensord.workers.calls.asking import begin as begun

    return begun(model, inputs, outputs, **own)


def stream(
    model: str, inputs: Mapping[str, Any], outputs: Sequence[str] = (), **own: Unpack[Asked]
) -> Iterator[dict[str, Array]]:
    """Calls a model that answers with any number of responses, and yields each response when it comes.

    Closing the iterator cancels the call.

    Args:
      inputs: the arrays by input name, in the shapes that clients send: with the batch dimension.
      outputs: the names of the outputs to return, or none for all outputs.
      own: further fields of the request, such as ``version`` or ``priority``.
    Raises: InvalidArgument: an input is no array, a field in ``own`` is wrong, or the caller is not the code of a loaded
      model, or is its ``is_ready`` or ``finalize``. If a response is an error, the iterator raises it as a ServingError, and
      ends.
    """
    from tensord.workers.calls.asking import stream as streamed

    return streamed(model, inputs, outputs, **own)


def load_model(name: str, config: str = "", files: Mapping[str, bytes] | None = None) -> None:
    """Makes the server load or reload the model ``name``, and waits until it is loaded. A model's ``create`` may call this.

    Args:
      config: a configuration in JSON that replaces the model's config.pbtxt, or "" to keep the model's configuration.
      files: the contents of all files of the model, by ``file:<version>/<name>``: at most 256 files of 128 MiB together. With
        ``files``, ``config`` must be given, too. None means the files in the model's folder.

    Raises: ServingError: the load failed, or the caller is not the code of a model that a server is loading or serving.
    """
    from tensord.workers.calls.asking import load

    load(name, config, files)


def unload_model(name: str, dependents: bool = False) -> None:
    """Makes the server begin to unload the model ``name``, and does not wait until the model is unloaded.

    ``dependents``: True to unload also the models that were loaded only as members of the ensemble ``name``. Raises
    ServingError if the server refuses, or if the caller is not the code of a model that a server is loading or serving.
    """
    from tensord.workers.calls.asking import unload

    unload(name, dependents)


def is_ready(name: str, version: int = 0) -> bool:
    """Returns whether the server answers requests for a model version. ``version`` 0 means any version.

    Raises ServingError if the server cannot say, or if the caller is not code of a model that a server runs.
    """
    from tensord.workers.calls.asking import is_ready

    return is_ready(name, version)


def span(name: str, **attributes: bool | int | float | str) -> AbstractContextManager[None]:
    """Returns a context manager that makes its block a named span in the traces of the model's requests.

        with tensord.models.span("tokenize", words=len(words)):
            ...

    Spans inside the block become children of this span. An exception that leaves the block becomes the span's error. Nothing
    is recorded for a request that is not traced, or in threads that the model has started itself. A request has at most 128
    spans, with at most 16 attributes each. The first 256 characters of a text are stored.
    """
    from tensord.workers.calls.own_spans import span

    return span(name, attributes)


def counter(name: str, description: str = "", labels: Mapping[str, str] | None = None) -> Counter:
    """Makes a metric of this model that only grows. The returned object has ``increment(by=1)`` and ``value``.

    The server shows the metric at /metrics, with ``description``, as long as the model keeps the object. ``labels`` has the
    values of labels by name.

    Raises: InvalidArgument: the name or a label is not valid, a metric of another kind has this name, or no model runs this code.
    """
    from tensord.workers.calls.own_metrics import Counter

    return Counter(name, description, labels)


def gauge(name: str, description: str = "", labels: Mapping[str, str] | None = None) -> Gauge:
    """Makes a metric of this model that goes up and down.

    The returned object has ``set(to)``, ``increment(by=1)``, where ``by`` may be negative, and ``value``. The server shows
    the metric at /metrics, with ``description``, as long as the model keeps the object. ``labels`` has the values of labels
    by name.

    Raises: InvalidArgument: the name or a label is not valid, a metric of another kind has this name, or no model runs this code.
    """
    from tensord.workers.calls.own_metrics import Gauge

    return Gauge(name, description, labels)


def histogram(
    name: str, buckets: Sequence[float], description: str = "", labels: Mapping[str, str] | None = None
) -> Histogram:
    """Makes a metric of this model that counts values by size. The returned object has ``observe(value)``.

    The server shows the metric at /metrics, with ``description``, as long as the model keeps the object. ``buckets`` are
    upper bounds, ascending. ``labels`` has the values of labels by name.

    Raises: InvalidArgument: name, labels or buckets are not valid, another metric has this name, or no model runs this code.
    """
    from tensord.workers.calls.own_metrics import Histogram

    return Histogram(name, description, labels, buckets)
