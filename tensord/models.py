"""For those who write models: parameters from files, models written as folders without Python, answers of other models."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from shm.arrays import Array
from shm.errors import Cancelled, InvalidArgument, NotFound, ServingError, Unavailable
from tensord.parameter_files import load

if TYPE_CHECKING:
    from workers.calls.asking import Asked, Pending

__all__ = [
    "Cancelled",
    "InvalidArgument",
    "NotFound",
    "ServingError",
    "Unavailable",
    "begin",
    "call",
    "export",
    "load",
    "stream",
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

    Raises: shm.errors.InvalidArgument: a declaration is wrong, or the function cannot be exported; it says why.
    """
    # Imported here: ``load`` needs no JAX.
    from workers.models.exporting import export_model

    return export_model(folder, function, parameters, inputs, max_batch_size, buckets, platforms)


def call(model: str, inputs: Mapping[str, Any], outputs: Sequence[str] = (), **own: Unpack[Asked]) -> dict[str, Array]:
    """Asks another model of the server, from within a host model or a generator, and waits for its outputs.

    Args:
      inputs: name -> array, in the shapes that clients send: with the batch dimension.
      outputs: which are wanted; none: all.
      own: what else the request says: ``version``, ``parameters``, ``request_id``, ``priority``, ``timeout_us``,
        ``sequence_id``, ``sequence_start``, ``sequence_end``.

    Returns: name -> numpy array, not to be written to.

    Raises: ServingError: what the other model answered, or why it could not be asked. Not caught, it is this model's answer.
    """
    return begin(model, inputs, outputs, **own).result()


def begin(model: str, inputs: Mapping[str, Any], outputs: Sequence[str] = (), **own: Unpack[Asked]) -> Pending:
    """As ``call``, without waiting: ``result()`` does. Several that were begun share batches of the model they are for."""
    from workers.calls.asking import begin as begun

    return begun(model, inputs, outputs, **own)


def stream(
    model: str, inputs: Mapping[str, Any], outputs: Sequence[str] = (), **own: Unpack[Asked]
) -> Iterator[dict[str, Array]]:
    """As ``call``, of a model with any number of responses: one by one, as they come. Closed, it ends the call."""
    from workers.calls.asking import stream as streamed

    return streamed(model, inputs, outputs, **own)
