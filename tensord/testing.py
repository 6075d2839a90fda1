"""A model without a server, for tests and notebooks: loaded, validated, batched, padded and run by a worker's own parts.

with tensord.testing.load("models/digits") as model:
    model({"image": images})["logits"]
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Unpack

import msgspec
import numpy as np

from tensord.config import ensemble_graph, layers, model_config
from tensord.daemon.models.repository import FoundModel, find
from tensord.shm.arrays import DTYPES, Array, datatype_of
from tensord.shm.errors import InvalidArgument, NotFound, ServingError, Unavailable
from tensord.shm.messages import Parameter, PreparedRequest, RequestRecord

if TYPE_CHECKING:
    import jax

    from tensord.workers.calls.asking import Own
    from tensord.workers.local_worker import Answers, LocalWorker
    from tensord.workers.models.model_version import ModelVersion

__all__ = ["InvalidArgument", "Model", "ModelSequence", "NotFound", "ServingError", "Tensor", "Unavailable", "load"]


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor that a model takes or gives."""

    name: str
    datatype: str
    #: The shape that clients see: with the batch dimension, -1 where the size varies.
    shape: tuple[int, ...]


class Answer(dict[str, Array]):
    """Outputs by name."""

    #: The parameters of the model's answer.
    parameters: Mapping[str, Parameter] = {}


def load(
    folder: str | os.PathLike[str],
    version: int = 0,
    *,
    config: str | os.PathLike[str] | None = None,
    device: jax.Device | None = None,
) -> Model:
    """Loads a model as a worker does, in this process: what it imports, compiles and keeps is the same.

    Args:
      folder: of the model. The members of an ensemble are looked for beside it.
      version: 0 is the newest that its version policy chooses.
      config: a configuration file, as ``tensord serve`` takes; variables such as TENSORD_WORKERS_THREADS count as they do there.
      device: None: JAX's first one.

    Raises: ServingError: it cannot be loaded; the text is what the daemon would say.
    """
    # JAX is imported here: whoever only imports this module may still set its environment.
    import jax

    from tensord.workers.local_worker import LocalWorker

    options = layers.load(None if config is None else Path(config), os.environ)
    path = Path(folder).absolute()
    # The device is needed only once the files were read: an error in these needs none.
    found = _found(path, version)
    worker = LocalWorker(options, device or jax.devices()[0])
    try:
        loaded: dict[str, dict[int, ModelVersion]] = {}
        for model, number in found:
            loaded.setdefault(model.name, {})[number] = worker.load(_whole(model, loaded).load(number))
        return Model(worker, loaded[path.name][found[-1][1]])
    except BaseException:
        worker.close()
        raise


def _found(path: Path, version: int) -> list[tuple[FoundModel, int]]:
    """Finds the version to load, and before it those that the steps of an ensemble need. Raises NotFound, InvalidArgument."""
    found: dict[tuple[FoundModel, int], None] = {}
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
        found.setdefault((model, number))

    add(path.name, version)
    return list(found)


def _whole(model: FoundModel, loaded: Mapping[str, Mapping[int, ModelVersion]]) -> FoundModel:
    """Completes an ensemble from its members, which are loaded; any other model stays as it is."""
    if not model.members:
        return model

    def member(name: str, number: int) -> model_config.ModelConfig:
        versions = loaded[name]
        described = versions[number if number > 0 else max(versions)].loaded.config
        return model_config.parse_json(described.decode(), name)

    message = model_config.from_bytes(model.config)
    ensemble_graph.check(message, member)
    message.model_transaction_policy.decoupled = ensemble_graph.decoupled(message, member)
    return dataclasses.replace(model, config=message.SerializeToString(deterministic=True))


class Model:
    """A loaded model. Calls may come from any thread; those that wait together share batches."""

    def __init__(self, worker: LocalWorker, version: ModelVersion) -> None:
        self._worker = worker
        self._version = version
        self.name = version.name
        self.version = version.version
        described = msgspec.json.decode(version.loaded.metadata)
        self.inputs = _tensors(described["inputs"])
        self.outputs = _tensors(described["outputs"])
        #: The completed configuration, as the protocol has it.
        self.config: dict[str, Any] = msgspec.json.decode(version.loaded.config)
        # The worker is closed also where nobody does so, and at the end of the process.
        self._end = weakref.finalize(self, worker.close)

    def __call__(self, inputs: Mapping[str, Any], *, outputs: Sequence[str] = (), **own: Unpack[Own]) -> Answer:
        """Answers one request.

        Args:
          inputs: name -> array, with the batch dimension where the model has one. What is no array yet, such as a list of
            numbers, becomes one of the input's datatype.
          outputs: which are wanted; none: all.

        Raises: ServingError: what the client would be told.
        """
        if self._version.loaded.streams:
            raise InvalidArgument(f"model '{self.name}' answers a request with several responses: use stream()")
        with contextlib.closing(self._ask(inputs, outputs, own)) as answers:
            return _answer(next(answers))

    def stream(self, inputs: Mapping[str, Any], *, outputs: Sequence[str] = (), **own: Unpack[Own]) -> Iterator[Answer]:
        """Returns an iterator over the responses to one request, as the model makes them; stopping early cancels it.

        Arguments are those of a call.

        Raises: ServingError: with the response that is one.
        """
        answers = self._ask(inputs, outputs, own)

        def taken() -> Iterator[Answer]:
            with contextlib.closing(answers):
                yield from map(_answer, answers)

        return taken()

    def sequence(self, sequence_id: int | str = 0) -> ModelSequence:
        """Makes a sequence of requests to a model that keeps state of it. ``sequence_id`` 0: an unused one."""
        return ModelSequence(self, sequence_id or (1 << 62) + next(self._worker.numbers))

    def end_sequence(self, sequence_id: int | str) -> None:
        """Ends a sequence without a further request."""
        sequences = self._version.sequences
        if sequences is not None and self._end.alive:
            self._worker.call(lambda: sequences.close(sequence_id))

    def close(self) -> None:
        """Ends the model once all requests are answered. Idempotent."""
        self._end()

    def __enter__(self) -> Model:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _ask(self, inputs: Mapping[str, Any], outputs: Sequence[str], own: Own) -> Answers:
        datatypes = {tensor.name: tensor.datatype for tensor in self.inputs}
        arrays = {name: _array(name, value, datatypes.get(name)) for name, value in inputs.items()}
        said: Any = {"client_id" if name == "request_id" else name: value for name, value in own.items()}
        prepared = PreparedRequest(self.name, self.version, parameters=said.pop("parameters", {}))
        record = RequestRecord(next(self._worker.numbers), prepared, **said)
        return self._worker.ask(prepared, record, arrays, outputs)

    def __repr__(self) -> str:
        return f"<Model {self.name}:{self.version}{'' if self._end.alive else ', closed'}>"


class ModelSequence:
    """A sequence of requests, one after the other: the first begins it, the one with ``end`` ends it."""

    def __init__(self, model: Model, sequence_id: int | str) -> None:
        self._model = model
        self.sequence_id = sequence_id
        self._begun = False
        self._ended = False

    def __call__(self, inputs: Mapping[str, Any], *, end: bool = False, **own: Unpack[Own]) -> Answer:
        """Runs the next step. Arguments and errors as for a call of the model."""
        start, self._begun = not self._begun, True
        self._ended = end
        own["sequence_id"], own["sequence_start"], own["sequence_end"] = self.sequence_id, start, end
        return self._model(inputs, **own)

    def __enter__(self) -> ModelSequence:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._begun and not self._ended:
            self._model.end_sequence(self.sequence_id)


def _tensors(described: Sequence[Mapping[str, Any]]) -> tuple[Tensor, ...]:
    return tuple(Tensor(each["name"], each["datatype"], tuple(map(int, each["shape"]))) for each in described)


def _array(name: str, value: Any, datatype: str | None) -> Array:
    """Makes an array that nobody else writes to, as requests have it."""
    if not hasattr(value, "dtype") and datatype is not None:
        try:
            made = np.array(value, DTYPES[datatype])
        except (ValueError, TypeError, OverflowError) as error:
            raise InvalidArgument(f"input '{name}' cannot be an array of {datatype}: {error}") from None
    else:
        made = np.array(value)
    if datatype_of(made.dtype) == "BYTES":
        from tensord.shm.arrays import strings

        made = strings(made)
    elif datatype_of(made.dtype) is None:
        raise InvalidArgument(f"input '{name}': arrays of {made.dtype} have no datatype in the protocol")
    made.flags.writeable = False
    return made


def _answer(result: dict[str, Array]) -> Answer:
    """Copies a result, so that the caller may do with it as it likes."""
    answer = Answer({name: np.array(array) for name, array in result.items()})
    answer.parameters = getattr(result, "parameters", {})
    return answer
