"""Serves models from a folder inside this process, with ``tensord.testing``; only this module imports it."""

from __future__ import annotations

import contextlib
import copy
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tensord_client.call import Call
from tensord_client.common.scheduling import SET_PARAMETER
from tensord_client.connection import RepeatedCall
from tensord_client.errors import CLOSED, NotFound, Unavailable, Unsupported, from_code
from tensord_client.http_channel import Buffer
from tensord_client.results import Answer, Array, Description, written

if TYPE_CHECKING:
    import concurrent.futures

    from tensord import testing


@contextlib.contextmanager
def _as_ours() -> Iterator[None]:
    """Within the ``with`` block, turns errors of ``tensord.testing`` into the client's errors of the same code."""
    from tensord import testing

    try:
        yield
    except testing.ServingError as error:
        raise from_code(error.code, error.message) from error


class LocalConnection:
    """A repository of models in a folder, served by this process. Each model is loaded when it is first used. Thread-safe."""

    def __init__(self, folder: Path) -> None:
        """Serves the models in ``folder``; none is loaded yet. Raises Unavailable: the package tensord is not installed."""
        try:
            import tensord.testing  # noqa: F401
        except ImportError as error:
            raise Unavailable(f"to serve models from a folder takes tensord in this process: {error}") from None
        self._folder = folder
        self._lock = threading.Lock()
        self._models: dict[tuple[str, int], testing.Model] = {}
        self._closed = False
        self._process = os.getpid()

    def open(self, model: str, version: int = 0) -> Description:
        """Returns the description of a model, after loading the model if need be; version 0: of the newest version.

        Raises: ServingError: there is no such model, or it cannot be loaded.
        """
        loaded = self.loaded(model, version)
        return Description(
            {
                "model": model,
                "version": loaded.version,
                "metadata": {
                    "name": model,
                    "versions": [str(loaded.version)],
                    "platform": loaded.config.get("platform", ""),
                    "inputs": [_described(each) for each in loaded.inputs],
                    "outputs": [_described(each) for each in loaded.outputs],
                },
                "max_batch_size": int(loaded.config.get("max_batch_size", 0)),
                "streams": bool(loaded.config.get("model_transaction_policy", {}).get("decoupled")),
                "sequences": "sequence_batching" in loaded.config,
                "pure": False,
            }
        )

    def loaded(self, model: str, version: int) -> testing.Model:
        """Returns a model, after loading it if it was not used before. Version 0: the newest.

        Raises: ServingError: there is no such model, or it cannot be loaded.  Unavailable: this process was forked off since.
        """
        from tensord import testing

        if os.getpid() != self._process:
            raise Unavailable(
                "a process that was forked off has not the models of its parent: connect in it, or spawn it"
            )
        with self._lock, _as_ours():
            if self._closed:
                raise Unavailable(CLOSED)
            found = self._models.get((model, version))
            if found is None:
                if not (self._folder / model).is_dir():
                    raise NotFound(f"Request for unknown model: '{model}' is not found")
                if version and not (self._folder / model / str(version)).is_dir():
                    raise NotFound(f"Request for unknown model: '{model}' version {version} is not found")
                found = self._models[model, version] = testing.load(self._folder / model, version)
            return found

    def config(self, model: str, version: int) -> Mapping[str, Any]:
        """Loads a model if need be. Returns its configuration with defaults filled in. Raises ServingError: loading failed."""
        return self.loaded(model, version).config

    def ask(self, call: Call) -> LocalPending:
        """Makes a request to a model in this process; it is run when somebody waits for its answer, or adds a callback.

        Raises: ServingError: there is no such model, or it cannot be loaded.
        """
        if call.detached:
            call.inputs = {name: array.copy() for name, array in call.inputs.items()}
        return LocalPending(self.loaded(call.model, call.version), call)

    def prepare(self, call: Call) -> RepeatedCall:
        """Makes a request that can be run many times, each time with what its arrays hold then."""
        return RepeatedCall(self, call)

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """Makes an ordinary numpy array: models in this process need no shared memory.

        Raises: Unavailable: ``close`` was called.
        """
        if self._closed:
            raise Unavailable(CLOSED)
        return np.empty(shape, dtype)

    def empty_on(self, device: str, shape: tuple[int, ...], dtype: Any) -> Any:
        """Always raises Unsupported: this process serves the models itself, so there is no daemon to share GPU memory with."""
        raise Unsupported(f"memory on '{device}' is shared with a daemon, and this process serves the model itself")

    def end_sequence(self, model: str, sequence_id: int | str) -> None:
        """Ends a sequence in all loaded versions of the model, without a further request."""
        with self._lock:
            loaded = [each for (name, _), each in self._models.items() if name == model]
        for each in loaded:
            each.end_sequence(sequence_id)

    def push(
        self,
        model: str,
        version: int,
        name: str,
        said: Mapping[str, Any],
        pieces: Sequence[Buffer],
        timeout: float | None,
    ) -> dict[str, Any]:
        """Always raises Unsupported: parameters can only be pushed into models that a daemon serves."""
        raise _no_sets()

    def parameter_sets(self, model: str, version: int) -> list[dict[str, Any]]:
        """Always raises Unsupported: only models that a daemon serves have parameter sets."""
        raise _no_sets()

    def drop_parameters(self, model: str, version: int, name: str) -> None:
        """Always raises Unsupported: only models that a daemon serves have parameter sets."""
        raise _no_sets()

    def revert_parameters(self, model: str, version: int, name: str) -> dict[str, Any]:
        """Always raises Unsupported: only models that a daemon serves have parameter sets."""
        raise _no_sets()

    def close(self) -> None:
        """Waits until all requests are answered, and unloads all models; later requests raise Unavailable. Idempotent."""
        if os.getpid() != self._process:
            return
        with self._lock:
            self._closed = True
            models, self._models = self._models, {}
        for model in models.values():
            model.close()

    def __repr__(self) -> str:
        return f"<LocalConnection to {str(self._folder)!r}>"


def _no_sets() -> Unsupported:
    return Unsupported("parameters are pushed into models that a daemon serves; this process serves the model itself")


def _described(tensor: testing.Tensor) -> dict[str, Any]:
    return {"name": tensor.name, "datatype": tensor.datatype, "shape": list(tensor.shape)}


class LocalPending:
    """A request to a model in this process. It begins when somebody waits for its answer or adds a callback."""

    def __init__(self, model: testing.Model, call: Call) -> None:
        self._model = model
        self._call = call
        own = call.scheduling._asdict()
        name = own.pop("parameter_set")
        parameters = {**call.parameters, SET_PARAMETER: name} if name else call.parameters
        self._own: Any = {**own, "parameters": parameters, "request_id": call.request_id}
        self._future: concurrent.futures.Future[testing.Answer] | None = None

    def _timed(self, timeout: float | None) -> testing.Model:
        """Returns a copy of the model whose timeout is ``timeout`` seconds; None: the time to the request's deadline."""
        if timeout is None and self._call.deadline is not None:
            timeout = max(0.0, self._call.deadline - time.monotonic())
        made = copy.copy(self._model)
        made.timeout = timeout
        return made

    def result(self, timeout: float | None = None) -> Answer:
        """Waits for the answer at most ``timeout`` seconds (None: until the deadline) and returns it, or raises its error.

        A request that was begun by ``submit`` is waited for until its deadline, whatever ``timeout`` is.

        Raises: ServingError: the answer is an error.  DeadlineExceeded: no answer came in time.
        """
        with _as_ours():
            if self._future is not None:
                return self._answer(self._future.result())
            return self._answer(self._timed(timeout)(self._call.inputs, outputs=self._call.outputs, **self._own))

    def _answer(self, found: testing.Answer) -> Answer:
        answer = Answer(written(dict(found), self._call.places))
        answer.version, answer.parameters = found.version, found.parameters
        answer.times = found.timing
        return answer

    def responses(self, timeout: float | None = None) -> Iterator[Answer]:
        """Iterates over the responses. ``timeout`` and Raises: as ``connection.Pending.responses``."""
        with _as_ours():
            found = self._timed(timeout).stream(self._call.inputs, outputs=self._call.outputs, **self._own)

        def each() -> Iterator[Answer]:
            with contextlib.closing(found), _as_ours():  # type: ignore[type-var]
                yield from map(self._answer, found)

        return each()

    def submit(self) -> concurrent.futures.Future[testing.Answer]:
        """Begins the request unless it has begun, and returns a future of the answer."""
        if self._future is None:
            with _as_ours():
                self._future = self._timed(None).submit(self._call.inputs, outputs=self._call.outputs, **self._own)
        return self._future

    def __await__(self) -> Generator[Any, None, Answer]:
        import asyncio

        yield from asyncio.wait([asyncio.wrap_future(self.submit())]).__await__()
        return self.result()

    async def async_responses(self, timeout: float | None = None) -> AsyncIterator[Answer]:
        """Iterates over the responses on the running event loop; each is waited for in a thread of the loop's executor.

        ``timeout``: seconds for each response; None: until the deadline. Raises ServingError: a response is an error.
        """
        import asyncio

        loop = asyncio.get_running_loop()
        responses = self.responses(timeout)
        try:
            while True:
                found = await loop.run_in_executor(None, next, responses, None)
                if found is None:
                    return
                yield found
        finally:
            await loop.run_in_executor(None, responses.close)  # type: ignore[attr-defined]

    def add_done_callback(self, callback: Callable[[LocalPending], object]) -> None:
        """Begins the request; once it is answered, ``callback`` is called with this object, in any thread, perhaps at once."""
        self.submit().add_done_callback(lambda _: callback(self))

    def cancel(self) -> None:
        """Cancels the request if ``submit`` began it and its future can still be cancelled; otherwise does nothing."""
        if self._future is not None:
            self._future.cancel()
