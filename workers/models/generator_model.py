"""Runs a host or JAX model whose function is a generator: each value that it yields is a response.

    apply(params, inputs) ─▶ {"token": ...} ─▶ {"token": ...}, {"parameter": ...} ─▶ the end of the function: no further one

Generators run in their instance's thread, one request at a time. While a client has not acknowledged earlier responses its
generator is paused and the thread runs others; when the client is gone its generator is closed (``close()``).
"""

from __future__ import annotations

import time
from collections.abc import Generator, Mapping
from typing import Any

import numpy as np

from tensord.shm.arrays import Array, encoded_strings
from tensord.shm.errors import Internal
from tensord.workers.calls.caller import Caller, calling
from tensord.workers.jax_internals.wide import precision
from tensord.workers.models.execution import Execution, chosen_by, own_failure
from tensord.workers.models.host_model import HostFunction, fetched
from tensord.workers.programs.lowering import check_output
from tensord.workers.requests.request import Request
from tensord.workers.requests.response_sender import ResponseSender
from tensord.workers.requests.result import STREAMED, Response, Result

_END: Any = object()


class GeneratorModel(HostFunction):
    """One version of a model whose function is a Python generator: each value that it yields is sent as a response."""

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

    def response(self, request: Request, made: Any) -> Result:
        """Returns ``made``, a value that the generator yielded for a request, as a response in the client's shapes.

        Raises Internal: the value is no valid response of this model.
        """
        parameters: Any = {}
        if isinstance(made, tuple) and len(made) == 2:
            made, parameters = made
            parameters = {} if parameters is None else parameters
        if not isinstance(made, Mapping) or not isinstance(parameters, Mapping):
            raise Internal(
                f"model '{self.signature.model}' yielded {type(made).__name__}, a dict of arrays is expected, or one with a "
                "dict of parameters"
            )
        outputs = {output: self._checked(request, output, array) for output, array in made.items()}
        return Response(outputs, dict(parameters)) if parameters else outputs

    def _checked(self, request: Request, output: str, made: Any) -> Array:
        spec, batches = self.signature.outputs.get(output), self.signature.batches
        if spec is None:
            raise Internal(f"model '{self.signature.model}' yielded '{output}', which is no output of it")
        array = spec.as_objects(np.asarray(made))
        check_output(self.signature.model, spec, batches, request.rows, array.shape, array.dtype)
        return encoded_strings(spec.for_client(array, batches))


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
        """Runs the generator to its end, or until its client has too many responses to acknowledge. Raises what the model raises.

        ``alone``: whether this is called outside of the model's ``execute``; then the worker's loop is woken at the end.
        """
        sender, generator, request = self._sender, self._generator, self._request
        # Of one that was given ahead, and that nobody waits for by now, nothing runs.
        while not (sender.is_cancelled or request.is_cancelled) and (made := next(generator, _END)) is not _END:
            sender.send(self._model.response(request, made))
            if sender.is_full and self._resume is not None and sender.when_room(self._room):
                return
        if sender.is_cancelled or request.is_cancelled:
            generator.close()
        sender.finish(alone)

    def _room(self) -> None:
        """Tells the instance's thread to resume the paused generator, because its client has acknowledged enough responses.

        Called on the loop.
        """
        assert self._resume is not None
        self._resume(self._rested)

    def _rested(self) -> None:
        try:
            if self._sender.is_cancelled:
                self._generator.close()
            with precision(self._model.signature.wide), calling(Caller(self._model.port, [self._request])) as caller:
                self.go_on(alone=True)
            caller.close()
        except BaseException as error:  # also sys.exit() in a model
            execution = Execution([self._request], time.monotonic_ns())
            self._sender.fail(own_failure(self._model, error, execution))
