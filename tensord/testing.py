"""Runs a model without a server, for tests and notebooks: a worker's own code loads, validates, batches, pads and runs it.

with tensord.testing.load("models/digits") as model:
    model({"image": images})["logits"]
"""

from __future__ import annotations

import dataclasses
import functools
import os
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from tensord.config import ensemble_checks, layers, model_config
from tensord.daemon.models.repository import FoundModel, find
from tensord.shm.arrays import Array, datatype_of
from tensord.shm.common.arrays import decode_strings, encode_strings
from tensord.shm.common.connection import Prepared
from tensord.shm.common.derivatives import described, lacks, of_model, original
from tensord.shm.common.latest import Latest
from tensord.shm.common.local import LocalConnection
from tensord.shm.common.model import Model, ModelSequence
from tensord.shm.common.results import Answer, Description, Tensor, Timing
from tensord.shm.errors import (
    UNKNOWN_MODEL,
    AlreadyExists,
    Cancelled,
    DeadlineExceeded,
    Internal,
    InvalidArgument,
    NotFound,
    Replaced,
    ServingError,
    Unavailable,
    Unknown,
    Unsupported,
)
from tensord.shm.messages import PreparedRequest, RequestRecord

if TYPE_CHECKING:
    import jax

    from tensord.shm.common.call import Call
    from tensord.shm.common.local import LocalRequest
    from tensord.workers.local_worker import LocalWorker
    from tensord.workers.models.model_version import ModelVersion

__all__ = [
    "AlreadyExists",
    "Answer",
    "Cancelled",
    "DeadlineExceeded",
    "Internal",
    "InvalidArgument",
    "Latest",
    "Model",
    "ModelSequence",
    "NotFound",
    "Prepared",
    "Replaced",
    "ServingError",
    "Tensor",
    "Timing",
    "Unavailable",
    "Unknown",
    "Unsupported",
    "load",
]


def load(
    folder: str | os.PathLike[str],
    version: int = 0,
    *,
    config: str | os.PathLike[str] | None = None,
    device: jax.Device | None = None,
) -> Model:
    """Loads a model in this process, exactly as a worker does, with the same imports and the same compiled programs.

    Args:
      folder: the model's folder. The members of an ensemble must be beside it.
      version: the version to load, or 0 for the newest that the model's version policy chooses.
      config: a configuration file of ``tensord serve``, or None. Variables such as TENSORD_WORKERS_THREADS count as well.
      device: the device to run on, or None for JAX's first device.

    Raises: ServingError: the model cannot be loaded; the message says why.  tensord.config.layers.ConfigurationError: the file
      ``config`` or a variable TENSORD_... is wrong.
    """
    served = _load(Path(folder).absolute(), version, config, device)
    connection = LocalConnection(lambda *_: served)
    # Opened at once: the connection closes what was opened, also where nobody asks it.
    description = connection.open(served.description.model, served.description.version)
    return _Loaded(connection, description, description.version, None)


def served(repository: Path, model: str, version: int) -> _Served:
    """Loads the model in ``repository``/``model`` and returns it. Code in this process can send requests to the loaded model.

    ``version`` 0 means the newest that the model's version policy chooses. Raises: NotFound: there is no such model or version.
    ServingError: loading has failed.  tensord.config.layers.ConfigurationError: an environment variable TENSORD_... is wrong.
    """
    if not (repository / model).is_dir():
        raise NotFound(f"{UNKNOWN_MODEL}'{model}' is not found")
    if version and not (repository / model / str(version)).is_dir():
        raise NotFound(f"{UNKNOWN_MODEL}'{model}' version {version} is not found")
    return _load((repository / model).absolute(), version)


def _load(
    path: Path, version: int, config: str | os.PathLike[str] | None = None, device: jax.Device | None = None
) -> _Served:
    # JAX is imported here: whoever only imports this module may still set its environment.
    import jax

    from tensord.workers.local_worker import LocalWorker

    options = layers.read(None if config is None else Path(config), os.environ).options
    # The device is needed only once the files were read: an error in these needs none.
    found = _found(path, version)
    worker = LocalWorker(options, device or jax.devices()[0])
    try:
        loaded: dict[str, dict[int, ModelVersion]] = {}
        for model, number in found:
            loaded.setdefault(model.name, {})[number] = worker.load(_whole(model, loaded).load(number))
        return _Served(worker, loaded[path.name][found[-1][1]])
    except BaseException:
        worker.close()
        raise


def _found(path: Path, version: int) -> list[tuple[FoundModel, int]]:
    found: dict[tuple[str, int], FoundModel] = {}
    under_way: list[str] = []

    def add(name: str, version: int) -> None:
        if name in under_way:
            raise InvalidArgument(f"circular dependency between ensembles: {' -> '.join((*under_way, name))}")
        model = find([path.parent], name)
        if model.error or (version <= 0 and model.problem):
            raise NotFound(f"model '{name}': {model.problem}")
        number = version if version > 0 else model.chosen[-1]
        if number not in model.versions:
            raise NotFound(f"model '{name}' has no version {number}, it has {', '.join(map(str, model.versions))}")
        under_way.append(name)
        for member in model.members:
            add(*member)
        under_way.pop()
        found[name, number] = model

    add(path.name, version)
    return [(model, number) for (_, number), model in found.items()]


def _whole(model: FoundModel, loaded: Mapping[str, Mapping[int, ModelVersion]]) -> FoundModel:
    """Returns ``model``. An ensemble that has a decoupled member is configured as decoupled in the returned object.

    Raises InvalidArgument if an ensemble does not fit its members. ``loaded``: model name -> version number -> loaded version.
    """
    if not model.members:
        return model

    def member(name: str, number: int) -> model_config.ModelConfig:
        versions = loaded[original(name)[0]]
        version = versions[number if number > 0 else max(versions)]
        found = described(name, version, {each.name: each for each in version.derivatives}, version.loaded.lacking)
        return model_config.parse_json(found.loaded.config.decode(), name)

    config = ensemble_checks.completed(model.config, member)
    return dataclasses.replace(model, config=config.SerializeToString(deterministic=True))


class _Served:
    """A model that is loaded in this process, and to which code in this process can send requests."""

    def __init__(self, worker: LocalWorker, version: ModelVersion, of: _Served | None = None) -> None:
        self._worker = worker
        self._version = version
        config = self.config = msgspec.json.decode(version.loaded.config)
        self.description = Description(
            {
                "model": version.name,
                "version": version.version,
                "metadata": msgspec.json.decode(version.loaded.metadata),
                "max_batch_size": int(config.get("max_batch_size", 0)),
                "streams": version.loaded.streams,
                "sequences": "sequence_batching" in config,
                "pure": False,
            }
        )
        self._datatypes = {each["name"]: each["datatype"] for each in self.description.metadata["inputs"]}
        # The worker is closed also where nobody does so, and at the end of the process.
        self.close: Any = weakref.finalize(self, worker.close) if of is None else of.close
        self._derivatives = {each.name: _Served(worker, each, self) for each in version.derivatives}
        self.took = lambda request: worker.post(functools.partial(worker.took, request))
        self.withdraw = lambda request: worker.post(functools.partial(worker.withdraw, request))

    def derivative(self, name: str) -> _Served:
        """Returns the model that computes a derivative of this one. Raises NotFound if there is none called ``name``."""
        if name not in self._derivatives:
            why = lacks(*of_model(name), self._version.loaded.lacking)
            raise NotFound(f"{UNKNOWN_MODEL}'{name}' is not found: {why}")
        return self._derivatives[name]

    def begin(self, request: LocalRequest, call: Call) -> int:
        """Sends ``call`` to this model with copies of the inputs. Another thread calls ``request.take`` with each response.

        Returns the number of copied bytes. Raises ServingError if an input cannot be sent or the model was closed.
        """
        arrays = {name: _array(array) for name, array in call.inputs.items()}
        prepared = PreparedRequest(call.model, self.description.version, parameters=dict(call.parameters))
        number = next(self._worker.numbers)
        record = RequestRecord.scheduled(call.scheduling, number, prepared, client_id=call.request_id)
        self._worker.ask(request, prepared, record, arrays, call.outputs)
        return sum(array.nbytes for array in arrays.values())

    def end_sequence(self, sequence_id: int | str) -> None:
        """Ends a sequence without a further request. It does nothing if there is no such sequence."""
        sequences = self._version.sequences
        if sequences is not None and self.close.alive:
            self._worker.call(lambda: sequences.close(sequence_id))


class _Loaded(Model):
    """A model that ``load`` has loaded. ``close`` unloads it."""

    def close(self) -> None:
        """Waits until all requests are answered, then unloads the model. Idempotent."""
        super().close()
        self._connection.close()


def _array(value: Array) -> Array:
    made = np.array(value)
    if datatype_of(made.dtype) == "BYTES":
        made = decode_strings(encode_strings(made), made.shape)
    made.flags.writeable = False
    return made
