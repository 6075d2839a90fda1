"""The client for programs on an asyncio event loop: the methods of ``Client`` and ``Model``, to be awaited."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tensord_client.client import AnyClient, Place, connection
from tensord_client.common.call import Call, Own, named
from tensord_client.common.connection import Connection
from tensord_client.common.derivatives import PULL_BACK, PUSH_FORWARD, VALUE_AND_GRADIENT
from tensord_client.common.latest import Newest
from tensord_client.common.model import Calls, Model, SequenceSteps
from tensord_client.common.pending import end_wait
from tensord_client.common.results import Answer, Array
from tensord_client.common.scheduling import SequenceId
from tensord_client.errors import DeadlineExceeded
from tensord_client.parameters import ModelParameters

if TYPE_CHECKING:
    from typing_extensions import Unpack


class AsyncClient(AnyClient, contextlib.AbstractAsyncContextManager["AsyncClient"]):
    """A connection to a server, for programs on an event loop. Any number of requests may be in flight.

    ``connect_async`` makes it.
    """

    async def model(
        self, name: str, version: int = 0, *, timeout: float | None = None, parameter_set: str = ""
    ) -> AsyncModel:
        """Looks up a model on the server, and returns it as a function of arrays whose calls are awaited.

        Args:
          version: the version to call, or 0 for the newest at the time of each call.
          timeout: the seconds that a call waits for its answer, and a stream for each response. None means no limit.
          parameter_set: the model's parameter set that calls are answered with. "" means ``main``.

        Raises: NotFound: the server does not serve this model or version.  Unavailable: the model is not ready, or no server
          answers.  InvalidArgument: an argument has a wrong type.
        """
        name, version = named(name, version)
        description = await asyncio.to_thread(self._connection.open, name, version)
        return AsyncModel(self._connection, description, version, timeout, parameter_set)

    async def close(self) -> None:
        """Closes the connection. If this process serves models itself, they are unloaded. Idempotent."""
        await asyncio.to_thread(self._connection.close)

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class AsyncModel(Calls, contextlib.AbstractAsyncContextManager["AsyncModel"]):
    """A served model. Call it with arrays by input name, and await the answer.

    Cancelling a task that awaits an answer cancels the request.
    """

    async def __call__(self, inputs: Mapping[str, Any], *, outputs: Sequence[str] = (), **own: Unpack[Own]) -> Answer:
        """Sends one request, awaits its answer and returns it.

        ``outputs`` are the names of the outputs to return, or none for all. ``own`` are the request's other fields, such as
        ``priority``.

        Raises: InvalidArgument: an input cannot be an array.  DeadlineExceeded: no answer came within the model's ``timeout``.
          ServingError: any other error of the server.
        """
        return await self._connection.ask(self.call(inputs, outputs, own))

    async def derivative(self, kind: str) -> AsyncModel:
        """Returns the derivative ``kind`` of this model, such as "pull_back", as a model. Works like ``Model.derivative``."""
        return await asyncio.to_thread(self._open, kind)

    async def pull_back(self, inputs: Mapping[str, Any], cotangents: Mapping[str, Any], **own: Unpack[Own]) -> Answer:
        """Computes the product of ``cotangents`` and the model's derivative. Arguments and result: see ``Model.pull_back``."""
        asked = self._asked(PULL_BACK)
        return asked.result(await (await self.derivative(PULL_BACK))(asked.arrays(inputs, cotangents), **own))

    async def push_forward(self, inputs: Mapping[str, Any], tangents: Mapping[str, Any], **own: Unpack[Own]) -> Answer:
        """Computes the product of the model's derivative and ``tangents``. Arguments and result: see ``Model.push_forward``."""
        asked = self._asked(PUSH_FORWARD)
        return asked.result(await (await self.derivative(PUSH_FORWARD))(asked.arrays(inputs, tangents), **own))

    async def value_and_gradient(self, inputs: Mapping[str, Any], **own: Unpack[Own]) -> tuple[Answer, Answer]:
        """Computes the model's outputs and the gradient of its only floating output with respect to its floating inputs.

        The arguments, results and errors are the same as for ``Model.value_and_gradient``.
        """
        asked = self._asked(VALUE_AND_GRADIENT)
        return asked.parts(await (await self.derivative(VALUE_AND_GRADIENT))(asked.arrays(inputs, {}), **own))

    def submit(
        self, inputs: Mapping[str, Any], *, outputs: Sequence[str] = (), **own: Unpack[Own]
    ) -> asyncio.Future[Answer]:
        """Sends one request and returns a future of its answer. Cancelling the future cancels the request.

        You may change the input arrays as soon as this returns. Arrays of ``AsyncClient.empty`` are an exception, and must
        not change until the answer has come. The future raises the server's errors. ``outputs`` are the names of the outputs
        to return, or none for all. ``own`` are the request's other fields, such as ``priority``.
        """
        pending = self._connection.ask(self.call(inputs, outputs, own, detached=True))

        async def answer() -> Answer:
            return await pending

        def over(future: asyncio.Future[Answer]) -> None:
            if future.cancelled():  # perhaps before it began
                pending.cancel()

        future = asyncio.ensure_future(answer())
        future.add_done_callback(over)
        return future

    def stream(
        self, inputs: Mapping[str, Any], *, outputs: Sequence[str] = (), **own: Unpack[Own]
    ) -> AsyncIterator[Answer]:
        """Sends one request and returns an asynchronous iterator over its responses.

        ``aclose()`` of the iterator cancels the request. ``outputs`` are the names of the outputs to return, or none for
        all. ``own`` are the request's other fields, such as ``priority``. The iterator raises ServingError if a response is
        an error or does not come within the model's ``timeout``.
        """
        call = self.call(inputs, outputs, own, streams=True, detached=True)
        return self._connection.ask(call).async_responses(self.timeout)

    def prepare(
        self,
        inputs: Mapping[str, Any],
        *,
        out: Mapping[str, Array] | None = None,
        outputs: Sequence[str] = (),
        **own: Unpack[Own],
    ) -> AsyncPrepared:
        """Returns an object that sends a request at each awaited call, with the input arrays' present values.

        Args:
          inputs: input name -> array. An array that is not C-contiguous, or not in this host's byte order, is copied by each
            call. A value that is no array, such as a list, is converted now, and the result is sent each time.
          out: output name -> the array that each answer's output is written to. A call of the returned object raises
            InvalidArgument if the array has another shape or dtype than the output.
          outputs: the names of the outputs to return. Empty means the names in ``out``, or all outputs if ``out`` is empty.
          own: the request's other fields, such as ``priority``.

        Raises: InvalidArgument: an input cannot be an array, an array in ``out`` is read-only, or the model answers a request
          with several responses.
        """
        return AsyncPrepared(self._connection, self.repeated(inputs, out, outputs, own), self.timeout)

    def latest(self) -> AsyncLatest:
        """Makes an object whose ``put`` sends inputs without waiting and whose ``get`` returns the newest answer.

        If ``put`` is called faster than the model answers, only the newest inputs are sent.
        """
        return AsyncLatest(self.submit)

    @property
    def parameters(self) -> AsyncModelParameters:
        """Returns an object that lists and drops the model's parameter sets, and pushes new parameters into one."""
        model = Model(
            self._connection, self._description, self._asked_version, self.timeout, self._scheduling.parameter_set
        )
        return AsyncModelParameters(model.parameters)

    def sequence(self, sequence_id: SequenceId = 0) -> AsyncModelSequence:
        """Returns a new sequence: requests that share state in the model and are sent one after the other.

        Each call of the returned object sends one request. If ``sequence_id`` is 0 or "", the sequence gets a random id.
        """
        return AsyncModelSequence(self, sequence_id or self.sequence_id())

    async def end_sequence(self, sequence_id: SequenceId) -> None:
        """Ends a sequence without a further request, once the sequence's requests in flight have run.

        Over HTTP it does nothing. The server ends a sequence that is idle for longer than the model's configuration allows.
        """
        await asyncio.to_thread(self._connection.end_sequence, self.name, sequence_id)

    async def close(self) -> None:
        """Closes this object. It then raises Unavailable for every request. The client stays connected. Idempotent."""
        self._closed = True

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class AsyncPrepared:
    """A request that is sent many times. Each awaited call sends the input arrays' present values.

    Several calls may be in flight.
    """

    def __init__(self, connection: Connection, call: Call, timeout: float | None) -> None:
        self._connection = connection
        self._call = call
        self._timeout = timeout
        call.repeats = True

    async def __call__(self) -> Answer:
        """Sends the request with the present values of its input arrays, awaits the answer and returns the outputs by name.

        Raises: ServingError: the answer is an error.  DeadlineExceeded: no answer came within the model's ``timeout``.
        """
        call = self._call
        if self._timeout is not None:
            call = copy.copy(call)
            call.deadline = time.monotonic() + self._timeout
        if call.sources:
            call.copy_sources()
        pending = self._connection.ask(call)
        self._call.layout = call.layout
        return await pending


class AsyncLatest(Newest[Answer], contextlib.AbstractAsyncContextManager["AsyncLatest"]):
    """Sends inputs to a model by ``put``, which does not wait. ``await get()`` returns the newest answer.

    While two requests are in flight, ``put`` stores its inputs to send them later, in place of inputs that were stored before.
    Closing an event loop ends the requests that were sent from it.
    """

    def forget(self) -> None:
        """Removes all requests and answers. Does not wake tasks that wait in ``get``. A child process calls it after a fork."""
        super().forget()
        #: Futures of the tasks that wait in ``get``.
        self._waits: list[asyncio.Future[None]] = []

    def put(self, inputs: Mapping[str, Any]) -> None:
        """Sends inputs to the model at once. If two requests are in flight already, it stores a copy to send next.

        The copy replaces inputs that were stored before. Raises: InvalidArgument: an input cannot be an array.  Cancelled:
        ``close`` was called.
        """
        for number, task in list(self._under_way.items()):
            if task.get_loop().is_closed():
                del self._under_way[number]
        super().put(inputs)

    def _notify(self) -> None:
        for waits in self._waits:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                waits.get_loop().call_soon_threadsafe(end_wait, waits)

    async def get(self, timeout: float | None = None) -> Answer:
        """Waits for an answer to inputs that were put later than those of the last answer returned, and returns it.

        If several answers have come, returns only the answer to the inputs that were put last. ``timeout`` is the seconds to
        wait, or None for no limit.

        Raises: ServingError: the answer is an error.  DeadlineExceeded: no answer came in time.  Cancelled: ``close`` was
          called, and there is no such answer.
        """
        until = None if timeout is None else time.monotonic() + timeout
        while not self._has_newer():
            waits: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waits.append(waits)
            try:
                await asyncio.wait_for(waits, None if until is None else max(0.0, until - time.monotonic()))
            except asyncio.TimeoutError:
                raise DeadlineExceeded from None
            finally:
                self._waits.remove(waits)
        return self._take()

    async def close(self) -> None:
        """Cancels the requests in flight. ``put`` then raises Cancelled, and so does ``get`` if it has no new answer.

        Idempotent.
        """
        self._end()

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class AsyncModelSequence(SequenceSteps[AsyncModel], contextlib.AbstractAsyncContextManager["AsyncModelSequence"]):
    """A sequence of requests to a model that keeps state. The first call begins it, the call with ``end=True`` ends it.

    ``AsyncModel.sequence`` makes it. If its ``async with`` block is left without an ``end`` call,
    ``AsyncModel.end_sequence`` is called.
    """

    async def __call__(self, inputs: Mapping[str, Any], *, end: bool = False, **own: Unpack[Own]) -> Answer:
        """Sends the sequence's next request, awaits its answer and returns it.

        ``end`` says that this request is the sequence's last one. ``own`` are the request's other fields, such as ``priority``.

        Raises: ServingError: the answer is an error.
        """
        answer = await self._model(inputs, **self._step(own, end))
        self._over = end
        return answer

    async def __aexit__(self, *_: object) -> None:
        if self._open:
            await self._model.end_sequence(self.sequence_id)


class AsyncModelParameters:
    """The parameter sets of one model, with the methods of ``ModelParameters`` as coroutines.

    The methods run in a thread of the event loop's executor.
    """

    def __init__(self, sets: ModelParameters) -> None:
        self._sets = sets

    async def update(self, parameters: Any, **how: Any) -> int:
        """Pushes parameters into a parameter set of the model. Returns the number that identifies the push.

        Args:
          parameters: a tree of arrays, which must not change until this has returned, or the name of a file on the server.
          how: keyword arguments of ``ModelParameters.update``, such as ``set`` or ``version``.

        Raises: Replaced: a newer push was made.  InvalidArgument: the parameters do not fit the model.  ServingError: any other
          error of the server.
        """
        return await asyncio.to_thread(self._sets.update, parameters, **how)

    async def gradient(self, inputs: Mapping[str, Any], cotangents: Mapping[str, Any], **own: Any) -> Any:
        """Computes ``cotangents`` times the model's derivative by its parameters, as ``ModelParameters.gradient`` does."""
        return await asyncio.to_thread(functools.partial(self._sets.gradient, inputs, cotangents, **own))

    async def list(self) -> list[dict[str, Any]]:
        """Returns a dictionary for each parameter set of the model.

        "set" is the set's name. "number" is the number of the push that brought the set's values, or 0 if they come from the
        model's folder. ``ModelParameters.list`` describes all items.
        """
        return await asyncio.to_thread(self._sets.list)

    async def drop(self, set: str) -> None:
        """Drops the parameter set named ``set``. Later requests for it fail.

        Raises: NotFound: there is no such parameter set.  InvalidArgument: ``set`` is ``main``, which cannot be dropped.
        """
        await asyncio.to_thread(self._sets.drop, set)

    async def roll_back(self, set: str = "main") -> int:
        """Undoes the newest push into a parameter set, so that the parameters before it are used again.

        Returns the number of the push that those parameters came with.

        Raises: NotFound: nothing was pushed into the set, or the server has not kept the parameters before the newest push.
        """
        return await asyncio.to_thread(self._sets.roll_back, set)


async def connect_async(
    address: Place | None = None,
    *,
    wait: float = 0.0,
    patience: float = 30.0,
    headers: Mapping[str, str] | None = None,
) -> AsyncClient:
    """Finds a server, connects to it and returns the client.

    Args:
      address: a folder with a daemon's sockets, a repository of models, a socket's path, ``unix:PATH`` or ``HOST:PORT``. None
        means ``$TENSORD`` or, if it is not set, the first server that answers: this host's service (/run/tensord), the user's
        own daemon, localhost:8000.
      wait: the seconds to wait for a server to appear. With 0, each address is tried once.
      patience: the seconds that a call waits, within its own timeout, for a lost server to come back.
      headers: header fields that every HTTP request has, such as a key that the server requires.

    Raises: Unavailable: no server answers.  InvalidArgument: ``address`` has none of these forms, or ``headers`` has a
      malformed name or value, or a field that the client writes by itself.
    """
    return AsyncClient(await asyncio.to_thread(connection, address, wait, patience, headers))
