"""Defines ``Model``, a model that is called like a function of arrays, over any kind of connection."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

from . import tensors
from .call import FOREVER, NOTHING, Call, Own, read_arguments, seconds, traced
from .derivatives import (
    FLOATING,
    KINDS,
    PARAMETER_GRADIENT,
    PULL_BACK,
    PUSH_FORWARD,
    VALUE_AND_GRADIENT,
    Names,
    lacks,
)
from .errors import InvalidArgument, NotFound, Unavailable
from .latest import Latest
from .pending import Pending
from .results import Answer, Array, Description, Tensors
from .scheduling import Scheduling, SequenceId

if TYPE_CHECKING:
    import concurrent.futures

    from typing_extensions import Unpack

    from .connection import Connection, Prepared

M = TypeVar("M")
C = TypeVar("C", bound="Calls")
#: A further argument of requests, with what checks it.
_TRACED = {"traceparent": traced}


class DerivativeCall:
    """Makes the inputs for calls of a model's derivative, such as ``pull_back``, and renames the outputs of the answers."""

    def __init__(self, model: str, kind: str, max_batch_size: int, inputs: Tensors, outputs: Tensors) -> None:
        """Takes the derivative's ``kind``, such as "pull_back". All other arguments describe the model, not the derivative."""
        names = Names(model)
        self._inputs = {tensor.name: tensor.datatype for tensor in inputs}
        of = inputs if kind == PUSH_FORWARD else () if kind == VALUE_AND_GRADIENT else outputs
        #: The tensors of which tangents or cotangents are given, and how the names of these begin.
        self._of = {tensor.name: tensor.datatype for tensor in of if tensor.datatype in FLOATING}
        self._prefix = names.tangent if kind == PUSH_FORWARD else names.cotangent
        self._made = {PULL_BACK: names.cotangent, PUSH_FORWARD: names.tangent, VALUE_AND_GRADIENT: names.gradient}.get(
            kind, ""
        )
        #: True if the derivative has rows, and the model has not.
        self._lifts = not max_batch_size and kind != PARAMETER_GRADIENT

    def arrays(self, inputs: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Array]:
        """Returns the inputs of the derivative by name: the model's ``inputs``, and the tangents or cotangents in ``more``.

        For ``push_forward``, ``more`` has a tangent by the name of each floating input. "x" becomes "tangent.x" in the result.
        For ``pull_back`` and ``parameter_gradient``, ``more`` has a cotangent by the name of each floating output. "y" becomes
        "cotangent.y". If the model is itself a derivative, the prefixes are "tangent2." and "cotangent2.". If the derivative
        has a batch dimension that the model lacks, each array gets a first dimension of 1.

        Raises InvalidArgument if a value cannot be an array, or if a name in ``more`` is missing or unknown.
        """
        found = tensors.arrays(inputs, self._inputs)
        if self._of or more:
            what = self._prefix.rstrip("2.")
            values = tensors.flat(more, self._of, what)
            if wrong := sorted(values.keys() ^ self._of.keys()):
                fault = "missing" if wrong[0] in self._of else "not known"
                raise InvalidArgument(f"the {what} of '{wrong[0]}' is {fault}: those of {[*self._of]} are expected")
            for name, datatype in self._of.items():
                found[self._prefix + name] = tensors.array(self._prefix + name, values[name], datatype)
        return {name: array[None] for name, array in found.items()} if self._lifts else found

    def result(self, answer: Answer) -> Answer:
        """Returns a derivative's answer with the model's tensor names, such as "x" for "cotangent.x". Copies no array."""
        return self.parts(answer)[1]

    def parts(self, answer: Answer) -> tuple[Answer, Answer]:
        """Splits the answer of a ``value_and_gradient`` into the model's outputs and the gradients, and returns both."""
        values, gradients, begin = Answer(), Answer(), len(self._made)
        for name, output in answer.items():
            part, own = (gradients, name[begin:]) if name.startswith(self._made) else (values, name)
            part[own] = output.reshape(output.shape[1:]) if self._lifts else output
        vars(values).update(vars(answer))
        vars(gradients).update(vars(answer))
        return values, gradients


class Calls:
    """Base class of ``Model`` and ``AsyncModel``. It has a model's description, and makes a ``Call`` for each request."""

    def __init__(
        self,
        connection: Connection,
        description: Description,
        version: int,
        timeout: float | None,
        parameter_set: str = "",
    ) -> None:
        self._connection = connection
        #: The scheduling of requests that say nothing of it. Its parameter set is that of each request whose parameters name
        #: none.
        self._scheduling = Scheduling(parameter_set=parameter_set)
        self._description = description
        #: The version that requests name; 0: the newest at the time of the request.
        self._asked_version = version
        self._closed = False
        # ``Model`` describes these.
        self.name, self.version = description.model, description.version
        self.max_batch_size, self.has_sequences = description.max_batch_size, description.sequences
        self.timeout = seconds(timeout)
        self.inputs: Tensors = tensors.tensors(description.metadata["inputs"])
        self.outputs: Tensors = tensors.tensors(description.metadata["outputs"])
        self._datatypes = {tensor.name: tensor.datatype for tensor in self.inputs}
        self._derivatives: dict[str, Any] = {}
        self._derivative_calls: dict[str, DerivativeCall] = {}

    def _open(self: C, kind: str) -> C:
        if kind not in KINDS:
            raise InvalidArgument(lacks(self.name, kind, {}))
        if kind not in self._derivatives:
            name, version = f"{self.name}.{kind}", self._asked_version
            try:
                description = self._connection.open(name, version)
            except NotFound as error:
                raise InvalidArgument(error.message) from error
            self._derivatives[kind] = type(self)(
                self._connection, description, version, self.timeout, self._scheduling.parameter_set
            )
        found: C = self._derivatives[kind]
        return found

    def has_derivative(self, kind: str) -> bool:
        """Returns whether the server offers a derivative of this model. ``kind`` is, for example, "pull_back"."""
        try:
            return self._open(kind) is not None
        except InvalidArgument:
            return False

    def _asked(self, kind: str) -> DerivativeCall:
        found = self._derivative_calls.get(kind)
        if found is None:
            found = DerivativeCall(self.name, kind, self.max_batch_size, self.inputs, self.outputs)
            self._derivative_calls[kind] = found
        return found

    @property
    def config(self) -> Mapping[str, Any]:
        """Returns the model's configuration (ModelConfig as JSON) with defaults filled in.

        The mapping is empty if the server sends no configuration.
        """
        return self._connection.config(self.name, self._asked_version)

    def call(
        self,
        inputs: Mapping[str, Any],
        outputs: Sequence[str],
        own: Mapping[str, Any],
        places: Mapping[str, Array] | None = None,
        streams: bool = False,
        detached: bool = False,
    ) -> Call:
        """Makes the ``Call`` object of one request to this model. Sends nothing.

        Args:
          inputs: input name -> array. Nested mappings are flattened, as ``tensors.flat`` describes.
          outputs: the names of the outputs to return, or none for all of them.
          own: the request's other fields, by their names in ``Own``.
          places: output name -> the caller's array that the output is written to, or None for no such arrays.
          streams: True if the caller accepts any number of responses.
          detached: True if the caller may change the input arrays before the answer has come.

        Raises: InvalidArgument: an input cannot be an array, two inputs have the same name, ``outputs`` is a str, an item of
          ``places`` is not a writable array, a field of ``own`` has a wrong value, the name of the parameter set is empty or
          no str, or the model gives several responses and ``streams`` is False.  TypeError: ``own`` has a key that ``Own``
          lacks.  Unavailable: ``close`` was called on this model.
        """
        if self._closed:
            raise Unavailable("the model was closed")
        if not streams and self._description.streams:
            raise InvalidArgument(f"model '{self.name}' answers a request with several responses: use stream()")
        scheduling, others = read_arguments(own, self._scheduling, _TRACED) if own else (self._scheduling, NOTHING)
        if isinstance(outputs, str):
            raise InvalidArgument(f"outputs are the text {outputs!r}, a sequence of names is expected")
        timeout = self.timeout
        deadline = None if timeout is None or streams or timeout >= FOREVER else time.monotonic() + timeout
        arrays = tensors.arrays(inputs, self._datatypes)
        pure = self._description.pure
        call = Call(self.name, arrays, self._asked_version, outputs, scheduling, deadline, pure, **others)
        if streams:
            call.streams = True
        if detached:
            call.detached = True
        if places:
            for name, place in places.items():
                if not (place.flags.writeable if isinstance(place, np.ndarray) else hasattr(place, "place")):
                    raise InvalidArgument(f"the place of output '{name}' is no array that can be written to")
            call.places = dict(places)
        return call

    def repeated(
        self, inputs: Mapping[str, Any], out: Mapping[str, Array] | None, outputs: Sequence[str], own: Mapping[str, Any]
    ) -> Call:
        """Makes the ``Call`` of a request that is sent many times. Arguments and errors: see ``Model.prepare``."""
        call = self.call(inputs, outputs or tuple(out or ()), own, out)
        if sources := tensors.copied(inputs, call.inputs, self._datatypes):
            call.sources = sources
        return call

    def sequence_id(self) -> int:
        """Returns a new random sequence id of 63 bits, never 0."""
        return int.from_bytes(os.urandom(8), "little") >> 1 | 1

    def __reduce__(self) -> Any:
        raise TypeError(
            "a model cannot be pickled, it is its process's own: call connect() and model() in each process"
        )

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__} {self.name}:{self._asked_version or 'newest'}{', closed' if self._closed else ''}>"
        )


class Model(Calls, AbstractContextManager["Model"]):
    """A served model. Call it with arrays by input name. Thread-safe.

    Attributes:
      name: the model's name.
      version: the version that was served when the model was looked up. ``Answer.version`` says which one answered.
      max_batch_size: the most rows of a request, or 0 if the model has no batch dimension.
      has_sequences: True if each request must belong to a sequence, for which the model keeps state.
      timeout: the seconds to wait for an answer, and in a stream for each response, or None for no limit.
      inputs, outputs: a ``Tensor`` for each input or output, found by position or by name.
    """

    def __call__(self, inputs: Mapping[str, Any], *, outputs: Sequence[str] = (), **own: Unpack[Own]) -> Answer:
        """Sends one request, waits for its answer and returns it.

        Args:
          inputs: input name -> array, with the batch dimension if the model has one. Nested mappings are flattened, with "/"
            between their keys. A value that is no array, such as a list, becomes an array of the input's datatype.
          outputs: the names of the outputs to return, or none for all of them.
          own: the request's other fields, such as ``parameters`` and ``priority``. ``Own`` has them all.

        Raises: InvalidArgument: an argument is wrong, or the model gives several responses (use ``stream``).
          DeadlineExceeded: no answer came within the model's ``timeout``.  ServingError: any other error of the server.
        """
        came = self._connection.exchange(self.call(inputs, outputs, own))
        return came.result() if isinstance(came, Pending) else came

    def derivative(self, kind: str) -> Model:
        """Returns a derivative of this model as a model. A server serves it under the name ``NAME.KIND``.

        ``kind`` is "pull_back", "push_forward", "value_and_gradient" or "parameter_gradient". Raises InvalidArgument if the
        model has no such derivative.
        """
        return self._open(kind)

    def pull_back(self, inputs: Mapping[str, Any], cotangents: Mapping[str, Any], **own: Unpack[Own]) -> Answer:
        """Computes the product of ``cotangents`` and the model's derivative (a vector-Jacobian product) in one request.

        Args:
          inputs: the inputs of the model, as in a call of the model.
          cotangents: output name -> array of the output's datatype and shape, for each floating output.
          own: the request's other fields, such as ``priority``.
        Returns: input name -> array of the input's datatype and shape, for each floating input.
        Raises: InvalidArgument: the model has no pull-back, an input or cotangent cannot be an array, or a cotangent is missing
          or has an unknown name.  ServingError: any other error of the server.
        """
        asked = self._asked(PULL_BACK)
        return asked.result(self._open(PULL_BACK)(asked.arrays(inputs, cotangents), **own))

    def push_forward(self, inputs: Mapping[str, Any], tangents: Mapping[str, Any], **own: Unpack[Own]) -> Answer:
        """Computes the product of the model's derivative and ``tangents`` (a Jacobian-vector product) in one request.

        Args:
          inputs: the inputs of the model, as in a call of the model.
          tangents: input name -> array of the input's datatype and shape, for each floating input.
          own: the request's other fields, such as ``priority``.
        Returns: output name -> array of the output's datatype and shape, for each floating output.
        Raises: InvalidArgument: the model has no push-forward, an input or tangent cannot be an array, or a tangent is missing
          or has an unknown name.  ServingError: any other error of the server.
        """
        asked = self._asked(PUSH_FORWARD)
        return asked.result(self._open(PUSH_FORWARD)(asked.arrays(inputs, tangents), **own))

    def value_and_gradient(self, inputs: Mapping[str, Any], **own: Unpack[Own]) -> tuple[Answer, Answer]:
        """Computes the model's outputs and the gradient of its only floating output in one request.

        This output must have one element in each row, and each row's gradient is the gradient of this element. ``own`` are the
        request's other fields, such as ``priority``. Returns the outputs by output name, and gradients by name of floating
        input. Raises InvalidArgument if the model has no such output or no derivatives. Raises ServingError if the server
        fails.
        """
        asked = self._asked(VALUE_AND_GRADIENT)
        return asked.parts(self._open(VALUE_AND_GRADIENT)(asked.arrays(inputs, {}), **own))

    def submit(
        self, inputs: Mapping[str, Any], *, outputs: Sequence[str] = (), **own: Unpack[Own]
    ) -> concurrent.futures.Future[Answer]:
        """Sends one request and returns a future of its answer. The future's ``cancel()`` cancels the request.

        You may change the input arrays as soon as this returns. Arrays of ``Client.empty`` are an exception, and must not
        change until the answer has come. The future's ``result()`` raises the server's errors. ``outputs`` are the names of
        the outputs to return, or none for all. ``own`` are the request's other fields, such as ``priority``.
        """
        return promised(self._connection.ask(self.call(inputs, outputs, own, detached=True)))

    def stream(self, inputs: Mapping[str, Any], *, outputs: Sequence[str] = (), **own: Unpack[Own]) -> Iterator[Answer]:
        """Sends one request and returns an iterator over its responses, in the order in which they are made.

        Leaving the iteration early cancels the request. ``outputs`` are the names of the outputs to return, or none for all.
        ``own`` are the request's other fields, such as ``priority``. The iterator raises ServingError if a response is an
        error or does not come within the model's ``timeout``.
        """
        call = self.call(inputs, outputs, own, streams=True, detached=True)
        return self._connection.ask(call).responses(self.timeout)

    def prepare(
        self,
        inputs: Mapping[str, Any],
        *,
        out: Mapping[str, Array] | None = None,
        outputs: Sequence[str] = (),
        **own: Unpack[Own],
    ) -> Prepared:
        """Prepares a request that is sent many times. Each call of the result sends the input arrays' present values.

        Args:
          inputs: input name -> array. Keep the arrays and write new values into them. An array that is not C-contiguous, or
            not in this host's byte order, is copied by each call. A value that is no array, such as a list, is converted now,
            and the result is sent each time.
          out: output name -> the array that each answer's output is written to. An array of ``Client.empty`` can save a copy.
            If an array has not its output's shape and dtype, this method or a call of the result raises InvalidArgument.
          outputs: the names of the outputs to return. If it is empty, the outputs named in ``out`` are returned. If ``out`` is
            also empty, all outputs are returned.
          own: the request's other fields, such as ``parameters`` or ``priority``.
        Raises: InvalidArgument: an input cannot be an array, an array in ``out`` is read-only, or the model answers a request
          with several responses.
        """
        made = self._connection.prepare(self.repeated(inputs, out, outputs, own))
        made.timeout = self.timeout
        return made

    @property
    def parameters(self) -> Any:
        """Returns a ``ModelParameters``, which lists, changes and removes the model's parameter sets, and computes gradients.

        Raises: Unsupported: this process serves the model itself.
        """
        found = self._connection.parameters(self.name, self._asked_version)
        found.of = self
        return found

    def latest(self) -> Latest[Answer]:
        """Makes an object whose ``put`` sends inputs without waiting and whose ``get`` returns the newest answer.

        If ``put`` is called faster than the model answers, only the newest inputs are sent.
        """
        return Latest(self.submit)

    def sequence(self, sequence_id: SequenceId = 0) -> ModelSequence:
        """Returns a new sequence: requests that share state in the model and are sent one after the other.

        Each call of the returned object sends one request. ``sequence_id`` is an integer or a string. If it is 0 or "", the
        sequence gets a random id.
        """
        return ModelSequence(self, sequence_id or self.sequence_id())

    def end_sequence(self, sequence_id: SequenceId) -> None:
        """Ends a sequence without a further request, once the sequence's requests in flight have run. Idempotent.

        Over HTTP it does nothing. The server ends a sequence that is idle for longer than the model's configuration allows.
        """
        self._connection.end_sequence(self.name, sequence_id)

    def close(self) -> None:
        """Closes this object, so that later calls of it raise Unavailable. The client stays connected. Idempotent."""
        self._closed = True

    def __exit__(self, *_: object) -> None:
        self.close()


class SequenceSteps(Generic[M]):
    """Base class of ``ModelSequence`` and its asynchronous counterpart. It sets each request's sequence id, start and end."""

    def __init__(self, model: M, sequence_id: SequenceId) -> None:
        self._model = model
        self.sequence_id = sequence_id
        #: True if a step was sent, and no last step was.
        self._open = False
        #: True if the last step was answered.
        self._over = False
        self._begun = False

    def _step(self, own: Own, end: bool) -> Own:
        if self._over:
            raise InvalidArgument(
                f"sequence {self.sequence_id!r} ended with an earlier step: sequence() begins another"
            )
        start, self._begun, self._open = not self._begun, True, not end
        own["sequence_id"], own["sequence_start"], own["sequence_end"] = self.sequence_id, start, end
        return own


class ModelSequence(SequenceSteps[Model], AbstractContextManager["ModelSequence"]):
    """A sequence of requests to a model that keeps state. The first call begins it, the call with ``end=True`` ends it.

    ``Model.sequence`` makes it. If its ``with`` block is left without an ``end`` call, ``Model.end_sequence`` is called.
    """

    def __call__(self, inputs: Mapping[str, Any], *, end: bool = False, **own: Unpack[Own]) -> Answer:
        """Sends the sequence's next request, waits for its answer and returns it.

        ``end`` says that this request is the sequence's last one. ``own`` are the request's other fields, such as ``priority``.

        Raises: ServingError: the answer is an error.
        """
        answer = self._model(inputs, **self._step(own, end))
        self._over = end
        return answer

    def __exit__(self, *_: object) -> None:
        if self._open:
            self._model.end_sequence(self.sequence_id)


def promised(pending: Pending[Answer]) -> concurrent.futures.Future[Answer]:
    """Returns a future of the answer to a request that was already sent. Cancelling the future cancels the request."""
    import concurrent.futures

    future: concurrent.futures.Future[Answer] = concurrent.futures.Future()

    def over(pending: Pending[Answer]) -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(pending.result())
        except BaseException as error:
            future.set_exception(error)

    def cancelled(future: concurrent.futures.Future[Answer]) -> None:
        if future.cancelled():
            pending.cancel()

    future.add_done_callback(cancelled)
    pending.add_done_callback(over)
    return future
