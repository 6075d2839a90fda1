"""Runs a Triton Python-backend model: one ``TritonPythonModel`` object per instance, each in its own thread.

The interface that the model sees is ``tensord.workers.python_backend.interface``; this module converts requests and responses. A
model returns its responses from ``execute``, or sends them by its requests' response senders, as decoupled models always do.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import json
import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import numpy as np
from google.protobuf import json_format

from tensord.config.model_checks import STRICT_OUTPUTS
from tensord.config.model_config import ModelConfig, empty, to_json, wants
from tensord.shm.arrays import Array, encoded_strings
from tensord.shm.errors import Internal, InvalidArgument, ServingError, from_code
from tensord.shm.messages import all_parameters
from tensord.workers.calls.caller import Caller, CallerPhase, ModelPort, calling
from tensord.workers.declarations.sequence_declaration import SequencePlan
from tensord.workers.models.author_error import describe_exception
from tensord.workers.models.execution import Execution, own_failure
from tensord.workers.models.is_ready_calls import IsReadyCalls
from tensord.workers.programs.lowering import check_output
from tensord.workers.python_backend import interface
from tensord.workers.python_backend.request import parameters_of
from tensord.workers.requests.request import Request, controls_of, named, traced
from tensord.workers.requests.response_sender import NOT_COMPLETED
from tensord.workers.requests.result import STREAMED, Response, Result
from tensord.workers.tensors.signature import Signature
from tensord.workers.threads.coroutine_thread import CoroutineThread

_log = logging.getLogger(__name__)


def auto_complete(module: ModuleType, config: ModelConfig, port: ModelPort) -> ModelConfig:
    """Returns the configuration as ``auto_complete_config`` of the model's ``module`` completes it.

    Without such a function returns ``config`` itself. ``port``: connects the module's code with the worker.
    Raises InvalidArgument: the result is no valid configuration. Errors of the function are raised unchanged.
    """
    complete = getattr(module.TritonPythonModel, "auto_complete_config", None)
    if complete is None:
        return config
    asked = interface.ModelConfig(to_json(config).decode())
    with calling(Caller(port, phase=CallerPhase.APART)):
        answered = complete(asked)
    if not isinstance(answered, interface.ModelConfig):
        raise InvalidArgument(f"model '{config.name}': auto_complete_config must return the configuration it was given")
    completed = empty()
    try:
        json_format.ParseDict(answered.as_dict(), completed)
    except json_format.ParseError as error:
        raise InvalidArgument(f"model '{config.name}': auto_complete_config: {error}") from None
    return completed


@dataclass(frozen=True, slots=True)
class PythonVersion:
    """What the instances of one version of a Triton Python model share, such as its code and configuration."""

    module: ModuleType
    config: ModelConfig
    signature: Signature
    #: The number of the version.
    version: int
    #: The model's folder.
    repository: str
    #: "CPU" or "GPU", which ``initialize`` is given.
    kind: str
    #: Connects the model's code with the worker.
    port: ModelPort
    #: None: the model has no sequences.
    sequences: SequencePlan | None = None
    #: Where the instances' ``is_ready`` is registered; None: the model has none.
    readiness: IsReadyCalls | None = None
    #: Entered while an instance is finalized; a lock for code that expects a process for each instance.
    finalizing: contextlib.AbstractContextManager[Any] = field(default_factory=contextlib.nullcontext)
    outputs: DeclaredOutputs = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "outputs", DeclaredOutputs(self.config, self.signature))


class PythonModel:
    """One instance of a Triton Python model. The instance's thread calls ``initialize``, ``execute`` and ``close``."""

    def __init__(self, shared: PythonVersion, instance: str) -> None:
        """Creates the ``TritonPythonModel``, whose errors are raised unchanged. ``instance``: the instance's name."""
        self._readiness = shared.readiness
        self._port = shared.port
        self._sequences = shared.sequences
        self._decoupled = shared.config.model_transaction_policy.decoupled
        self._coroutines = CoroutineThread(f"{instance} coroutines", shared.port.code)
        self._signature = shared.signature
        self._outputs = shared.outputs
        self._instance = instance
        self._finalizing = shared.finalizing
        self._model = shared.module.TritonPythonModel()
        self._arguments = {
            "model_config": to_json(shared.config).decode(),
            "model_name": shared.config.name,
            "model_version": str(shared.version),
            "model_repository": shared.repository,
            "model_instance_name": instance,
            "model_instance_kind": shared.kind,
            "model_instance_device_id": "0",
        }

    def initialize(self) -> None:
        """Calls the model's ``initialize``, if it has one. Errors of the model are raised unchanged."""
        if hasattr(self._model, "initialize"):
            with calling(Caller(self._port, phase=CallerPhase.LOADING)):
                self._model.initialize(self._arguments)
        if self._readiness is not None:
            self._readiness.join(self._is_ready)

    def _is_ready(self) -> object:
        """Returns what the model's ``is_ready`` returns. Any thread may call it."""
        with self._port.code(), calling(Caller(self._port, phase=CallerPhase.APART)):
            said = self._model.is_ready()
            return asyncio.run(said) if inspect.iscoroutine(said) else said

    def execute(self, execution: Execution) -> None:
        requests = execution.requests
        given = asked = [self._request(request, execution) for request in requests]
        rows = self._rows(requests)
        if rows is not None:
            # Triton gives a model a request for each slot up to the last one that has something to do.
            given = [self._nobody(requests[0]) if row is None else asked[row] for row in rows]
            execution.rows_of_nobody = len(rows) - len(requests)
        execution.gathered_ns = time.monotonic_ns()
        with calling(execution.caller(self._port)) as caller:
            responses = self._model.execute(given)
            if inspect.iscoroutine(responses):
                if self._decoupled and execution.responder is not None:
                    # It runs beside others, and holds no instance.
                    caller.execution = None
                    for request in requests:
                        request.version.senders[request].thread = self._coroutines.thread
                    self._coroutines.begin(responses, functools.partial(self._ended, requests, asked, caller))
                    execution.finish([STREAMED for _ in requests])
                    return
                responses = self._coroutines.run(responses)
        caller.close()
        execution.computed_ns = time.monotonic_ns()
        if self._decoupled:
            if responses is not None:
                reason = f"Python model '{self._instance}' is using the decoupled mode and the execute function must return None."
                raise Internal(f"Failed to process the request(s) for model '{self._instance}', message: {reason}")
            execution.finish([self._sent(*each) for each in zip(requests, asked, strict=True)])
            return
        if responses is None and any(request.sender is not None for request in asked):
            responses = [None] * len(given)
        if not isinstance(responses, list) or len(responses) != len(given):
            count = f"{len(responses)} responses" if isinstance(responses, list) else type(responses).__name__
            raise TypeError(f"execute() returned {count}, a list of {len(given)} InferenceResponse is expected")
        if rows is not None:
            responses = [response for response, row in zip(responses, rows, strict=True) if row is not None]
        execution.finish([self._result(*each) for each in zip(requests, asked, responses, strict=True)])

    def _rows(self, requests: Sequence[Request]) -> list[int | None] | None:
        if self._sequences is None or not self._sequences.direct or requests[0].version is None:
            return None
        rows: list[int | None] = [None] * (requests[-1].slot.number + 1)
        for number, request in enumerate(requests):
            rows[request.slot.number] = number
        return rows

    def _nobody(self, request: Request) -> interface.InferenceRequest:
        """Makes a request with inputs of zeros, shaped as those of ``request``, for a row of the batch that is unused."""
        assert self._sequences is not None
        arrays = {name: np.zeros(array.shape, array.dtype) for name, array in request.arrays.items()}
        for array in arrays.values():
            if array.dtype == np.object_:
                array.fill(b"")
        arrays |= self._sequences.controls.nobody
        return interface.InferenceRequest(
            inputs=[interface.Tensor.borrowed(name, array) for name, array in arrays.items()],
            requested_output_names=self._signature.outputs,
            model_name=self._signature.model,
        )

    def _request(self, request: Request, execution: Execution) -> interface.InferenceRequest:
        prepared, own = request.prepared, request.own
        controls = controls_of(own) if self._sequences is None or request.version is None else request.controls
        return interface.InferenceRequest(
            request_id=request.client_id,
            correlation_id=controls.correlation_id,
            # What is fetched when it is its turn is fetched here, in the model's own thread.
            inputs=[interface.Tensor.borrowed(name, np.asarray(array)) for name, array in request.arrays.items()],
            requested_output_names=request.outputs or self._signature.outputs,
            model_name=prepared.model,
            flags=controls.start | controls.end << 1,
            timeout=own.timeout_us,
            parameters=json.dumps(all_parameters(prepared, own)),
            given=request,
            answering=lambda: interface.InferenceResponseSender(
                request, execution.sender(request), self._decoupled, self._answer
            ),
        )

    def _sent(self, request: Request, asked: interface.InferenceRequest) -> Result | None:
        again = bool(asked.release_flags & interface.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
        held = asked.sender is not None
        if self._sequences is not None and request.version is not None:
            sender = request.version.senders.get(request)
            # Whoever has a sender goes on answering, that of an earlier round as well.
            held = held if sender is None else sender.released(again)
        if again:
            return self._reschedule_error(request, None)
        return STREAMED if held else Internal(NOT_COMPLETED)

    def _ended(
        self,
        requests: Sequence[Request],
        asked: list[interface.InferenceRequest],
        caller: Caller,
        error: BaseException | None,
    ) -> None:
        caller.close()
        if self._port.ran is not None:
            self._port.ran()
        failed: ServingError = Internal(NOT_COMPLETED)
        if error is not None:
            failed = own_failure(self, error, Execution(requests, time.monotonic_ns()))
        for request, each in zip(requests, asked, strict=True):
            if error is None and each.release_flags & interface.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE:
                self._reschedule_error(request, None)
            if error is not None or each.sender is None:
                sender = request.version.senders.get(request)
                if sender is not None:
                    sender.fail(failed)

    def _result(self, request: Request, asked: interface.InferenceRequest, response: Any) -> Result | None:
        if asked.release_flags & interface.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE:
            return self._reschedule_error(request, response)
        if asked.sender is not None:
            if response is not None:
                asked.sender.send(response, interface.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
            return STREAMED
        if not isinstance(response, interface.InferenceResponse):
            raise TypeError(f"execute() returned a list with {type(response).__name__}, InferenceResponse is expected")
        return self._answer(request, response)

    def _answer(self, request: Request, response: interface.InferenceResponse) -> Result:
        if response.has_error():
            return _client_error(response.error())
        try:
            outputs = {
                tensor.name(): self._outputs.fit(tensor.name(), tensor.content, request.rows)
                for tensor in response.output_tensors()
                if tensor.name() in self._signature.outputs
            }
            parameters = parameters_of(response)
            return Response(outputs, parameters) if parameters else outputs
        except Internal as error:
            # One response is wrong, not the batch.
            _log.error("%s%s", named(request.client_id), error.message, extra=traced([request]))
            return error

    def _reschedule_error(self, request: Request, response: Any) -> Result | None:
        if self._sequences is None or self._sequences.iterative is None:
            refused = Internal(
                "Request is released with TRITONSERVER_REQUEST_RELEASE_RESCHEDULE, while the model is not configured to "
                "handle such a flag."
            )
        elif response is not None:
            refused = Internal(
                "Expected a None object in the execute function return list for reschduled request, found type "
                f"'{type(response)}'."
            )
        else:
            return None
        sender = None if request.version is None else request.version.senders.get(request)
        if sender is not None:
            # At once: the model's own sender goes with its request, and would say something else.
            sender.fail(refused)
        return refused

    def describe(self, error: BaseException) -> str:
        reason = describe_exception(error)
        return f"Failed to process the request(s) for model '{self._instance}', message: {reason}"

    def close(self) -> None:
        """Calls the model's ``finalize``, if it has one. An exception is logged."""
        if self._readiness is not None:
            self._readiness.leave(self._is_ready)
        self._coroutines.close()
        finalize = getattr(self._model, "finalize", None)
        if finalize is None:
            return
        try:
            with self._finalizing, calling(Caller(self._port, phase=CallerPhase.APART)):
                finalize()
        except BaseException:  # also sys.exit() in a model
            _log.exception("finalize of model '%s' failed", self._instance)


def _client_error(error: Any) -> ServingError:
    if isinstance(error, interface.TritonError):
        return from_code(error.code().serving_code, str(error.message()))
    return Internal(str(error))


class DeclaredOutputs:
    """Checks that a version's outputs are as the configuration declares, and reshapes them as clients expect.

    An output that is not as declared is sent as it is, and the first time a warning is logged. With the model's parameter
    ``strict_outputs`` it is an error.
    """

    def __init__(self, config: ModelConfig, signature: Signature) -> None:
        """Reads ``strict_outputs`` of a configuration. Raises InvalidArgument: its value is no boolean."""
        self._signature = signature
        self._strict = wants(config, STRICT_OUTPUTS)
        self._lock = threading.Lock()
        self._warned = False

    def fit(self, name: str, array: Array, rows: int) -> Array:
        """Returns an output of a model as clients get it. ``rows``: how many rows the output must have.

        If the output does not fit the declaration in the model's configuration, returns it and logs a warning the first time.
        If the configuration sets ``strict_outputs``, raises Internal for such an output.
        """
        spec = self._signature.outputs[name]
        array = spec.as_objects(array)
        if self._strict and array.dtype != spec.dtype and array.dtype.kind in "iu" and spec.dtype.kind in "iu":
            # Integers that numpy made wider on the way (``np.array([0])``) are what was declared, where all of them fit.
            as_declared = array.astype(spec.dtype)
            array = as_declared if np.array_equal(as_declared, array) else array
        try:
            check_output(self._signature.model, spec, self._signature.batches, rows, array.shape, array.dtype)
        except Internal as error:
            if self._strict:
                raise
            self._warn(error.message)
            lead = int(self._signature.batches)
            if len(array.shape) < lead or not spec.fits_model(array.shape[lead:]):
                return encoded_strings(array)
        return encoded_strings(spec.for_client(array, self._signature.batches))

    def _warn(self, why: str) -> None:
        with self._lock:
            first, self._warned = not self._warned, True
        if first:
            _log.warning(
                "%s; it is sent as it is, as Triton does. Mend the configuration, or let the parameter %s refuse it",
                why,
                STRICT_OUTPUTS,
            )
