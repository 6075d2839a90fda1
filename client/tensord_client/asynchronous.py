"""The client for programs on an event loop of asyncio: the names of ``Client`` and ``Model``, to be awaited."""

from __future__ import annotations

import asyncio
import copy
import functools
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from tensord_client.call import Call, Own, SequenceId
from tensord_client.client import Client, Place, connection
from tensord_client.connection import Connection
from tensord_client.errors import DeadlineExceeded
from tensord_client.latest import Newest
from tensord_client.model import Calls
from tensord_client.parameters import ModelParameters
from tensord_client.results import Answer, Array, Tensor

if TYPE_CHECKING:
    from typing_extensions import Unpack

T = TypeVar("T")


class AsyncClient:
    """Connects an event loop to a server, as ``Client`` does a thread; any number of requests may be in flight."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._connection = client._connection

    async def model(
        self, name: str, version: int = 0, *, timeout: float | None = None, parameter_set: str = ""
    ) -> AsyncModel:
        """Returns a model. As ``Client.model``."""
        loop = asyncio.get_running_loop()
        description = await loop.run_in_executor(None, self._connection.open, name, version)
        return AsyncModel(self._connection, description, version, timeout, parameter_set)

    def empty(
        self,
        tensor: Tensor | Sequence[int],
        dtype: Any = None,
        *,
        shape: Sequence[int] | None = None,
        device: str = "",
    ) -> Any:
        """Makes an array in memory that the server shares. As ``Client.empty``."""
        return self._client.empty(tensor, dtype, shape=shape, device=device)

    async def close(self) -> None:
        """Ends the connection. Idempotent."""
        await asyncio.get_running_loop().run_in_executor(None, self._client.close)

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"<AsyncClient on {self._connection!r}>"


class AsyncModel(Calls):
    """Represents a served model whose calls are awaited, as ``Model`` otherwise. A cancelled task cancels its request."""

    async def __call__(self, inputs: Mapping[str, Any], *, outputs: Sequence[str] = (), **own: Unpack[Own]) -> Answer:
        """Answers one request. As a call of ``Model``."""
        return await self._connection.ask(self.call(inputs, outputs, own))

    def submit(
        self, inputs: Mapping[str, Any], *, outputs: Sequence[str] = (), **own: Unpack[Own]
    ) -> asyncio.Future[Answer]:
        """Begins a request and returns its answer to come. The arrays may be written to as soon as this returns."""
        pending = self._connection.ask(self.call(inputs, outputs, own))

        async def answer() -> Answer:
            return await pending

        return asyncio.ensure_future(answer())

    def stream(
        self, inputs: Mapping[str, Any], *, outputs: Sequence[str] = (), **own: Unpack[Own]
    ) -> AsyncIterator[Answer]:
        """Iterates over the responses to one request; ``aclose()`` cancels it. As ``Model.stream``."""
        return self._connection.ask(self.call(inputs, outputs, own, streams=True)).async_responses(self.timeout)

    def prepare(
        self,
        inputs: Mapping[str, Any],
        *,
        out: Mapping[str, Array] | None = None,
        outputs: Sequence[str] = (),
        **own: Unpack[Own],
    ) -> AsyncPrepared:
        """Prepares a request that is asked again and again: ``await call()`` sends what the arrays hold then.

        Arguments are those of ``Model.prepare``.
        """
        return AsyncPrepared(self._connection, self.call(inputs, outputs or tuple(out or ()), own, out), self.timeout)

    def latest(self) -> AsyncLatest:
        """Makes something that is given inputs at any rate, and answers to the newest of them."""
        return AsyncLatest(self.submit)

    @property
    def parameters(self) -> AsyncModelParameters:
        """Returns the model's parameter sets. As ``Model.parameters``."""
        return AsyncModelParameters(ModelParameters(self._connection, self.name, self._asked_version))

    def sequence(self, sequence_id: SequenceId = 0) -> AsyncModelSequence:
        """Makes a sequence of requests. As ``Model.sequence``."""
        return AsyncModelSequence(self, sequence_id or self.sequence_id())

    async def end_sequence(self, sequence_id: SequenceId) -> None:
        """Ends a sequence without a further request. As ``Model.end_sequence``."""
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(None, self._connection.end_sequence, self.name, sequence_id)

    async def close(self) -> None:
        """Ends the use of the model. Idempotent."""
        self._closed = True

    async def __aenter__(self) -> AsyncModel:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


class AsyncPrepared:
    """A request that is asked again and again with what its arrays hold then. Several may be under way."""

    def __init__(self, connection: Connection, call: Call, timeout: float | None) -> None:
        self._connection = connection
        self._call = call
        self._timeout = timeout

    async def __call__(self) -> Answer:
        """Sends the request, waits and returns the outputs by name. Raises as a call of the model."""
        call = self._call
        if self._timeout is not None:
            call = copy.copy(call)
            call.deadline = time.monotonic() + self._timeout
        return await self._connection.ask(call)


class AsyncLatest(Newest):
    """Answers to the newest of the inputs that were put, for one event loop. ``put`` does not wait, ``get`` is awaited."""

    #: Set when an answer came, or this was closed; made anew for each wait.
    _came_or_closed: asyncio.Event | None = None

    def _notify(self) -> None:
        if self._came_or_closed is not None:
            self._came_or_closed.set()

    async def get(self, timeout: float | None = None) -> Answer:
        """Waits for an answer that is newer than the last one that was taken, and returns the newest. As ``Latest.get``."""
        until = None if timeout is None else time.monotonic() + timeout
        while not self._has_newer():
            self._came_or_closed = self._came_or_closed or asyncio.Event()
            self._came_or_closed.clear()
            try:
                left = None if until is None else max(0.0, until - time.monotonic())
                await asyncio.wait_for(self._came_or_closed.wait(), left)
            except asyncio.TimeoutError:
                raise DeadlineExceeded from None
        return self._take()

    async def close(self) -> None:
        """Cancels what is under way. Idempotent."""
        self._end()

    async def __aenter__(self) -> AsyncLatest:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


class AsyncModelSequence:
    """A sequence of requests, one after the other: the first begins it, the one with ``end`` ends it."""

    def __init__(self, model: AsyncModel, sequence_id: SequenceId) -> None:
        self._model = model
        self.sequence_id = sequence_id
        self._begun = False
        self._ended = False

    async def __call__(self, inputs: Mapping[str, Any], *, end: bool = False, **own: Unpack[Own]) -> Answer:
        """Runs the next step. Arguments and errors as for a call of the model."""
        start, self._begun = not self._begun, True
        self._ended = end
        own["sequence_id"], own["sequence_start"], own["sequence_end"] = self.sequence_id, start, end
        return await self._model(inputs, **own)

    async def __aenter__(self) -> AsyncModelSequence:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._begun and not self._ended:
            await self._model.end_sequence(self.sequence_id)


class AsyncModelParameters:
    """The parameter sets of one model, each change to be awaited; it goes on in a thread of the loop. As ``ModelParameters``."""

    def __init__(self, sets: ModelParameters) -> None:
        self._sets = sets

    async def update(self, parameters: Any, **how: Any) -> int:
        """Pushes parameters, which may not be written to meanwhile. Arguments and errors as of ``ModelParameters.update``."""
        return await _in_a_thread(functools.partial(self._sets.update, parameters, **how))

    async def list(self) -> list[dict[str, Any]]:
        """Returns what there is, an entry for each set."""
        return await _in_a_thread(self._sets.list)

    async def drop(self, set: str) -> None:
        """Drops a set, which is not ``main``."""
        await _in_a_thread(functools.partial(self._sets.drop, set))

    async def roll_back(self, set: str = "main") -> int:
        """Puts a set's parameters before the newest into use again. Returns their number."""
        return await _in_a_thread(functools.partial(self._sets.roll_back, set))


async def _in_a_thread(change: Callable[[], T]) -> T:
    return await asyncio.get_running_loop().run_in_executor(None, change)


async def connect_async(address: Place | None = None, *, wait: float = 0.0, patience: float = 30.0) -> AsyncClient:
    """Finds a server and connects to it. As ``connect``."""
    loop = asyncio.get_running_loop()
    return AsyncClient(Client(await loop.run_in_executor(None, connection, address, wait, patience)))
