"""A served model as a function of arrays, with the surface of ``tensord.testing.Model``, whichever way leads to it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from tensord_client import tensors
from tensord_client.call import Call, Own, SequenceId
from tensord_client.errors import InvalidArgument, ServingError, Unavailable
from tensord_client.latest import Latest
from tensord_client.results import Answer, Array, Description, Tensors
from tensord_client.results import tensors as described

if TYPE_CHECKING:
    import concurrent.futures

    from typing_extensions import Unpack

    from tensord_client.connection import Connection, Pending, PreparedCall
    from tensord_client.parameters import ModelParameters


class Calls:
    """Makes calls of what the caller gives; the base of a model and of an asynchronous one."""

    def __init__(
        self,
        connection: Connection,
        description: Description,
        version: int,
        timeout: float | None,
        parameter_set: str = "",
    ) -> None:
        self._connection = connection
        #: The parameter set that each request names; empty: none, and ``main`` answers.
        self._set: Mapping[str, str] = {"parameter_set": parameter_set} if parameter_set else {}
        self._description = description
        #: The version that is asked; 0: the newest at that time.
        self._asked_version = version
        self._closed = False
        self.name = description.model
        #: The version that was served when the model was looked up; ``Answer.version`` says which one answered.
        self.version = description.version
        #: Rows of a request at most; 0: there is no batch dimension.
        self.max_batch_size = description.max_batch_size
        #: Seconds for an answer, of a stream for each response; None: any time.
        self.timeout = timeout
        self.inputs: Tensors = described(description.metadata["inputs"])
        self.outputs: Tensors = described(description.metadata["outputs"])
        self._datatypes = {tensor.name: tensor.datatype for tensor in self.inputs}

    @property
    def config(self) -> Mapping[str, Any]:
        """Returns the completed configuration, as the protocol has it."""
        return self._connection.config(self.name, self._asked_version)

    def call(
        self,
        inputs: Mapping[str, Any],
        outputs: Sequence[str],
        own: Mapping[str, Any],
        places: Mapping[str, Array] | None = None,
        streams: bool = False,
    ) -> Call:
        """Makes a call. Raises InvalidArgument: an input cannot be an array.  TypeError: a request has no such argument."""
        if self._closed:
            raise Unavailable("the model was closed")
        if not streams and self._description.streams:
            raise InvalidArgument(f"model '{self.name}' answers a request with several responses: use stream()")
        if unknown := own.keys() - Own.__annotations__.keys():
            raise TypeError(f"a request to a model has no {', '.join(sorted(unknown))}")
        if self._set:
            own = {**own, "parameters": {**self._set, **own.get("parameters", {})}}
        datatypes = self._datatypes
        arrays = {
            name: tensors.array(name, value, datatypes.get(name))
            for name, value in tensors.flat(inputs, datatypes).items()
        }
        return Call(
            self.name,
            arrays,
            version=self._asked_version,
            outputs=outputs,
            places=places,
            deadline=None if self.timeout is None or streams else time.monotonic() + self.timeout,
            streams=streams,
            pure=self._description.pure,
            **own,
        )

    def sequence_id(self) -> int:
        """Returns an id that no other client takes: 63 random bits, and never 0."""
        import os

        return int.from_bytes(os.urandom(8), "little") >> 1 | 1

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__} {self.name}:{self._asked_version or 'newest'}{', closed' if self._closed else ''}>"
        )


class Model(Calls):
    """A model. Calls may come from any thread."""

    def __call__(self, inputs: Mapping[str, Any], *, outputs: Sequence[str] = (), **own: Unpack[Own]) -> Answer:
        """Answers one request.

        Args:
          inputs: name -> array, with the batch dimension where the model has one; nested mappings are flattened, with "/"
            between their keys. What is no array yet, such as a list of numbers, becomes one of the input's datatype.
          outputs: which are wanted; none: all.

        Raises: ServingError: what the server says; DeadlineExceeded: no answer within ``timeout``.
        """
        return self._connection.ask(self.call(inputs, outputs, own)).result()

    def submit(
        self, inputs: Mapping[str, Any], *, outputs: Sequence[str] = (), **own: Unpack[Own]
    ) -> concurrent.futures.Future[Answer]:
        """Begins a request and returns its answer to come. Arguments are those of a call; ``cancel()`` cancels the request.

        The arrays may be written to as soon as this returns.
        """
        return promised(self._connection.ask(self.call(inputs, outputs, own)))

    def stream(self, inputs: Mapping[str, Any], *, outputs: Sequence[str] = (), **own: Unpack[Own]) -> Iterator[Answer]:
        """Returns an iterator over the responses to one request, as the model makes them; stopping early cancels it.

        Arguments are those of a call. Raises: ServingError: with the response that is one.
        """
        return self._connection.ask(self.call(inputs, outputs, own, streams=True)).responses(self.timeout)

    def prepare(
        self,
        inputs: Mapping[str, Any],
        *,
        out: Mapping[str, Array] | None = None,
        outputs: Sequence[str] = (),
        **own: Unpack[Own],
    ) -> Prepared:
        """Prepares a request that is asked again and again: ``call()`` sends what the arrays hold then.

        Args:
          out: output -> the array that each answer is written to.
        """
        call = self.call(inputs, outputs or tuple(out or ()), own, out)
        call.deadline = None
        return Prepared(self._connection.prepare(call), self.timeout)

    @property
    def parameters(self) -> ModelParameters:
        """Returns the model's parameter sets, into which new ones are pushed while it is served."""
        from tensord_client.parameters import ModelParameters

        return ModelParameters(self._connection, self.name, self._asked_version)

    def latest(self) -> Latest:
        """Makes a ``Latest``: it takes inputs at any rate, drops those that newer ones replace, and returns the newest answer."""
        return Latest(self.submit)

    def sequence(self, sequence_id: SequenceId = 0) -> ModelSequence:
        """Makes a sequence of requests to a model that keeps state of it. ``sequence_id`` 0: an unused one."""
        return ModelSequence(self, sequence_id or self.sequence_id())

    def end_sequence(self, sequence_id: SequenceId) -> None:
        """Ends a sequence without a further request; over HTTP it ends by itself, once it has been idle for long enough."""
        self._connection.end_sequence(self.name, sequence_id)

    def close(self) -> None:
        """Ends the use of the model; the client stays. Idempotent."""
        self._closed = True

    def __enter__(self) -> Model:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Prepared:
    """A request that is asked again and again with what its arrays hold then."""

    def __init__(self, prepared: PreparedCall, timeout: float | None) -> None:
        self._prepared = prepared
        self._timeout = timeout

    def __call__(self) -> Mapping[str, Array]:
        """Sends the request, waits and returns the outputs by name. Raises as a call of the model."""
        return self._prepared(self._timeout)


class ModelSequence:
    """A sequence of requests, one after the other: the first begins it, the one with ``end`` ends it."""

    def __init__(self, model: Model, sequence_id: SequenceId) -> None:
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


def promised(pending: Pending) -> concurrent.futures.Future[Answer]:
    """Makes a future of a request under way."""
    import concurrent.futures

    future: concurrent.futures.Future[Answer] = concurrent.futures.Future()

    def over(pending: Pending) -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(pending.result())
        except ServingError as error:
            future.set_exception(error)

    def cancelled(future: concurrent.futures.Future[Answer]) -> None:
        if future.cancelled():
            pending.cancel()

    future.add_done_callback(cancelled)
    pending.add_done_callback(over)
    return future
