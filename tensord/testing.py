"""Runs a model without a server, for tests and notebooks: a worker's own code loads, validates, batches, pads and runs it.

with tensord.testing.load("models/digits") as model:
    model({"image": images})["logits"]
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import os
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Unpack

import msgspec
import numpy as np

from tensord.config import ensemble_graph, layers, model_config
from tensord.daemon.models.repository import FoundModel, find
from tensord.shm.arrays import Array, datatype_of
from tensord.shm.common import tensors
from tensord.shm.common.latest import Latest
from tensord.shm.common.scheduling import Arguments
from tensord.shm.common.tensors import Tensor, Timing, check_place
from tensord.shm.errors import (
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
from tensord.shm.messages import Parameter

if TYPE_CHECKING:
    import jax

    from tensord.workers.local_worker import Answers, LocalWorker
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
#: Threads that wait for the answers of ``submit``.
_WAITERS = 64


class Answer(dict[str, Array]):
    """The outputs of a request by name. The arrays are copies that the caller may change."""

    #: The version of the model that answered.
    version: int = 0
    #: The parameters of the model's answer.
    parameters: Mapping[str, Parameter] = {}
    #: None: it is one of several responses.
    timing: Timing | None = None

    @property
    def copied_bytes(self) -> int | None:
        """Returns how many bytes were copied for the request; None if this is one of several responses."""
        return None if self.timing is None else self.timing.copied_bytes

    def release(self) -> None:
        """Does nothing. (In ``tensord_client``, an answer may lie in the server's memory, which this method gives back.)"""

    def __enter__(self) -> Answer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


@contextlib.contextmanager
def _in_plain_words() -> Iterator[None]:
    """Takes out of the messages of errors in its block what the protocol adds: the id of a request without one, a note."""
    try:
        yield
    except ServingError as error:
        error.message = error.message.removeprefix("[request id: <id_unknown>] ").partition(" NOTE: ")[0].rstrip()
        error.args = (error.message,)
        raise


def load(
    folder: str | os.PathLike[str],
    version: int = 0,
    *,
    config: str | os.PathLike[str] | None = None,
    device: jax.Device | None = None,
) -> Model:
    """Loads a model in this process, exactly as a worker does, with the same imports and the same compiled programs.

    Args:
      folder: the model's folder. The members of an ensemble are looked for in the folder that contains it.
      version: the version to load; 0: the newest that the model's version policy chooses.
      config: a configuration file, as ``tensord serve`` takes; variables such as TENSORD_WORKERS_THREADS count as they do there.
      device: the device to run on; None: JAX's first one.

    Raises: ServingError: the model cannot be loaded; the message is the one that the daemon would give.
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
    """Returns the models to load with their version numbers, in the order of loading: an ensemble after all that its steps need.

    Raises NotFound: a model or version does not exist or cannot be read; InvalidArgument: ensembles contain each other.
    """
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
    """Returns an ensemble with its configuration checked and completed from its members'; any other model as it is.

    ``loaded``: model name -> version number -> loaded version. Raises InvalidArgument: the ensemble does not fit its members.
    """
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
    """A model loaded in this process by ``load``. Any thread may call it; requests that wait at the same time share a batch."""

    def __init__(self, worker: LocalWorker, version: ModelVersion) -> None:
        self._worker = worker
        self._version = version
        self.name = version.name
        self.version = version.version
        described = msgspec.json.decode(version.loaded.metadata)
        #: Seconds for an answer, of a stream for each response; None: any time.
        self.timeout: float | None = None
        self.inputs = tensors.tensors(described["inputs"])
        self.outputs = tensors.tensors(described["outputs"])
        #: The completed configuration, as the protocol has it.
        self.config: dict[str, Any] = msgspec.json.decode(version.loaded.config)
        #: Threads that wait for those who have submitted.
        self._waiters = concurrent.futures.ThreadPoolExecutor(_WAITERS, "tensord-answers")
        # The worker is closed also where nobody does so, and at the end of the process.
        self._end = weakref.finalize(self, worker.close)

    def __call__(self, inputs: Mapping[str, Any], *, outputs: Sequence[str] = (), **own: Unpack[Arguments]) -> Answer:
        """Runs one request and returns its outputs.

        Args:
          inputs: name -> array, with the batch dimension where the model has one. Nested mappings are flattened, with "/" between
            their keys, or "." where the model's input names have dots. A value that is no array, such as a list of numbers, is
            converted to the input's datatype.
          outputs: the names of the outputs to return; none: all.
          own: further fields of the request: ``parameters``, ``request_id``, ``priority``, ``timeout_us``, ``sequence_id``,
            ``sequence_start``, ``sequence_end``, ``replace_key``.

        Raises: ServingError: the error that a client would get.
        """
        answers, copied = self._ask(inputs, outputs, own, streams=False)
        return self._waited(answers, copied)

    def submit(
        self, inputs: Mapping[str, Any], *, outputs: Sequence[str] = (), **own: Unpack[Arguments]
    ) -> concurrent.futures.Future[Answer]:
        """Begins a request and returns a future of its answer, or of its ServingError.

        ``outputs``: names of the outputs to return; none: all. ``own``: further fields of the request, such as ``priority``.
        Raises InvalidArgument: an input cannot be an array, or the model gives several responses; Unavailable: it is closed.
        """
        answers, copied = self._ask(inputs, outputs, own, streams=False)
        return self._waiters.submit(self._waited, answers, copied)

    def stream(
        self, inputs: Mapping[str, Any], *, outputs: Sequence[str] = (), **own: Unpack[Arguments]
    ) -> Iterator[Answer]:
        """Begins a request and returns an iterator over its responses; leaving the iterator early cancels the request.

        ``outputs``: names of the outputs to return; none: all. ``own``: further fields of the request, such as ``priority``.

        Raises: ServingError: a response is this error.
        """
        answers, _ = self._ask(inputs, outputs, own, streams=True)

        def taken() -> Iterator[Answer]:
            with contextlib.closing(answers), _in_plain_words():
                for result in answers:
                    answer = self._answer(result)
                    for name in answer.keys() - set(outputs or answer):
                        del answer[name]
                    yield answer

        return taken()

    def prepare(
        self,
        inputs: Mapping[str, Any],
        *,
        out: Mapping[str, Array] | None = None,
        outputs: Sequence[str] = (),
        **own: Unpack[Arguments],
    ) -> Prepared:
        """Prepares a request that is sent many times: each call of the returned object sends what the input arrays hold then.

        Args:
          out: output -> the array that its values are written to, at each call.
          inputs: name -> array; keep the arrays and write new values into them.
          outputs: the names of the outputs to return; none: those in ``out``, or all if ``out`` is empty too.
          own: further fields of the request, such as ``priority``.
        """
        return Prepared(self, inputs, out or {}, outputs or tuple(out or ()), own)

    def latest(self) -> Latest[Answer]:
        """Returns an object that takes inputs at any rate, sends only the newest to the model and returns the newest answer."""
        return Latest(self.submit)

    def sequence(self, sequence_id: int | str = 0) -> ModelSequence:
        """Returns a sequence of requests to a model that keeps state between them.

        ``sequence_id``: the sequence's id; 0: an unused one is chosen.
        """
        return ModelSequence(self, sequence_id or (1 << 62) + next(self._worker.numbers))

    def end_sequence(self, sequence_id: int | str) -> None:
        """Ends the sequence with this id, if there is one, without a further request; the model's state of it is dropped."""
        sequences = self._version.sequences
        if sequences is not None and self._end.alive:
            self._worker.call(lambda: sequences.close(sequence_id))

    def close(self) -> None:
        """Waits until all requests are answered, then unloads the model. Idempotent."""
        self._end()
        self._waiters.shutdown()

    def __enter__(self) -> Model:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _ask(
        self, inputs: Mapping[str, Any], outputs: Sequence[str], own: Arguments, streams: bool
    ) -> tuple[Answers, int]:
        """Begins a request. Returns an iterator over its answers, and how many bytes of its inputs were copied.

        ``streams``: whether the caller takes several answers. Raises InvalidArgument: ``streams`` is False, and the model gives
        several; or an input cannot be an array; Unavailable: ``close`` was called.
        """
        if self._version.loaded.streams and not streams:
            raise InvalidArgument(f"model '{self.name}' answers a request with several responses: use stream()")
        # It imports the worker's parts, which who only imports this module does without.
        from tensord.workers.calls.asking import records

        if isinstance(outputs, str):
            raise InvalidArgument(f"outputs are the text {outputs!r}, a sequence of names is expected")
        datatypes = {tensor.name: tensor.datatype for tensor in self.inputs}
        given = tensors.flat(inputs, datatypes)
        arrays = {name: _array(name, value, datatypes.get(name)) for name, value in given.items()}
        if "version" in own:
            raise TypeError("a request to a loaded model has no version")
        prepared, record = records(next(self._worker.numbers), self.name, {**own, "version": self.version})
        with _in_plain_words():
            answers = self._worker.ask(prepared, record, arrays, outputs)
        # What is infinite is no time that a wait can have.
        answers.timeout = self.timeout if self.timeout is not None and self.timeout < threading.TIMEOUT_MAX else None
        return answers, sum(array.nbytes for array in arrays.values())

    def _waited(self, answers: Answers, copied: int) -> Answer:
        """Waits for the one answer to a request and returns it. Raises ServingError: the answer is this error.

        ``copied``: how many bytes of the request's inputs were copied, for the answer's ``timing``.
        """
        with contextlib.closing(answers), _in_plain_words():
            answer = self._answer(next(answers))
        if answers.moments is not None and answers.request is not None:
            began, _, computed = answers.moments
            copied += sum(array.nbytes for array in answer.values())
            answer.timing = Timing(began - answers.request.arrived_ns, computed - began, copied)
        return answer

    def _answer(self, result: dict[str, Array]) -> Answer:
        """Copies the outputs of one response (name -> array) into an Answer, so that the caller may change them."""
        answer = Answer({name: np.array(array) for name, array in result.items()})
        answer.version = self.version
        answer.parameters = getattr(result, "parameters", {})
        return answer

    def __repr__(self) -> str:
        return f"<Model {self.name}:{self.version}{'' if self._end.alive else ', closed'}>"


class Prepared:
    """A request that is sent many times, each time with what its input arrays hold then; made by ``Model.prepare``."""

    def __init__(
        self, model: Model, inputs: Mapping[str, Any], out: Mapping[str, Array], outputs: Sequence[str], own: Arguments
    ) -> None:
        for name, place in out.items():
            if not (isinstance(place, np.ndarray) and place.flags.writeable):
                raise InvalidArgument(f"the place of output '{name}' is no array that can be written to")
        self._model = model
        self._inputs = inputs
        self._out = out
        self._outputs = outputs
        self._own = own

    def __call__(self) -> Answer:
        """Sends the request, waits for its answer and returns the outputs by name.

        Raises: ServingError: the error that a client would get.  InvalidArgument: an output and its array in ``out`` differ in
          shape or dtype.
        """
        answer = self._model(self._inputs, outputs=self._outputs, **self._own)
        for name, place in self._out.items():
            made = answer[name]
            check_place(name, made.shape, made.dtype, place)
            place[...] = made
            answer[name] = place
        return answer


class ModelSequence:
    """A sequence of requests to a model that keeps state between them; made by ``Model.sequence``.

    The first request starts it; the one with ``end=True``, or leaving its ``with`` block, ends it.
    """

    def __init__(self, model: Model, sequence_id: int | str) -> None:
        self._model = model
        self.sequence_id = sequence_id
        self._begun = False
        self._ended = False
        #: Whether the last step was answered.
        self._over = False

    def __call__(self, inputs: Mapping[str, Any], *, end: bool = False, **own: Unpack[Arguments]) -> Answer:
        """Runs the next request of the sequence and returns its outputs. ``end``: whether the request is the last.

        ``own``: further fields of the request, such as ``priority``. Raises: ServingError: the error that a client would get.
        """
        if self._over:
            raise InvalidArgument(
                f"sequence {self.sequence_id!r} ended with an earlier step: sequence() begins another"
            )
        start, self._begun = not self._begun, True
        self._ended = end
        own["sequence_id"], own["sequence_start"], own["sequence_end"] = self.sequence_id, start, end
        answer = self._model(inputs, **own)
        self._over = end
        return answer

    def __enter__(self) -> ModelSequence:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._begun and not self._ended:
            self._model.end_sequence(self.sequence_id)


def _array(name: str, value: Any, datatype: str | None) -> Array:
    """Returns a read-only numpy copy of an input, of a dtype that requests can have.

    ``datatype``: the one that a value that is no array gets; None: numpy chooses. Raises InvalidArgument: the value cannot be
    such an array.
    """
    made = np.array(tensors.array(name, value, datatype))
    if datatype_of(made.dtype) == "BYTES":
        from tensord.shm.arrays import as_strings

        if made.dtype.kind == "O" and any(each is None for each in made.flat):
            raise InvalidArgument("an element of a BYTES tensor is None, bytes or str is expected")
        try:
            made = as_strings(made)
        except UnicodeEncodeError as error:
            raise InvalidArgument(f"an element of a BYTES tensor is not valid Unicode: {error}") from None
    made.flags.writeable = False
    return made
