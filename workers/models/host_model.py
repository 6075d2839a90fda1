"""Runs a host-side model: a Python function of numpy arrays, for strings, tokenizers and other code that is not to be jitted.

Each instance has a thread of its own, so a function that sleeps or parses delays no other model. BYTES tensors are object
arrays of ``bytes``.

The function of a host-side or JAX model may also be a generator, which runs in the instance's thread. Each value that the
generator yields is sent as a response: a dict of outputs, or a tuple of a dict of outputs and a dict of response parameters.

While too many responses of a request are not acknowledged by the client, the request's generator is paused, and the thread runs
other requests. If the request is cancelled, the generator is closed (``close()``).
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import numpy as np

from tensord.shm.arrays import Array, encoded_strings
from tensord.shm.errors import Internal, InvalidArgument
from tensord.workers.calls.caller import Caller, ModelPort, calling
from tensord.workers.devices.late_tensor import LateTensor
from tensord.workers.jax_internals.wide import precision
from tensord.workers.models.execution import Execution, chosen_by, own_failure
from tensord.workers.models.instance import Instantiated
from tensord.workers.parameters.parameter_set import ParameterSets
from tensord.workers.programs.lowering import check_cut, check_output, warn_of_undeclared
from tensord.workers.programs.run_errors import describe_failure
from tensord.workers.requests.request import Request
from tensord.workers.requests.response_sender import ResponseSender
from tensord.workers.requests.result import STREAMED, Response, Result, checked_parameters
from tensord.workers.tensors.ragged import batch_input, cut, elements, flat, unit, whole_shape
from tensord.workers.tensors.request_tensors import by_rows
from tensord.workers.tensors.signature import Signature, TensorSpec


class HostFunction(Instantiated):
    """A function of a model version that runs on the host. All instances share this object and the parameters."""

    def __init__(
        self,
        version: int,
        signature: Signature,
        apply: Callable[[Any, dict[str, Array]], Any],
        sets: ParameterSets,
        port: ModelPort,
    ) -> None:
        self.port = port
        self.signature = signature
        self._version = version
        self._apply = apply
        self._sets = sets

    def describe(self, error: BaseException) -> str:
        return describe_failure(self.signature.model, self._version, error)

    def _fitted(self, spec: TensorSpec, value: Any, rows: int) -> Array:
        """Returns an output that the function made in the shape that clients get. Raises Internal: it is not as declared."""
        array = spec.as_objects(np.asarray(value))
        check_output(self.signature.model, spec, self.signature.batches, rows, array.shape, array.dtype)
        return spec.for_client(array, self.signature.batches)


class HostModel(HostFunction):
    """A model version whose function returns a dict of arrays for a batch."""

    _told = False  #: Whether the log says which outputs are made and not declared.

    def execute(self, execution: Execution) -> None:
        requests = execution.requests
        chosen = execution.parameters = execution.parameters_of(requests[0]) or chosen_by(self._sets, requests)
        if len(requests) == 1 and not self.signature.ragged:
            inputs, execution.copied_byte_size = fetched(requests[0])
        else:
            inputs = self._laid_out(requests)
            execution.copied_byte_size = sum(array.nbytes for array in inputs.values())
        execution.gathered_ns = time.monotonic_ns()
        with calling(execution.caller(self.port)) as caller:
            made = self._apply(chosen.on(0), inputs)
        caller.close()
        rows = sum(request.rows for request in requests)
        outputs = {spec.name: self._checked(spec, made, rows, inputs) for spec in self.signature.outputs.values()}
        execution.computed_ns = time.monotonic_ns()
        if len(made) > len(outputs) and not self._told:
            self._told = True
            warn_of_undeclared(self.signature, made)
        cuts = {
            name: cut(outputs.pop(name), self.signature.inputs[spec.cut_like], requests)
            for name, spec in self.signature.outputs.items()
            if spec.cut_like
        }
        results = [*by_rows(outputs, requests)] if self.signature.batches else [outputs]
        for number, result in enumerate(results):
            result |= {name: arrays[number] for name, arrays in cuts.items()}
        execution.results = [{name: encoded_strings(array) for name, array in result.items()} for result in results]

    def _laid_out(self, requests: Sequence[Request]) -> dict[str, Array]:
        """Concatenates each input of a batch's requests. Adds the inputs that the configuration computes (``batch_input``)."""
        inputs: dict[str, Array] = {}
        rows = sum(request.rows for request in requests)
        for spec in self.signature.inputs.values():
            if spec.of_batch is not None:
                source = self.signature.inputs[spec.of_batch.source]
                counts = [elements(request, source.name) for request in requests]
                shape = whole_shape(spec, source, rows, sum(counts) // unit(source), max(counts))
                inputs[spec.name] = batch_input(spec, source, shape, rows, requests)
            elif spec.name in requests[0].arrays:
                arrays = [request.arrays[spec.name] for request in requests]
                inputs[spec.name] = np.concatenate([np.asarray(flat(each) if spec.ragged else each) for each in arrays])
        return inputs

    def _checked(self, spec: TensorSpec, outputs: Any, rows: int, inputs: Mapping[str, Array]) -> Array:
        name = self.signature.model
        if not isinstance(outputs, dict):
            raise Internal(f"model '{name}' returned {type(outputs).__name__}, a dict of arrays is expected")
        if spec.name not in outputs:
            raise Internal(f"model '{name}' did not compute its output '{spec.name}'")
        if spec.cut_like:
            array = spec.as_objects(np.asarray(outputs[spec.name]))
            check_cut(name, spec, inputs[spec.cut_like].size, array.shape, array.dtype)
            return array
        return self._fitted(spec, outputs[spec.name], rows)


def fetched(request: Request) -> tuple[dict[str, Array], int]:
    """Returns a request's inputs in host memory, and how many bytes were copied from regions. The model's thread calls it."""
    inputs = {name: np.asarray(array) for name, array in request.arrays.items()}
    copied = sum(array.nbytes for array in request.arrays.values() if isinstance(array, LateTensor))
    return inputs, copied


_END: Any = object()


class GeneratorModel(HostFunction):
    """A model version whose function is a Python generator. Each value that it yields is sent as a response."""

    def execute(self, execution: Execution) -> None:
        (request,) = execution.requests
        inputs, execution.copied_byte_size = fetched(request)
        execution.gathered_ns = time.monotonic_ns()
        chosen = execution.parameters = chosen_by(self._sets, [request])
        run = _GeneratorRun(self, request, execution, self._apply(chosen.on(0), inputs))
        with precision(self.signature.wide), calling(execution.caller(self.port)) as caller:
            run.go_on(alone=False)
        caller.close()
        execution.computed_ns = time.monotonic_ns()
        execution.results = [STREAMED]

    def response(self, request: Request, value: Any) -> Result:
        """Makes a response of ``value``, which the generator has yielded. Raises Internal: ``value`` is not as declared."""
        parameters: Any = {}
        if isinstance(value, tuple) and len(value) == 2:
            value, parameters = value
            parameters = {} if parameters is None else parameters
        if not isinstance(value, Mapping) or not isinstance(parameters, Mapping):
            raise Internal(
                f"model '{self.signature.model}' yielded {type(value).__name__}, a dict of arrays is expected, or one with a "
                "dict of parameters"
            )
        outputs: dict[str, Array] = {}
        for name, array in value.items():
            if (spec := self.signature.outputs.get(name)) is None:
                raise Internal(f"model '{self.signature.model}' yielded '{name}', which is no output of it")
            outputs[name] = encoded_strings(self._fitted(spec, array, request.rows))
        try:
            return Response(outputs, checked_parameters(parameters)) if parameters else outputs
        except InvalidArgument as error:
            raise Internal(f"model '{self.signature.model}': {error.message}") from None


class _GeneratorRun:
    """One request's generator and its response sender, used in the instance's thread."""

    def __init__(
        self,
        model: GeneratorModel,
        request: Request,
        execution: Execution,
        generator: Generator[Any, None, None],
    ) -> None:
        self._model = model
        self._request = request
        self._generator = generator
        self._sender: ResponseSender = execution.sender(request)
        self._resume = execution.resume

    def go_on(self, alone: bool) -> None:
        sender, generator, request = self._sender, self._generator, self._request
        # Of one that was given ahead, and that nobody waits for by now, nothing runs.
        while not (sender.is_cancelled or request.is_cancelled) and (made := next(generator, _END)) is not _END:
            sender.send(self._model.response(request, made))
            if (
                sender.is_full
                and self._resume is not None
                and sender.when_room(functools.partial(self._resume, self._rested))
            ):
                return
        if sender.is_cancelled or request.is_cancelled:
            generator.close()
        sender.finish(alone)

    def _rested(self) -> None:
        """Continues the paused generator, or closes the generator if the request is cancelled."""
        try:
            with precision(self._model.signature.wide), calling(Caller(self._model.port, [self._request])) as caller:
                self.go_on(alone=True)
            caller.close()
        except BaseException as error:  # also sys.exit() in a model
            execution = Execution([self._request], time.monotonic_ns())
            self._sender.fail(own_failure(self._model, error, execution))
